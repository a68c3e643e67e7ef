"""What `hslake status` reports."""

from dataclasses import dataclass
from datetime import datetime

# What holds a run back.
NOTHING, NOBODY, UNKNOWN = "nothing", "nothing running", "unknown"
SERVER, STAGING, COMPACTOR, DRIVER = "server", "staging", "compactor", "driver"
UP = "up"


@dataclass(frozen=True)
class Coverage:
    """One source and split: samples planned = committed + waiting (in staging) + missing."""

    source: str
    split: str
    planned: int
    committed: int
    waiting: int
    missing: int
    planned_tokens: int
    committed_tokens: int
    waiting_tokens: int
    missing_tokens: int


@dataclass(frozen=True)
class WriterState:
    """One writer's staging: rows in all and free, what it captured and dropped since it started.

    `seen_at`: the server or staging folder that told. `sealed_rows`: of parts that wait for the
    compactor. `samples_captured` leaves preflight's probes out; `tokens_captured` is the writer's
    own figure, with them. `dropped_by`: kind of reason -> attempts. `updated_at`: UTC.
    """

    seen_at: str
    writer: str
    alive: bool
    armed: bool
    error: str | None
    capacity_rows: int
    free_rows: int
    sealed_rows: int
    samples_captured: int
    tokens_captured: int
    dropped: int
    dropped_by: dict[str, int]
    updated_at: datetime


@dataclass(frozen=True)
class ServerState:
    """`state`: "up", or what is wrong. `age_seconds`: of what it told last, None when it never did.
    `tokens_per_second`: captured over the last minute, as --watch saw it; None at the first look.
    """

    url: str
    state: str
    age_seconds: float | None
    writers: int
    capacity_rows: int
    free_rows: int
    samples_captured: int
    dropped: int
    tokens_per_second: float | None


@dataclass(frozen=True)
class CompactorState:
    """What `compact --watch --listen` says of itself."""

    url: str
    samples: int
    tokens_per_second: float
    backlog_samples: int
    backlog_rows: int
    committed_at: datetime | None
    troubles: list[str]


@dataclass(frozen=True)
class RunState:
    """A run of extract, as the run log has it. `live`: it said something lately and no end."""

    run_id: str
    command: str | None
    host: str | None
    started_at: datetime | None
    last_seen_at: datetime
    live: bool
    outcome: str | None
    reason: str | None
    captured: int
    captured_tokens: int
    retried: int
    dropped: int
    refused: int
    seconds: float
    tokens_per_second: float | None


@dataclass(frozen=True)
class Pace:
    """Tokens a second and the time left.

    `now`: captured over the last minute as --watch saw it on the servers, else over the newest
    window; `average`: over the run (or, without a live one, the work of the last hours); `basis`:
    run log | commits, where the rate is from; `eta_*`: seconds, at the rate of up to an hour; the
    range holds 9 times in 10 (hslake.rates.estimate), None while too little is known for one.
    None where nothing was done or nothing is going on.
    """

    now: float | None
    average: float | None
    basis: str | None
    eta_seconds: float | None
    eta_soonest: float | None
    eta_latest: float | None


@dataclass(frozen=True)
class Bottleneck:
    """`name`: server | staging | compactor | driver | nothing running | nothing (the plan is
    covered) | unknown; `why`: the figures that say so."""

    name: str
    why: str


@dataclass(frozen=True)
class Refusals:
    """Samples that are not asked for again, for one reason."""

    reason: str
    samples: int


@dataclass(frozen=True)
class StatusReport:
    """Where a lake stands. `waiting`: captured, seen in staging and not committed; figures are None
    when neither server nor staging was given. `whole_staging`: all that lies in the staging folders
    behind what was named is seen; else what server processes that have ended left there (and
    others do not tell of) counts as missing.

    `lake_age_seconds`: since the lake's tables were read, `lake_error`: why they cannot be now;
    the figures are then those of before. `tokens_left`: planned and not committed.
    `tokens_per_second` and `eta_seconds` are those of `pace`. `expected_bytes`: what the spec's
    estimate foresees for the tokens committed so far; None without an estimate. `dropped_by`: of
    all writers that are seen. `runs`: live ones, or the last one. `invalidated`: planned samples
    that are of an older generation of the plan; None where lakes have none. `needs`: what somebody
    should do.
    """

    lake: str
    version: int
    at: datetime
    lake_age_seconds: float
    lake_error: str | None
    coverage: list[Coverage]
    planned: int
    committed: int
    waiting: int | None
    whole_staging: bool
    missing: int
    planned_tokens: int
    committed_tokens: int
    tokens_left: int
    tokens_per_second: float | None
    eta_seconds: float | None
    pace: Pace
    bottleneck: Bottleneck
    runs: list[RunState]
    stored_bytes: int
    raw_bytes: int
    forecast_bytes: int
    estimate_bytes: int | None
    expected_bytes: int | None
    refusals: list[Refusals]
    dropped_by: dict[str, int]
    canaries: int
    invalidated: int | None
    servers: list[ServerState]
    writers: list[WriterState]
    compactors: list[CompactorState]
    needs: list[str]

    @property
    def done(self) -> float:
        """Share of the planned tokens that is committed, 0 to 1."""
        return self.committed_tokens / self.planned_tokens if self.planned_tokens else 0.0
