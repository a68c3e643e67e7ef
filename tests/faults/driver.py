"""Asks for what a lake lacks as `hslake extract` does: by its own worklist and whereabouts, with
acknowledgements from the writers' events and credits of their free rows; only HTTP is left out."""

import contextlib
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import hslake
from hslake.compact import compact
from hslake.errors import Missing
from hslake.extract.whereabouts import Places, Whereabouts
from hslake.extract.worklist import captured_attempts, of_lake, worklist
from hslake.ids import RequestId, new_attempt
from hslake.server import CAPTURED, ServerStatus, parse_status
from hslake.staging import StatusReader
from hslake.status import local_statuses
from tests.faults.children import Child
from tests.faults.hook import Hook, capture
from tests.faults.world import World, length_of

_LOST_S = 5.0  # without an acknowledgement


@dataclass(eq=False)
class Server:
    """A writer's process. `run`: how its writer's status names it."""

    child: Child
    requests: Connection
    run: str


@dataclass
class _Flight:
    sample_id: str
    server: Server
    sent: float


@dataclass(eq=False)
class Driver:
    """Keeps servers busy with what is missing. `acknowledged`: samples whose capture an event
    confirmed; `double`: the share of samples that are sent to a second server as well."""

    world: World
    rng: random.Random
    double: float = 0.1
    acknowledged: set[str] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._lake8 = self.world.spec.lake8
        self._lake_id = self.world.spec.lake_id
        self._readers = [StatusReader(root) for root in self.world.roots]
        self._cursors: dict[str, int] = {}
        self._flights: dict[str, _Flight] = {}
        self._attempts: dict[str, str] = {}  # attempt -> sample, also of flights given up
        self._whereabouts = Whereabouts(self.world.roots)
        self._queue: list[str] = []
        self._heard: set[str] = set()  # acknowledged in this pass

    # -- one turn ------------------------------------------------------------------------------

    def turn(self, servers: Sequence[Server]) -> None:
        """Hear what was captured, give up what is lost, send what there is room for."""
        found = [
            parse_status(reader.read(self._cursors), str(reader.root)) for reader in self._readers
        ]
        for status in found:
            self._hear(status)
        now = time.monotonic()
        for attempt, flight in list(self._flights.items()):
            if not flight.server.child.is_alive() or now - flight.sent > _LOST_S:
                # It may have been captured all the same: nobody will know before it is asked again.
                del self._flights[attempt]
                self.counts["lost flights"] += 1
                self._queue.append(flight.sample_id)
        self._send(found, servers)

    def _hear(self, status: ServerStatus) -> None:
        for writer in status.writers:
            for event in writer.events:
                flight = self._flights.pop(event.attempt, None)
                sample = self._attempts.get(event.attempt)
                if sample is None:
                    continue
                if event.state == CAPTURED:
                    self.acknowledged.add(sample)
                    self._heard.add(sample)
                    self._whereabouts.captured(sample, writer.writer)
                    self.counts["captured"] += 1
                elif flight is not None:
                    self.counts["dropped"] += 1
                    self._queue.append(sample)
            self._cursors[writer.writer] = writer.cursor

    def _send(self, found: Sequence[ServerStatus], servers: Sequence[Server]) -> None:
        states = {w["engine"].get("run"): w for s in found for w in s.raw["writers"] if w["alive"]}
        for server in self.rng.sample(servers, len(servers)):
            state = states.get(server.run)
            if state is None or not server.child.is_alive():
                continue
            mine = [f for f in self._flights.values() if f.server is server]
            room = state["free_rows"] - sum(length_of(f.sample_id) for f in mine)
            while self._queue and len(mine) < 6:
                sample = self._queue[0]
                room -= length_of(sample)
                if room < 0:
                    break
                if self.rng.random() >= self.double:
                    self._queue.pop(0)
                if sample not in self._heard or self.rng.random() < 0.1:
                    mine.append(self._ask(server, sample))

    def _ask(self, server: Server, sample: str) -> _Flight:
        rid = RequestId(self._lake8, new_attempt(), length_of(sample), "A1", sample)
        flight = self._flights[rid.attempt] = _Flight(sample, server, time.monotonic())
        self._attempts[rid.attempt] = sample
        self.counts["asked"] += 1
        with contextlib.suppress(OSError):  # just killed
            server.requests.send(rid)
        return flight

    # -- passes over what is missing -----------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether all of the last pass was sent and heard of."""
        return not self._queue and not self._flights

    def look(self) -> tuple[set[str], Places]:
        """What no commit holds, and where of that is known to be."""
        statuses = staged(self.world, self._lake_id)
        lake = hslake.open(self.world.url)
        missing = {item.sample_id for item in worklist(lake).missing}
        return missing, self._whereabouts.look(lake, missing, statuses)

    def begin_pass(self) -> tuple[int, int]:
        """Queue what is to be asked for; returns how many, and how many are not committed yet."""
        missing, places = self.look()
        self.counts["passes"] += 1
        again = missing - places.waiting - places.unconfirmed
        # Seldom: given up for another attempt that was not committed yet when we looked.
        self.counts["acknowledged, asked again"] += len(self.acknowledged & again)
        self._queue, self._heard = self.rng.sample(sorted(again), len(again)), set()
        return len(again), len(missing)


def staged(world: World, lake_id: str) -> list[ServerStatus]:
    """What the writers in staging say."""
    found: list[ServerStatus] = []
    for root in world.roots:
        with contextlib.suppress(Missing):
            found += local_statuses(root)
    return of_lake(found, lake_id)


def acknowledged(world: World) -> set[str]:
    """Samples that lie in staging as their writers' events say."""
    return set(captured_attempts(staged(world, world.spec.lake_id)).values())


def told(world: World) -> set[str]:
    """Samples that the writers in staging have ever called captured, wherever they are now."""
    statuses = staged(world, world.spec.lake_id)
    events = (e for s in statuses for w in s.writers for e in w.events)
    return {e.sample_id for e in events if e.state == CAPTURED}


def settle(world: World) -> int:
    """Capture and compact in this process until nothing is missing; returns how many samples were
    captured. Raises AssertionError when that does not end."""
    driver = Driver(world, random.Random(0))
    captured = 0
    for turn in range(5):
        if turn:
            compact(world.url, world.roots)
        missing, places = driver.look()
        again = sorted(missing - places.waiting - places.unconfirmed)
        if not missing:
            return captured
        hook = Hook(world.roots[0], world.spec, settings={"part_tokens": 8192, "max_parts": 4})
        for name in again:
            rid = RequestId(world.spec.lake8, new_attempt(), length_of(name), "A1", name)
            capture(hook, rid)
        captured += len(again)
        hook.finish()
    raise AssertionError(f"{len(missing)} samples never reach the lake: {sorted(missing)[:3]}")
