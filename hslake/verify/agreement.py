"""How far stored `final` rows and the server's own log-probs agree: figures, a verdict a sample.

A sample disagrees when one of its positions is off by more than `lmhead.tolerance` allows: what the
server loses by rounding logits to its dtype. It says something at all only if rows that are shifted
by one would have been off: a prompt that ends in one token over and over says nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import numpy as np


@dataclass(frozen=True)
class Canary:
    """Log-probs of a prompt's own tokens from `first` on, told by `server`, and where the sample
    lies that the same attempt stored."""

    sample_id: str
    segment_id: str
    token_start: int
    length: int
    server: str
    run_id: str
    asked_at: datetime
    first: int
    told: np.ndarray  # float32 [length - first]


@dataclass(frozen=True)
class Compared:
    """A canary beside the rows. `off`: |difference| of log-probs, natural logarithm; `position`:
    the worst one in the sample; `over`: positions that are off by more than allowed; `telling`:
    whether rows shifted by one would have been."""

    sample_id: str
    segment_id: str
    server: str
    run_id: str
    asked_at: datetime
    positions: int
    over: int
    position: int
    off: float
    allowed: float
    mean_off: float
    telling: bool

    @property
    def agrees(self) -> bool:
        return not self.over


@dataclass(frozen=True)
class Figures:
    """Of many positions. Means are over the positions that have numbers on both sides."""

    samples: int = 0
    disagreeing: int = 0
    positions: int = 0
    within: int = 0  # positions that are off by no more than allowed
    mean_off: float | None = None
    max_off: float | None = None
    mean_told: float | None = None  # log-prob by the server
    mean_made: float | None = None  # log-prob by the stored rows
    correlation: float | None = None


@dataclass(frozen=True)
class Group:
    """Canaries of one server, run and hour (UTC, its beginning)."""

    server: str
    run_id: str
    hour: datetime
    figures: Figures


@dataclass
class Agreement:
    """What `verify --level canary` found. `unlike`: canaries without a live sample of their
    attempt; `untelling`: samples that agree and would have if their rows were shifted;
    `fingerprint`: whether the folder was told to be the lake's model by its weights."""

    model: str
    fingerprint: bool = False
    figures: Figures = field(default_factory=Figures)
    unlike: int = 0
    untelling: int = 0
    groups: list[Group] = field(default_factory=list)
    worst: list[Compared] = field(default_factory=list)

    @property
    def most_disagree(self) -> bool:
        """Then it is not the samples: it is the folder, or the whole extraction."""
        return 2 * self.figures.disagreeing > self.figures.samples


class Tally:
    """Figures of what is added, mergeable."""

    def __init__(self) -> None:
        self.figures = Figures()
        self._n, self._sums = 0, np.zeros(6)

    def add(self, one: Compared, told: np.ndarray, made: np.ndarray) -> None:
        """One sample, with both log-probs [positions], float64."""
        both = np.isfinite(told) & np.isfinite(made)
        x, y = told[both], made[both]
        self._n += len(x)
        self._sums += [
            x.sum(), y.sum(), (x * x).sum(), (y * y).sum(), (x * y).sum(), np.abs(x - y).sum(),
        ]  # fmt: skip
        old, worst = self.figures, one.off if math.isfinite(one.off) else None
        self.figures = replace(
            old,
            samples=old.samples + 1,
            disagreeing=old.disagreeing + (not one.agrees),
            positions=old.positions + one.positions,
            within=old.within + one.positions - one.over,
            max_off=max((v for v in (old.max_off, worst) if v is not None), default=None),
        )

    def total(self) -> Figures:
        """All that was added."""
        if not self._n:
            return self.figures
        x, y, xx, yy, xy, off = (float(v) / self._n for v in self._sums)
        spread = math.sqrt(max(xx - x * x, 0.0) * max(yy - y * y, 0.0))
        return replace(
            self.figures,
            mean_off=off,
            mean_told=x,
            mean_made=y,
            correlation=(xy - x * y) / spread if spread > 0 else None,
        )


def judge(canary: Canary, made: np.ndarray, shifted: np.ndarray, allowed: np.ndarray) -> Compared:
    """Compare. `made` [n]: log-probs of the canary's tokens by the stored rows; `shifted` [n]: of
    the token that precedes each, which is what rows shifted by one would be asked for; `allowed`
    [n]: by the tolerance. All float64."""
    told = canary.told.astype(np.float64)
    off = np.abs(made - told)
    over = ~(off <= allowed)  # a NaN is over too
    worst = int(np.argmax(np.where(np.isfinite(off), off / allowed, np.inf)))
    control = np.abs(shifted[1:] - told[:-1])
    return Compared(
        canary.sample_id,
        canary.segment_id,
        canary.server,
        canary.run_id,
        canary.asked_at,
        positions=len(off),
        over=int(over.sum()),
        position=canary.first + worst,
        off=float(off[worst]),
        allowed=float(allowed[worst]),
        mean_off=float(off.mean()),
        telling=bool((control > allowed[1:]).any()),
    )


def hour_of(at: datetime) -> datetime:
    """The beginning of its hour, UTC."""
    return at.astimezone(UTC).replace(minute=0, second=0, microsecond=0)


def sample_text(one: Compared, dtype: str) -> str:
    """What is wrong with a sample that disagrees."""
    return (
        f"`final` does not give the log-probs that {one.server} told of it: {one.over} of "
        f"{one.positions} positions are off by more than allowed, position {one.position} by "
        f"{one.off:.3g} (allowed: {one.allowed:.2g} in {dtype})"
    )


def worst_of(compared: Sequence[Compared], count: int) -> list[Compared]:
    """The farthest off for what is allowed."""

    def key(one: Compared) -> float:
        return one.off / one.allowed if math.isfinite(one.off) else math.inf

    return sorted(compared, key=key, reverse=True)[:count]
