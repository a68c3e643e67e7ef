"""What a process does that `tests.faults.points` kills at each of its steps."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from hslake import manifest
from hslake import plan as plans
from hslake.compact import compact
from hslake.ids import RequestId, new_attempt
from hslake.store import open_store
from hslake.tables import catalog
from tests.faults import children
from tests.faults.children import Child, Faults, spawn
from tests.faults.driver import acknowledged
from tests.faults.hook import Hook, capture
from tests.faults.world import World, age, copy_world, length_of, make_world, write_plan

CHECKPOINT = 99  # the version at which deltalake writes its first checkpoint

Scenario = Callable[[Path, Faults], tuple[World, Child, set[str]]]
"""Makes a world under the folder and runs a child in it to its end: the world, the child, and the
samples that are known to be captured."""


def roots_of(folder: Path) -> tuple[str, ...]:
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
    return _compactor(folder, faults, CHECKPOINT - 2)


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
        "upload: stored segments/ID/inventory.json",  # a commit begun would hold the segment back
    ):
        at = Faults(roots_of(folder), (step, 1))
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
