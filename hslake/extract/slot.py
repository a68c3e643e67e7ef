"""One server of a run: what is on its way there, what it may still get, and whether it is well."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hslake.extract.jobs import Job
from hslake.extract.pace import Pace
from hslake.extract.reach import Reach, reach_of
from hslake.ids import RequestId
from hslake.server import (
    RequestFailed,
    RequestRefused,
    Server,
    ServerDown,
    ServerStatus,
    WriterStatus,
    context_limit,
)

if TYPE_CHECKING:
    from hslake.extract.drive import Driver

log = logging.getLogger("hslake.extract")

_SETTLE_S = 0.5  # the writer refreshes its figures five times a second
_ASIDE_MAX_S = 30.0
_UNHEARD = 8  # times as many may be answered and not acknowledged yet as may be asked for


@dataclass(slots=True, eq=False)
class Flight:
    """One attempt on its way: sent, and neither acknowledged nor lost yet."""

    job: Job
    rid: RequestId
    task: asyncio.Task[None] | None = None
    answered: float | None = None  # when the server answered; its event is still to come
    extra: bool = False  # sent with further fields


@dataclass(slots=True)
class _Held:
    """Rows of an ended attempt that the last `free_rows` may not have taken off yet."""

    rows: int
    until: float
    writer: str = ""
    seq: int = 0  # known to `free_rows` once the writer's last_seq has reached it


class Slot:
    """Sends one server what its credits allow and reads its acknowledgements."""

    def __init__(self, driver: Driver, server: Server) -> None:
        self.driver, self.server = driver, server
        self.flights: dict[str, Flight] = {}  # by attempt
        self.wake = asyncio.Event()
        self.up = False
        self.reason = f"{server.url} was not asked yet"
        self.reach = driver.reach.get(server.url, Reach(0, ""))  # 0 while not known
        self.starved = False  # has work and a free place, but no room in staging
        self.captured = self.tokens = self.dropped = self.outages = 0
        self.asked = self.asked_tokens = 0  # flights that the server has not answered
        self.pace = Pace()  # of `tokens`
        self.status: ServerStatus | None = None
        self.writers: dict[str, WriterStatus] = {}  # seen behind the server, by name
        self._cursors: dict[str, int] = {}
        self._held: list[_Held] = []
        self._flying = 0  # tokens of all flights
        self._strikes, self._missed = 0, False
        self._aside = driver.limits.backoff
        self._delay = driver.limits.poll_min

    async def run(self) -> None:
        """Until cancelled."""
        self.reason = not_answered(self.server.url)
        try:
            while True:
                await (self._work() if self.up else self._try_again())
        finally:
            tasks = [f.task for f in self.flights.values() if f.task]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def free_rows(self) -> int:
        """Rows of staging that are free for sure, once all that is on its way has come."""
        held = sum(h.rows for h in self._held)
        return self.status.free_rows - self._flying - held if self.status else 0

    async def abort_flights(self) -> None:
        """Ask the server to forget what is on its way."""
        for flight in list(self.flights.values()):
            with contextlib.suppress(ServerDown):
                await self.server.abort(flight.rid)

    # -- the loop ------------------------------------------------------------------------------

    async def _work(self) -> None:
        try:
            status = await self.server.status(self._cursors)
        except ServerDown as error:
            self._strikes += 1
            if self._strikes >= self.driver.limits.strikes:
                self._set_aside(str(error))
            else:
                await asyncio.sleep(min(0.2 * self._strikes, self.driver.limits.poll_max))
            return
        self._strikes = 0
        self._absorb(status)
        problem = unfit(status, self.driver.lake_id)
        if problem:
            self._set_aside(f"{self.server.url}: {problem}")
        elif not status.more:
            self._expire()
            self._fill()
            await self._pause()

    async def _try_again(self) -> None:
        """Ask a server that was set aside (or is new) whether it can work."""
        url = self.server.url
        try:
            status = await self.server.status(self._cursors)
            problem = unfit(status, self.driver.lake_id)
            limit = context_limit(await self.server.info())
        except ServerDown as error:
            problem = str(error)
        else:
            self._absorb(status)
        if problem:
            self.reason = problem if url in problem else f"{url}: {problem}"
            if not self.outages and not self._missed:
                self._missed = True
                log.warning("not used until it can work: %s", self.reason)
            # The wait is fixed: a wake-up is about work, and this server can do none.
            await asyncio.sleep(self._aside)
            self._aside = min(_ASIDE_MAX_S, self._aside * 2)
            return
        self.reach = reach_of(status, limit)
        if self.outages:
            log.warning("%s is back", url)
        self.up, self.reason = True, "up"
        self.pace.forget()
        self._strikes, self._aside = 0, self.driver.limits.backoff

    def _set_aside(self, reason: str) -> None:
        self.up, self.reason, self.starved = False, reason, False
        self.outages += 1
        log.warning("set aside: %s", reason)
        self._held.clear()
        for flight in list(self.flights.values()):
            self._land(flight.rid.attempt)
            if flight.task:
                flight.task.cancel()
            self._lose(flight, f"the server was set aside: {reason}")
        self.driver.wake()

    async def _pause(self) -> None:
        """Until an answer comes, a retry is due, or it is time to look again."""
        limits = self.driver.limits
        self._delay = min(limits.poll_max, self._delay * 2)
        wait = self._delay
        due = self.driver.queue.next_due()
        if due is not None and not self.starved:
            wait = min(wait, max(limits.poll_min, due - time.monotonic()))
        with contextlib.suppress(TimeoutError):
            # Not wait_for: before Python 3.12 it may swallow a cancellation.
            async with asyncio.timeout(wait):
                await self.wake.wait()
            self._delay = limits.poll_min
            # Several answers of one batch: one look for all of them.
            await asyncio.sleep(limits.poll_min)
        self.wake.clear()

    # -- acknowledgements ----------------------------------------------------------------------

    def _absorb(self, status: ServerStatus) -> None:
        self.status = status
        now = time.monotonic()
        known = {w.writer: w.last_seq for w in status.writers}
        for writer in status.writers:
            self.writers[writer.writer] = replace(writer, events=())
            for event in writer.events:
                flight = self._land(event.attempt)
                if flight is not None:
                    flight.job.flights -= 1
                    # The figures were read before the events: they may not know this one's rows.
                    self._hold(flight, writer.writer, event.seq)
                    self._delay = self.driver.limits.poll_min
                self.driver.event(self, writer.writer, event, mine=flight is not None)
            self._cursors[writer.writer] = writer.cursor
        self.pace.tell(self.tokens)
        self._held = [
            h
            for h in self._held
            if (known.get(h.writer, -1) < h.seq if h.writer else now < h.until)
            and now < h.until + 10 * _SETTLE_S
        ]

    def _hold(self, flight: Flight, writer: str = "", seq: int = 0) -> None:
        until = time.monotonic() + _SETTLE_S
        self._held.append(_Held(flight.job.length, until, writer, seq))

    def _expire(self) -> None:
        """Answered long ago and still not acknowledged: the server does not capture this one."""
        limit = time.monotonic() - self.driver.limits.ack_timeout
        for attempt, flight in list(self.flights.items()):
            if flight.answered is not None and flight.answered < limit:
                self._land(attempt)
                self._hold(flight)
                self._lose(flight, "the server answered but acknowledged no capture")

    # -- requests ------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Send what the bounds and credits allow."""
        limits, status = self.driver.limits, self.status
        self.starved = False
        assert status is not None
        held = sum(h.rows for h in self._held)
        longest = max((f.job.length for f in self.flights.values()), default=0)
        rooms: dict[int, int] = {}

        def fits(length: int) -> bool:
            most = max(longest, length)
            if most not in rooms:
                rooms[most] = status.room(most)
            room = rooms[most] - held - self._flying
            bound = limits.tokens - self._flying
            # One that alone exceeds the bound may still go, alone.
            return length <= room and (length <= bound or not self.flights)

        while self.asked < limits.requests and len(self.flights) < _UNHEARD * limits.requests:
            job, self.starved = self.driver.take(self, fits)
            if job is None:
                return
            flight = Flight(job, self.driver.request_id(job))
            self.flights[flight.rid.attempt] = flight
            job.flights += 1
            self._flying += job.length
            self.asked += 1
            self.asked_tokens += job.length
            longest = max(longest, job.length)
            flight.task = asyncio.create_task(self._send(flight))

    def _land(self, attempt: str) -> Flight | None:
        """Take a flight off, if it is on its way here."""
        flight = self.flights.pop(attempt, None)
        if flight is not None:
            self._flying -= flight.job.length
            self._answered(flight)
        return flight

    def _answered(self, flight: Flight) -> None:
        """The server is through with it, whatever came of it."""
        if flight.answered is None:
            flight.answered = time.monotonic()
            self.asked -= 1
            self.asked_tokens -= flight.job.length

    async def _send(self, flight: Flight) -> None:
        job = flight.job
        if job.done:  # an older attempt was acknowledged in this very moment
            self._take_back(flight)
            return
        url, extras, answer = self.server.url, self.driver.extras, None
        ask = extras is not None and not job.bare
        more = extras.fields(url, job.item, flight.rid.attempt) if extras and ask else {}
        flight.extra = bool(more)
        try:
            answer = await self.server.generate(flight.rid, job.ids, **more)
        except RequestRefused as error:
            if self._take_back(flight):
                self.driver.refused_by_server(flight, url, error)
        except (RequestFailed, ServerDown) as error:
            if self._take_back(flight):
                self.driver.lost(flight, str(error))
        else:
            self._answered(flight)
        finally:
            if extras and more:
                extras.answered(url, job.item, flight.rid.attempt, answer)
        self.wake.set()
        if self.up and self.asked < self.driver.limits.requests:
            self._fill()  # a look at staging takes its time, and what is asked for fits for sure

    def _take_back(self, flight: Flight) -> bool:
        """Whether `flight` was still on its way; it is not any more."""
        if self._land(flight.rid.attempt) is None:
            return False
        flight.job.flights -= 1
        self._hold(flight)  # the hook may have reserved its rows before the request failed
        return True

    def _lose(self, flight: Flight, reason: str) -> None:
        flight.job.flights -= 1
        self.driver.lost(flight, reason)


def not_answered(url: str) -> str:
    """The state of a server that was asked: a busy one takes its time."""
    return f"{url} has not answered yet"


def unfit(status: ServerStatus, lake_id: str) -> str | None:
    """Why a server with this status cannot capture for this lake, or None."""
    if status.lake_id is not None and status.lake_id != lake_id:
        return f"it captures for lake {status.lake_id}, not {lake_id}: start it with this lake"
    if not status.armed:
        return f"the hook is not armed: {status.error or 'no reason given'}"
    if not status.writers:
        return "no writer stands behind it yet"
    return None
