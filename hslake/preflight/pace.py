"""From what the burst measured to what the run will do: the slowest of three sets the pace."""

import math
from dataclasses import dataclass

SERVER, STAGING, COMPACTOR = "server", "staging", "compactor"
BURST, MODEL = "burst", "model"  # what the rate through staging is from
# From sealing a part to its rows being free again, beside the work itself: the compactor's look
# (every second), a manifest commit, the writer's tick.
TURNAROUND_S = 2.0
_EVENTS = 2000  # of the simulation; a few dozen make a period
HELD_BACK = 0.25  # of a burst without room in staging, which then sets the pace
_LOSS = 0.97  # of the slower one's rate: less than that is staging's doing


@dataclass(frozen=True)
class Quota:
    """Staging behind the servers, in rows: parts and their size, and what is on its way."""

    parts: int
    part_rows: int
    in_flight: int


def through(quota: Quota, server: float, compactor: float) -> float:
    """Tokens a second that go through staging, given the rates (> 0) of both its ends.

    Simulated: parts fill one after the other; a pass of the compactor takes all that are full, and
    they are free again when it is over, TURNAROUND_S later than its work takes. Rows on their way
    beyond a part's keep further parts from being sealed.
    """
    size = quota.part_rows
    parts = max(1, quota.parts - max(0, quota.in_flight - 1) // size)
    now = filled = end = 0.0
    full = busy = done = 0
    half = (0.0, 0)
    for event in range(_EVENTS):
        filling = full + busy < parts
        to_fill = (size - filled) / server if filling else math.inf
        to_free = end - now if busy else math.inf
        step = min(to_fill, to_free)
        now += step
        filled += server * step if filling else 0.0
        if to_fill <= to_free:
            filled, full = 0.0, full + 1
        else:
            done, busy = done + busy, 0
        if full and not busy:
            busy, full = full, 0
            end = now + busy * size / compactor + TURNAROUND_S
        if event == _EVENTS // 2:
            half = (now, done)
    return min(server, compactor, (done - half[1]) * size / (now - half[0]))


def as_seen(quota: Quota, rate: float, compactor: float) -> float:
    """Like `through`, of staging that was seen to pass on `rate` tokens a second of a burst, long
    enough to have turned its parts over.

    The compactor only gives up the rows of a burst. What its work on those of samples costs on top
    is simulated, with as few parts as explain what was seen.
    """
    alone, both = rate, rate
    for parts in range(1, quota.parts + 1):
        like = Quota(parts, quota.part_rows, 0)
        alone, both = through(like, rate, math.inf), through(like, rate, compactor)
        if alone >= _LOSS * rate:
            break
    return min(compactor, rate, rate * both / alone)  # ends of the simulation are not exact


def slowest(server: float, compactor: float | None, passed_on: float | None) -> tuple[str, float]:
    """(which of the three sets the pace, what comes of it). `passed_on`: of `through`. Staging is
    to blame when less comes of it than the slower of its ends could do."""
    if compactor is None or passed_on is None:
        return SERVER, server
    if passed_on < _LOSS * min(server, compactor):
        return STAGING, passed_on
    return (COMPACTOR if compactor < server else SERVER), min(server, compactor)
