"""Kills of everything that an extraction consists of: the real driver, real compactors and
simulated servers, each a process of its own, on random shots from outside.

    python -m tests.faults.extraction --kills 200 --seed 1 --out FILE.json

SIGKILL mostly; besides, SIGTERM, SIGINT, a process that stands still for a while (SIGSTOP), and
reboots, which kill everything and empty staging. The servers have troubles of their own. Sometimes
there are two servers, two drivers, two compactors, or two staging folders. Whoever ends is started
again. Behind each episode an audit (tests.sim.audit) looks at the lake.
"""

import argparse
import contextlib
import json
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hslake_sglang.process import free_port

import hslake
from hslake.compact import compact
from hslake.extract.worklist import worklist
from hslake.plan import plan_files
from tests.sim.audit import Audit, audit
from tests.sim.fleet import Process, empty, sim_server
from tests.sim.fleet import hslake as command
from tests.sim.samples import lengths_of, write_plan

_TROUBLE = (
    "error=0.01,late_error=0.005,abort=0.005,broken=0.005,drop=0.005,late=0.01,"
    "retract=0.02,freeze=0.01,crash=0.003,freeze_s=1,late_s=0.3"
)
_STREAMS = [3, 31, 59, "final"]
_MEAN, _LONGEST = 250, 2048
_EACH = 300  # samples planned at a time
_SHOT_S = 1.2  # mean time between shots
_NO_END_S = 150.0  # without a sample reaching the lake although nobody is shot at any more
_YOUNG_S = 4.0  # after its start a process may not have its signal handlers yet
_LAST_LINE = re.compile(r"^(complete|incomplete|interrupted|done|unconfirmed|error)\b")


@dataclass
class Episode:
    """One lake's life. `kills`: SIGKILLs by victim; `shots`: everything by kind; `ends`: how
    drivers ended by themselves; `wrong`: whatever is not as it should be."""

    seed: int
    kills: Counter[str] = field(default_factory=Counter)
    shots: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    found: Audit = field(default_factory=Audit)
    last_s: float = 0.0  # from the last shot to the end

    @property
    def ok(self) -> bool:
        return self.found.ok and not self.wrong


class World:
    """A lake, its staging, and the processes around it."""

    def __init__(self, folder: Path, rng: random.Random, each: int) -> None:
        self.folder, self.rng, self.each, self.names = folder, rng, each, 0
        self.finished = False  # a driver has said so
        self.url = str(folder / "lake")
        hslake.create(self.url, streams=_STREAMS, hidden_size=8, num_layers=61, name="faults")
        self.plan()
        servers = rng.choice([1, 2])
        apart = servers == 2 and rng.random() < 0.5
        self.roots = [folder / f"staging{i}" for i in range(servers if apart else 1)]
        for root in self.roots:
            root.mkdir()
        ports = [free_port() for _ in range(servers)]
        self.processes = [
            self._process(
                f"server-{i}",
                sim_server(
                    self.url, "--staging", self.roots[i % len(self.roots)], "--port", port,
                    "--part-tokens", 4096, "--max-parts", 3, "--chunk", 1024, "--kv", 16_384,
                    "--rate", 6000, "--overhead", 0.01, "--jitter", 0.5, "--traffic", 2,
                    "--mixed", "--trouble", _TROUBLE,
                ),
            )
            for i, port in enumerate(ports)
        ]  # fmt: skip
        staging = [x for root in self.roots for x in ("--staging", root)]
        urls = [x for port in ports for x in ("--server", f"http://127.0.0.1:{port}")]
        driver = command("extract", self.url, *urls, *staging, "--patience", 60, "--until-complete")
        compactor = command(
            "compact", self.url, *staging, "--watch",
            "--interval", 0.2, "--max-age", 1, "--segment-tokens", 16_384,
        )  # fmt: skip
        for i in range(rng.choice([1, 1, 2])):
            self.processes.append(self._process(f"driver-{i}", driver))
        for i in range(rng.choice([1, 1, 2])):
            self.processes.append(self._process(f"compactor-{i}", compactor))
        self.due = {p.name: 0.0 for p in self.processes}  # when it is started (again)
        self.told: dict[str, int] = {}  # the last signal that was to end a process
        self.stopped: dict[str, float] = {}  # until when it stands still
        self.planned_at = 0.0

    def _process(self, name: str, argv: list[str]) -> Process:
        return Process(name, argv, self.folder / f"{name}.log")

    def plan(self) -> None:
        """Plan some more samples."""
        lengths = lengths_of(self.each, mean=_MEAN, longest=_LONGEST, seed=self.names)
        files = write_plan(self.folder / "plan", lengths, seed=self.names, first=self.names)
        plan_files(self.url, files)
        self.names += self.each
        self.finished = False
        self.planned_at = time.monotonic()

    def missing(self) -> int:
        """Planned samples that are not in the lake."""
        return len(worklist(hslake.open(self.url)).missing)

    def of_kind(self, kind: str) -> list[Process]:
        return [p for p in self.processes if p.name.startswith(kind)]


def episode(folder: Path, kills: int, seed: int, *, each: int = _EACH) -> Episode:
    """At least `kills` SIGKILLs over the life of one lake under `folder`, then the audit. `each`:
    samples planned at a time."""
    rng = random.Random(seed)
    done = Episode(seed)
    world = World(folder, rng, each)
    try:
        _shoot_on(world, kills, done)
        began = time.monotonic()
        _quiet(world, done)
        done.last_s = round(time.monotonic() - began, 1)
    finally:
        for process in world.processes:
            process.kill()
    done.found = audit(world.url)
    return done


def _shoot_on(world: World, kills: int, done: Episode) -> None:
    next_shot = time.monotonic() + 4.0
    while done.kills.total() < kills and len(done.wrong) < 5:
        _tend(world, done)
        now = time.monotonic()
        if now >= next_shot:
            _shoot(world, done)
            next_shot = now + world.rng.expovariate(1 / _SHOT_S)
        if world.finished:
            world.plan()
        time.sleep(0.05)


def _tend(world: World, done: Episode) -> None:
    """Start what has ended, let go on what stood still long enough."""
    now = time.monotonic()
    for process in world.processes:
        until = world.stopped.get(process.name)
        if until is not None and now >= until:
            process.send(signal.SIGCONT)
            del world.stopped[process.name]
        if process.alive:
            continue
        if process.codes and process.name not in world.due:
            _ended(world, process, done)
            world.due[process.name] = now + world.rng.uniform(0.0, 1.0)
        if now >= world.due.get(process.name, 0.0):
            world.due.pop(process.name, None)
            world.told.pop(process.name, None)
            process.start()


def _ended(world: World, process: Process, done: Episode) -> None:
    """Look at how a process has ended."""
    kind, code = process.name.split("-")[0], process.codes[-1]
    told = world.told.get(process.name)
    young = time.monotonic() - process.began < _YOUNG_S
    if code == -signal.SIGKILL:
        done.shots["own crash"] += told != signal.SIGKILL
        if told != signal.SIGKILL and kind != "server":
            done.wrong.append(f"{process.name} was killed by somebody: {process.tail()}")
        return
    # It may have been at its own end, or at its very beginning, without handlers; or told twice.
    told_to_end = told in (signal.SIGTERM, signal.SIGINT)
    if told_to_end and (young or code in (130, 143, -signal.SIGTERM, -signal.SIGINT)):
        return
    if told_to_end and code == 0 and kind != "driver":
        return
    if kind != "driver":
        done.wrong.append(f"{process.name} ended with {code}: {process.tail()}")
        return
    last = (process.tail().splitlines() or [""])[-1]
    done.ends[f"{code}: {last.split(':')[0]}"] += 1
    if code not in (0, 1, 2) or not _LAST_LINE.match(last):
        done.wrong.append(f"{process.name} ended with {code}: {process.tail()}")
    elif code == 0:
        world.finished = True
        if process.began > world.planned_at and world.missing():
            done.wrong.append(f"{process.name}: {world.missing()} are missing, it says: {last}")


def _shoot(world: World, done: Episode) -> None:
    kind = world.rng.choices(
        ["kill", "term", "int", "stop", "reboot"], [0.75, 0.08, 0.06, 0.08, 0.03]
    )[0]
    if kind == "reboot":
        _reboot(world, done)
        return
    # By kind first: two compactors shall not take the shots of one driver.
    kinds = [[p for p in world.of_kind(k) if p.alive] for k in ("server", "driver", "compactor")]
    if not any(kinds):
        return
    process = world.rng.choice(world.rng.choice([some for some in kinds if some]))
    if kind == "stop":
        process.send(signal.SIGSTOP)
        world.stopped[process.name] = time.monotonic() + world.rng.uniform(0.2, 4.0)
    elif kind == "kill":
        _kill(world, process, done)
    else:
        sign = signal.SIGTERM if kind == "term" else signal.SIGINT
        world.told[process.name] = sign
        process.send(sign)
    done.shots[kind] += 1


def _kill(world: World, process: Process, done: Episode) -> None:
    if process.alive:
        world.told[process.name] = signal.SIGKILL
        world.stopped.pop(process.name, None)
        process.kill()
        done.kills[process.name.split("-")[0]] += 1


def _reboot(world: World, done: Episode) -> None:
    for process in world.rng.sample(world.processes, len(world.processes)):
        _kill(world, process, done)
    for root in world.roots:
        empty(root)
    done.shots["reboot"] += 1


def _quiet(world: World, done: Episode) -> None:
    """Nobody is shot at any more: all must arrive, everybody must end, staging must be empty."""
    for process in world.processes:
        process.send(signal.SIGCONT)
    world.stopped.clear()
    end, left = time.monotonic() + _NO_END_S, world.missing()
    while left and time.monotonic() < end:
        _tend(world, done)
        time.sleep(0.2)
        if (now := world.missing()) < left:
            end, left = time.monotonic() + _NO_END_S, now
    if left:
        done.wrong.append(f"{left} samples do not arrive although nobody is shot at any more")
    for kind in ("driver", "server", "compactor"):
        for process in world.of_kind(kind):
            if kind != "driver":
                process.send(signal.SIGTERM)
            found = process.wait(60)
            if found is None:
                done.wrong.append(f"{process.name} does not end: {process.tail()}")
            elif kind == "server" and found == -signal.SIGKILL:
                done.shots["own crash"] += 1
            elif found != 0 and kind != "driver" and process.name not in world.due:
                done.wrong.append(f"{process.name} ended with {found}: {process.tail()}")
    report = compact(world.url, world.roots)
    done.wrong += report.messages()
    left_over = [p for root in world.roots for p in root.glob("*") if p.name != ".hook"]
    done.wrong += [f"left in staging: {p}" for p in left_over]


def main() -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.extraction",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kills", type=int, default=200, help="SIGKILLs in all (default: 200)")
    parser.add_argument("--each", type=int, default=25, help="kills of one lake (default: 25)")
    parser.add_argument("--seed", type=int, default=None, help="default: by the clock")
    parser.add_argument("--folder", type=Path, default=None, help="default: one in /dev/shm")
    parser.add_argument("--out", type=Path, default=None, help="JSON file of the counts")
    options = parser.parse_args()
    # Told to end, it ends its processes too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    seed = options.seed if options.seed is not None else time.time_ns() % 1_000_000
    base = options.folder or ("/dev/shm" if Path("/dev/shm").is_dir() else None)
    began, bad, episodes = time.monotonic(), False, list[Episode]()
    while (killed := sum(e.kills.total() for e in episodes)) < options.kills:
        folder = Path(tempfile.mkdtemp(prefix="hslake-extraction-", dir=base))
        done = episode(folder, min(options.each, options.kills - killed), seed + len(episodes))
        episodes.append(done)
        print(f"{time.monotonic() - began:6.0f} s  {_told(done)}", flush=True)
        if done.ok:
            shutil.rmtree(folder)
        else:
            bad = True
            print(
                f"  left in {folder}: {done.found.examples()}", *done.wrong, sep="\n  ", flush=True
            )
    result = summary(episodes, seed, time.monotonic() - began)
    print(json.dumps(result))
    if options.out is not None:
        with contextlib.suppress(OSError):
            options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    return int(bad)


def _told(done: Episode) -> str:
    found = done.found.counts()
    return (
        f"seed {done.seed}: {dict(done.kills)} killed, {dict(done.shots)}, "
        f"drivers {dict(done.ends)}; "
        f"{found['planned']} samples, lost {found['lost']}, duplicated {found['duplicated']}, "
        f"torn {found['torn']}, strangers {found['strangers']}, {len(done.wrong)} wrong; "
        f"quiet in {done.last_s} s"
    )


def summary(episodes: list[Episode], seed: int, seconds: float) -> dict[str, Any]:
    """The figures of all episodes together."""
    kills, shots, ends = Counter[str](), Counter[str](), Counter[str]()
    audits = Counter[str]()
    for done in episodes:
        kills, shots, ends = kills + done.kills, shots + done.shots, ends + done.ends
        audits.update(done.found.counts())
    return {
        "kills": kills.total(),
        "kills_by": dict(kills),
        "shots": dict(shots),
        "driver_ends": dict(ends),
        "lakes": len(episodes),
        "samples": audits["planned"],
        **{name: audits[name] for name in ("lost", "duplicated", "torn", "strangers", "orphans")},
        "wrong": sum(len(e.wrong) for e in episodes),
        "seed": seed,
        "seconds": round(seconds),
    }


if __name__ == "__main__":
    sys.exit(main())
