"""Bursts of one driver whose concurrency is changed while it runs: nothing is drained between."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from hslake.extract.drive import Driver, Limits
from hslake.extract.slot import Slot
from hslake.extract.worklist import Item
from hslake.server import Server
from hslake.spec import LakeSpec
from hslake.tune.report import Trial

_LOOK_S = 0.05
_LONGER = 3.0  # times as long a burst may take, until enough was captured
_LEAST = 8  # captures in a burst, and as many as were on their way
_END_S = 120.0  # for what is on its way at the end


@dataclass(frozen=True)
class _Mark:
    at: float
    tokens: int
    samples: int


class Bursts:
    """Use once, in `async with`. Whatever is captured is captured for good."""

    def __init__(
        self,
        spec: LakeSpec,
        servers: Sequence[Server],
        items: Sequence[Item],
        read_ids: Callable[[Sequence[Item]], Mapping[str, Any]],
        seconds: float,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._seconds, self._tell = seconds, tell
        # Concurrency alone is to decide, so tokens are bound by staging only.
        limits = Limits(requests=0, tokens=1 << 40, tries=3, patience=max(60.0, 4 * seconds))
        self.driver = Driver(spec.lake_id, servers, items, read_ids, limits=limits)
        self._work: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._work = asyncio.create_task(self.driver.run())
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._work is not None
        try:
            if exc[0] is None and not self._work.done():
                self._allow(0)  # so that no reservation stays half filled and keeps its part open
                end = time.monotonic() + _END_S
                while self._flights() and not self._work.done() and time.monotonic() < end:
                    self._tell(f"{self._flights()} requests are still on their way")
                    await asyncio.sleep(_LOOK_S)
                self.driver.stop("the time is over")
                await self._work
        finally:
            self._work.cancel()
            await asyncio.gather(self._work, return_exceptions=True)

    async def measure(self, requests: int) -> Trial | None:
        """A burst with so many requests on their way to each server; None when the samples are used
        up, or no server captures any more."""
        before, on_the_way = self._mark(), self._flights()
        dropped = self.driver.dropped
        self._allow(requests)
        # What was on its way under the last bound is no part of this burst.
        end = time.monotonic() + self._seconds
        while time.monotonic() < end or any(s.asked > requests for s in self.driver.slots):
            if not await self._look(requests, "settles"):
                return None
            now = self._mark()
            if now.samples - before.samples > on_the_way and now.at - before.at >= _LOOK_S:
                break
        watch = _Watch(self.driver.slots)
        marks = [self._mark()]
        start, worked = time.monotonic(), time.process_time()
        enough = max(_LEAST, requests * len(self.driver.slots))
        while True:
            spent = time.monotonic() - start
            captured = marks[-1].samples - marks[0].samples
            over = spent >= self._seconds and captured >= enough
            if over or spent >= _LONGER * self._seconds:
                break
            if not await self._look(requests, f"{captured} captured"):
                break  # the samples are used up: with enough of them, it counts all the same
            watch.look()
            mark = self._mark()
            if mark.tokens != marks[-1].tokens:
                marks.append(mark)
        # From the first capture to the last: the ends of the burst lie between captures.
        first, last = marks[min(1, len(marks) - 1)], marks[-1]
        seconds = last.at - first.at
        if seconds <= 0 or (last.samples - first.samples < _LEAST and self._over()):
            return None if self._over() else watch.trial(requests, first, last, 0.0, 0)
        busy = (time.process_time() - worked) / max(1e-9, time.monotonic() - start)
        return watch.trial(requests, first, last, busy, self.driver.dropped - dropped)

    def _over(self) -> bool:
        return self._work is None or self._work.done()

    async def _look(self, requests: int, what: str) -> bool:
        """Wait a moment; whether the driver goes on."""
        assert self._work is not None
        self._tell(f"{requests} at once: {what}, {self._flights()} on their way")
        await asyncio.wait({self._work}, timeout=_LOOK_S)
        if self._work.done():
            self._work.result()  # an error inside is ours: let it out
            return False
        return True

    def _allow(self, requests: int) -> None:
        self.driver.limits = replace(self.driver.limits, requests=requests)
        self.driver.wake()

    def _flights(self) -> int:
        return sum(len(slot.flights) for slot in self.driver.slots)

    def _mark(self) -> _Mark:
        driver = self.driver
        return _Mark(time.monotonic(), driver.captured_tokens, driver.captured)


class _Watch:
    """What was on its way, and the room in staging, at every look of a burst."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = slots
        self._looks = self._starved = self._most = 0
        self._asked = self._sealed = 0.0

    def look(self) -> None:
        self._looks += 1
        self._starved += any(slot.starved for slot in self._slots)
        self._asked += max(slot.asked for slot in self._slots)
        flying = (sum(f.job.length for f in s.flights.values()) for s in self._slots)
        self._most = max(self._most, *flying)
        used = sealed = 0
        for status in (slot.status for slot in self._slots):
            for writer in status.writers if status is not None else ():
                used += writer.capacity_rows - writer.free_rows
                sealed += sum(p.reserved for p in writer.parts if p.state == "sealed")
        self._sealed += min(1.0, sealed / used) if used else 0.0

    def trial(self, requests: int, first: _Mark, last: _Mark, busy: float, dropped: int) -> Trial:
        looks, seconds = max(1, self._looks), last.at - first.at
        tokens = last.tokens - first.tokens
        return Trial(
            requests,
            tokens / seconds if seconds > 0 else 0.0,
            seconds,
            last.samples - first.samples,
            tokens,
            self._asked / looks,
            self._most,
            self._starved / looks,
            self._sealed / looks,
            busy,
            dropped,
        )
