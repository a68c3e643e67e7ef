"""What `hslake tune` reports."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Trial:
    """One burst at one concurrency. Rates in tokens a second, over all servers of the group.

    `requests`: allowed on their way to each server; `on_the_way` and `most_tokens`: requests (mean)
    and tokens (most) that were, of the fullest server; `starved`: share of the time in which a
    server could have got more, but staging had no room; `sealed`: share of staging's rows in use
    that waited for the compactor meanwhile; `busy`: share of a core that this process took;
    `dropped`: captures that the hook gave up.
    """

    requests: int
    rate: float
    seconds: float
    samples: int
    tokens: int
    on_the_way: float
    most_tokens: int
    starved: float
    sealed: float
    busy: float
    dropped: int


@dataclass(frozen=True)
class Level:
    """All bursts at one concurrency: mean rate, and the standard deviation of the bursts (None of
    one alone)."""

    requests: int
    rate: float
    spread: float | None
    bursts: int
    on_the_way: float
    most_tokens: int
    starved: float


@dataclass(frozen=True)
class Group:
    """Servers of one chunk size, and what was measured on them together.

    `best`: the least concurrency whose rate is within noise of the best one; None when nothing was
    captured. `max_tokens`: for --max-tokens. `memory_bytes`: that the capture takes of each GPU at
    this chunk size; None when the chunk size is not known.
    """

    chunk: int | None
    servers: list[str]
    levels: list[Level]
    trials: list[Trial]
    best: Level | None
    max_tokens: int | None
    memory_bytes: int | None


@dataclass(frozen=True)
class TuneReport:
    """`samples`: planned ones that were captured for real (0 with `probes`); `warnings`: why what
    was measured may not be what was meant; `commands`: to be copied."""

    lake: str
    probes: bool
    samples: int
    groups: list[Group]
    best: Group | None
    warnings: list[str]
    commands: list[str]
