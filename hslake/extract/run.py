"""One call of `extract`: passes over what is missing, until nothing is or patience ends."""

import asyncio
import contextlib
import logging
import random
import shlex
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import hslake
from hslake import runlog
from hslake.compact.trouble import told
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
from hslake.extract.canary import Canaries
from hslake.extract.drive import Driver, Extras
from hslake.extract.items import Item, Items
from hslake.extract.look import FirstLook, Trouble, all_statuses, first_look
from hslake.extract.notes import RunNotes
from hslake.extract.options import ExtractOptions, parse_shard
from hslake.extract.reach import Reach, ask_reach, name_long
from hslake.extract.refusals import EARLIER, HINT, RECORDED, Refusal, to_record
from hslake.extract.report import INTERRUPTED, ExtractReport, ServerUse, Tally, make_report
from hslake.extract.slot import not_answered
from hslake.extract.tokenfile import TokenFile
from hslake.extract.whereabouts import Places, Whereabouts
from hslake.extract.worklist import (
    Worklist,
    captured_attempts,
    committed_attempts,
    worklist,
)
from hslake.lake import Lake
from hslake.progress import ProgressMaker
from hslake.runlog import Figures
from hslake.server import Server, ServerStatus
from hslake.staging.check import check_roots

log = logging.getLogger("hslake.extract")

_LOST = 3  # captures of one sample that never reach the lake, before it is not asked for again
_PAUSE_MAX_S = 60.0
_MENDS = (Unavailable, Conflict, NoSpace, OSError)  # what may go away by itself


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


class Run:
    """Use once: `await all()`. `extras`: see `hslake.extract.drive.Extras`."""

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
        self.forgiven = 0  # samples that a server refused, and took when asked again
        self.recorded: set[str] = set()  # of those, in the run log
        self.uses: dict[str, ServerUse] = {}
        self.view: View | None = None  # the last that there was
        self.moved = time.monotonic()  # when something was captured or committed last

    async def all(self) -> ExtractReport:
        """The whole call."""
        lake = await asyncio.to_thread(hslake.open, self.lake_url)
        await asyncio.to_thread(check_roots, self.options.staging, lake.spec)
        first = await self._first_look(lake.spec.lake_id)
        self.ready = first.ready
        self.reach = await ask_reach(self.ready, self.stop)
        view = await self._look(first.statuses)
        del first  # with every event of staging
        self.notes = RunNotes(lake.store, self._standing)
        if self.extras is None and lake.spec.has_final and self.options.canary_share:
            self.extras = Canaries(self.options.canary_share, self.notes.log)
        self.notes.begin(self.options.told())
        self.notes.allowed(view.listing.missing.only(self.lifted))
        try:
            report = await self._passes(lake.spec.lake_id, view)
        except BaseException as error:
            cut = isinstance(error, asyncio.CancelledError | KeyboardInterrupt)
            await self.notes.end(runlog.INTERRUPTED if cut else runlog.FAILED, reason(error))
            raise
        await self.notes.end(report.outcome, report.message)
        return report

    async def _first_look(self, lake_id: str) -> FirstLook:
        """With --until-complete it waits for a server, which may still be starting."""
        trouble = Trouble(self.options.limits.patience)
        told = False
        while True:
            try:
                return await first_look(self.servers, self.options.staging, lake_id)
            except (Missing, CheckFailed) as error:
                if not self.options.until_complete or self.stop.is_set():
                    raise
                pause = trouble.met(error)
                if not told:
                    log.warning("waiting for a server: %s", error)
                told = True
            await self._sleep(pause)

    async def _passes(self, lake_id: str, view: View | None) -> ExtractReport:
        trouble = Trouble(self.options.limits.patience)
        while True:
            try:
                if view is None:
                    view = await self._look(await self._statuses(lake_id))
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

    async def _statuses(self, lake_id: str) -> list[ServerStatus]:
        return await all_statuses(self.servers, self.options.staging, lake_id)

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
        self.forgiven += driver.forgiven
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
        found = to_record(self.refusals, self.tally.captured, self.forgiven, self.lifted)
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
                view = await self._look(await self._statuses(view.lake.spec.lake_id))
                bar.advance(max(0, total - view.awaited - done))
                done = max(done, total - view.awaited)
        if view.todo or view.awaited or self.stop.is_set() or not self._failed(view):
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
