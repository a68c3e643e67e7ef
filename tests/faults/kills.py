"""Random SIGKILLs of hook writers, compactors and vacuums, while a driver asks again for what is
missing: `python -m tests.faults.kills --count 1000`.

Half of the kills come at random moments, half at a random step of the process itself. Every other
episode has two hosts: two staging folders, compactors with clocks days apart, and one lake.
"""

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hslake.compact import compact
from tests.faults import children
from tests.faults.children import Child, Faults, spawn
from tests.faults.driver import Driver, Server, settle
from tests.faults.results import RESULTS, record
from tests.faults.world import Verdict, World, judge, make_world

_DAY = 86_400.0
_WRITER = {"part_tokens": 1024, "max_parts": 3, "idle_s": 0.2, "silent_s": 0.5, "max_age_s": 3.0}
_NO_END_S = 120.0  # without a sample reaching the lake although nobody is killed


@dataclass(eq=False)
class _Place:
    """A process that is started anew whenever it was killed. `steps`: about how many it makes
    before it has done everything that it can do."""

    name: str
    start: Callable[[Faults], tuple[Child, Server | None]]
    steps: int
    skew_s: float = 0.0
    child: Child | None = None
    server: Server | None = None
    doomed: bool = False  # it kills itself at a step


@dataclass
class Episode:
    """One lake's life. `kills` by kind of process, of which `at_step` at a step."""

    seed: int
    kills: Counter[str] = field(default_factory=Counter)
    at_step: int = 0
    samples: int = 0
    died: list[str] = field(default_factory=list)  # of something else than our kills
    counts: Counter[str] = field(default_factory=Counter)
    verdict: Verdict = field(default_factory=Verdict)


def episode(folder: Path, kills: int, seed: int, *, hosts: int = 1) -> Episode:
    """`kills` SIGKILLs over the life of one lake under `folder`, then the oracle."""
    rng = random.Random(seed)
    done = Episode(seed)
    world = make_world(folder, 40, roots=hosts)
    driver = Driver(world, rng)
    places = _places(world, hosts)
    try:
        for place in places:
            _start(world, place, rng)
        _kill_on(world, driver, places, kills, rng, done)
        _quiet(world, driver, places, done)
    finally:
        for place in places:
            _end(place)
    done.samples = len(world.names)
    done.counts = driver.counts
    # What was acknowledged is in the lake or in staging: a compactor alone must find it.
    acknowledged = set(driver.acknowledged)
    compact(world.url, world.roots)
    missing, _ = driver.look()
    never = acknowledged & missing
    settle(world)
    done.verdict = judge(world)
    done.verdict.lost += sorted(never - set(done.verdict.lost))
    return done


def _places(world: World, hosts: int) -> list[_Place]:
    roots = [str(root) for root in world.roots]

    def writer(root: str) -> Callable[[Faults], tuple[Child, Server | None]]:
        def start(faults: Faults) -> tuple[Child, Server | None]:
            here, there = children.pipe()
            run = f"run-{time.monotonic_ns()}"
            settings: dict[str, Any] = {
                **_WRITER,
                "engine": {"engine": "fake", "hook_version": "0", "run": run},
                "ahead": bool(time.monotonic_ns() // 1000 % 2),
            }
            child = spawn(children.write, faults, world.url, root, there, settings)
            there.close()
            return child, Server(child, here, run)

        return start

    def other(work: Callable[..., None], *args: Any) -> Callable[[Faults], tuple[Child, None]]:
        return lambda faults: (spawn(work, faults, world.url, *args), None)

    found = [_Place("writer", writer(roots[i % hosts]), 400) for i in range(3)]
    for i in range(2):
        mine = [roots[i]] if hosts > 1 else roots
        skew = (-40.0 * _DAY, 3.0 * _DAY)[i] if hosts > 1 else 0.0
        watch = other(children.compact_watch, mine, 1500, 0.05)
        found.append(_Place("compactor", watch, 250, skew))
    found.append(_Place("vacuum", other(children.vacuum_now, 1.0), 60))
    return found


def _start(world: World, place: _Place, rng: random.Random) -> None:
    place.doomed = rng.random() < 0.5
    at = 1 + int(rng.expovariate(2.0 / place.steps)) if place.doomed else None
    roots = (world.url, *map(str, world.roots))
    place.child, place.server = place.start(Faults(roots, kill_at=at, skew_s=place.skew_s))


def _reap(place: _Place, done: Episode, *, shot: bool) -> bool:
    """Take in the end of a process. Returns whether it was one of our kills."""
    assert place.child is not None
    place.child.join()
    code = place.child.exitcode
    if place.server is not None:
        place.server.requests.close()
    if code == -signal.SIGKILL and (shot or place.doomed):
        done.kills[place.name] += 1
        done.at_step += not shot
        return True
    done.died.append(f"{place.name} ended with {code}")
    return False


def _kill_on(
    world: World,
    driver: Driver,
    places: list[_Place],
    kills: int,
    rng: random.Random,
    done: Episode,
) -> None:
    next_shot, next_pass = time.monotonic() + 0.3, 0.0
    while done.kills.total() < kills and len(done.died) < 20:
        for place in places:
            assert place.child is not None
            if not place.child.is_alive():
                _reap(place, done, shot=False)
                _start(world, place, rng)
        now = time.monotonic()
        if now >= next_shot:
            place = rng.choice(places)
            assert place.child is not None
            if place.child.is_alive():
                place.child.kill()
                _reap(place, done, shot=True)
                _start(world, place, rng)
            next_shot = now + rng.expovariate(1 / 0.3)
        driver.turn([p.server for p in places if p.server is not None])
        if driver.idle and now >= next_pass:
            _, missing = driver.begin_pass()
            if missing < 30:
                world.plan(30)
            next_pass = time.monotonic() + 0.3
        time.sleep(0.01)


def _quiet(world: World, driver: Driver, places: list[_Place], done: Episode) -> None:
    """Nobody is killed any more (but for those that will do it themselves): all must arrive."""
    end, left = time.monotonic() + _NO_END_S, len(world.names) + 1
    rng = random.Random(0)
    while time.monotonic() < end:
        for place in places:
            assert place.child is not None
            if not place.child.is_alive():
                _reap(place, done, shot=False)
                _start(world, place, rng)
        driver.turn([p.server for p in places if p.server is not None])
        if driver.idle:
            _, missing = driver.begin_pass()
            if missing == 0:
                return
            if missing < left:
                end, left = time.monotonic() + _NO_END_S, missing
        time.sleep(0.05)
    done.verdict.other.append(f"{left} samples do not arrive although nobody is killed any more")


def _end(place: _Place) -> None:
    if place.child is not None:
        place.child.kill()
        place.child.join()


def main() -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.kills",
        description=__doc__,
        epilog="example: python -m tests.faults.kills --count 1000 --seed 1",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--count", type=int, default=1000, help="kills in all (default: 1000)")
    parser.add_argument("--each", type=int, default=50, help="kills of one lake (default: 50)")
    parser.add_argument("--seed", type=int, default=None, help="default: by the clock")
    parser.add_argument("--folder", type=Path, default=None, help="default: one in /dev/shm")
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON file of the counts")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else time.time_ns() % 1_000_000
    base = options.folder or ("/dev/shm" if Path("/dev/shm").is_dir() else None)
    total: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    began, bad = time.monotonic(), False
    while total["kills"] < options.count:
        folder = Path(tempfile.mkdtemp(prefix="hslake-kills-", dir=base))
        left = min(options.each, options.count - total["kills"])
        hosts = 1 + total["lakes"] % 2
        done = episode(folder, left, seed + total["lakes"], hosts=hosts)
        verdict = done.verdict
        total.update(
            lakes=1,
            kills=done.kills.total(),
            at_step=done.at_step,
            samples=done.samples,
            captured=done.counts["captured"],
            lost=len(verdict.lost),
            duplicated=len(verdict.duplicated),
            torn=len(verdict.torn),
            other=len(verdict.other),
            died=len(done.died),
        )
        kinds.update(done.kills)
        print(
            f"{time.monotonic() - began:6.0f} s  seed {done.seed}, {hosts} host(s): "
            f"{dict(done.kills)} killed, {done.samples} samples, {dict(done.counts)}; "
            f"lost {len(verdict.lost)}, duplicated {len(verdict.duplicated)}, "
            f"torn {len(verdict.torn)}",
            flush=True,
        )
        if not verdict.ok or done.died:
            bad = True
            print(f"  left in {folder}: {verdict} {Counter(done.died)}", flush=True)
        else:
            shutil.rmtree(folder)
    counts = {**total, "by": dict(kinds), "seed": seed, "seconds": round(time.monotonic() - began)}
    print(counts)
    record(options.out, "kills", counts)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
