"""One call of `extract`: passes over what is missing, until nothing is or patience ends."""

import asyncio
import contextlib
import logging
import math
import random
import shlex
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import hslake
from hslake import runlog
from hslake.compact.trouble import told
from hslake.drive import Driver, Extras
from hslake.errors import (
    CheckFailed,
    Conflict,
    InvalidInput,
    Missing,
    NoSpace,
    Unavailable,
    reason,
    without_secrets,
)
from hslake.extractoptions import ExtractOptions, parse_shard
from hslake.extractreport import INTERRUPTED, ExtractReport, ServerUse, Tally, make_report
from hslake.items import Item, Items
from hslake.lake import Lake
from hslake.progress import ProgressMaker
from hslake.reach import Reach, ask_reach, name_long
from hslake.refusals import EARLIER, HINT, RECORDED, Refusal, to_record
from hslake.runlog import Figures
from hslake.runnotes import RunNotes
from hslake.server import Server, ServerDown, ServerStatus, whole_status
from hslake.slot import not_answered, unfit
from hslake.spec import LakeSpec
from hslake.staging.check import check_roots
from hslake.status import local_statuses
from hslake.tokenfile import TokenFile
from hslake.whereabouts import Places, Whereabouts
from hslake.worklist import (
    Worklist,
    captured_attempts,
    committed_attempts,
    of_lake,
    worklist,
)

log = logging.getLogger("hslake.extract")

_LOST = 3  # captures of one sample that never reach the lake, before it is not asked for again
_PAUSE_MAX_S = 60.0
_MENDS = (Unavailable, Conflict, NoSpace, OSError)  # what may go away by itself
_LATER_S = 300.0  # after so long without an error, one is a new trouble


@dataclass(frozen=True)
class View:
    """The lake and staging at one moment. `todo`: what is to be asked for; `awaited`: how many of
    the chosen samples are captured and not committed."""

    lake: Lake
    listing: Worklist
    places: Places
    todo: Items
    awaited: int
    seconds: float  # that the look took


class Trouble:
    """Errors that may mend by themselves, and how long they have been met."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._first = self._last = -math.inf
        self._tries = 0

    def met(self, error: Exception) -> float:
        """Seconds to wait before the next try. Raises `error` when patience is over."""
        now = time.monotonic()
        if now - self._last > _LATER_S:
            self._first, self._tries = now, 0
        if now - self._first > self._patience:
            raise error
        self._last, self._tries = now, self._tries + 1
        return min(_PAUSE_MAX_S, 2.0 ** min(self._tries, 10) / 4)


class Run:
    """Use once: `await all()`. `extras`: see `hslake.drive.Extras`."""

    extras: Extras | None = None

    def __init__(
        self,
        lake_url: str,
        servers: list[Server],
        options: ExtractOptions,
        progress: ProgressMaker,
        stop: asyncio.Event,
    ) -> None:
        self.lake_url, self.servers, self.options = lake_url, servers, options
        self.progress, self.stop = progress, stop
        self.shard = parse_shard(options.shard) if options.shard else None
        self.start = time.monotonic()
        self.stopped: str | None = None
        self.captures: Counter[str] = Counter()  # sample id -> times captured, not committed
        self.whereabouts = Whereabouts(tuple(map(Path, options.staging)))
        self.never: dict[str, str] = {}  # sample id -> why it is not asked for again
        self.failed: dict[str, str] = {}  # sample id -> why not, for now
        self.lifted: set[str] = set()  # refused in an earlier run, to be asked for again
        self.ready: list[tuple[Server, ServerStatus]] = []  # at the first look
        self.reach: dict[str, Reach] = {}  # of those by URL, as far as they tell
        self.told_long = False
        self.unheard: dict[str, Item] = {}  # attempt -> its sample, sent and not acknowledged
        self.chosen: set[str] | None = None  # what --limit allows, settled at the first look
        self.tally = Tally()
        self.driver: Driver | None = None  # at work now
        self.refusals: list[Refusal] = []  # by servers, in this call
        self.recorded: set[str] = set()  # of those, in the run log
        self.uses: dict[str, ServerUse] = {}
        self.view: View | None = None  # the last that there was
        self.moved = time.monotonic()  # when something was captured or committed last

    async def all(self) -> ExtractReport:
        """The whole call."""
        lake = await asyncio.to_thread(hslake.open, self.lake_url)
        await asyncio.to_thread(check_roots, self.options.staging, lake.spec)
        statuses = await self._first_look(lake.spec)
        self.reach = await ask_reach(self.ready, self.stop)
        view = await self._look(statuses)
        del statuses  # with every event of staging
        self.notes = RunNotes(lake.store, self._standing)
        self.notes.begin(self.options.told())
        self.notes.allowed(view.listing.missing.only(self.lifted))
        try:
            report = await self._passes(lake.spec, view)
        except BaseException as error:
            cut = isinstance(error, asyncio.CancelledError | KeyboardInterrupt)
            await self.notes.end(runlog.INTERRUPTED if cut else runlog.FAILED, reason(error))
            raise
        await self.notes.end(report.outcome, report.message)
        return report

    async def _passes(self, spec: LakeSpec, view: View | None) -> ExtractReport:
        trouble = Trouble(self.options.limits.patience)
        while True:
            try:
                if view is None:
                    view = await self._look(await self._statuses(spec))
                if self._over(view):
                    return self._report(view)
                now, view = view, None  # whatever comes of it, what it left to do is to be seen
                await (self._drive(now) if now.todo else self._wait(now))
            except _MENDS as error:
                log.warning("%s; tried again for as long as --patience lasts", told(error))
                wait = trouble.met(error)
                await self._sleep(wait)
                if self.stop.is_set() and self.view is not None:
                    self.stopped = f"{INTERRUPTED} while {told(error)}"
                    return self._report(self.view)

    def _over(self, view: View) -> bool:
        if self.stopped or self.stop.is_set():
            return True
        if view.todo:
            return False
        return not (self.options.until_complete and (view.awaited or self._failed(view)))

    def _failed(self, view: View) -> bool:
        """Whether samples that were to be captured failed, and are still missing."""
        there = view.listing.missing.among(self.failed)
        return bool(there if self.chosen is None else there & self.chosen)

    # -- what is there -------------------------------------------------------------------------

    async def _first_look(self, spec: LakeSpec) -> list[ServerStatus]:
        """Every server's status; an error now rather than a long wait for what cannot work."""
        found = await asyncio.gather(*(whole_status(s, held_only=True) for s in self.servers))
        answers, problems = [], []
        for server, status in zip(self.servers, found, strict=True):
            if isinstance(status, ServerDown):
                problems.append(str(status))
                continue
            answers.append(status)  # also of one that captures no more: its staging holds samples
            problem = unfit(status, spec.lake_id)
            if problem is None:
                self.ready.append((server, status))
                continue
            problem = f"{server.url}: {problem}"
            if status.lake_id not in (None, spec.lake_id):
                raise InvalidInput(problem)
            problems.append(problem)
        if self.ready:
            return of_lake([*answers, *await asyncio.to_thread(self._local)], spec.lake_id)
        hint = "start one with `hslake serve LAKE --staging DIR -- …`"
        if all(isinstance(s, ServerDown) for s in found):
            raise Missing(f"no server answers, {hint}: " + "; ".join(problems))
        raise CheckFailed("no server is ready to capture: " + "; ".join(problems))

    async def _statuses(self, spec: LakeSpec) -> list[ServerStatus]:
        """Status of all servers that answer, and of local staging: of this lake's writers."""
        found = await asyncio.gather(*(whole_status(s, held_only=True) for s in self.servers))
        answers = [s for s in found if isinstance(s, ServerStatus)]
        return of_lake([*answers, *await asyncio.to_thread(self._local)], spec.lake_id)

    def _local(self) -> list[ServerStatus]:
        found: list[ServerStatus] = []
        for root in self.options.staging:
            with contextlib.suppress(Missing):  # it was there at the start: deleted since
                found += local_statuses(Path(root))
        return found

    async def _look(self, statuses: list[ServerStatus]) -> View:
        """The lake as it is now. Staging (`statuses`) was read before: what is committed in between
        is then seen twice, not never."""
        begun = time.monotonic()
        lake = await asyncio.to_thread(hslake.open, self.lake_url)
        options = self.options
        listing = await asyncio.to_thread(worklist, lake, options.where, options.order, self.shard)
        self._check_plan(listing)
        places = await asyncio.to_thread(self.whereabouts.look, lake, listing.missing, statuses)
        await asyncio.to_thread(self._hear_late, lake, statuses)
        missing = listing.missing.among(self.captures)
        self.captures = Counter({s: n for s, n in self.captures.items() if s in missing})
        if self.view and listing.committed > self.view.listing.committed:
            self.moved = time.monotonic()
        self._skip_refused(listing)
        todo = self._todo(listing, places)
        if not self.told_long:
            todo = self._without_long(todo, listing.missing)
        there = places.waiting | places.unconfirmed
        awaited = len(there if self.chosen is None else there & self.chosen)
        self.view = View(lake, listing, places, todo, awaited, time.monotonic() - begun)
        return self.view

    def _check_plan(self, listing: Worklist) -> None:
        if listing.planned:
            return
        if self.options.where:
            raise InvalidInput(f"--where {self.options.where!r} selects no planned sample")
        if self.options.shard and self.shard != (1, 1):
            raise InvalidInput(f"--shard {self.options.shard} holds no planned sample")
        raise Missing(
            f"nothing is planned in {self.lake_url}: register samples with `hslake plan LAKE FILE`"
        )

    def _skip_refused(self, listing: Worklist) -> None:
        """What earlier runs, or another one beside this, have recorded is not asked for."""
        if self.options.retry_refused and self.view is None:
            self.lifted = set(listing.refused)
        for name, why in listing.refused.items():
            if name not in self.lifted and name not in self.recorded:
                self.never[name] = f"{EARLIER}: {why} ({HINT})"

    def _without_long(self, todo: Items, missing: Items) -> Items:
        """`todo` without what no server can take, which is named now and not at the end."""
        self.told_long = True
        if len(self.reach) < len(self.ready):
            return todo
        best = max(self.reach.values(), key=lambda r: r.tokens)
        if text := name_long(missing.longer(best.tokens), best):
            log.warning("%s", text)
        long = {item.sample_id: best.why for item in todo.longer(best.tokens)}
        self.never |= long
        return todo.without(long)

    def _todo(self, listing: Worklist, places: Places) -> Items:
        there = places.waiting | places.unconfirmed
        often = [name for name, count in self.captures.items() if count >= _LOST]
        for name in listing.missing.among(often) - there - self.never.keys():
            self.never[name] = (
                f"captured {_LOST} times but never committed: see what `hslake compact` says"
            )
        todo = listing.missing.without(there | self.never.keys() | self.failed.keys())
        if self.options.limit is None:
            return todo
        if self.chosen is None:
            self.chosen = {item.sample_id for item in todo[: self.options.limit]}
        return todo.only(self.chosen)

    # -- the work ------------------------------------------------------------------------------

    async def _drive(self, view: View) -> None:
        """One pass: ask for what there is to do."""
        lake, todo = view.lake, view.todo
        with (
            await asyncio.to_thread(TokenFile, lake, todo) as tokens,
            self.progress(todo.tokens, "extract (tokens)") as bar,
        ):

            def captured(item: Item, writer: str) -> None:
                self.captures[item.sample_id] += 1
                self.whereabouts.captured(item.sample_id, writer)
                bar.advance(item.length)

            self.driver = driver = Driver(
                lake.spec.lake_id,
                self.servers,
                todo,
                tokens.read,
                limits=self.options.limits,
                reach=self.reach,
                when_full=self._when_full(),
                on_captured=captured,
                on_note=bar.note,
                extras=self.extras,
            )
            stopper = asyncio.create_task(self._stop(driver))
            try:
                await driver.run()
            finally:
                stopper.cancel()
                self.driver = None
                self._collect(driver)

    async def _stop(self, driver: Driver) -> None:
        await self.stop.wait()
        cause = driver.stalled(min(5.0, self.options.limits.stall))
        driver.stop(f"{INTERRUPTED} while {cause}" if cause else INTERRUPTED)

    def _when_full(self) -> str:
        """What to do about staging that is full, to be copied into a shell."""
        roots = [f"--staging {shlex.quote(str(root))}" for root in self.options.staging]
        lake = shlex.quote(without_secrets(self.lake_url))
        command = f"run `hslake compact {lake} {' '.join(roots) or '--staging DIR'} --watch`"
        return command if roots else f"{command}, DIR as given to `hslake serve`"

    def _collect(self, driver: Driver) -> None:
        self.unheard |= {attempt: job.item for attempt, job in driver.attempts.items()}
        self.never |= driver.refused
        self.failed |= {
            name: f"failed {self.options.limits.tries} times, last: {why}"
            for name, why in driver.failed.items()
        }
        self.refusals += driver.refusals
        self.stopped = driver.stopped
        if driver.captured:
            self.moved = time.monotonic()
        elif not self.options.until_complete:
            self.stopped = self.stopped or "not captured"
        self.tally = self.tally.plus(driver)
        for slot in driver.slots:
            self.whereabouts.seen(slot.writers.values())
            self.uses[slot.server.url] = self._use(slot.server.url).plus(slot)
        self._record()

    def _record(self) -> None:
        """Tell the run log of refusals that are the samples' own fault."""
        found = to_record(self.refusals, self.tally.captured, self.lifted)
        fresh = [one for one in found if one.item.sample_id not in self.recorded]
        self.notes.refused(fresh)
        for one in fresh:
            name = one.item.sample_id
            self.recorded.add(name)
            self.never[name] = f"{self.never[name]} ({RECORDED})"

    def _hear_late(self, lake: Lake, statuses: list[ServerStatus]) -> None:
        """Count what a server captured and could not say any more, as it died."""
        there = committed_attempts(lake, self.unheard) | captured_attempts(statuses).keys()
        late = {i.sample_id: i for a, i in self.unheard.items() if a in there}
        self.unheard = {a: i for a, i in self.unheard.items() if a not in there}
        for name, item in late.items():
            if not self.captures[name]:
                self.captures[name] = 1
                self.tally = self.tally.heard(item.length)

    def _use(self, url: str) -> ServerUse:
        busy = any(s.url == url for s, _ in self.ready) and url not in self.reach
        return self.uses.get(url, ServerUse(url, not_answered(url) if busy else "not used"))

    # -- the wait for the compactor --------------------------------------------------------------

    async def _wait(self, view: View) -> None:
        """Until there is something to ask for again, all is committed, or nothing moves for as long
        as patience lasts."""
        limits, total = self.options.limits, view.awaited
        done, warned = 0, False
        with self.progress(total, "wait for the compactor (samples)") as bar:
            while not view.todo and view.awaited and not self.stop.is_set():
                idle = time.monotonic() - self.moved
                if idle > limits.patience:
                    self.stopped = self._idle(view, idle)
                    return
                if idle > limits.stall and not warned:
                    log.warning("%s", self._idle(view, idle))
                warned = idle > limits.stall
                bar.note(f"{view.awaited:,} captured and not committed yet")
                await self._sleep(max(limits.poll_max, min(_PAUSE_MAX_S, 5 * view.seconds)))
                view = await self._look(await self._statuses(view.lake.spec))
                bar.advance(max(0, total - view.awaited - done))
                done = max(done, total - view.awaited)
        if view.todo or view.awaited or self.stop.is_set():
            return
        # Only samples are left that failed as often as they may: once more, after a while.
        idle = time.monotonic() - self.moved
        if idle > limits.patience:
            self.stopped = f"nothing was captured for {idle:,.0f} s"
            return
        await self._sleep(min(_PAUSE_MAX_S, 2 * limits.backoff_max))
        self.failed.clear()

    def _idle(self, view: View, seconds: float) -> str:
        waiting = len(view.places.waiting)
        there = f"{waiting:,} captured samples wait in staging" if waiting else "some may be there"
        return f"nothing was committed for {seconds:,.0f} s while {there}: {self._when_full()}"

    async def _sleep(self, seconds: float) -> None:
        """Unless the run is to stop."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds * random.uniform(0.75, 1.25)):
                await self.stop.wait()

    # -- the end -------------------------------------------------------------------------------

    def _standing(self) -> tuple[Figures, list[dict[str, object]]]:
        """Figures for the run log."""
        tally, uses = self.tally, {s.url: self._use(s.url) for s in self.servers}
        if self.driver is not None:
            tally = tally.plus(self.driver)
            uses |= {s.server.url: uses[s.server.url].plus(s) for s in self.driver.slots}
        assert self.view is not None
        listing, there = self.view.listing, self.view.awaited
        captured_since = tally.captured - self.tally.captured
        figures = Figures(
            listing.planned,
            listing.committed,
            max(0, len(listing.missing) - there - captured_since),
            tally.captured,
            tally.tokens,
            tally.retried,
            tally.dropped,
            len(self.recorded),
        )
        return figures, [vars(use) for use in uses.values()]

    def _report(self, view: View) -> ExtractReport:
        behind = self.options.until_complete and view.awaited > 0
        return make_report(
            lake=self.lake_url,
            options=self.options,
            view=view,
            reasons=self.never | self.failed,
            stopped=self.stopped,
            interrupted=self.stop.is_set() and (bool(view.todo) or behind),
            tally=self.tally,
            servers=[self._use(s.url) for s in self.servers],
            seconds=time.monotonic() - self.start,
        )
