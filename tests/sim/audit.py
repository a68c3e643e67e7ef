"""The independent look at a lake that a simulated server has filled: against the plan's tokens and
the function that the states are of, by other ways than hslake's own.

    python -m tests.sim.audit LAKE [--sample 2000]

The Delta tables are read as they stand, checksums are computed here, and segments are read with
zarr-python.
"""

import argparse
import dataclasses
import hashlib
import itertools
import json
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as pads
import zarr
from deltalake import DeltaTable

from hslake.spec import LakeSpec, read_spec
from tests.sim.states import rows_of, states_of

_BATCH_ROWS = 500
_NAMED = 20


@dataclass
class Audit:
    """`lost`: planned and not live; `duplicated`: live more than once, or added again without
    having been hidden; `torn`: what is stored or said of them is not the truth; `strangers`: live
    and never planned. `read`: samples of which every bit was compared; `orphans`: stored segments
    that nothing names, which are no data."""

    planned: int = 0
    live: int = 0
    tokens: int = 0
    read: int = 0
    segments: int = 0
    orphans: int = 0
    lost: list[str] = field(default_factory=list)
    duplicated: list[str] = field(default_factory=list)
    torn: list[str] = field(default_factory=list)
    strangers: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not (self.lost or self.duplicated or self.torn or self.strangers)

    def examples(self) -> dict[str, list[str]]:
        """Some of each kind."""
        kinds = ("lost", "duplicated", "torn", "strangers")
        return {kind: getattr(self, kind)[:_NAMED] for kind in kinds}

    def counts(self) -> dict[str, int]:
        """Every figure, and how many of each kind."""
        found = dataclasses.asdict(self)
        return {k: len(v) if isinstance(v, list) else v for k, v in found.items()}


def audit(
    lake: str | Path,
    *,
    sample: int | None = None,
    absent: frozenset[str] = frozenset(),
    seed: int = 0,
) -> Audit:
    """Look at every planned sample of a local lake; compare every bit of `sample` random ones (all
    by default). `absent`: planned ones that are not to be there, as the servers refuse them."""
    folder, spec = Path(lake), read_spec(str(lake))
    found = Audit()
    live = _live(folder, found)
    found.live = len(live)
    chosen = set(live)
    if sample is not None and sample < len(live):
        chosen = set(random.Random(seed).sample(sorted(live), sample))
    segments = _Segments(folder)
    for name, ids, mask in _planned(folder):
        found.planned += 1
        row = live.pop(name, None)
        if row is None:
            if name not in absent:
                found.lost.append(name)
            continue
        found.tokens += len(ids)
        wrong = _said(spec, row, ids)
        if name in chosen and not wrong:
            found.read += 1
            wrong = segments.wrong(spec, row, ids, mask)
        if wrong:
            found.torn.append(f"{name}: {wrong}")
    found.strangers += sorted(live)
    return found


# -- the tables ---------------------------------------------------------------------------------


def _table(folder: Path, name: str) -> pads.Dataset:
    table = DeltaTable(str(folder / name))
    schema = pa.schema(table.schema())
    return pads.dataset([u.removeprefix("file://") for u in table.file_uris()], schema=schema)


def _planned(folder: Path) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """(sample id, token ids, loss mask) of every row of the plan."""
    columns = ["sample_id", "input_ids", "loss_mask"]
    few = {"batch_size": _BATCH_ROWS, "batch_readahead": 1, "fragment_readahead": 1}
    for batch in _table(folder, "plan").to_batches(columns=columns, **few):
        names = batch.column(0).to_pylist()
        ids, masks = batch.column(1), batch.column(2)
        for i, name in enumerate(names):
            yield name, ids[i].values.to_numpy(), masks[i].values.to_numpy(zero_copy_only=False)


def _live(folder: Path, found: Audit) -> dict[str, dict[str, Any]]:
    """The live row of every sample; what cannot be is noted in `found`."""
    columns = ["op", "sample_id", "segment_id", "token_start", "length", "token_hash", "checksum"]
    rows = _table(folder, "manifest").to_table(columns=columns).to_pylist()
    hidden = {(r["sample_id"], r["segment_id"]) for r in rows if r["op"] == "hide"}
    adds = [r for r in rows if r["op"] == "add"]
    live = [r for r in adds if (r["sample_id"], r["segment_id"]) not in hidden]
    times = Counter(r["sample_id"] for r in live)
    again = Counter(r["sample_id"] for r in adds)
    once = Counter(name for name, _ in hidden)
    many = {n for n, k in times.items() if k > 1} | {n for n in again if again[n] > 1 + once[n]}
    found.duplicated = sorted(many)
    named = {r["segment_id"] for r in adds}
    stored = {p.name for p in (folder / "segments").glob("*") if p.is_dir()}
    found.segments, found.orphans = len(named), len(stored - named)
    found.torn += [f"segment {s} is named and not stored" for s in sorted(named - stored)]
    found.torn += _overlaps(live)
    return {r["sample_id"]: r for r in live}


def _overlaps(live: list[dict[str, Any]]) -> list[str]:
    """Samples whose rows are also another's."""
    by_segment = defaultdict(list)
    for row in live:
        end = row["token_start"] + row["length"]
        by_segment[row["segment_id"]].append((row["token_start"], end, row["sample_id"]))
    wrong = []
    for places in by_segment.values():
        places.sort()
        for (_, end, name), (start, _, other) in itertools.pairwise(places):
            if start < end:
                wrong.append(f"{other}: rows of {name}")
    return wrong


# -- the samples --------------------------------------------------------------------------------


def _mix(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _checksums(spec: LakeSpec, ids: np.ndarray) -> list[int]:
    """DESIGN section 4's checksum of each stream, from the states as they ought to be."""
    position = np.arange(len(ids), dtype=np.uint64)
    of_row = _mix(position + np.uint64(1 << 40)) | np.uint64(1)
    of_lane = _mix(np.arange(spec.hidden_size, dtype=np.uint64)) | np.uint64(1)
    found = []
    for rows in rows_of(spec, ids, np.arange(len(ids))):
        sums = (rows.astype(np.uint64) * of_lane).sum(axis=1, dtype=np.uint64)
        found.append(int((sums * of_row).sum(dtype=np.uint64).view(np.int64)))
    return found


def _said(spec: LakeSpec, row: dict[str, Any], ids: np.ndarray) -> str | None:
    """What is wrong with what the manifest says of a sample."""
    if row["length"] != len(ids):
        return f"length {row['length']}, planned {len(ids)}"
    if row["token_hash"] != hashlib.sha256(ids.astype("<i4").tobytes()).digest()[:16].hex():
        return "token hash"
    if list(row["checksum"]) != _checksums(spec, ids):
        return "checksum"
    return None


class _Segments:
    """Reads samples with zarr-python; keeps the last segments open."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, Any] = {}

    def wrong(
        self, spec: LakeSpec, row: dict[str, Any], ids: np.ndarray, mask: np.ndarray
    ) -> str | None:
        """What is wrong with what is stored of a sample."""
        if row["segment_id"] not in self._open:
            if len(self._open) > 64:
                self._open.clear()
            group = zarr.open_group(self._folder / "segments" / row["segment_id"], mode="r")
            names = ("hidden_states", "input_ids", "loss_mask")
            self._open[row["segment_id"]] = [group[n] for n in names]
        states, tokens, masks = self._open[row["segment_id"]]
        at = slice(row["token_start"], row["token_start"] + row["length"])
        try:
            if not np.array_equal(tokens[at], ids):
                return "token ids"
            if not np.array_equal(masks[at], mask):
                return "loss mask"
            if not np.array_equal(states[:, at].view(np.uint16), states_of(spec, ids)):
                return "states"
        except Exception as error:  # whatever a reader makes of what is half there
            return f"{type(error).__name__}: {error}"
        return None


def main() -> int:
    """Run the command; exit code 1 when something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.audit", description=__doc__)
    parser.add_argument("lake")
    parser.add_argument("--sample", type=int, help="compare every bit of so many only")
    options = parser.parse_args()
    found = audit(options.lake, sample=options.sample)
    print(json.dumps(found.counts()))
    for kind, some in found.examples().items():
        for what in some:
            print(f"{kind}: {what}")
    return int(not found.ok)


if __name__ == "__main__":
    sys.exit(main())
