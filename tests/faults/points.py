"""A crash at every externally visible step of hook writer, compactor, vacuum and plan:
`python -m tests.faults.points`.

Each scenario is run once to count its steps, then once for every step with a SIGKILL right before
it; after each the work is taken up again, and the oracle looks at the lake. Named points that were
never reached fail the run.
"""

import argparse
import contextlib
import functools
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import hslake
from hslake import plan as plans
from hslake.compact import compact
from hslake.ids import RequestId, new_attempt
from tests.faults import children
from tests.faults.children import Child, Faults, spawn
from tests.faults.driver import acknowledged, settle
from tests.faults.hook import Hook, capture
from tests.faults.instruments import UNUSABLE
from tests.faults.results import RESULTS, record
from tests.faults.steps import KillAt
from tests.faults.world import (
    Verdict,
    World,
    age,
    copy_world,
    judge,
    length_of,
    make_world,
    write_plan,
)

NATIVE = (("create", 1), ("write", 1), ("link", 1), ("unlink", 1), ("link", 2), ("unlink", 2))
_PHASES = (
    *("birth", "make", "reserve", "write", "seal", "recycle", "status"),
    *("take", "encode", "upload", "commit", "free", "remove", "vacuum"),
)
NAMED = (
    "birth: mkdir stagingN/.ID.new",
    "birth: lockf stagingN/.ID.new/lock",
    "birth: rename stagingN/ID",
    "birth: fallocate stagingN/ID/events",
    "make: lockf stagingN/.room",
    "make: mkdir stagingN/ID/part-N",
    "make: fallocate stagingN/ID/part-N/hidden_states/c/N/N/N",
    "make: rename stagingN/ID/part-N/journal",
    "reserve: frame bytes payload, half",
    "reserve: frame bytes magic, none",
    "write: rows, half of them",
    "write: rows in place",
    "write: frame bytes header, half",
    "write: frame bytes payload, half",
    "write: frame bytes magic, none",
    "seal: open stagingN/ID/part-N/manifest.arrow.new",
    "seal: rename stagingN/ID/part-N/manifest.arrow",
    "status: rename stagingN/ID/status.json",
    "recycle: lockf stagingN/ID/part-N/read.lock",
    "recycle: remove stagingN/ID/part-N/zarr.json",
    "recycle: remove stagingN/ID/part-N/journal",
    "recycle: remove stagingN/ID/part-N/DONE",
    "recycle: rename stagingN/ID/part-N",
    "recycle: open stagingN/ID/part-N/zarr.json",
    "recycle: rename stagingN/ID/part-N/journal",
    "take: lockf stagingN/ID/compact.lock",
    "take: lockf stagingN/ID/part-N/read.lock",
    "encode: chunk",
    "upload: piece of segments/ID/hidden_states/c/N/N/N",
    "upload: fsync segments/ID/hidden_states/c/N/N/.N.X.tmp",
    "upload: rename segments/ID/hidden_states/c/N/N/N",
    "upload: rename segments/ID/inventory.json",
    "upload: stored segments/ID/inventory.json",
    "commit: rename manifest/part-N-X.parquet",
    "commit: before the entry of manifest",
    "commit: after the entry of manifest",
    "commit: fsync manifest/_delta_log",
    "free: open stagingN/ID/part-N/DONE",
    "free: utime stagingN/ID/part-N/DONE",
    "remove: rename stagingN/.ID.gone",
    "remove: remove stagingN/.ID.gone/lock",
    "remove: rmdir stagingN/.ID.gone",
    "vacuum commit: before the entry of manifest",
    "vacuum commit: after the entry of manifest",
    "vacuum: remove segments/ID/inventory.json",
    "vacuum: remove segments/ID/hidden_states/c/N/N/.N.X.tmp",
    "vacuum: rmdir segments/ID",
    "plan commit: before the entry of plan",
    "plan commit: after the entry of plan",
    *(f"commit: system call {call} of entry {nth}" for call, nth in NATIVE),
)
"""Points at each of which a process must have died; beside them at one of each phase at least."""


@dataclass
class Outcome:
    """One run of a scenario: the steps' names (the last is where it died), whether it was killed,
    and what the oracle says afterwards."""

    steps: list[str]
    killed: bool
    verdict: Verdict
    usable: bool = True


Scenario = Callable[[Path, Faults], tuple[World, Child, set[str]]]
"""Makes a world under the folder and runs a child in it to its end: the world, the child, and the
samples that are known to be captured."""


# -- scenarios ---------------------------------------------------------------------------------


def _roots(folder: Path) -> tuple[str, ...]:
    return (str(folder / "lake"), str(folder))


def _new(folder: Path, count: int) -> World:
    return copy_world(_template(folder.parent, count), folder)


@functools.cache
def _template(base: Path, count: int) -> World:
    return make_world(base / f"template{count}", count)


def _writer(folder: Path, faults: Faults, buffered: bool) -> tuple[World, Child, set[str]]:
    world = _new(folder, 8)
    here, there = children.pipe()
    root = str(world.roots[0])
    child = spawn(children.write_script, faults, world.url, root, world.names, buffered, there)
    there.close()
    with contextlib.suppress(EOFError, ConnectionResetError):
        while True:
            here.recv()
            compact(world.url, world.roots, segment_tokens=600)
            here.send("done")
    child.join()
    return world, child, acknowledged(world)


def writer(folder: Path, faults: Faults) -> tuple[World, Child, set[str]]:
    """The hook's life; a compactor comes by between."""
    return _writer(folder, faults, True)


def slow_writer(folder: Path, faults: Faults) -> tuple[World, Child, set[str]]:
    """The same of a writer that makes parts when needed and journals every row at once."""
    return _writer(folder, faults, False)


def _staged(folder: Path) -> tuple[World, list[Hook]]:
    """A world with the parts of two writers: a living one with a sealed part and an open one, in
    which a sample is half there, and one that was killed."""
    world = _new(folder, 9)
    names = iter(world.names)
    settings = {"part_tokens": 900, "max_parts": 3, "idle_s": 0.0}

    def rid(name: str) -> RequestId:
        return RequestId(world.spec.lake8, new_attempt(), length_of(name), "A1", name)

    live = Hook(world.roots[0], world.spec, settings=settings)
    for name in (next(names), next(names), next(names)):
        capture(live, rid(name))
    live.writer._parts.seal_all()
    capture(live, rid(next(names)))
    live.submit(rid(next(names)))
    live.forward()
    dead = Hook(world.roots[0], world.spec, settings=settings)
    capture(dead, rid(world.names[0]))  # a second attempt
    for name in (next(names), next(names), next(names)):
        capture(dead, rid(name))
    dead.submit(rid(next(names)))
    dead.forward()
    dead.die()
    return world, [live]


def _after(world: World, hooks: Sequence[Hook]) -> None:
    """The living writers go on: they recycle, and serve to the end what had begun."""
    for hook in hooks:
        hook.upkeep()
        hook.finish()


def compactor(folder: Path, faults: Faults) -> tuple[World, Child, set[str]]:
    """One pass over a living and a dead writer."""
    world, hooks = _staged(folder)
    known = acknowledged(world)
    roots = [str(r) for r in world.roots]
    child = spawn(children.compact_once, faults, world.url, roots, 600)
    child.join()
    _after(world, hooks)
    return world, child, known


def vacuum(folder: Path, faults: Faults) -> tuple[World, Child, set[str]]:
    """A vacuum over what three killed compactors left."""
    world, hooks = _staged(folder)
    roots = [str(r) for r in world.roots]
    for step in (
        "upload: fsync segments/ID/hidden_states/c/N/N/.N.X.tmp",
        "upload: stored segments/ID/zarr.json",
        "commit: before the entry of manifest",
    ):
        at = Faults(_roots(folder), (step, 1))
        spawn(children.compact_once, at, world.url, roots, 600).join()
    age(folder / "lake")
    known = acknowledged(world)
    child = spawn(children.vacuum_now, faults, world.url)
    child.join()
    _after(world, hooks)
    return world, child, known


def plan(folder: Path, faults: Faults) -> tuple[World, Child, set[str]]:
    """Planning, and planning the same again."""
    world = _new(folder, 2)
    names = [f"S-{i:05d}" for i in range(2, 6)]
    write_plan(folder / "more.parquet", names)
    child = spawn(children.plan, faults, world.url, str(folder / "more.parquet"))
    child.join()
    plans.plan_files(world.url, [folder / "more.parquet"])
    world.names += names
    return world, child, set()


SCENARIOS: dict[str, Scenario] = {
    "writer": writer,
    "slow-writer": slow_writer,
    "compactor": compactor,
    "vacuum": vacuum,
    "plan": plan,
}


# -- running them ------------------------------------------------------------------------------


def run(
    scenario: Scenario,
    folder: Path,
    *,
    kill_at: KillAt = None,
    lost_answers: bool = False,
    native: tuple[str, int] | None = None,
) -> Outcome:
    """One run under `folder`, which must be new: until the child's death or end, then until
    everything is in the lake, then the oracle."""
    folder.mkdir()
    trace = folder / "steps"
    faults = Faults(_roots(folder), kill_at, str(trace), lost_answers=lost_answers, native=native)
    world, child, known = scenario(folder, faults)
    steps = trace.read_text().splitlines() if trace.exists() else []
    death = -signal.SIGSYS if native else -signal.SIGKILL
    verdict = Verdict()
    if child.exitcode == UNUSABLE:
        return Outcome(steps, False, verdict, usable=False)
    killed = child.exitcode == death
    if not killed and child.exitcode != 0:
        verdict.other.append(f"the child ended with {child.exitcode}")
    # What was acknowledged needs nobody to ask for it again.
    report = compact(world.url, world.roots)
    live = {r[0] for r in hslake.open(world.url).sql("select sample_id from samples").fetchall()}
    lost = sorted(known - live)
    settle(world)
    found = judge(world)
    found.lost += lost
    found.other += [*verdict.other, *(f"compact: {m}" for m in report.messages())]
    return Outcome(steps, killed, found)


@dataclass
class Tally:
    """What a whole run found. `reached`: named point -> how often a process died there."""

    reached: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    kills: int = 0
    skipped: list[str] = field(default_factory=list)
    bad: list[tuple[str, Verdict]] = field(default_factory=list)

    def take(self, where: str, outcome: Outcome) -> None:
        self.runs += 1
        self.kills += outcome.killed
        if not outcome.verdict.ok:
            self.bad.append((where, outcome.verdict))

    def missing(self) -> list[str]:
        """Named points and phases at which nobody died."""
        phases = {name.partition(": ")[0] for name in self.reached}
        named = [p for p in NAMED if not self.reached[p] and p not in self.skipped]
        return named + [p for p in _PHASES if p not in phases]


def every_point(
    name: str, folders: Iterator[Path], tally: Tally, *, every: int = 1, lost_answers: bool = False
) -> None:
    """Kill scenario `name` at every step, or at every `every`-th and at NAMED ones."""
    what = f"{name}, answers lost" if lost_answers else name
    whole = run(SCENARIOS[name], next(folders), lost_answers=lost_answers)
    tally.take(f"{what}, not killed", whole)
    seen: Counter[str] = Counter()
    for at, step in enumerate(whole.steps):
        seen[step] += 1
        if lost_answers and "commit" not in step:
            continue  # nothing differs there
        if at % every and (step not in NAMED or tally.reached[step]):
            continue
        kill_at = (step, seen[step])
        outcome = run(SCENARIOS[name], next(folders), kill_at=kill_at, lost_answers=lost_answers)
        tally.take(f"{what}, {step} number {seen[step]}", outcome)
        if outcome.killed:
            tally.reached[step] += 1


def native_points(folders: Iterator[Path], tally: Tally) -> None:
    """Die inside Delta's own writing of a log entry."""
    for call, nth in NATIVE:
        outcome = run(compactor, next(folders), native=(call, nth))
        where = f"commit: system call {call} of entry {nth}"
        if not outcome.usable:
            tally.skipped.append(where)  # no seccomp on this machine
            continue
        tally.take(where, outcome)
        if outcome.killed:
            tally.reached[where] += 1
        else:
            tally.bad.append((where, Verdict(other=["never reached"])))


def fresh_folders(base: Path) -> Iterator[Path]:
    """New folders below `base`, each removed when the next one is asked for."""
    number = 0
    while True:
        number += 1
        folder = base / f"run{number}"
        yield folder
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.points",
        description=__doc__,
        epilog="example: python -m tests.faults.points --every 1",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--every", type=int, default=1, help="only each N-th step (default: all)")
    parser.add_argument("--scenario", choices=sorted(SCENARIOS), action="append")
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON file of the counts")
    options = parser.parse_args()
    tally, began = Tally(), time.monotonic()
    base = Path(tempfile.mkdtemp(prefix="hslake-points-", dir=_in_ram()))
    folders = fresh_folders(base)
    names = options.scenario or list(SCENARIOS)
    for name in names:
        every_point(name, folders, tally, every=options.every)
        print(f"{name}: {tally.runs} runs, {time.monotonic() - began:.0f} s", flush=True)
    if "compactor" in names:
        every_point("compactor", folders, tally, every=options.every, lost_answers=True)
        native_points(folders, tally)
    shutil.rmtree(base, ignore_errors=True)
    for point, count in sorted(tally.reached.items()):
        print(f"{count:5}  {point}")
    for line in tally.skipped:
        print(f"skipped, as there is no seccomp here: {line}")
    for where, verdict in tally.bad:
        print(f"BAD {where}: {verdict}")
    missing = [] if options.scenario else tally.missing()
    for point in missing:
        print(f"NEVER REACHED {point}")
    counts = {
        "failpoints": len(tally.reached),
        "kills": tally.kills,
        "runs": tally.runs,
        "lost": sum(len(v.lost) for _, v in tally.bad),
        "duplicated": sum(len(v.duplicated) for _, v in tally.bad),
        "torn": sum(len(v.torn) for _, v in tally.bad),
        "other": sum(len(v.other) for _, v in tally.bad),
        "never_reached": len(missing),
        "seconds": round(time.monotonic() - began),
    }
    print(counts)
    if not options.scenario:
        record(options.out, "points", counts)
    return int(bool(tally.bad or missing))


def _in_ram() -> Path | None:
    ram = Path("/dev/shm")
    return ram if ram.is_dir() else None


if __name__ == "__main__":
    sys.exit(main())
