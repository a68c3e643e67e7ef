"""A small lake whose every state follows from its sample's id, and the oracle over it.

Attempts do not matter then: whoever captured a sample, and how often, the lake must hold the one
truth about it once.
"""

import contextlib
import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import hslake
from hslake.compact import compact
from hslake.errors import HslakeError
from hslake.plan import plan_files
from hslake.spec import LakeSpec, read_spec
from hslake.verify import verify
from hslake.versions import vacuum
from tests.lakes import random_states

# For vacuum: also orphans of a machine whose clock is months ahead.
EVERYTHING = timedelta(days=-300)
LONG_AGO = 3600.0  # seconds: older than anything that somebody might still be at


def length_of(sample_id: str, longest: int = 400) -> int:
    """Tokens of the sample."""
    return 1 + int.from_bytes(_digest(sample_id)[:4], "big") % longest


def ids_of(sample_id: str) -> list[int]:
    """Token ids of the sample."""
    return _rng(sample_id).integers(0, 1000, length_of(sample_id)).tolist()


def mask_of(sample_id: str) -> list[int]:
    """Loss mask of the sample."""
    return [token % 2 for token in ids_of(sample_id)]


def states_of(spec: LakeSpec, sample_id: str) -> np.ndarray:
    """States of the sample: uint16 bits [stream, token, hidden]."""
    make = random_states(len(spec.streams), spec.hidden_size, spec.dtype)
    return make(_rng(sample_id), length_of(sample_id))


def _digest(sample_id: str) -> bytes:
    return hashlib.sha256(sample_id.encode()).digest()


def _rng(sample_id: str) -> np.random.Generator:
    return np.random.default_rng(int.from_bytes(_digest(sample_id)[:8], "big"))


@dataclass
class World:
    """A lake at `url`, staging folders, and the ids of all that is planned."""

    url: str
    roots: tuple[Path, ...]
    names: list[str] = field(default_factory=list)

    @cached_property
    def spec(self) -> LakeSpec:
        return read_spec(self.url)

    def plan(self, count: int) -> list[str]:
        """Plan `count` more samples; returns their ids."""
        new = [f"S-{i:05d}" for i in range(len(self.names), len(self.names) + count)]
        path = Path(self.url).parent / f"plan-{len(self.names)}.parquet"
        write_plan(path, new)
        plan_files(self.url, [path])
        self.names += new
        return new


def write_plan(path: Path, names: Iterable[str], source: str = "A1") -> None:
    """A file to plan these samples from."""
    rows = [
        {"sample_id": n, "source": source, "input_ids": ids_of(n), "loss_mask": mask_of(n)}
        for n in names
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)


def copy_world(template: World, folder: Path) -> World:
    """A world as `template` was when it was made, under `folder`: cheaper than making one."""
    old = Path(template.url).parent
    shutil.copytree(old, folder, dirs_exist_ok=True)
    roots = tuple(folder / root.relative_to(old) for root in template.roots)
    return World(str(folder / "lake"), roots, list(template.names))


def make_world(folder: Path, count: int, roots: int = 1) -> World:
    """A lake with `count` planned samples and nothing in it, and `roots` staging folders."""
    folder.mkdir(parents=True, exist_ok=True)
    lake = hslake.create(
        folder / "lake", streams=[2, "final"], hidden_size=8, num_layers=4, name="faults"
    )
    world = World(lake.url, tuple(folder / f"staging{i}" for i in range(roots)))
    for root in world.roots:
        root.mkdir()
    if count:
        world.plan(count)
    return world


@dataclass
class Verdict:
    """Samples `lost` (planned or acknowledged, not live), `duplicated` (added or live more than
    once, or never planned), `torn` (not bit for bit their truth); `other`: whatever else is not as
    it should be."""

    lost: list[str] = field(default_factory=list)
    duplicated: list[str] = field(default_factory=list)
    torn: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not (self.lost or self.duplicated or self.torn or self.other)


def judge(world: World, *, hidden: Sequence[str] = ()) -> Verdict:
    """The oracle: everything planned is in the lake once and is what it was, staging is empty, and
    what kills left can be removed. `hidden`: samples that were added and hidden on the way."""
    verdict = Verdict()
    lake = hslake.open(world.url)
    live = Counter(r[0] for r in lake.sql("select sample_id from samples").fetchall())
    adds = Counter(
        r[0] for r in lake.sql("select sample_id from manifest where op = 'add'").fetchall()
    )
    verdict.lost = sorted(set(world.names) - live.keys())
    many = {n for n, k in live.items() if k > 1} | (live.keys() - set(world.names))
    many |= {n for n, k in adds.items() if k > 1 and n not in hidden}
    verdict.duplicated = sorted(many)
    planned = Counter(r[0] for r in lake.sql("select sample_id from plan").fetchall())
    if planned != Counter(world.names):
        verdict.other.append(f"the plan has {len(planned)} samples of {len(world.names)}, or twice")
    verdict.torn = judge_samples(world)
    checked = verify(world.url, "full")
    verdict.other += [f"verify: {d.segment_id} {d.what}" for d in checked.damage]
    verdict.other += _remains(world)
    return verdict


def judge_samples(world: World) -> list[str]:
    """Live samples that are not bit for bit what they were captured from."""
    lake, torn = hslake.open(world.url), []
    for (name,) in lake.sql("select sample_id from samples").fetchall():
        try:
            found = lake.read(name)
        except HslakeError as error:
            torn.append(f"{name}: {error}")
            continue
        whole = (
            np.array_equal(found.hidden_states.view(np.uint16), states_of(lake.spec, name))
            and found.input_ids.tolist() == ids_of(name)
            and found.loss_mask.tolist() == mask_of(name)
        )
        if not whole:
            torn.append(name)
    return torn


def _remains(world: World) -> list[str]:
    """What is left of kills once everybody has had the time and the calls to remove it."""
    for root in world.roots:
        age(root)
    age(Path(world.url))
    report = compact(world.url, world.roots)
    found = [f"compact: {m}" for m in report.messages()]
    for root in world.roots:
        found += [f"left in staging: {p}" for p in root.rglob("*")]
    vacuum(world.url, retain=EVERYTHING)
    lake = hslake.open(world.url)
    named = {r[0] for r in lake.sql("select segment_id from segments").fetchall()}
    stored = set(lake.store.folders("segments"))
    if stored != named:
        found.append(f"segments {sorted(stored ^ named)} are stored or named, not both")
    left = [p for p in Path(world.url).rglob("*") if p.name[0] == "." or "#" in p.name]
    found += [f"left in the lake: {p}" for p in left]
    return found


def age(folder: Path) -> None:
    """Make everything below `folder` look as if it had lain there for an hour."""
    then = folder.stat().st_mtime - LONG_AGO
    for path in [*folder.rglob("*")]:
        with contextlib.suppress(FileNotFoundError):
            os.utime(path, (then, then))
