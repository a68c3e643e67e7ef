"""What preflight found."""

from dataclasses import dataclass

from hslake.checks import FAIL, WARN, Check


@dataclass(frozen=True)
class Pace:
    """What the timed burst measured, and what follows for the rest of the plan.

    Rates in tokens a second, over all servers; None where it was not measured (without local
    staging only the server is). `staging_rate`: what comes through staging when server and
    compactor work at theirs; `staging_from`: burst (it ran through this staging for long enough) |
    model (computed from its parts). `bottleneck`: server | staging | compactor. `ratio`: stored
    over raw bytes, in codec `codec`. `stored_bytes`: what the rest of the plan will take.
    """

    seconds: float
    samples: int
    tokens: int
    server_rate: float
    server_rates: dict[str, float]
    staging_rate: float | None
    staging_from: str | None
    compactor_rate: float | None
    bottleneck: str
    tokens_left: int
    eta_seconds: float
    codec: str
    ratio: float | None
    stored_bytes: int


@dataclass(frozen=True)
class PreflightReport:
    """The checks, in the order of the data's way. `passed`: none failed. `pace` is None when no
    burst was run."""

    lake: str
    servers: list[str]
    passed: bool
    checks: list[Check]
    pace: Pace | None = None

    @property
    def warnings(self) -> list[Check]:
        """Those to think about."""
        return [c for c in self.checks if c.result == WARN]

    @property
    def failures(self) -> list[Check]:
        """Those that forbid a run."""
        return [c for c in self.checks if c.result == FAIL]
