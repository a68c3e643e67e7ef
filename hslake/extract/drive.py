"""Drives servers until every sample of a worklist is acknowledged, refused or given up.

Nothing counts as captured because a server answered: only the event of its attempt in
/hslake/status does. What is sent is bounded by requests, by tokens, and by credits: rows free in
staging less all that is on its way, so the hook finds room for whatever it is asked to capture.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hslake.extract.items import Item, Items
from hslake.extract.jobs import Job, JobQueue
from hslake.extract.reach import Reach
from hslake.extract.refusals import Refusal
from hslake.extract.slot import Flight, Slot
from hslake.ids import RequestId, new_attempt
from hslake.server import CAPTURED, Event, RequestRefused, Server

log = logging.getLogger("hslake.extract")

NO_SPACE = "no space"  # how the hook's reason for a drop begins when staging was full
_REFUSALS = 2  # by the server, before a sample is taken to be refused for good


@dataclass(frozen=True)
class Limits:
    """Bounds and times of a run. Per server: `requests` and `tokens` on their way. Seconds else."""

    requests: int = 32
    tokens: int = 131_072
    tries: int = 8  # failed attempts of one sample before it is given up
    patience: float = 1800.0  # without any server, or without any sample captured
    request_timeout: float = 900.0
    status_timeout: float = 20.0
    stall: float = 30.0  # without any sample captured, before a warning
    ack_timeout: float = 60.0  # between a server's answer and the event of the attempt
    backoff: float = 0.5  # before the first retry; doubles
    backoff_max: float = 30.0
    poll_min: float = 0.02
    poll_max: float = 1.0
    strikes: int = 3  # status calls in a row without an answer before a server is set aside


class Extras(Protocol):
    """Further fields of some requests, and what is made of the answers."""

    def fields(self, server: str, item: Item, attempt: str) -> Mapping[str, Any]:
        """Fields to add to the request that goes out now; mostly none."""

    def answered(self, server: str, item: Item, attempt: str, answer: Any) -> None:
        """A request that had such fields has ended: with `answer`, or None when it failed."""


class Driver:
    """One run over a fixed list of items. Use once: `await run()`, then read the results."""

    def __init__(
        self,
        lake_id: str,
        servers: Sequence[Server],
        items: Sequence[Item],
        read_ids: Callable[[Sequence[Item]], Mapping[str, Any]],
        *,
        limits: Limits,
        reach: Mapping[str, Reach] | None = None,
        when_full: str = "run `hslake compact LAKE --staging DIR --watch`",
        on_captured: Callable[[Item, str], None] = lambda item, writer: None,
        on_note: Callable[[str], None] = lambda text: None,
        extras: Extras | None = None,
    ) -> None:
        self.lake_id = lake_id
        self.limits, self.when_full = limits, when_full
        self.reach = reach or {}  # of servers by URL, as far as it is known already
        tokens = items.tokens if isinstance(items, Items) else sum(i.length for i in items)
        self.queue = JobQueue(items, tokens, read_ids)
        self.slots = [Slot(self, server) for server in servers]
        self.attempts: dict[str, Job] = {}  # of jobs that are not done
        self.left = len(items)
        self.captured = self.captured_tokens = self.retried = self.dropped = 0
        self.refused: dict[str, str] = {}  # sample id -> why it is not asked for again
        self.failed: dict[str, str] = {}  # sample id -> the last error, after all tries
        self.refusals: list[Refusal] = []  # those of `refused` that a server has spoken
        self.forgiven = 0  # captured after having been refused
        self.extras = extras
        self._said: dict[str, str] = {}  # of many equal reasons one object
        self.stopped: str | None = None  # why the run ended early
        self._on_captured, self._on_note = on_captured, on_note
        self._over = asyncio.Event()
        self._progress = time.monotonic()

    # -- the run -------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until nothing is left or patience ends (`stopped` says why). Safe to cancel at any time:
        what was acknowledged is in staging, the rest is simply asked for again."""
        if not self.left:
            return
        work = [self._watch(), self.queue.feed(self.wake), *(slot.run() for slot in self.slots)]
        tasks = [asyncio.create_task(w) for w in work]
        over = asyncio.create_task(self._over.wait())
        try:
            pending: set[asyncio.Task[Any]] = {over, *tasks}
            while not over.done():
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()  # an error inside is ours: let it out
        finally:
            for task in (over, *tasks):
                task.cancel()
            await asyncio.gather(over, *tasks, return_exceptions=True)
            await self._abort_all()

    def stop(self, reason: str) -> None:
        """End the run now; `stopped` will be `reason`."""
        self.stopped = reason
        self._over.set()

    async def _watch(self) -> None:
        """Ends the run when patience does; says meanwhile what it waits for."""
        limits = self.limits
        patience = max(limits.patience, 0.0)
        warned = False
        while True:
            await asyncio.sleep(min(1.0, patience / 4 or 0.01))
            waited = time.monotonic() - self._progress
            up = [slot for slot in self.slots if slot.up]
            flights = sum(len(slot.flights) for slot in self.slots)
            cause = self.stalled(min(5.0, limits.stall))
            self._on_note(self._now(up, flights, cause))
            if waited < limits.stall:
                warned = False
            elif cause and not warned:
                warned = True
                log.warning("nothing captured for %.0f s: %s", waited, cause)
            # A slow server may need most of its request timeout for what is on its way.
            if waited > (max(patience, limits.request_timeout) if flights else patience):
                self.stop(self._waits_for(up))

    def stalled(self, after: float) -> str | None:
        """What the run waits for, when nothing was captured for `after` seconds and nothing that
        may still come is on its way."""
        up = [slot for slot in self.slots if slot.up]
        now = time.monotonic()
        if now - self._progress < after:
            return None
        # Requests that found no room stay on their way until they time out, and those that were
        # answered long ago until nobody waits for their event any more: no hope in them.
        flights = (f for slot in self.slots for f in slot.flights.values())
        hope = any(f.answered is None or now - f.answered < after for f in flights)
        return self._waits_for(up) if not hope or all(slot.starved for slot in up) else None

    def _now(self, up: list[Slot], flights: int, cause: str | None) -> str:
        parts = [f"{self.left:,} left", f"{flights} in flight"]
        if len(up) < len(self.slots):
            parts.append(f"{len(up)} of {len(self.slots)} servers")
        if self.retried:
            parts.append(f"{self.retried} retries")
        if cause:
            parts.append(cause)
        return ", ".join(parts)

    def _waits_for(self, up: list[Slot]) -> str:
        if not up:
            return "no server answers: " + "; ".join(s.reason for s in self.slots)
        if all(slot.starved for slot in up):
            return f"staging is full: {self.when_full}"
        return "the servers acknowledge nothing: see /hslake/status and their logs"

    def wake(self) -> None:
        """Let every server look for work."""
        for slot in self.slots:
            slot.wake.set()

    async def _abort_all(self) -> None:
        """Tell the servers to forget what is still on its way; nobody waits long for it."""
        calls = [slot.abort_flights() for slot in self.slots if slot.flights]
        if calls:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(2.0):
                    await asyncio.gather(*calls, return_exceptions=True)

    # -- what slots ask and tell ---------------------------------------------------------------

    def take(self, slot: Slot, fits: Callable[[int], bool]) -> tuple[Job | None, bool]:
        """(the next job for `slot` if it `fits`, whether one waits for room). Refuses on the way
        what no server can take."""
        best = max((s.reach for s in self.slots), key=lambda r: r.tokens)

        def not_mine(job: Job) -> bool:
            return slot.server.url in job.refusers and self._others(job)

        while True:
            job = self.queue.take(time.monotonic(), slot.reach.tokens, best.tokens, not_mine)
            if job is None:
                return None, False
            if job.length > best.tokens:
                self.refuse(job, best.why)
            elif not self._in_time(slot):
                self.queue.put_back(job)
                return None, False
            elif fits(job.length):
                return job, False
            else:
                self.queue.put_back(job)
                return None, True

    def _in_time(self, slot: Slot) -> bool:
        """Whether `slot`, at its pace, is through with what it has when all is done at that of all.

        Always so until near the end; then the last samples go to whoever is free first, and a slow
        server does not keep everybody waiting."""
        if not slot.asked_tokens:
            return True
        up = [s for s in self.slots if s.up]
        rates = [s.pace.rate() for s in up]
        mine, whole = slot.pace.rate(), sum(rate or 0.0 for rate in rates)
        if None in rates or mine is None or not whole:
            return True
        left = self.queue.tokens + sum(s.asked_tokens for s in up)
        return slot.asked_tokens * whole <= mine * left

    def request_id(self, job: Job) -> RequestId:
        """A request id for a new attempt of `job`."""
        item = job.item
        attempt = new_attempt()
        job.attempts.append(attempt)
        self.attempts[attempt] = job
        return RequestId(self.lake_id[:8], attempt, item.length, item.source, item.sample_id)

    def event(self, slot: Slot, writer: str, event: Event, *, mine: bool) -> None:
        """An attempt ended, as the hook saw it; `mine`: it was on its way to `slot` until now.
        Events of other drivers' attempts are ignored."""
        job = self.attempts.get(event.attempt)
        if job is None:
            return
        if event.state == CAPTURED:
            self.captured += 1
            self.captured_tokens += job.length
            slot.captured += 1
            slot.tokens += job.length
            self.forgiven += job.blamed
            self._finish(job)
            self._on_captured(job.item, writer)
        elif mine:
            self.dropped += 1
            slot.dropped += 1
            reason = event.reason or "dropped by the hook"
            # Room is a matter of the compactor, not of the sample.
            self.again(job, f"dropped: {reason}", counts=not reason.startswith(NO_SPACE))

    def lost(self, flight: Flight, reason: str) -> None:
        """The attempt of `flight`, already taken from its slot, came to nothing."""
        self.again(flight.job, reason)

    def refused_by_server(self, flight: Flight, server: str, error: RequestRefused) -> None:
        """The server called the request wrong; asked twice, so that one bad moment is not fatal."""
        job, reason = flight.job, str(error)
        if flight.extra:  # what was added may be what it does not like
            job.bare = True
            self.again(job, reason, counts=False)
            return
        job.refusals += 1
        job.refusers = (*job.refusers, server)
        job.blamed |= error.lasting
        if job.done or job.queued or job.flights:
            return
        if job.refusals >= _REFUSALS and not self._others(job):
            self.refusals.append(Refusal(job.item, reason, server, error.lasting))
            self.refuse(job, f"refused by the server: {reason}")
        else:
            self.again(job, reason)

    def _others(self, job: Job) -> bool:
        """Whether a second server is to be heard about a sample that one has refused."""
        return len(set(job.refusers)) == 1 and any(
            s.up and s.server.url not in job.refusers and job.length <= s.reach.tokens
            for s in self.slots
        )

    def again(self, job: Job, reason: str, *, counts: bool = True) -> None:
        """Ask for `job` again later, or give it up after too many failures."""
        if job.done or job.queued or job.flights:
            return
        job.failures += counts
        if job.failures >= self.limits.tries:
            self.failed[job.item.sample_id] = self._said.setdefault(reason, reason)
            self._finish(job)
            return
        delay = min(self.limits.backoff_max, self.limits.backoff * 2**job.waits)
        job.waits = min(job.waits + 1, 30)
        self.retried += 1
        log.info("%s: %s; asked again in %.1f s", job.item.sample_id, reason, delay)
        # Spread, so that what failed together does not come back together.
        self.queue.again(job, time.monotonic() + delay * random.uniform(0.75, 1.25))

    def refuse(self, job: Job, reason: str) -> None:
        """`job` will not be asked for again."""
        self.refused[job.item.sample_id] = self._said.setdefault(reason, reason)
        self._finish(job)

    def _finish(self, job: Job) -> None:
        job.done, job.ids = True, None
        for attempt in job.attempts:
            self.attempts.pop(attempt, None)
        self._progress = time.monotonic()
        self.left -= 1
        if self.left == 0:
            self._over.set()
