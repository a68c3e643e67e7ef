"""Small lakes and staging folders to be damaged, and the truth about them."""

import dataclasses
import json
import shutil
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from deltalake import DeltaTable

import hslake
from hslake.compact import compact
from hslake.lake import Lake
from hslake.pins import pin, read_pins
from hslake.segment.layout import hidden_grid, segment_prefix
from hslake.segment.shard import parse_index
from hslake.spec import Geometry
from tests.lakes import MadeLake, Truth, random_states

HIDDEN, STREAMS = 48, 3
KINDS = (
    ("bfloat16", "standard"),
    ("bfloat16", "bf16plane"),
    ("bfloat16", "none"),
    ("float32", "standard"),
    ("float32", "none"),
)
FIRST, SECOND = (1, 300, 700, 256, 20, 513), (90, 600, 255)


def make(folder: Path, dtype: str, codec: str) -> MadeLake:
    """A lake with shards and segments small enough that there are several, a final norm, pins and
    checkpoints, all samples committed; its truth beside it."""
    made = _empty(folder, dtype, codec)
    made.add(FIRST)
    pin(made.url, "first")
    made.add(SECOND)
    pin(made.url, "second")
    for name in ("manifest", "plan"):
        DeltaTable(f"{made.url}/{name}").create_checkpoint()
    _save(made, folder)
    return made


def make_staged(folder: Path, dtype: str, codec: str) -> MadeLake:
    """A lake in which nothing is committed, and the staging of a writer that has ended."""
    made = _empty(folder, dtype, codec)
    made.stage(made.plan((*FIRST, *SECOND)))
    _save(made, folder)
    return made


def _empty(folder: Path, dtype: str, codec: str) -> MadeLake:
    folder.mkdir(parents=True)
    hslake.create(
        folder / "lake",
        model_config=_model(folder / "model", dtype),
        streams=[2, 6, "final"],
        codec=codec,
        name="test",
    )
    spec = hslake.open(folder / "lake").spec
    small = dataclasses.replace(spec, geometry=Geometry(256, 512, 1024))
    (folder / "lake/hslake.json").write_text(small.to_json())
    (folder / "staging").mkdir()
    states = random_states(STREAMS, HIDDEN, dtype)
    return MadeLake(str(folder / "lake"), folder / "staging", states)


def _model(folder: Path, dtype: str) -> Path:
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "num_hidden_layers": 8,
        "vocab_size": 1000,
        "rms_norm_eps": 1e-5,
        "dtype": dtype,
    }
    (folder / "config.json").write_text(json.dumps(config))
    weight = np.arange(0x3F80, 0x3F80 + HIDDEN, dtype="<u2").tobytes()
    entry = {"dtype": "BF16", "shape": [HIDDEN], "data_offsets": [0, len(weight)]}
    header = json.dumps({"model.norm.weight": entry}).encode()
    data = struct.pack("<Q", len(header)) + header + weight
    (folder / "model.safetensors").write_bytes(data)
    return folder


def _save(made: MadeLake, folder: Path) -> None:
    states = {name: truth.states for name, truth in made.samples.items()}
    np.savez(folder / "truth.npz", **states)
    rest = {
        name: {k: v for k, v in dataclasses.asdict(truth).items() if k != "states"}
        for name, truth in made.samples.items()
    }
    (folder / "truth.json").write_text(json.dumps(rest))


def load(folder: Path) -> MadeLake:
    """A world of `make` or `make_staged` in a copy at `folder`."""
    states = np.load(folder / "truth.npz")
    rest = json.loads((folder / "truth.json").read_text())
    made = MadeLake(str(folder / "lake"), folder / "staging", random_states(1, 1, "bfloat16"))
    made.samples = {name: Truth(states=states[name], **of) for name, of in rest.items()}
    return made


def same(made: MadeLake, lake: Lake, name: str) -> bool:
    """Whether a sample reads as it went in, bit by bit. Raises what the read raises."""
    found, truth = lake.read(name), made.samples[name]
    bits = found.hidden_states.view(truth.states.dtype)
    return (
        np.array_equal(bits, truth.states)
        and found.input_ids.tolist() == truth.input_ids
        and found.loss_mask.tolist() == truth.loss_mask
        and (found.source, found.split) == (truth.source, truth.split)
    )


@dataclass(frozen=True)
class Content:
    """All that a lake says: rows of its tables, spec, norm, metadata, pins."""

    tables: dict[str, pa.Table]
    samples: pa.Table
    rest: dict[str, Any]

    def equals(self, other: "Content") -> bool:
        """Whether two say the same."""
        return (
            self.rest == other.rest
            and self.samples.equals(other.samples)
            and all(t.equals(other.tables[n]) for n, t in self.tables.items())
        )


def content(lake: Lake) -> Content:
    """Everything but the states. When a pin was made is only for people."""
    store = lake.store
    good, bad = read_pins(lake)
    rest: dict[str, Any] = {
        "spec": json.loads(lake.spec.to_json()),
        "norm": store.read("model/final_norm/c/0").hex(),
        "pins": [(p.name, p.version, p.commit) for p in good],
        "bad pins": bad,
        "versions": (lake.version, lake.plan_version),
    }
    rest |= {
        path: json.loads(store.read(path))
        for path in store.list("")
        if path.endswith("zarr.json") or path.endswith("inventory.json")
    }
    tables = {"manifest": lake.manifest_table().arrow(), "plan": lake.plan_table().arrow()}
    text = "select * from samples order by sample_id"
    return Content(tables, lake.connect().sql(text).to_arrow_table(), rest)


@dataclass(frozen=True)
class Extent:
    """Bytes [start, end) of an object that only these samples need."""

    path: str
    start: int
    end: int
    samples: tuple[str, ...]
    what: str  # payload | tokens | index


def extents(made: MadeLake) -> list[Extent]:
    """Every chunk of every shard of a lake, and the shards' indexes."""
    lake = made.lake
    spec, found = lake.spec, []
    text = "select sample_id, segment_id, token_start, length from samples order by all"
    rows = lake.connect().sql(text).fetchall()
    for segment_id in sorted({row[1] for row in rows}):
        members = [row for row in rows if row[1] == segment_id]
        for path in lake.store.list(segment_prefix(segment_id)):
            if "/c/" not in path:
                continue
            hidden = "/hidden_states/" in path
            grid = hidden_grid(spec) if hidden else _token_grid(spec, path)
            shard = int(path.split("/")[-2 if hidden else -1])
            data = lake.store.read(path)
            index = parse_index(grid, data[-grid.index_bytes :], path)
            touching = set()
            for stream in range(index.shape[0]):
                for chunk in range(index.shape[1]):
                    offset, size = (int(x) for x in index[stream, chunk])
                    if size > len(data):
                        continue
                    at = (shard * grid.chunks + chunk) * grid.chunk
                    owner = [n for n, _, start, length in members if start <= at < start + length]
                    touching |= set(owner)
                    what = "payload" if hidden else "tokens"
                    found.append(Extent(f"lake/{path}", offset, offset + size, tuple(owner), what))
            end = len(data) - grid.index_bytes
            found.append(Extent(f"lake/{path}", end, len(data), tuple(sorted(touching)), "index"))
    return found


def _token_grid(spec: Any, path: str) -> Any:
    from hslake.segment.layout import token_grid

    return token_grid(spec, path.split("/")[2])


def copy(source: Path, to: Path) -> None:
    """A copy of a world."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(source, to, symlinks=True)


__all__ = [
    "KINDS",
    "Content",
    "Extent",
    "compact",
    "content",
    "copy",
    "extents",
    "load",
    "make",
    "make_staged",
    "same",
]
