"""What a call of `extract` reports."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hslake import runlog

if TYPE_CHECKING:
    from hslake.extract.drive import Driver
    from hslake.extract.options import ExtractOptions
    from hslake.extract.run import View
    from hslake.extract.slot import Slot

INTERRUPTED = "interrupted"
LIMITED = "beyond --limit"
NOT_CAPTURED = "not captured"
_SHOWN = 1000  # missing samples listed by id
LOST = (
    "captured, but in staging no more (it was emptied, or the compactor gave them up): the same "
    "command asks for them again"
)
_UNCONFIRMED = (
    "captured by a server process that is not seen any more, and not committed; whether its "
    "staging is still there cannot be told (on its machine, --staging DIR tells). Run `hslake "
    "compact` there, then this command again: it asks for what is not committed then"
)


@dataclass(frozen=True)
class Tally:
    """What a call has done so far: samples and tokens captured, attempts asked for again, attempts
    that the hook dropped."""

    captured: int = 0
    tokens: int = 0
    retried: int = 0
    dropped: int = 0

    def plus(self, driver: Driver) -> Tally:
        """With what `driver` did."""
        return Tally(
            self.captured + driver.captured,
            self.tokens + driver.captured_tokens,
            self.retried + driver.retried,
            self.dropped + driver.dropped,
        )

    def heard(self, tokens: int) -> Tally:
        """With one more sample."""
        return replace(self, captured=self.captured + 1, tokens=self.tokens + tokens)


@dataclass(frozen=True)
class MissingSample:
    """A planned sample that is neither committed nor waiting in staging, and why."""

    sample_id: str
    length: int
    reason: str


@dataclass(frozen=True)
class ServerUse:
    """What one server did in this call. `state`: "up", or why it is set aside."""

    url: str
    state: str
    captured: int = 0
    tokens: int = 0
    dropped: int = 0
    outages: int = 0

    def plus(self, slot: Slot) -> ServerUse:
        """With what `slot` did, and its state."""
        return ServerUse(
            self.url,
            slot.reason,
            self.captured + slot.captured,
            self.tokens + slot.tokens,
            self.dropped + slot.dropped,
            self.outages + slot.outages,
        )


@dataclass(frozen=True)
class ExtractReport:
    """The end of one call.

    `planned`, `committed`, `waiting` (captured, in staging, uncommitted), `unconfirmed` (captured
    by a writer that nobody shows any more; the compactor commits them if its staging is still
    there) and `missing` (reason -> samples) speak of the plan's samples that --where selects;
    `captured` and what follows of this call. `complete`: nothing is missing or unconfirmed.
    `message` is the last line a person reads.
    """

    lake: str
    complete: bool
    interrupted: bool
    planned: int
    planned_tokens: int
    committed: int
    waiting: int
    unconfirmed: int
    missing: dict[str, int]
    missing_samples: list[MissingSample]
    captured: int
    captured_tokens: int
    retried: int
    dropped: int
    servers: list[ServerUse]
    seconds: float
    message: str

    not_committed: bool = False  # it was to stay until all is committed, and is not

    @property
    def passed(self) -> bool:
        """Complete, or only short of what --limit left out."""
        short = self.interrupted or self.unconfirmed or self.not_committed
        return not short and all(reason == LIMITED for reason in self.missing)

    @property
    def outcome(self) -> str:
        """As the run log has it."""
        if self.interrupted:
            return runlog.INTERRUPTED
        return runlog.COMPLETE if self.complete else runlog.INCOMPLETE

    def __str__(self) -> str:
        return self.message


def make_report(
    *,
    lake: str,
    options: ExtractOptions,
    view: View,
    reasons: Mapping[str, str],
    stopped: str | None,
    interrupted: bool,
    tally: Tally,
    servers: list[ServerUse],
    seconds: float,
) -> ExtractReport:
    """The report on what `view` shows at the end. `reasons`: sample id -> why it was given up;
    `stopped`: why the call ended early."""
    listing, places = view.listing, view.places
    asked = set(view.todo.names.to_pylist())
    counts: Counter[str] = Counter()
    alike: dict[str, str] = {}  # reasons that differ only in numbers are one
    samples: list[MissingSample] = []
    for item in listing.missing.without(places.waiting | places.unconfirmed):
        name = item.sample_id
        why = reasons.get(name)
        if why is None and name in places.lost:
            why = LOST
        elif why is None and name in asked:
            why = stopped or (INTERRUPTED if interrupted else NOT_CAPTURED)
        why = why or LIMITED
        key = alike.setdefault(re.sub(r"\d[\d,.]*", "#", why), why)
        counts[key] += 1
        if len(samples) < _SHOWN:
            samples.append(MissingSample(name, item.length, why))
    missing = dict(counts.most_common())
    behind = options.until_complete and view.awaited > 0
    report = ExtractReport(
        lake=lake,
        complete=not missing and not places.unconfirmed and not behind,
        interrupted=interrupted,
        planned=listing.planned,
        planned_tokens=listing.planned_tokens,
        committed=listing.committed,
        waiting=len(places.waiting),
        unconfirmed=len(places.unconfirmed),
        missing=missing,
        missing_samples=samples,
        captured=tally.captured,
        captured_tokens=tally.tokens,
        retried=tally.retried,
        dropped=tally.dropped,
        servers=servers,
        seconds=seconds,
        message="",
        not_committed=behind,
    )
    return replace(report, message=_last_line(report, options, stopped))


def _last_line(report: ExtractReport, options: ExtractOptions, stopped: str | None) -> str:
    """The line that says complete, or exactly what is missing and why."""
    selected = "selected" if options.where or options.shard else "planned"
    there = f"{report.committed:,} committed"
    if report.waiting:
        there += f", {report.waiting:,} captured and waiting in staging for `hslake compact`"
    if report.complete:
        done = "committed" if report.committed == report.planned else "captured"
        return f"complete: all {report.planned:,} {selected} samples are {done} ({there})"
    gone = sum(report.missing.values())
    told = []
    if gone:
        why = "; ".join(f"{n:,} {reason}" for reason, n in report.missing.items())
        told.append(f"{gone:,} of {report.planned:,} {selected} samples are missing: {why}")
    if report.not_committed and report.waiting:
        why = stopped or INTERRUPTED
        told.append(f"{report.waiting:,} captured samples are not committed: {why}")
    if report.unconfirmed:
        told.append(f"{report.unconfirmed:,} unconfirmed: {_UNCONFIRMED}")
    if report.interrupted:
        head = INTERRUPTED
    elif report.passed:
        head = "done as far as asked"
    else:
        head = "incomplete" if gone or report.not_committed else "unconfirmed"
    end = ". The same command again continues" if report.interrupted else ""
    return f"{head}: {'; besides, '.join(told)} ({there}){end}"
