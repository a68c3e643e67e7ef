"""Real lakes for tests: planned, written through the StagingWriter, compacted."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import hslake
from hslake import checksum
from hslake.compact import compact
from hslake.ids import RequestId, new_attempt
from hslake.lake import Lake
from hslake.plan import plan_files
from hslake.segment.layout import hidden_grid, segment_prefix
from hslake.segment.shard import parse_index
from hslake.staging import StagingWriter
from hslake.tables import tablefile, tablename

ITEM = {"bfloat16": np.uint16, "float16": np.uint16, "float32": np.uint32}
SOURCES = ("A1", "B3", "B4")
VOCAB = 1000
States = Callable[[np.random.Generator, int], np.ndarray]


@dataclass(frozen=True)
class Truth:
    """What went in: bit patterns [stream, length, hidden], ids and mask."""

    states: np.ndarray
    input_ids: list[int]
    loss_mask: list[int]
    source: str
    split: str


@dataclass
class MadeLake:
    """A lake and the truth about every sample in it."""

    url: str
    staging: Path
    states: States
    samples: dict[str, Truth] = field(default_factory=dict)

    @property
    def lake(self) -> Lake:
        """The lake at its newest version."""
        return hslake.open(self.url)

    def add(self, lengths: Sequence[int]) -> list[str]:
        """Plan, stage and compact more samples; returns their ids."""
        names = self.plan(lengths)
        self.stage(names)
        compact(self.url, [self.staging])
        return names

    def plan(self, lengths: Sequence[int]) -> list[str]:
        """Register samples of these lengths with random tokens and states."""
        rng = np.random.default_rng(len(self.samples))
        names = []
        for length in lengths:
            i = len(self.samples)
            source = SOURCES[i % len(SOURCES)]
            name = f"{source}-{i:06d}"
            names.append(name)
            self.samples[name] = Truth(
                self.states(rng, length),
                rng.integers(0, VOCAB, length).tolist(),
                rng.integers(0, 2, length).tolist(),
                source,
                "validation" if i % 5 == 4 else "train",
            )
        columns = ("input_ids", "loss_mask", "source", "split")
        rows = [
            {"sample_id": n, **{c: getattr(self.samples[n], c) for c in columns}} for n in names
        ]
        path = self.staging.parent / f"plan-{len(self.samples)}.parquet"
        pq.write_table(pa.Table.from_pylist(rows), path)
        plan_files(self.url, [path])
        return names

    def writer(self, tokens: int, engine: dict[str, str] | None = None) -> StagingWriter:
        """A writer of this lake with one part of `tokens` rows."""
        spec = self.lake.spec
        return StagingWriter(
            self.staging,
            spec,
            part_tokens=tokens,
            max_parts=1,
            fingerprint=spec.model.fingerprint,
            engine=engine or {},
        )

    def stage(self, names: Sequence[str], chunk: int = 100) -> None:
        """Write the samples to staging as a server would: `chunk` rows at a time."""
        tokens = sum(len(self.samples[n].input_ids) for n in names)
        writer = self.writer(
            tokens,
            {
                "engine": "test",
                "engine_version": "0",
                "hook_version": hslake.__version__,
                "tp": "1",
                "dp_rank": "0",
                "chunk_size": str(chunk),
            },
        )
        for name in names:
            self.put(writer, name, chunk)
        writer.close()

    def put(self, writer: StagingWriter, name: str, chunk: int = 100) -> None:
        """Write one sample, `chunk` rows at a time."""
        spec, truth = writer.spec, self.samples[name]
        length = len(truth.input_ids)
        rid = RequestId(spec.lake8, new_attempt(), length, truth.source, name)
        place = writer.begin(rid)
        for at in range(0, length, chunk):
            n = min(chunk, length - at)
            rows = place.rows(at, n)
            sums, stats = [], []
            for k, states in enumerate(truth.states):
                part = states[at : at + n]
                rows.hidden[k][...] = part
                sums.append(checksum.rows_checksum(part, at))
                stats.append(checksum.row_stats(checksum.to_float32(part, spec.dtype)))
            rows.input_ids[...] = truth.input_ids[at : at + n]
            writer.wrote(place, at, n, sums, stats)


def random_states(streams: int, hidden: int, dtype: str, nan: bool = False) -> States:
    """A maker of ordinary values; with `nan`, the first value of every stream is not a number."""

    def states(rng: np.random.Generator, length: int) -> np.ndarray:
        values = rng.standard_normal((streams, length, hidden), dtype=np.float32) * 3
        if nan:
            values[:, 0, 0] = np.nan
        if dtype == "bfloat16":
            return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        kind = np.float16 if dtype == "float16" else np.float32
        return values.astype(kind).view(ITEM[dtype])

    return states


def make_lake(
    folder: Path,
    n: int = 12,
    *,
    hidden: int = 8,
    dtype: str = "bfloat16",
    lengths: Sequence[int] | None = None,
    streams: int = 4,
    codec: str = "standard",
    nan: bool = False,
    states: States | None = None,
    url: str | None = None,
) -> MadeLake:
    """A lake under `folder` (or at `url`) with `n` samples (or one per entry of `lengths`), all
    committed. Its staging is under `folder`.

    `streams` counts the boundaries and `final`; `states(rng, length)` makes bit patterns
    [stream, length, hidden]. The lake is `made.lake`, the truth `made.samples`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lake = hslake.create(
        url or folder / "lake",
        streams=[*range(2, 2 * streams - 1, 2), "final"],
        hidden_size=hidden,
        num_layers=2 * streams,
        dtype=dtype,
        codec=codec,
        name="test",
    )
    made = MadeLake(
        lake.url, folder / "staging", states or random_states(streams, hidden, dtype, nan)
    )
    made.staging.mkdir()
    if lengths is None:
        lengths = np.random.default_rng(n).integers(1, 600, n).tolist()
    made.add(lengths)
    return made


def damage_sample(lake: Lake, sample_id: str) -> None:
    """Flip a bit in the middle of the stored bytes of a sample's first chunk, and only there."""
    at = lake.location(sample_id)
    grid = hidden_grid(lake.spec)
    shard, chunk = divmod(at.token_start // grid.chunk, grid.chunks)
    path = segment_prefix(at.segment_id) + grid.key(shard)
    data = bytearray(lake.store.read(path))
    index = parse_index(grid, bytes(data[-grid.index_bytes :]), path)
    offset, size = (int(x) for x in index[0, chunk])
    data[offset + size // 2] ^= 1
    lake.store.put(path, bytes(data))


def replace_table_file(path: Path, rows: list[dict[str, Any]]) -> None:
    """Put other rows into a file of a local table as if they had been committed so: with the file's
    digest in its name, which the log names, page checksums and all."""
    body = tablefile.encode(pa.Table.from_pylist(rows, schema=pq.read_schema(path)))
    new = path.with_name(f"{path.name[:59]}{tablename.digest(body)}.parquet")
    entry = path.parent / "_delta_log" / f"{tablename.version_of(path.name):020d}.json"
    path.unlink()
    new.write_bytes(body)
    text = entry.read_text().replace(path.name, new.name)
    entry.write_text(re.sub(r'"size":\d+', f'"size":{len(body)}', text))
