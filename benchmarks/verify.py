"""`verify` beside plain reading of the same bytes, and its level manifest on many segments.

    python benchmarks/verify.py                     # 1 GB of states a codec; 100,000 samples' rows
    python benchmarks/verify.py --gigabytes 4 --rows 1700000

Throughput: a lake of hidden size 7168 is written, then read, in turns: `cat` of all segment files,
`sha256sum` of them, `verify --level checksum`, `verify --level full`. Wall and CPU seconds, each
the least of the rounds: the files are in the page cache, so it is the machine's cores that count,
and the least is what other work on it disturbed the least. Rates are of stored bytes.

Rows: a lake with the rows, inventories and objects (sparse files of the right size) of as many
samples, 75 a segment. Nothing of the states is read at level manifest.

Writes benchmarks/results/verify.json.
"""

import argparse
import hashlib
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from rich.progress import track

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import hslake  # noqa: E402
from hslake import catalog  # noqa: E402
from hslake.segment import inventory  # noqa: E402
from hslake.segment.layout import (  # noqa: E402
    INVENTORY,
    hidden_grid,
    metadata_documents,
    new_segment_id,
    padded,
    segment_prefix,
)
from hslake.verify import verify  # noqa: E402
from queries import SEGMENT_SAMPLES, added, planned  # noqa: E402
from tests.lakes import make_lake, random_states  # noqa: E402

HIDDEN, STREAMS = 7168, 4


def timed(what: Callable[[], object]) -> tuple[float, float]:
    """(wall, CPU) seconds, children's included."""

    def cpu() -> float:
        uses = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(u.ru_utime + u.ru_stime for u in uses)

    wall, before = time.perf_counter(), cpu()
    what()
    return time.perf_counter() - wall, cpu() - before


def throughput(folder: Path, codec: str, gigabytes: float, rounds: int) -> dict[str, Any]:
    """Rates of the ways to read one lake, in turns."""
    lengths = np.random.default_rng(0).integers(200, 1600, 10_000)
    tokens = np.cumsum(lengths) * HIDDEN * STREAMS * 2
    lengths = lengths[: max(1, int(np.searchsorted(tokens, gigabytes * 1e9)))]
    made = make_lake(
        folder,
        hidden=HIDDEN,
        streams=STREAMS,
        codec=codec,
        lengths=lengths.tolist(),
        states=random_states(STREAMS, HIDDEN, "bfloat16"),
    )
    files = [str(p) for p in (Path(made.url) / "segments").rglob("*") if p.is_file()]
    stored = sum(Path(f).stat().st_size for f in files)
    cores = os.cpu_count() or 1
    ways: dict[str, Callable[[], object]] = {
        "cat": lambda: subprocess.run(["cat", *files], stdout=subprocess.DEVNULL, check=True),
        "sha256sum": lambda: subprocess.run(
            ["sha256sum", *files], stdout=subprocess.DEVNULL, check=True
        ),
        f"verify checksum, {cores} threads": lambda: _sound(made.url, "checksum", None),
        "verify checksum, 1 thread": lambda: _sound(made.url, "checksum", 1),
        f"verify full, {cores} threads": lambda: _sound(made.url, "full", None),
        "verify full, 1 thread": lambda: _sound(made.url, "full", 1),
    }
    best: dict[str, tuple[float, float]] = {}
    for _ in range(rounds):
        for name, way in ways.items():
            wall, cpu = timed(way)
            old = best.get(name, (wall, cpu))
            best[name] = min(wall, old[0]), min(cpu, old[1])
    raw = sum(lengths) * HIDDEN * STREAMS * 2
    found = {
        name: {
            "wall_s": round(wall, 3),
            "cpu_s": round(cpu, 3),
            "gb_per_s": round(stored / wall / 1e9, 3),
            "gb_per_cpu_s": round(stored / cpu / 1e9, 3),
            "times_cat": round(best["cat"][0] / wall, 3),
            "times_sha256sum": round(best["sha256sum"][0] / wall, 3),
            "cpu_times_sha256sum": round(best["sha256sum"][1] / cpu, 3),
        }
        for name, (wall, cpu) in best.items()
    }
    return {"stored_bytes": stored, "raw_bytes": int(raw), "samples": len(lengths), "ways": found}


def _sound(url: str, level: str, threads: int | None) -> None:
    report = verify(url, level, threads=threads)
    assert report.ok, report.damage[:3]


def rows(folder: Path, count: int, commits: int, ids: int) -> dict[str, Any]:
    """Seconds of level manifest for `count` samples."""
    lake = hslake.create(folder / "lake", hidden_size=HIDDEN, num_layers=61, capture="eagle3")
    each = -(-count // commits)
    segments = 0
    for first in track(range(0, count, each), "commits", transient=True):
        plan = planned(first, min(each, count - first), ids)
        catalog.commit(lake.store, "plan", lambda _, t=plan: t, f"plan-{first}")
        for at in range(0, len(plan), SEGMENT_SAMPLES):
            table = _segment(lake, plan.slice(at, SEGMENT_SAMPLES), first + at)
            segments += 1
            if commits * SEGMENT_SAMPLES > count:  # a commit a segment, as a compactor makes them
                catalog.commit(lake.store, "manifest", lambda _, t=table: t, f"s-{first}-{at}")
                continue
            parts = [table] if at == 0 else [*parts, table]  # noqa: F821
        if commits * SEGMENT_SAMPLES <= count:
            whole = pa.concat_tables(parts)
            catalog.commit(lake.store, "manifest", lambda _, t=whole: t, f"s-{first}")
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        report = verify(lake.url, "manifest")
        seconds.append(round(time.perf_counter() - start, 2))
        assert report.ok and report.samples == count, report.damage[:3]
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return {
        "samples": count,
        "tokens": report.tokens,
        "segments": segments,
        "objects": len(lake.store.list("segments")),
        "commits": hslake.open(lake.url).version,
        "seconds": seconds,
        "peak_gb": round(memory, 2),
    }


def _segment(lake: Any, plan: pa.Table, seed: int) -> pa.Table:
    """Rows of a segment, and its objects: metadata, inventory, and holes of the right size."""
    spec, segment_id = lake.spec, new_segment_id()
    size = spec.geometry.chunk_tokens
    places = np.cumsum([0, *(padded(n, size) for n in plan["length"].to_pylist())])
    tokens = int(places[-1])
    objects = []
    prefix = lake.store.local(segment_prefix(segment_id))
    shards = -(-tokens // hidden_grid(spec).shard)
    keys = [*(f"hidden_states/c/0/{n}/0" for n in range(shards)), "input_ids/c/0", "loss_mask/c/0"]
    for key in keys:
        path = prefix / key
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as f:
            f.truncate(300_000_000)
        objects.append(inventory.Object(key, 300_000_000, "0" * 64))
    for key, data in metadata_documents(spec, segment_id, tokens).items():
        (prefix / key).write_bytes(data)
        objects.append(inventory.describe(key, [data]))
    text = inventory.build(segment_id, objects)
    (prefix / INVENTORY).write_bytes(text)
    shared = ["sample_id", "source", "split", "length", "supervised_tokens", "token_hash"]
    table = added(plan.select(shared), np.random.default_rng(seed))
    n = len(table)
    new: dict[str, Any] = {
        "segment_id": pa.array([segment_id] * n),
        "token_start": places[:-1],
        "segment_tokens": np.full(n, tokens),
        "segment_raw_bytes": np.full(n, sum(plan["length"].to_pylist()) * spec.bytes_per_token),
        "segment_stored_bytes": np.full(n, sum(o.size for o in objects) + len(text)),
        "inventory_digest": pa.array([hashlib.sha256(text).hexdigest()] * n),
    }
    for name, values in new.items():
        table = table.set_column(table.schema.get_field_index(name), name, pa.array(values))
    return table


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of raw states a codec")
    parser.add_argument("--codecs", default="standard,bf16plane,none")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=100_000, help="samples of the second part")
    parser.add_argument("--commits", type=int, default=1340)
    parser.add_argument("--ids", type=int, default=256, help="most token ids kept per sample")
    parser.add_argument("--scratch", type=Path, help="folder for the lakes")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/verify.json")
    args = parser.parse_args()
    report: dict[str, Any] = {
        "machine": {
            "cpu": platform.machine(),
            "cores": os.cpu_count(),
            "load_before": round(os.getloadavg()[0], 2),
            "python": platform.python_version(),
        },
        "throughput": {},
    }
    for codec in filter(None, args.codecs.split(",")):
        with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
            report["throughput"][codec] = throughput(
                Path(folder), codec, args.gigabytes, args.rounds
            )
    if args.rows:
        with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
            report["manifest"] = rows(Path(folder), args.rows, args.commits, args.ids)
    report["machine"]["load_after"] = round(os.getloadavg()[0], 2)
    print(json.dumps(report, indent=1))
    args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
