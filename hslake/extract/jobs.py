"""The driver's queue: samples to ask for, in order, and those to ask for again, when due."""

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hslake.extract.items import Item

BLOCK = 1024  # samples whose token ids are read at once
_LOOK_AHEAD = 64  # how far a server looks for a sample that it can take
_MOST_RETRIES = 4096  # with their tokens in memory: more of them, and nothing fresh is begun


@dataclass(slots=True, eq=False)
class Job:
    """One sample and everything that happened to it in this run. `ids` holds its token ids."""

    item: Item
    ids: Any
    attempts: list[str] = field(default_factory=list)  # every attempt id it was sent under
    failures: int = 0  # that count against the limit
    refusals: int = 0
    refusers: tuple[str, ...] = ()  # the servers that did
    blamed: bool = False  # one of them for a reason that would lie in the sample
    bare: bool = False  # to be sent without further fields: with them it was refused
    waits: int = 0  # how often it was put back, for the back-off
    flights: int = 0  # requests now on their way
    queued: bool = True
    done: bool = False  # captured, refused or given up

    @property
    def length(self) -> int:
        """Tokens, which are also rows of staging."""
        return self.item.length


class JobQueue:
    """Fresh jobs in the order given and retries by due time. Token ids are read in blocks.

    `read_ids(items)` returns token ids by sample id; it runs in a thread. `tokens`: of all jobs
    that are not taken.
    """

    def __init__(
        self,
        items: Iterable[Item],
        tokens: int,
        read_ids: Callable[[Sequence[Item]], Mapping[str, Any]],
        block: int = BLOCK,
    ) -> None:
        self._rest = iter(items)
        self.tokens = tokens
        self._read_ids = read_ids
        self._block = block
        self._ready: deque[Job] = deque()
        self._retries: list[tuple[float, int, Job]] = []
        self._numbers = itertools.count()
        self._low = asyncio.Event()
        self._low.set()

    async def feed(self, loaded: Callable[[], None]) -> None:
        """Keep fresh jobs at hand until all have been handed out; calls `loaded` after a block."""
        while True:
            await self._low.wait()
            items = list(itertools.islice(self._rest, self._block))
            if not items:
                return
            ids = await asyncio.to_thread(self._read_ids, items)
            self._ready.extend(Job(item, ids[item.sample_id]) for item in items)
            self._low.clear()
            loaded()

    def again(self, job: Job, due: float) -> None:
        """Put `job` back, to be taken at `due` or later."""
        job.queued = True
        self.tokens += job.length
        heapq.heappush(self._retries, (due, next(self._numbers), job))

    def next_due(self) -> float | None:
        """When the next retry is due, or None."""
        return self._retries[0][0] if self._retries else None

    def __len__(self) -> int:
        return len(self._ready) + len(self._retries)

    def take(
        self,
        now: float,
        longest: int,
        refused: int,
        not_mine: Callable[[Job], bool] = lambda job: False,
    ) -> Job | None:
        """The next job of at most `longest` tokens, or of more than `refused`: retries that are
        due first, then fresh ones. What lies between, or is `not_mine`, is another server's to
        take."""

        def mine(job: Job) -> bool:
            return (job.length <= longest or job.length > refused) and not not_mine(job)

        job = self._take_retry(now, mine)
        if job is None and len(self._retries) < _MOST_RETRIES:
            while self._ready and self._ready[0].done:
                self.tokens -= self._ready.popleft().length
            for place in range(min(_LOOK_AHEAD, len(self._ready))):
                if mine(self._ready[place]) and not self._ready[place].done:
                    job = self._ready[place]
                    del self._ready[place]
                    break
        if len(self._ready) <= self._block // 2:
            self._low.set()
        if job is not None:
            job.queued = False
            self.tokens -= job.length
        return job

    def put_back(self, job: Job) -> None:
        """Return a job just taken to the front. It waits for room rather than being overtaken:
        else long ones would starve."""
        job.queued = True
        self.tokens += job.length
        self._ready.appendleft(job)

    def _take_retry(self, now: float, mine: Callable[[Job], bool]) -> Job | None:
        passed: list[tuple[float, int, Job]] = []
        found = None
        while self._retries and self._retries[0][0] <= now and len(passed) < _LOOK_AHEAD:
            entry = heapq.heappop(self._retries)
            if entry[2].done:  # an older attempt was acknowledged after all
                self.tokens -= entry[2].length
                continue
            if mine(entry[2]):
                found = entry[2]
                break
            passed.append(entry)
        for entry in passed:
            heapq.heappush(self._retries, entry)
        return found
