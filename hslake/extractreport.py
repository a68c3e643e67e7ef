"""What a call of `extract` reports."""

from dataclasses import dataclass

INTERRUPTED = "interrupted"
LIMITED = "beyond --limit"
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

    @property
    def passed(self) -> bool:
        """Complete, or only short of what --limit left out."""
        short = self.interrupted or self.unconfirmed
        return not short and all(reason == LIMITED for reason in self.missing)

    def __str__(self) -> str:
        return self.message


def last_line(report: ExtractReport, where: str | None) -> str:
    """The line that says complete, or exactly what is missing and why."""
    selected = "selected" if where else "planned"
    there = f"{report.committed:,} committed"
    if report.waiting:
        there += f", {report.waiting:,} captured and waiting in staging for `hslake compact`"
    if report.complete:
        return f"complete: all {report.planned:,} {selected} samples are captured ({there})"
    gone = sum(report.missing.values())
    unsure = f"{report.unconfirmed:,} unconfirmed: {_UNCONFIRMED}" if report.unconfirmed else ""
    end = ". The same command again continues" if report.interrupted else ""
    if not gone:
        return f"{INTERRUPTED if report.interrupted else 'unconfirmed'}: {unsure} ({there}){end}"
    why = "; ".join(f"{n:,} {reason}" for reason, n in report.missing.items())
    head = INTERRUPTED if report.interrupted else "done as far as asked" * report.passed
    unsure = f"; besides, {unsure}" if unsure else ""
    return (
        f"{head or 'incomplete'}: {gone:,} of {report.planned:,} {selected} samples are missing: "
        f"{why}{unsure} ({there}){end}"
    )
