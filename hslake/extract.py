"""`hslake extract`: drives servers until every planned sample is captured. Resumable.

There is no state of its own to keep: what is committed stands in the manifest, what is captured and
waits for the compactor stands in staging, and everything else is asked for. What was captured by a
writer that nobody shows any more is asked for again where its staging is known to be gone; else it
may still come, and is reported as unconfirmed.
"""

import asyncio
import contextlib
import logging
import re
import shlex
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import hslake
from hslake.drive import Driver, Limits
from hslake.errors import CheckFailed, InvalidInput, Missing, without_secrets
from hslake.extractreport import (
    INTERRUPTED,
    LIMITED,
    LOST,
    ExtractReport,
    MissingSample,
    ServerUse,
    last_line,
)
from hslake.items import Item, Items
from hslake.lake import Lake
from hslake.listeners import server_at
from hslake.progress import ProgressMaker, Silent
from hslake.reach import Reach, ask_reach, name_long
from hslake.server import Server, ServerDown, ServerStatus, new_session, whole_status
from hslake.signals import stopping
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

_SHOWN = 1000  # missing samples listed by id
_LOST = 3  # captures of one sample that never reach the lake, before it is not asked for again


@dataclass(frozen=True)
class ExtractOptions:
    """What to ask for, and how.

    `where`, `order`: SQL over the plan's columns (default order: md5 of the sample id, which mixes
    lengths); `limit`: samples to ask for in this call; `staging`: staging folders on this machine
    that also tell what is captured (of servers that have ended); `limits`: bounds and times.
    """

    where: str | None = None
    order: str | None = None
    limit: int | None = None
    staging: tuple[str | Path, ...] = ()
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        for what, value in (("concurrency", self.limits.requests), ("limit", self.limit)):
            if value is not None and value < 1:
                raise InvalidInput(f"--{what}: found {value}, expected at least 1")


def extract(
    lake_url: str,
    servers: Sequence[str],
    options: ExtractOptions = ExtractOptions(),
    *,
    progress: ProgressMaker = Silent,
) -> ExtractReport:
    """Capture what is planned and neither committed nor waiting in staging.

    `servers`: URLs of servers started with `hslake serve`, each with the listeners of its further
    machines behind commas (`hslake.listeners`). Ctrl-C and SIGTERM end the call early
    with `interrupted` set; a second one ends it at once.

    Raises InvalidInput (bad SQL, another lake's server or staging), Missing (no lake, no plan, no
    staging folder, no server answers), CheckFailed (no server is ready to capture). An incomplete
    run is a report, not an error.
    """

    async def main() -> ExtractReport:
        stop = asyncio.Event()
        with stopping(stop):
            return await extract_async(lake_url, servers, options, progress=progress, stop=stop)

    return asyncio.run(main())


async def extract_async(
    lake_url: str,
    servers: Sequence[str],
    options: ExtractOptions = ExtractOptions(),
    *,
    progress: ProgressMaker = Silent,
    stop: asyncio.Event | None = None,
) -> ExtractReport:
    """`extract` inside a running event loop. `stop`, once set, ends it early."""
    if not servers:
        raise InvalidInput("no server given: name at least one with --server http://HOST:PORT")
    limits = options.limits
    async with new_session() as session:
        clients = [
            server_at(
                url,
                session,
                request_timeout=limits.request_timeout,
                status_timeout=limits.status_timeout,
            )
            for url in dict.fromkeys(servers)
        ]
        return await _Run(lake_url, clients, options, progress, stop or asyncio.Event()).all()


class _Run:
    """One call: passes over what is missing, until nothing is or a pass brings nothing."""

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
        self.start = time.monotonic()
        self.stopped: str | None = None
        self.captures: Counter[str] = Counter()  # sample id -> acknowledgements in this call
        self.whereabouts = Whereabouts(tuple(map(Path, options.staging)))
        self.gave_up: dict[str, str] = {}  # sample id -> why it is not asked for again
        self.ready: list[tuple[Server, ServerStatus]] = []  # at the first look
        self.reach: dict[str, Reach] = {}  # of those by URL, as far as they tell
        self.told_long = False
        self.unheard: dict[str, Item] = {}  # attempt -> its sample, sent and not acknowledged
        self.chosen: set[str] | None = None  # what --limit allows, settled at the first look
        self.tokens = self.retried = self.dropped = 0
        self.uses: dict[str, ServerUse] = {}

    async def all(self) -> ExtractReport:
        spec = (await asyncio.to_thread(hslake.open, self.lake_url)).spec
        await asyncio.to_thread(check_roots, self.options.staging, spec)
        statuses = await self._first_look(spec)
        self.reach = await ask_reach(self.ready, self.stop)
        while True:
            # Staging first: what is committed in between is then seen twice, not never.
            lake = await asyncio.to_thread(hslake.open, self.lake_url)
            listing = await asyncio.to_thread(
                worklist, lake, self.options.where, self.options.order
            )
            self._check_plan(listing)
            names = {item.sample_id for item in listing.missing}
            places = await asyncio.to_thread(self.whereabouts.look, lake, names, statuses)
            todo = self._todo(listing, places)
            if not self.told_long:
                todo = self._without_long(todo, listing.missing)
            if not todo or self.stopped or self.stop.is_set():
                await asyncio.to_thread(self._hear_late, lake, statuses)
                return self._report(listing, places, todo)
            before = sum(self.captures.values())
            await self._drive(lake, todo)
            statuses = await self._statuses(spec)
            if sum(self.captures.values()) == before and not self.stopped:
                self.stopped = "not captured"

    # -- what is there -------------------------------------------------------------------------

    async def _first_look(self, spec: LakeSpec) -> list[ServerStatus]:
        """Every server's status; an error now rather than a long wait for what cannot work."""
        found = await asyncio.gather(*(whole_status(s) for s in self.servers))
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

    def _without_long(self, todo: Items, missing: Items) -> Items:
        """`todo` without what no server can take, which is named now and not at the end."""
        self.told_long = True
        if len(self.reach) < len(self.ready):
            return todo
        best = max(self.reach.values(), key=lambda r: r.tokens)
        if text := name_long(missing.longer(best.tokens), best):
            log.warning("%s", text)
        long = {item.sample_id: best.why for item in todo.longer(best.tokens)}
        self.gave_up |= long
        return todo.without(long)

    async def _statuses(self, spec: LakeSpec) -> list[ServerStatus]:
        """Status of all servers that answer, and of local staging: of this lake's writers."""
        found = await asyncio.gather(*(whole_status(s) for s in self.servers))
        answers = [s for s in found if isinstance(s, ServerStatus)]
        return of_lake([*answers, *await asyncio.to_thread(self._local)], spec.lake_id)

    def _local(self) -> list[ServerStatus]:
        found: list[ServerStatus] = []
        for root in self.options.staging:
            with contextlib.suppress(Missing):  # it was there at the start: deleted since
                found += local_statuses(Path(root))
        return found

    def _check_plan(self, listing: Worklist) -> None:
        if listing.planned:
            return
        if self.options.where:
            raise InvalidInput(f"--where {self.options.where!r} selects no planned sample")
        raise Missing(
            f"nothing is planned in {self.lake_url}: register samples with `hslake plan LAKE FILE`"
        )

    def _todo(self, listing: Worklist, places: Places) -> Items:
        there = places.waiting | places.unconfirmed
        often = [name for name, count in self.captures.items() if count >= _LOST]
        for name in listing.missing.among(often) - there - self.gave_up.keys():
            self.gave_up[name] = (
                f"captured {_LOST} times but never committed: see what `hslake compact` says"
            )
        todo = listing.missing.without(there | self.gave_up.keys())
        if self.options.limit is None:
            return todo
        if self.chosen is None:
            self.chosen = {item.sample_id for item in todo[: self.options.limit]}
        return todo.only(self.chosen)

    # -- the work ------------------------------------------------------------------------------

    async def _drive(self, lake: Lake, todo: Items) -> None:
        with (
            await asyncio.to_thread(TokenFile, lake, todo) as tokens,
            self.progress(todo.tokens, "extract (tokens)") as bar,
        ):

            def captured(item: Item, writer: str) -> None:
                self.captures[item.sample_id] += 1
                self.whereabouts.captured(item.sample_id, writer)
                bar.advance(item.length)

            driver = Driver(
                lake.spec.lake_id,
                self.servers,
                todo,
                tokens.read,
                limits=self.options.limits,
                reach=self.reach,
                when_full=self._when_full(),
                on_captured=captured,
                on_note=bar.note,
            )
            stopper = asyncio.create_task(self._stop(driver))
            try:
                await driver.run()
            finally:
                stopper.cancel()
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
        self.gave_up |= driver.refused
        self.gave_up |= {
            name: f"failed {self.options.limits.tries} times, last: {why}"
            for name, why in driver.failed.items()
        }
        self.stopped = driver.stopped
        self.tokens += driver.captured_tokens
        self.retried += driver.retried
        self.dropped += driver.dropped
        for slot in driver.slots:
            old = self.uses.get(slot.server.url, ServerUse(slot.server.url, ""))
            self.uses[slot.server.url] = ServerUse(
                slot.server.url,
                slot.reason,
                old.captured + slot.captured,
                old.tokens + slot.tokens,
                old.dropped + slot.dropped,
                old.outages + slot.outages,
            )

    def _hear_late(self, lake: Lake, statuses: list[ServerStatus]) -> None:
        """Count what a server captured and could not say any more, as it died."""
        there = committed_attempts(lake, self.unheard) | captured_attempts(statuses).keys()
        late = {i.sample_id: i for a, i in self.unheard.items() if a in there}
        for name, item in late.items():
            if not self.captures[name]:
                self.captures[name] = 1
                self.tokens += item.length

    def _use(self, url: str) -> ServerUse:
        busy = any(s.url == url for s, _ in self.ready) and url not in self.reach
        return self.uses.get(url, ServerUse(url, not_answered(url) if busy else "not used"))

    # -- the end -------------------------------------------------------------------------------

    def _report(self, listing: Worklist, places: Places, todo: Items) -> ExtractReport:
        interrupted = self.stop.is_set() and bool(todo)
        asked = {item.sample_id for item in todo}
        counts: Counter[str] = Counter()
        shown: dict[str, str] = {}  # reasons that differ only in numbers are one
        samples: list[MissingSample] = []
        for item in listing.missing:
            name = item.sample_id
            if name in places.waiting or name in places.unconfirmed:
                continue
            why = self.gave_up.get(name)
            if why is None and name in places.lost:
                why = LOST
            elif why is None and name in asked:
                why = self.stopped or (INTERRUPTED if interrupted else "not captured")
            why = why or LIMITED
            key = shown.setdefault(re.sub(r"\d[\d,.]*", "#", why), why)
            counts[key] += 1
            if len(samples) < _SHOWN:
                samples.append(MissingSample(name, item.length, why))
        missing = dict(counts.most_common())
        report = ExtractReport(
            lake=self.lake_url,
            complete=not missing and not places.unconfirmed,
            interrupted=interrupted,
            planned=listing.planned,
            planned_tokens=listing.planned_tokens,
            committed=listing.committed,
            waiting=len(places.waiting),
            unconfirmed=len(places.unconfirmed),
            missing=missing,
            missing_samples=samples,
            captured=sum(self.captures.values()),
            captured_tokens=self.tokens,
            retried=self.retried,
            dropped=self.dropped,
            servers=[self._use(s.url) for s in self.servers],
            seconds=time.monotonic() - self.start,
            message="",
        )
        return replace(report, message=last_line(report, self.options.where))
