"""What holds a run back, and what somebody should do about it: from the figures, with the figures.

The rules, in order: nothing is left; nobody works; no server captures; staging has no room (then
the compactor is behind if most of what fills it waits for it, else staging is too small); there is
room, and nothing arrives (the driver); else the servers set the pace, as they should.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hslake.status.report import (
    COMPACTOR,
    DRIVER,
    NOBODY,
    NOTHING,
    SERVER,
    STAGING,
    UNKNOWN,
    UP,
    Bottleneck,
    CompactorState,
    Refusals,
    RunState,
    ServerState,
    WriterState,
)
from hslake.units import format_bytes, format_span

FULL = 0.15  # of staging's rows free: with less, requests wait for room
_WAITS = 0.5  # of the rows in use: with more of them waiting, the compactor is behind
_BEGINS_S = 60.0  # a run that is younger has its first requests still to send
_BEHIND_S = 300.0  # without a commit although samples wait


@dataclass(frozen=True)
class Scene:
    """What the rules look at. `told`: a server or staging folder was named; `captures`: tokens were
    seen to be captured since the last look; `waiting_tokens`: captured and not committed;
    `silent`: staging folders that cannot be read now, and why; `run_age`: seconds since the oldest
    live run began."""

    tokens_left: int
    runs: Sequence[RunState]
    servers: Sequence[ServerState]
    writers: Sequence[WriterState]
    compactors: Sequence[CompactorState]
    going_on: bool
    told: bool
    captures: bool
    commit_age: float | None
    waiting_tokens: int = 0
    silent: Sequence[str] = ()
    run_age: float | None = None

    @property
    def live(self) -> list[WriterState]:
        """Writers that can capture."""
        return [w for w in self.writers if w.alive and w.armed]

    @property
    def capacity(self) -> int:
        """Rows of the live writers."""
        return sum(w.capacity_rows for w in self.live)

    @property
    def free(self) -> int:
        """Free rows of the live writers."""
        return sum(w.free_rows for w in self.live)

    @property
    def waits(self) -> int:
        """Rows that wait for the compactor, of all writers: of sealed parts, or of whole samples,
        whichever are more (a compactor that is short of room takes them from open parts too)."""
        return max(self.waiting_tokens, sum(w.sealed_rows for w in self.writers))

    @property
    def arriving(self) -> int | None:
        """Rows in use that are not of whole samples; None where ended writers' samples wait too,
        which are not told apart."""
        if any(w.sealed_rows for w in self.writers if not w.alive):
            return None
        return max(0, self.capacity - self.free - self.waits)

    @property
    def full(self) -> bool:
        """Whether one of the live writers has hardly any room: which one gets a request is not the
        driver's to say, so the fullest decides."""
        return any(w.free_rows < FULL * w.capacity_rows for w in self.live)

    @property
    def run_live(self) -> bool:
        """Whether a run says that it is going on."""
        return any(run.live for run in self.runs)


def bottleneck(s: Scene) -> Bottleneck:
    """The first rule that applies."""
    if not s.tokens_left:
        return Bottleneck(NOTHING, "all planned tokens are committed")
    if s.told and not s.live:
        down = [f"{x.url}: {x.state}" for x in s.servers if x.state != UP]
        if s.run_live or s.captures:
            why = "; ".join(down) or "no live writer stands behind what was named"
            return Bottleneck(SERVER, why)
        why = "no run is live and no live writer is seen"
        return Bottleneck(NOBODY, why + (f" ({'; '.join(down)})" if down else ""))
    if not (s.run_live or s.captures or s.going_on):
        last = s.runs[0] if s.runs else None
        why = "no run of extract is live"
        if last is not None and last.outcome:
            why += f", the last one ended {last.outcome}"
        elif last is not None:
            why += ", the last one was cut off"
        return Bottleneck(NOBODY, why)
    if not s.live:
        return Bottleneck(UNKNOWN, "name --server and --staging to tell")
    share = 1 - s.free / max(1, s.capacity)
    filled = f"staging is {share:.0%} full"
    if s.full:
        used = max(1, s.capacity - s.free)
        waits = f"{min(1.0, s.waits / used):.0%} of that waits for the compactor"
        if s.waits >= _WAITS * used:
            return Bottleneck(COMPACTOR, f"{filled}, {waits}")
        return Bottleneck(STAGING, f"{filled}, and only {waits}: the rest is still arriving")
    begins = s.run_age is not None and s.run_age < _BEGINS_S
    if s.run_live and not begins and not s.captures and s.arriving == 0:
        return Bottleneck(DRIVER, f"{filled}, and nothing is arriving there")
    if not s.run_live and not s.captures:
        return Bottleneck(UNKNOWN, f"{filled}; whether anything is on its way is not known")
    return Bottleneck(SERVER, f"{filled}: there is room, and requests are on their way")


def needs(
    s: Scene,
    found: Bottleneck,
    lake_error: str | None,
    refusals: Sequence[Refusals],
    invalidated: int | None,
    forecast_bytes: int,
    estimate_bytes: int | None,
) -> list[str]:
    """What somebody should do, most urgent first."""
    told = [f"the lake cannot be read now: {lake_error}"] if lake_error else []
    told += [f"server {x.url}: {x.state}" for x in s.servers if x.state != UP]
    told += [f"staging {text}" for text in s.silent]
    told += [f"writer {w.writer[:8]}: {w.error}" for w in s.writers if w.alive and w.error]
    told += [f"compactor {c.url}: {t}" for c in s.compactors for t in c.troubles]
    young = s.commit_age is None and s.run_age is not None and s.run_age < _BEHIND_S
    behind = s.commit_age is None or s.commit_age > _BEHIND_S
    if found.name == COMPACTOR:
        todo = "is `hslake compact LAKE --staging DIR --watch` running?"
        if not behind:
            todo = "give the compactor more cores, or a nearer store"
        told.append(f"staging is full and waits for the compactor: {todo}")
    elif s.waits and behind and not young and not s.compactors and s.told:
        when = "nothing was committed yet"
        if s.commit_age is not None:
            when = f"nothing was committed for {format_span(s.commit_age)}"
        told.append(f"samples wait in staging and {when}: run `hslake compact … --watch`")
    if found.name == STAGING:
        told.append("staging is too small for its servers: start them with more --max-parts")
    if found.name == DRIVER:
        todo = "is it still there? A run that was killed counts as live until it is silent for long"
        told.append(f"a run says that it is live, and nothing arrives: {todo}")
    last = s.runs[0] if s.runs else None
    if s.tokens_left and not s.run_live and last is not None:
        if last.outcome is None:
            told.append("the last run was cut off: run the same `hslake extract` again")
        elif last.outcome != "complete":
            # The reason may begin with the outcome.
            why = (last.reason or "").removeprefix(f"{last.outcome}: ")
            told.append(f"the last run ended {last.outcome}" + (f": {why}" if why else ""))
    if refusals:
        count = sum(r.samples for r in refusals)
        what = f"{count:,} sample{'s are' if count != 1 else ' is'} refused for good"
        told.append(f"{what}: `hslake query LAKE refusals`")
    if invalidated:
        told.append(f"{invalidated:,} samples are of an older plan: extract asks for them again")
    if estimate_bytes and forecast_bytes > 1.02 * estimate_bytes:
        by = format_bytes(forecast_bytes - estimate_bytes)
        told.append(f"the plan will take {by} more than the lake's estimate: is there room?")
    return told
