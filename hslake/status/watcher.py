"""Looks at a lake, its servers and its staging again and again; each look costs what is new."""

import time
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

import hslake
from hslake.errors import HslakeError, without_secrets
from hslake.extract.slot import unfit
from hslake.extract.worklist import held_attempts, of_lake
from hslake.rates import average, estimate
from hslake.server import ServerStatus
from hslake.staging.check import check_roots
from hslake.status import work
from hslake.status.bottleneck import Scene, bottleneck, needs
from hslake.status.mirror import Mirror
from hslake.status.observer import Observer, Told
from hslake.status.report import (
    UP,
    CompactorState,
    Coverage,
    Pace,
    Refusals,
    RunState,
    ServerState,
    StatusReport,
    WriterState,
)
from hslake.views import SAME, VIEWS


class Watcher:
    """A context manager. `look` reports; `look(strict=False)` outlives errors of the lake."""

    def __init__(
        self,
        lake_url: str,
        servers: Sequence[str] = (),
        staging: Sequence[str | Path] = (),
        *,
        timeout_s: float = 10.0,
    ) -> None:
        self._url, roots = lake_url, [Path(s) for s in staging]
        lake = hslake.open(lake_url)
        check_roots(roots, lake.spec)
        self._spec = lake.spec
        self._observer = Observer(servers, roots, timeout_s=timeout_s)
        self._mirror = Mirror(lake)
        self._read_at = 0.0
        self._lake_error: str | None = None
        self._captured: int | None = None  # tokens, at the last look

    def look(self, *, strict: bool = True) -> StatusReport:
        """The report now. Not `strict`: a lake that cannot be read is a line of the report, whose
        figures are those of before; at the first look it raises all the same."""
        # Staging first: what is committed in between is then counted once, as committed.
        told = self._observer.look()
        try:
            self._mirror.refresh()
            self._read_at, self._lake_error = time.time(), None
        except (HslakeError, OSError) as error:
            if strict or not self._read_at:
                raise
            self._lake_error = without_secrets(str(error))
        return self._report(told)

    def close(self) -> None:
        """Close connections."""
        self._observer.close()
        self._mirror.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- the report --------------------------------------------------------------------------

    def _report(self, told: Sequence[Told]) -> StatusReport:
        now = datetime.now(UTC)
        answers = [t.status for t in told if t.status is not None]
        statuses = of_lake(answers, self._spec.lake_id)
        waiting = self._waiting(statuses) if statuses else None
        coverage = self._coverage(waiting or {})
        (forecast,) = self._mirror.rows("forecast").to_pylist()
        writers = _writers(told)
        captures = self._captures(writers)
        found = work.runs(self._mirror, now)
        live = any(run.live for run in found)
        left = sum(r.planned_tokens - r.committed_tokens for r in coverage)
        done = work.best(self._mirror, now, live)
        worked = work.goes_on(done, found, now)
        going_on = live or captures or worked
        going_on = going_on and (not told or any(w.alive for w in writers))
        pace = _pace(done, going_on, left, found, told)
        scene = Scene(
            tokens_left=left,
            runs=found,
            servers=[self._server(t) for t in told if not t.local],
            writers=writers,
            compactors=_compactors(told),
            going_on=worked,
            told=bool(told),
            captures=captures,
            commit_age=self._commit_age(now),
            waiting_tokens=sum(r.waiting_tokens for r in coverage),
            silent=[f"{t.where}: {t.error}" for t in told if t.local and t.error],
            run_age=max(
                ((now - r.started_at).total_seconds() for r in found if r.live and r.started_at),
                default=None,
            ),
        )
        held_back = bottleneck(scene)
        estimate_bytes, expected = self._spec.estimate.bytes, None
        if estimate_bytes and self._spec.estimate.tokens:
            share = forecast["committed_tokens"] / self._spec.estimate.tokens
            expected = round(estimate_bytes * share)
        refusals = self._refusals()
        invalidated = self._invalidated()
        dropped: Counter[str] = Counter()
        for w in writers:
            dropped.update({k: n for k, n in w.dropped_by.items() if n})
        return StatusReport(
            lake=self._url,
            version=self._mirror.versions["manifest"],
            at=now,
            lake_age_seconds=max(0.0, time.time() - self._read_at),
            lake_error=self._lake_error,
            coverage=coverage,
            planned=sum(r.planned for r in coverage),
            committed=sum(r.committed for r in coverage),
            waiting=None if waiting is None else sum(r.waiting for r in coverage),
            whole_staging=_whole(told),
            missing=sum(r.missing for r in coverage),
            planned_tokens=sum(r.planned_tokens for r in coverage),
            committed_tokens=sum(r.committed_tokens for r in coverage),
            tokens_left=left,
            tokens_per_second=pace.now,
            eta_seconds=pace.eta_seconds,
            pace=pace,
            bottleneck=held_back,
            runs=found,
            stored_bytes=forecast["stored_bytes"],
            raw_bytes=forecast["raw_bytes"],
            forecast_bytes=forecast["forecast_stored_bytes"],
            estimate_bytes=estimate_bytes,
            expected_bytes=expected,
            refusals=refusals,
            dropped_by=dict(dropped.most_common()),
            canaries=self._canaries(),
            invalidated=invalidated,
            servers=list(scene.servers),
            writers=writers,
            compactors=list(scene.compactors),
            needs=needs(
                scene,
                held_back,
                self._lake_error,
                refusals,
                invalidated,
                forecast["forecast_stored_bytes"],
                estimate_bytes,
            ),
        )

    # -- from the lake -----------------------------------------------------------------------

    def _waiting(self, statuses: Sequence[ServerStatus]) -> dict[tuple[str, str], tuple[int, int]]:
        """(source, split) -> samples and tokens that lie captured in staging and are not committed.

        An attempt that was committed and then hidden (quarantine) is not waiting.
        """
        held = held_attempts(statuses)
        if not held:
            return {}
        rows = self._mirror.rows(
            f"""
            with held as (select unnest($attempts) as attempt, unnest($samples) as sample_id
            ), waiting as (select distinct sample_id from held anti join manifest using (attempt))
            select p.source, p.split, count(*) as samples, sum(p.length)::bigint as tokens
            from plan p semi join waiting w on w.sample_id = p.sample_id
            anti join samples s on {SAME}
            group by all
            """,
            {"attempts": list(held), "samples": [sample for sample, _ in held.values()]},
        )
        return {(r["source"], r["split"]): (r["samples"], r["tokens"]) for r in rows.to_pylist()}

    def _coverage(self, waiting: dict[tuple[str, str], tuple[int, int]]) -> list[Coverage]:
        rows = []
        for r in self._mirror.rows("select * from coverage order by source, split").to_pylist():
            samples, tokens = waiting.get((r["source"], r["split"]), (0, 0))
            rows.append(
                Coverage(
                    r["source"],
                    r["split"],
                    r["planned"],
                    r["committed"],
                    samples,
                    r["missing"] - samples,
                    r["planned_tokens"],
                    r["committed_tokens"],
                    tokens,
                    r["missing_tokens"] - tokens,
                )
            )
        return rows

    def _refusals(self) -> list[Refusals]:
        # Those of samples that are planned so and not in the lake: others stop nobody.
        rows = self._mirror.rows(
            """
            select r.reason, count(*) as samples from refusals r
            semi join plan p on p.sample_id = r.sample_id and p.token_hash = r.token_hash
            anti join samples s on s.sample_id = r.sample_id and s.token_hash = r.token_hash
            group by r.reason order by samples desc, r.reason
            """
        )
        return [Refusals(r["reason"], r["samples"]) for r in rows.to_pylist()]

    def _canaries(self) -> int:
        rows = self._mirror.rows("select count(*) as n from run_log where op = 'canary'")
        return int(rows.to_pylist()[0]["n"])

    def _commit_age(self, now: datetime) -> float | None:
        sql = "select max(committed_at) as made from manifest where op = 'add'"
        made = self._mirror.rows(sql).to_pylist()[0]["made"]
        return None if made is None else max(0.0, (now - made).total_seconds())

    def _invalidated(self) -> int | None:
        if "invalidated" not in VIEWS:
            return None
        return int(self._mirror.rows("select count(*) as n from invalidated").to_pylist()[0]["n"])

    # -- from servers and staging ------------------------------------------------------------

    def _server(self, told: Told) -> ServerState:
        status, state = told.status, UP
        if told.error is not None or status is None:
            state = (told.error or "not asked yet").removeprefix(f"{told.where}: ")
        else:
            state = unfit(status, self._spec.lake_id) or UP
        writers = [w for w in status.writers if w.alive] if status is not None else []
        return ServerState(
            told.where,
            state,
            max(0.0, time.time() - told.seen_at) if status is not None else None,
            len(writers),
            sum(w.capacity_rows for w in writers),
            sum(w.free_rows for w in writers),
            sum(w.samples_captured - told.probes.get(w.writer, 0) for w in writers),
            sum(w.dropped for w in writers),
            told.rate,
        )

    def _captures(self, writers: Sequence[WriterState]) -> bool:
        """Whether more was captured than at the last look."""
        tokens, before = sum(w.tokens_captured for w in writers if w.alive), self._captured
        self._captured = tokens
        return before is not None and tokens > before


def _pace(
    done: work.Work | None,
    going_on: bool,
    left: int,
    runs: Sequence[RunState],
    told: Sequence[Told],
) -> Pace:
    # Servers and staging folders tell of the same writers: of one kind only.
    sources = [t for t in told if not t.local] or told
    seen = [t.rate for t in sources if t.rate is not None and t.now is not None]
    now = sum(seen) if seen else None
    if done is None or (found := estimate(done.done, left)) is None:
        return Pace(now, None, None, None, None, None)
    live = [run for run in runs if run.live and run.tokens_per_second is not None]
    mean = average(done.done)
    if done.basis == "run log" and live:
        mean = sum(run.tokens_per_second or 0.0 for run in live)
    if now is None:
        now = found.windows[-1]
    if not going_on or not left:
        return Pace(now, mean, done.basis, None, None, None)
    return Pace(now, mean, done.basis, found.seconds, found.soonest, found.latest)


def _whole(told: Sequence[Told]) -> bool:
    """Whether all writers behind what was named are seen, those that have ended too."""
    servers = [t for t in told if not t.local]
    seen = all(t.now is not None and t.now.roots for t in servers)
    return bool(told) and (seen or len(servers) < len(told))


def _writers(told: Sequence[Told]) -> list[WriterState]:
    """Every writer once: a server and its staging folder tell of the same ones, and a server of
    others in its folder."""
    found: dict[str, WriterState] = {}
    for t, key in [*((t, "writers") for t in told), *((t, "others") for t in told)]:
        if t.status is None:
            continue
        by = {w["writer"]: w.get("dropped_by", {}) for w in t.status.raw.get(key, ())}
        for w in t.status.writers if key == "writers" else t.status.others:
            if w.writer in found and found[w.writer].alive:
                continue
            found[w.writer] = WriterState(
                t.where,
                w.writer,
                w.alive and t.error is None,
                w.armed,
                w.error,
                w.capacity_rows,
                w.free_rows,
                sum(p.reserved for p in w.parts if p.state == "sealed"),
                w.samples_captured - t.probes.get(w.writer, 0),
                w.tokens_captured,
                w.dropped,
                dict(by.get(w.writer, {})),
                datetime.fromtimestamp(w.updated_at, UTC),
            )
    return list(found.values())


def _compactors(told: Sequence[Told]) -> list[CompactorState]:
    found = []
    for t in told:
        own = t.now.raw.get("compactor") if t.now is not None else None
        if not isinstance(own, dict):
            continue
        made = own.get("committed_at")
        found.append(
            CompactorState(
                t.where,
                own.get("samples", 0),
                own.get("tokens_per_s", 0.0),
                own.get("backlog_samples", 0),
                own.get("backlog_rows", 0),
                datetime.fromtimestamp(made, UTC) if made else None,
                [*own.get("troubles", []), *own.get("damage", []), *own.get("refused", [])],
            )
        )
    return found
