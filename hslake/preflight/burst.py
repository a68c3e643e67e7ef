"""A short timed burst: the plan's own prompts, captured as extract would, under probe ids.

It obeys extract's credits and its own share of staging's free rows, so it never fills staging; what
is on its way when the time is over is waited for, so no half-filled rows are left.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hslake.extract.drive import Driver, Limits
from hslake.extract.worklist import Item
from hslake.ids import PROBE_PREFIX
from hslake.preflight.probe import SOURCE, probe_id
from hslake.server import Server, ServerStatus
from hslake.spec import LakeSpec
from hslake.staging import scan
from hslake.staging.folder import COMPACT_LOCK, LOCK

SHARE = 0.25  # of the free rows that a burst may leave filled behind it
_SHARE_BESIDE = 0.5  # of the free rows at any time, with a compactor that frees them
_SEEN_S = 10.0  # a compactor that has been there since then is at work
_WARM_UP = 0.25  # of the time
_MAX_SAMPLES = 50_000
_LOOK_S = 0.05
_STEADY = 0.5  # of the most that was on its way: below it the end of the burst shows


@dataclass(frozen=True)
class Burst:
    """What was captured, in tokens a second after the warm-up: `rate`, and `rates` by server.

    `seconds`: from the first request to the last capture; `sample_ids`: the captured probes;
    `longest`: tokens of the longest one; `cut`: it ended early, when its share of staging was used;
    `troubles`: why probes failed; `dropped`: attempts that the hook gave up;
    `rough`: too little was captured for a rate without the warm-up; `turned`: rows that came free
    again meanwhile, 0 when it was cut; `held_back`: share of the time in which the servers had
    nothing to do for want of room in staging.
    """

    seconds: float
    samples: int
    tokens: int
    rate: float
    rates: dict[str, float]
    sample_ids: frozenset[str]
    longest: int
    cut: bool
    troubles: tuple[str, ...]
    dropped: int
    rough: bool
    turned: int
    held_back: float


@dataclass(frozen=True)
class _Mark:
    """Tokens captured so far by each server, and requests on their way, at one time."""

    at: float
    tokens: tuple[int, ...]
    flights: int


def compactor_seen(roots: Sequence[Path]) -> bool:
    """Whether a compactor has been at every live writer under `roots` just now."""
    alive = [w.path for root in roots if root.is_dir() for w in scan(root) if w.alive]
    return bool(alive) and all(_seen(folder) for folder in alive)


def _seen(writer: Path) -> bool:
    """A pass touches its lock, which is as old as the writer's own otherwise."""
    touched = (writer / COMPACT_LOCK).stat().st_mtime
    return touched > max((writer / LOCK).stat().st_mtime, time.time() - _SEEN_S)


async def run_burst(
    spec: LakeSpec,
    servers: Sequence[tuple[Server, ServerStatus]],
    prompts: Sequence[list[int]],
    seconds: float,
    limits: Limits,
    *,
    compactor: bool,
    tell: Callable[[float, int], None] = lambda seconds, on_the_way: None,
) -> Burst | None:
    """Capture `prompts`, again and again, for so long on all servers at once. None when staging
    has too little room for any of them.

    `compactor`: one is at work that frees the probes' rows, so the burst may go on when its share
    of the rows was used once. `tell` hears the seconds that are over, and the probes on their way.
    """
    free = sum(status.free_rows for _, status in servers)
    smallest = min((status.free_rows for _, status in servers), default=0)
    fitting = [ids for ids in prompts if len(ids) <= SHARE * smallest]
    if not fitting:
        return None
    tokens_of = probes(fitting, None if compactor else int(SHARE * free))
    items = [Item(name, SOURCE, len(ids)) for name, ids in tokens_of.items()]
    captured: dict[str, int] = {}
    driver = Driver(
        spec.lake_id,
        [server for server, _ in servers],
        items,
        lambda some: {i.sample_id: np.asarray(tokens_of[i.sample_id]) for i in some},
        limits=replace(
            limits,
            tries=1,
            patience=max(60.0, 3 * seconds),
            request_timeout=max(120.0, 3 * seconds),
            ack_timeout=30.0,
        ),
        on_captured=lambda item, writer: captured.update({item.sample_id: item.length}),
    )
    marks, most = [_mark(driver)], 0
    work = asyncio.create_task(driver.run())
    sending, cut = True, False
    looks = turned = 0
    starved = 0
    try:
        while not work.done():
            await asyncio.wait({work}, timeout=_LOOK_S)
            mark = _mark(driver)
            most = max(most, mark.flights)
            tell(min(seconds, mark.at - marks[0].at), mark.flights)
            if mark.tokens != marks[-1].tokens:
                marks.append(mark)
            now_free = sum(s.status.free_rows for s in driver.slots if s.status is not None)
            if sending and all(s.status is not None for s in driver.slots):
                # Rows of samples on their way are not free either: it is at least that.
                turned = max(turned, sum(mark.tokens) - (free - now_free))
                # One that waits for room while others are on their way holds no server back.
                idle = not mark.flights and all(s.starved for s in driver.slots)
                looks, starved = looks + 1, starved + idle
            sure = sum(s.free_rows for s in driver.slots)  # the status is as old as its last call
            full = compactor and mark.flights > 0 and sure < _SHARE_BESIDE * free
            if sending and (full or mark.at - marks[0].at >= seconds):
                # Nothing more is sent; what is on its way comes to its end, so that no reservation
                # stays half filled and keeps its part open.
                sending, cut = False, full
                driver.limits = replace(driver.limits, requests=0)
            if not sending and not mark.flights:
                driver.stop("the time is over")
        await work
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
    if _mark(driver).tokens != marks[-1].tokens:
        marks.append(_mark(driver))
    lost = [why for why in driver.failed.values() if not why.startswith("dropped: ")]
    troubles = [*lost, *driver.refused.values()]
    if driver.stopped and sending:
        troubles.append(driver.stopped)
    rates, rough = _rates(marks, most)
    return Burst(
        marks[-1].at - marks[0].at,
        len(captured),
        sum(captured.values()),
        sum(rates),
        dict(zip((server.url for server, _ in servers), rates, strict=True)),
        frozenset(captured),
        max(captured.values(), default=0),
        cut or sending,
        tuple(dict.fromkeys(troubles)),
        driver.dropped,
        rough,
        0 if cut else turned,
        starved / max(1, looks),
    )


def probes(prompts: Sequence[list[int]], budget: int | None) -> dict[str, list[int]]:
    """Token ids by fresh probe id: the first prompt once (it is the longest), the others again and
    again, up to `budget` tokens. All ids are small ints of few lists: nothing is copied."""
    run = probe_id().removeprefix(PROBE_PREFIX)
    turns = itertools.chain(prompts[:1], itertools.cycle(prompts[1:] or prompts))
    made: dict[str, list[int]] = {}
    tokens = 0
    for i, ids in enumerate(itertools.islice(turns, _MAX_SAMPLES)):
        tokens += len(ids)
        if budget is not None and tokens > budget:
            break
        made[f"{PROBE_PREFIX}{run}-{i:05d}"] = ids
    return made


def _mark(driver: Driver) -> _Mark:
    slots = driver.slots
    flights = sum(len(slot.flights) for slot in slots)
    return _Mark(time.monotonic(), tuple(slot.tokens for slot in slots), flights)


def _rates(marks: Sequence[_Mark], most: int) -> tuple[list[float], bool]:
    """(tokens a second of each server, whether that is rough). Between the first capture after the
    warm-up and the last one while the servers still had enough to do; `most`: that were on their
    way at once. Rough: over all of the burst."""
    first = marks[0]
    busy = [m for m in marks[1:] if m.flights >= _STEADY * most] or [first]
    last = busy[-1]
    warm = first.at + _WARM_UP * (last.at - first.at)
    start = next((m for m in busy if m.at >= warm), last)
    rough = not sum(last.tokens) > sum(start.tokens)
    if rough:
        start, last = first, marks[-1]
    span = max(last.at - start.at, 1e-6)
    return [(b - a) / span for a, b in zip(start.tokens, last.tokens, strict=True)], rough
