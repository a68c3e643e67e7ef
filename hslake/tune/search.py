"""Which concurrency is enough: doubled until it gains nothing, then the candidates in turns.

Rates are noisy: a second burst at the same concurrency differs by some percent, and a server that
warms up or a neighbour that comes makes later bursts differ from earlier ones. So the candidates
are measured again in turns, up and down, and the least one within noise of the best is taken.
"""

import math
import statistics
from collections.abc import Awaitable, Callable, Sequence

from hslake.tune.report import Level, Trial

FIRST, MOST = 4, 1024
GAIN = 0.03  # of the best rate so far: doubling that gains less does not go on for long
IDLE_STEPS = 2  # doublings in a row without a gain, before the end: one may be bad luck
NEAR = 0.02  # of the best rate: less than that is no reason for more concurrency
STARVED = 0.25  # of the time without room in staging: more concurrency tells nothing then

Measure = Callable[[int], Awaitable[Trial | None]]


async def search(
    measure: Measure, *, first: int = FIRST, most: int = MOST, repeats: int = 3
) -> list[Trial]:
    """All bursts, in order. `measure` returns None when no more can be measured."""
    trials: list[Trial] = []
    best, idle, requests = 0.0, 0, first
    while requests <= most:
        trial = await measure(requests)
        if trial is None:
            return trials
        trials.append(trial)
        idle = 0 if trial.rate > best * (1 + GAIN) else idle + 1
        best = max(best, trial.rate)
        if idle >= IDLE_STEPS or trial.starved > STARVED:
            break
        requests *= 2
    turns = candidates(trials)
    for turn in range(repeats - 1):
        for requests in turns if turn % 2 else reversed(turns):
            trial = await measure(requests)
            if trial is None:
                return trials
            trials.append(trial)
    while (top := _top_is_best(trials)) and 2 * top <= most:  # the first look at it was unlucky
        for _ in range(repeats):
            trial = await measure(2 * top)
            if trial is None:
                return trials
            trials.append(trial)
    return trials


def _top_is_best(trials: Sequence[Trial]) -> int:
    """The most that was tried, if that is what would be taken and staging did not decide; else
    0."""
    found = levels(trials)
    best = enough(found)
    if best is None or best != found[-1] or best.starved > STARVED:
        return 0
    return best.requests


def candidates(trials: Sequence[Trial]) -> list[int]:
    """Concurrencies worth another look: the best and what comes near it, ascending."""
    found = levels(trials)
    best = max((level.rate for level in found), default=0.0)
    return [level.requests for level in found if level.rate >= best * (1 - 3 * GAIN)]


def levels(trials: Sequence[Trial]) -> list[Level]:
    """Bursts by concurrency, ascending."""
    found = []
    for requests in sorted({t.requests for t in trials}):
        mine = [t for t in trials if t.requests == requests]
        rates = [t.rate for t in mine]
        found.append(
            Level(
                requests,
                statistics.fmean(rates),
                statistics.stdev(rates) if len(rates) > 1 else None,
                len(rates),
                statistics.fmean(t.on_the_way for t in mine),
                max(t.most_tokens for t in mine),
                statistics.fmean(t.starved for t in mine),
            )
        )
    return found


def noise(found: Sequence[Level]) -> float:
    """Standard deviation of one burst's rate over the mean, from all levels with several bursts; 0
    when there is none."""
    many = [(x, x.bursts - 1) for x in found if x.spread is not None and x.rate > 0]
    free = sum(n for _, n in many)
    if not free:
        return 0.0
    return math.sqrt(sum(n * ((x.spread or 0.0) / x.rate) ** 2 for x, n in many) / free)


def enough(found: Sequence[Level]) -> Level | None:
    """The least concurrency whose rate is not below the best one's by more than NEAR, or than twice
    the standard error of their difference, whichever is more; None when nothing was captured."""
    if not found or max(x.rate for x in found) <= 0:
        return None
    best = max(found, key=lambda x: (x.rate, -x.requests))
    spread = noise(found)
    for level in sorted(found, key=lambda x: x.requests):
        error = 2 * spread * math.sqrt(1 / level.bursts + 1 / best.bursts)
        near = level.rate >= best.rate * (1 - max(NEAR, min(error, 3 * NEAR)))
        if near and (level.bursts > 1 or best.bursts == 1):
            return level
    return best
