"""Named queries and views on a manifest and a plan of many rows.

    python benchmarks/queries.py                               # a million samples, 100 commits
    python benchmarks/queries.py --rows 100000 --commits 1340  # DESIGN's run: a commit a segment
    python benchmarks/queries.py --rows 10000000 --ids 8       # few token ids, for the disk's sake

Makes real Delta tables through the catalog (nothing behind them: no segment is read), then times
each query as the command line runs it, from a fresh DuckDB connection. 3 % of the plan is missing,
0.1 % of the samples were hidden and captured again. Adds a line for this shape of lake to
benchmarks/results/queries.json.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
from rich.console import Console
from rich.progress import track
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import hslake  # noqa: E402
from hslake import query  # noqa: E402
from hslake.extract.worklist import worklist  # noqa: E402
from hslake.spec import CHUNK_TOKENS  # noqa: E402
from hslake.tables import catalog  # noqa: E402

STREAMS = 4
VOCAB = 163_840
SEGMENT_SAMPLES = 75  # 65,536 tokens at the reference run's 878 tokens a sample
PLAN_COMMITS = 100
MISSING, HIDDEN = 0.03, 0.001
COMMANDS: dict[str, str] = {
    "view samples": "select sample_id, segment_id, length from samples",
    "view plan": "select sample_id, source, length from plan",
    "view segments": "select * from segments",
    "view coverage": "select * from coverage",
    "view versions": "select * from versions",
    "one sample": "select * from samples where sample_id = 'B3-00000017'",
}


def hexes(rng: np.random.Generator, count: int, digits: int) -> pa.Array:
    """`count` random strings of hex digits."""
    offsets = pa.py_buffer(np.arange(0, (count + 1) * digits, digits, dtype=np.int32))
    text = pa.py_buffer(rng.bytes(count * digits // 2).hex().encode())
    return pa.Array.from_buffers(pa.string(), count, [None, offsets, text])


def lists(values: np.ndarray, lengths: np.ndarray) -> pa.Array:
    """A list array of `lengths`, filled from `values` in order."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def planned(first: int, count: int, ids: int) -> pa.Table:
    """Rows of the plan; the same for the same `first` and `count`."""
    rng = np.random.default_rng(first)
    lengths = np.clip(rng.lognormal(6.4, 0.9, count), 16, 16_384).astype(np.int32)
    kept = np.minimum(lengths, ids)
    groups = rng.integers(0, 12, count)
    names = [f"{'AB'[g // 6]}{g % 6 + 1}" for g in range(12)]
    masks = (rng.random(int(kept.sum())) < 0.6).astype(np.int32)
    return pa.table(
        {
            "op": pa.array(["add"] * count, pa.string()),
            "sample_id": pa.array([f"{names[g]}-{first + i:08d}" for i, g in enumerate(groups)]),
            "source": pa.array([names[g] for g in groups]),
            "split": pa.array(np.where(rng.random(count) < 0.02, "validation", "train")),
            "length": lengths,
            "supervised_tokens": (lengths * 0.6).astype(np.int32),
            "token_hash": hexes(rng, count, 32),
            "input_ids": lists(rng.integers(0, VOCAB, len(masks), dtype=np.int32), kept),
            "loss_mask": lists(masks, kept),
            "planned_at": pa.array([datetime.now(UTC)] * count, pa.timestamp("us", "UTC")),
        }
    )


def committed(plan: pa.Table, first: int) -> pa.Table:
    """Manifest rows of a plan's: some missing, some hidden and then there again."""
    rng = np.random.default_rng(first + 1)
    plan = plan.filter(pa.array(rng.random(len(plan)) >= MISSING))
    again = plan.filter(pa.array(rng.random(len(plan)) < HIDDEN))
    shared = ["sample_id", "source", "split", "length", "supervised_tokens", "token_hash"]
    adds = added(pa.concat_tables([plan.select(shared), again.select(shared)]), rng)
    hidden = adds.filter(np.isin(adds["sample_id"].to_numpy(), again["sample_id"].to_numpy()))
    hides = hidden.slice(0, len(again)).set_column(
        0, "op", pa.array(["hide"] * len(again), pa.string())
    )
    return pa.concat_tables([adds, hides])


def added(plan: pa.Table, rng: np.random.Generator) -> pa.Table:
    """`add` rows of these samples, in segments of SEGMENT_SAMPLES."""
    count = len(plan)
    segment = np.arange(count) // SEGMENT_SAMPLES
    segments = hexes(rng, int(segment[-1]) + 1 if count else 0, 32)
    digests = hexes(rng, len(segments), 64)
    four = np.full(count, STREAMS)
    numbers = rng.random(count * STREAMS, dtype=np.float32)
    now = pa.array([datetime.now(UTC)] * count, pa.timestamp("us", "UTC"))
    columns: dict[str, Any] = {
        "segment_id": segments.take(pa.array(segment)),
        "token_start": (np.arange(count) % SEGMENT_SAMPLES) * 4 * CHUNK_TOKENS,
        "attempt": hexes(rng, count, 12),
        "checksum": lists(rng.integers(-(2**63), 2**63 - 1, count * STREAMS), four),
        "rms": lists(numbers, four),
        "absmax": lists(numbers + 10, four),
        "nonfinite": lists(np.zeros(count * STREAMS, np.int64), four),
        "segment_tokens": np.full(count, 80_000, np.int64),
        "segment_raw_bytes": np.full(count, 4_587_520_000, np.int64),
        "segment_stored_bytes": np.full(count, 3_160_801_280, np.int64),
        "inventory_digest": digests.take(pa.array(segment)),
        "engine": pa.array(["sglang"] * count),
        "engine_version": pa.array(["0.5.23"] * count),
        "hook_version": pa.array([hslake.__version__] * count),
        "chunk_size": np.full(count, 8192, np.int32),
        "tp": np.full(count, 8, np.int32),
        "dp_rank": np.zeros(count, np.int32),
        "writer": pa.array(["0194d3c2-6b7e-7c3a-9f10-8d2f6a1b2c3d"] * count),
        "captured_at": now,
        "committed_at": now,
    }
    table = plan.add_column(0, "op", pa.array(["add"] * count, pa.string()))
    for name, values in columns.items():
        table = table.append_column(name, values if isinstance(values, pa.Array) else [values])
    return table


def make(folder: Path, rows: int, commits: int, ids: int) -> str:
    """A lake of `rows` planned samples: `commits` of the manifest, PLAN_COMMITS of the plan."""
    lake = hslake.create(folder / "lake", hidden_size=7168, num_layers=61, capture="eagle3")
    store = lake.store
    edges = np.linspace(0, rows, min(commits, PLAN_COMMITS) + 1).astype(int)
    spans = list(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True))
    each = -(-commits // len(spans))
    for first, end in track(spans, "commits", console=Console(stderr=True), transient=True):
        plan = planned(first, end - first, ids)
        done = committed(plan, first)
        size = -(-len(done) // each)
        parts = [("manifest", done.slice(at, size)) for at in range(0, len(done), size)]
        for i, (name, table) in enumerate([("plan", plan), *parts]):
            catalog.commit(store, name, lambda _, t=table: t, f"benchmark-{first}-{i}")
    return lake.url


def timed(what: Callable[[], object], repeats: int) -> dict[str, float]:
    """Seconds of the first call, and the median of the others."""
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        what()
        seconds.append(time.perf_counter() - start)
    return {
        "first_s": round(seconds[0], 3),
        "median_s": round(statistics.median(seconds[1:]), 3),
    }


def timed_from_second(what: Callable[[], object], repeats: int) -> dict[str, float]:
    """As `timed`, the second call left out, which prepares the others."""
    first, second = timed(what, 1), timed(what, repeats)
    return {"first_s": first["first_s"], "median_s": second["median_s"]}


def measure(url: str, repeats: int) -> dict[str, dict[str, float]]:
    """Seconds of opening, of every named query and view, and of extract's worklist."""
    lake = hslake.open(url)
    found = {
        "open": timed(lambda: hslake.open(url), repeats),
        "connect": timed(lambda: query.connect(lake).close(), repeats),
    }
    for name in query.named():
        found[name] = timed(lambda name=name: query.run(lake, name), repeats)
    for name, sql in COMMANDS.items():
        found[name] = timed(lambda sql=sql: query.run(lake, sql), repeats)
    found["worklist of extract"] = timed(lambda: worklist(lake), repeats)
    name = query.run(lake, "select min(sample_id) as name from samples")["name"][0].as_py()
    found["lake.location: first, then"] = timed_from_second(lambda: lake.location(name), repeats)
    return found


def size(url: str, table: str) -> int:
    """Bytes of a table's Parquet files."""
    return sum(p.stat().st_size for p in (Path(url) / table).glob("*.parquet"))


def main() -> None:
    """Make the lake, time, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000, help="planned samples")
    parser.add_argument("--commits", type=int, default=100)
    parser.add_argument("--ids", type=int, default=16_384, help="most token ids kept per sample")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--folder", type=Path, help="keep the lake here, and use it when it is there"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/queries.json")
    args = parser.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="hslake-queries-"))
    try:
        url = str(folder / "lake")
        if not (folder / "lake/hslake.json").exists():
            url = make(folder, args.rows, args.commits, args.ids)
        report = {
            "machine": {
                "cpu": platform.machine(),
                "cores": os.cpu_count(),
                "load_before": round(os.getloadavg()[0], 2),
                "python": platform.python_version(),
                "duckdb": duckdb.__version__,
                "pyarrow": pa.__version__,
            },
            "rows": args.rows,
            "commits": args.commits,
            "manifest_bytes": size(url, "manifest"),
            "plan_bytes": size(url, "plan"),
            "seconds": measure(url, args.repeats),
        }
    finally:
        if args.folder is None:
            shutil.rmtree(folder)
    show(report)
    shapes = json.loads(args.out.read_text()) if args.out.exists() else {}
    shapes[f"{args.rows} samples in {args.commits} commits"] = report
    args.out.write_text(json.dumps(shapes, indent=1) + "\n")


def show(report: dict[str, Any]) -> None:
    """Print the times as a table."""
    table = Table(title=f"{report['rows']:,} samples in {report['commits']} commits")
    for column in ("", "first s", "median s"):
        table.add_column(column, justify="left" if not column else "right")
    for name, row in report["seconds"].items():
        table.add_row(name, f"{row['first_s']:.3f}", f"{row['median_s']:.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
