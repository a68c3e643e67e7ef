"""Rates and times left: one arithmetic for `extract`, `status` and `tune`.

Progress is a list of stretches of work, each so many seconds long with so many tokens done in it;
time in which nobody worked is in none of them. The rate is that of the newest stretches, cut into
windows of one length, and the spread of the windows gives the range of the time left.
"""

import itertools
import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

WINDOWS = 12  # at most, that the rate is taken over
LONGEST_S = 300.0  # of a window: with 12 of them, the rate is that of the last hour
HISTORY = 6 * WINDOWS  # windows that the spread is taken over: six hours show slow changes too
ENOUGH = 3  # windows, for a range
_STEADIEST = 0.95  # how alike neighbouring windows may be taken to be
_NOTHING = 1e-12  # tokens a second: a rate that is none, but for rounding
# Student's t, 90 % two-sided, by degrees of freedom.
_T = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Work without a pause: `seconds` > 0, `tokens` >= 0 done in them."""

    seconds: float
    tokens: float


@dataclass(frozen=True)
class Estimate:
    """Tokens a second of late, and seconds left at it.

    `soonest` and `latest`: the range that holds 9 times in 10 if the rate goes on varying as it did
    in the `windows` (tokens a second, oldest first); None while there are fewer than three of them.
    `window`: seconds of one.
    """

    rate: float
    seconds: float
    soonest: float | None
    latest: float | None
    windows: tuple[float, ...]
    window: float


def stretches(points: Iterable[tuple[float, float]]) -> list[Stretch]:
    """Stretches between (time, tokens so far) in the order they were told.

    A clock that is set back gives no stretch until it is where it was; a count that falls has begun
    again from 0 (a process that was started anew).
    """
    found: list[Stretch] = []
    latest, before, waiting = -math.inf, 0.0, 0.0
    for at, total in points:
        if not math.isfinite(at) or not math.isfinite(total):
            continue
        if latest == -math.inf:
            latest, before = at, total
            continue
        waiting += total - before if total >= before else max(total, 0.0)
        before = total
        if at > latest:
            found.append(Stretch(at - latest, waiting))
            latest, waiting = at, 0.0
    if waiting and found:  # told while the clock was behind
        found[-1] = Stretch(found[-1].seconds, found[-1].tokens + waiting)
    return found


def merged(runs: Sequence[Sequence[tuple[float, float]]]) -> list[Stretch]:
    """Stretches of several runs, each (time, tokens so far) from its start: those at one time add
    up, and time in which none of them ran is left out."""
    curves = []
    for points in runs:
        at, total = -math.inf, 0.0
        curve: list[tuple[float, float]] = []
        for time, count in points:
            at, total = max(at, time), max(total, count)  # a run's own count never falls
            curve.append((at, total))
        if len(curve) > 1 and curve[-1][0] > curve[0][0]:
            curves.append(curve)
    edges = sorted({at for curve in curves for at, _ in curve})
    seconds = [0.0] * len(edges)
    tokens = [0.0] * len(edges)
    place = {at: i for i, at in enumerate(edges)}
    for curve in curves:
        for (a, x), (b, y) in itertools.pairwise(curve):
            if b <= a:  # at one moment: of the stretch that ends there
                if place[a]:
                    tokens[place[a]] += y - x
                continue
            for i in range(place[a] + 1, place[b] + 1):
                seconds[i] = edges[i] - edges[i - 1]
                tokens[i] += (y - x) * seconds[i] / (b - a)
    return [Stretch(s, t) for s, t in zip(seconds, tokens, strict=True) if s > 0]


def average(done: Sequence[Stretch]) -> float | None:
    """Tokens a second over all of them."""
    seconds = sum(s.seconds for s in done)
    return sum(s.tokens for s in done) / seconds if seconds > 0 else None


def windows(done: Sequence[Stretch]) -> tuple[list[float], float]:
    """(tokens a second in each window, oldest first; seconds of one).

    A twelfth of the work each, at most five minutes, and no less than the longest stretch of the
    last hour, within which nothing more is known; the newest work lies in the last one. Of work
    of more than an hour there are more than 12, at most 72.
    """
    whole = sum(s.seconds for s in done)
    if whole <= 0:
        return [], 0.0
    newest = WINDOWS * min(LONGEST_S, whole / WINDOWS)
    covered = 0.0
    coarsest = 0.0
    for stretch in reversed(done):
        coarsest = max(coarsest, stretch.seconds)
        covered += stretch.seconds
        if covered >= newest:
            break
    width = max(newest / WINDOWS, coarsest)
    count = max(1, min(HISTORY, int(whole / width * (1 + 1e-9))))
    width = min(width, whole)
    found = [0.0] * count
    at = whole
    for stretch in reversed(done):
        start = at - stretch.seconds
        # The windows that it lies in, counted from the end.
        first = max(0, math.floor((whole - at) / width))
        last = min(count - 1, math.floor((whole - start) / width))
        for k in range(first, last + 1):
            high, low = whole - k * width, whole - (k + 1) * width
            share = max(0.0, min(at, high) - max(start, low)) / stretch.seconds
            found[count - 1 - k] += share * stretch.tokens
        at = start
        if whole - at >= count * width:
            break
    return [tokens / width for tokens in found], width


def estimate(done: Sequence[Stretch], left: float) -> Estimate | None:
    """What the newest windows say of the rate, and of the time that `left` tokens take.

    None when nothing was done in them. The rate is the mean of the n <= 12 newest windows of w
    seconds. With T = left / rate, c the standard deviation of all N <= 72 windows over the rate,
    and r how alike neighbours are (lag-1 autocorrelation, made good for its bias, 0 to 0.95):

        T ± t(N - 1) · c · sqrt((1 + r) / (1 - r)) · sqrt(T² / n + w · T)

    The first term under the root is what n windows do not tell of the rate itself, the second how
    the time still to come will vary. It is never sooner than at the fastest window's rate.
    """
    every, width = windows(done)
    newest = every[-WINDOWS:]
    rate = statistics.fmean(newest) if newest else 0.0
    if rate <= _NOTHING:
        return None
    seconds = max(left, 0.0) / rate
    if len(every) < ENOUGH:
        return Estimate(rate, seconds, None, None, tuple(every), width)
    vary = _T[min(len(every) - 1, len(_T)) - 1] * statistics.stdev(every) / rate
    alike = _alike(every)
    vary *= math.sqrt((1 + alike) / (1 - alike))
    off = vary * math.sqrt(seconds * seconds / len(newest) + width * seconds)
    soonest = min(seconds, max(seconds - off, seconds * rate / max(every)))
    return Estimate(rate, seconds, soonest, seconds + off, tuple(every), width)


def _alike(rates: Sequence[float]) -> float:
    """Lag-1 autocorrelation, from 0 to _STEADIEST; few values show less of it than there is."""
    mean = statistics.fmean(rates)
    whole = sum((x - mean) ** 2 for x in rates)
    if whole <= 0:
        return 0.0
    step = sum((a - mean) * (b - mean) for a, b in itertools.pairwise(rates))
    found = step / whole
    found += (1 + 3 * found) / len(rates)
    return min(_STEADIEST, max(0.0, found))


class Meter:
    """Rates of a count that is looked at now and then; remembers six hours."""

    def __init__(self, keep_s: float = HISTORY * LONGEST_S) -> None:
        self._keep = keep_s
        self._points: deque[tuple[float, float]] = deque()

    def add(self, at: float, total: float) -> None:
        """`total` so far, at the time `at` in seconds of any clock."""
        self._points.append((at, total))
        while len(self._points) > 2 and self._points[1][0] <= at - self._keep:
            self._points.popleft()

    def stretches(self) -> list[Stretch]:
        """What was done between the looks."""
        return stretches(self._points)

    def rate(self, over_s: float = 60.0) -> float | None:
        """Over the last looks that are `over_s` seconds together; None with less than two."""
        found: list[Stretch] = []
        seconds = 0.0
        for stretch in reversed(self.stretches()):
            found.append(stretch)
            seconds += stretch.seconds
            if seconds >= over_s:
                break
        return average(found)

    def estimate(self, left: float) -> Estimate | None:
        """As `hslake.rates.estimate`."""
        return estimate(self.stretches(), left)
