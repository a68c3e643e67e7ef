"""Work that was done, from the lake alone: the runs, and the stretches that rates come from."""

import itertools
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from hslake.rates import ENOUGH, Stretch, merged, windows
from hslake.status.mirror import Mirror
from hslake.status.report import RunState

RECENT = timedelta(hours=7)  # that rates look back
SILENT_S = 150.0  # a run that says nothing for twice its habit (extract's is 60 s) is not live
GAP_S = 30.0  # without a capture or a commit: no time of work
IDLE_S = 60.0  # without a commit, at least, before nothing is taken to be going on
_SHOWN = 5  # live runs


@dataclass(frozen=True)
class Work:
    """Stretches of work, oldest first, where they are from (`run log` | `commits`), whether it is
    going on as far as that tells, and seconds since the last sign."""

    done: list[Stretch]
    basis: str
    going_on: bool
    since: float


def runs(mirror: Mirror, now: datetime) -> list[RunState]:
    """The live runs, newest first; the last one when there is none."""
    rows = mirror.rows(
        """
        with told as (
            select run_id, told_at, told_at - lag(told_at) over (
                partition by run_id order by seq) as pause
            from run_log where op in ('start', 'progress', 'end')
        ), habits as (select run_id, epoch(median(pause)) as habit from told group by run_id)
        select r.* exclude (options, servers), h.habit
        from runs r left join habits h using (run_id)
        order by r.last_seen_at desc, r.run_id
        """
    ).to_pylist()
    found = [_run(row, now) for row in rows]
    live = [run for run in found if run.live]
    return live[:_SHOWN] or found[:1]


def _run(row: dict[str, Any], now: datetime) -> RunState:
    silent = (now - row["last_seen_at"]).total_seconds()
    return RunState(
        run_id=row["run_id"],
        command=row["command"],
        host=row["host"],
        started_at=row["started_at"],
        last_seen_at=row["last_seen_at"],
        live=row["ended_at"] is None and silent < max(SILENT_S, 2.2 * (row["habit"] or 0.0)),
        outcome=row["outcome"],
        reason=row["reason"],
        captured=row["captured"] or 0,
        captured_tokens=row["captured_tokens"] or 0,
        retried=row["retried"] or 0,
        dropped=row["dropped"] or 0,
        refused=row["refused"] or 0,
        seconds=row["seconds"] or 0.0,
        tokens_per_second=row["tokens_per_second"],
    )


def goes_on(done: Work | None, found: list[RunState], now: datetime) -> bool:
    """Whether work goes on, as far as `done` tells; what came before the end of the last run is of
    a run that is over."""
    if done is None or not done.going_on:
        return False
    last = found[0] if found else None
    if last is None or last.live or last.outcome is None:
        return True
    return done.since < (now - last.last_seen_at).total_seconds()


def best(mirror: Mirror, now: datetime, live: bool) -> Work | None:
    """The figures of live runs, unless they are too few yet for a range and commits give one."""
    told = from_runs(mirror, now, live) if live else None
    if told is not None and len(windows(told.done)[0]) >= ENOUGH:
        return told
    made = from_commits(mirror, now)
    if told is not None and (made is None or len(windows(made.done)[0]) < ENOUGH):
        return told
    return made


def from_runs(mirror: Mirror, now: datetime, live: bool) -> Work | None:
    """From the figures that runs tell; None when none did lately."""
    rows = mirror.rows(
        """
        select
            run_id, captured_tokens::double as tokens,
            -- the run's own clock, which never goes back
            first_value(epoch(told_at) - elapsed_ms / 1000) over (partition by run_id order by seq)
                + elapsed_ms / 1000 as second
        from run_log where captured_tokens is not null and told_at > $since
        order by run_id, seq
        """,
        {"since": now - RECENT},
    ).to_pylist()
    curves = [
        [(r["second"], r["tokens"]) for r in group]
        for _, group in itertools.groupby(rows, key=lambda r: r["run_id"])
    ]
    done = merged(curves)
    if not done:
        return None
    last = max(at for curve in curves for at, _ in curve)
    return Work(done, "run log", live, max(0.0, now.timestamp() - last))


def from_commits(mirror: Mirror, now: datetime) -> Work | None:
    """From commits and the captures behind them; None without a commit lately.

    Signs of work are captures and commits; longer than GAP_S without one, nothing went on.
    """
    rows = mirror.rows(
        f"""
        with recent as materialized (
            select captured_at, committed_at, length from samples where committed_at > $since
        ), signs as (
            select captured_at as seen from recent union select committed_at from recent
        ), gaps as (
            select seen, epoch(seen - lag(seen) over (order by seen)) as gap from signs
        ), work as (select * from gaps where gap <= {GAP_S}
        ), commits as (
            select committed_at as made, sum(length)::double as tokens from recent group by 1
        ), spent as (
            select made, sum(gap) as seconds from work
            asof join (select made from commits) c on work.seen <= c.made group by made
        )
        select made, tokens, coalesce(seconds, 0.0) as seconds from commits
        left join spent using (made) order by made
        """,
        {"since": now - RECENT},
    ).to_pylist()
    if not rows:
        return None
    done: list[Stretch] = []
    waiting = 0.0
    for row in rows:  # segments of one pass come at once: no time of their own
        waiting += row["tokens"]
        if row["seconds"] > 0:
            done.append(Stretch(row["seconds"], waiting))
            waiting = 0.0
    if done and waiting:
        done[-1] = Stretch(done[-1].seconds, done[-1].tokens + waiting)
    since = (now - rows[-1]["made"]).total_seconds()
    rhythm = max((row["seconds"] for row in rows[1:]), default=0.0)
    return Work(done, "commits", since < max(IDLE_S, 2 * rhythm), max(0.0, since))
