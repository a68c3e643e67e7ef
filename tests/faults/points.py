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
from datetime import UTC, datetime
from pathlib import Path

import hslake
from hslake import catalog, manifest
from hslake import plan as plans
from hslake.compact import compact
from hslake.ids import RequestId, new_attempt
from hslake.store import open_store
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

NATIVE = (
    *(("compactor", call, 1) for call in ("create", "write", "link", "unlink")),
    *(("compactor", call, 2) for call in ("link", "unlink")),
    ("checkpoint", "rename", 2),  # the second entry of that scenario is followed by a checkpoint
)
"""(scenario, kind of system call, n): deaths inside Delta's own writing of the n-th log entry."""
_CHECKPOINT = 99  # the version at which deltalake writes its first one


def _native(scenario: str, call: str, nth: int) -> str:
    return f"commit: system call {call} of entry {nth}, {scenario}"


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
    *(_native(*each) for each in NATIVE),
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


def _new(folder: Path, count: int, version: int = 0) -> World:
    return copy_world(_template(folder.parent, count, version), folder)


@functools.cache
def _template(base: Path, count: int, version: int) -> World:
    world = make_world(base / f"template{count}-{version}", count)
    store = open_store(world.url)
    for at in range(version):
        row = {"op": "condemn", "segment_id": f"none{at}", "committed_at": datetime.now(UTC)}
        rows = manifest.rows([row])
        catalog.commit(store, "manifest", lambda _: rows, f"filler-{at}")  # noqa: B023
    return world


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


def _staged(folder: Path, version: int = 0) -> tuple[World, list[Hook]]:
    """A world at a version of its manifest with the parts of two writers: a living one, which has
    a sealed part and an open one with a sample half there, and one that was killed."""
    world = _new(folder, 9, version)
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
    return _compactor(folder, faults, 0)


def checkpoint(folder: Path, faults: Faults) -> tuple[World, Child, set[str]]:
    """The same in a lake of many versions: deltalake writes a checkpoint behind one of them."""
    return _compactor(folder, faults, _CHECKPOINT - 2)


def _compactor(folder: Path, faults: Faults, version: int) -> tuple[World, Child, set[str]]:
    world, hooks = _staged(folder, version)
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
    "plan": plan,
    "compactor": compactor,
    "vacuum": vacuum,
    "slow-writer": slow_writer,
    "writer": writer,
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
            print(f"BAD {where}: {outcome.verdict}", flush=True)

    def missing(self) -> list[str]:
        """Named points and phases at which nobody died."""
        phases = {name.partition(": ")[0] for name in self.reached}
        named = [p for p in NAMED if not self.reached[p] and p not in self.skipped]
        return named + [p for p in _PHASES if p not in phases]


def every_point(
    name: str, folders: Iterator[Path], tally: Tally, *, every: int = 1, lost_answers: bool = False
) -> None:
    """Kill scenario `name` at every step; or at the first of every name that is NAMED, or of every
    name at all if `every` is below 10, and at each `every`-th."""
    what = f"{name}, answers lost" if lost_answers else name
    whole = run(SCENARIOS[name], next(folders), lost_answers=lost_answers)
    tally.take(f"{what}, not killed", whole)
    seen: Counter[str] = Counter()
    for at, step in enumerate(whole.steps):
        seen[step] += 1
        if lost_answers and "commit" not in step:
            continue  # nothing differs there
        if at % every and seen[step] > (step in NAMED or every < 10):
            continue
        kill_at = (step, seen[step])
        outcome = run(SCENARIOS[name], next(folders), kill_at=kill_at, lost_answers=lost_answers)
        tally.take(f"{what}, {step} number {seen[step]}", outcome)
        if outcome.killed:
            tally.reached[step] += 1


def native_points(folders: Iterator[Path], tally: Tally) -> None:
    """Die inside Delta's own writing of a log entry."""
    for name, call, nth in NATIVE:
        outcome = run(
            {**SCENARIOS, "checkpoint": checkpoint}[name], next(folders), native=(call, nth)
        )
        where = _native(name, call, nth)
        if not outcome.usable:
            tally.skipped.append(where)  # no seccomp on this machine
            continue
        if outcome.killed and outcome.steps[-1].startswith("commit: before the entry"):
            tally.reached[where] += 1
        else:
            outcome.verdict.other.append("it did not die there")
        tally.take(where, outcome)


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
        if name == "compactor":
            native_points(folders, tally)
            every_point(name, folders, tally, every=options.every, lost_answers=True)
        print(f"{name}: {tally.runs} runs, {time.monotonic() - began:.0f} s", flush=True)
    shutil.rmtree(base, ignore_errors=True)
    for point, count in sorted(tally.reached.items()):
        print(f"{count:5}  {point}")
    for line in tally.skipped:
        print(f"skipped, as there is no seccomp here: {line}")
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
