"""`hslake compact` against `cp` and fsync of the same bytes: GB/s of raw states, memory, CPU time.

    python benchmarks/compact.py --staging /dev/shm/bench --target /data/bench
    python benchmarks/compact.py … --s3 s3://bucket/bench        # an S3 store as well

Stages samples of `--hidden` × 4 streams once (synthetic values with the entropy of real hidden
states, or `--states FILE.npz` with real ones laid side by side), then runs, in turns and
`--repeats` times, `cp` of the part files and `compact` into a fresh lake for every codec, each on
one and on two cores (taskset). Every run is a process of its own; staging is hard-linked anew for
each. Bytes are raw bytes of the states. The threads of a compactor have priority 10, so `cp` has it
too: on a busy machine they are served alike. `--baseline DIR` measures another checkout as well.
Writes benchmarks/results/compact.json.
"""

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import hslake  # noqa: E402
from benchmarks.loader import machine  # noqa: E402
from hslake import checksum  # noqa: E402
from hslake.ids import RequestId, new_attempt  # noqa: E402
from hslake.plan import plan_files  # noqa: E402
from hslake.staging import StagingWriter  # noqa: E402

CODECS = ("none", "standard", "bf16plane")
STREAMS = 4
CHUNK = 1024  # rows written at a time

PEAK = """
def peak():  # not ru_maxrss: that of whoever started this process counts in it
    lines = open("/proc/self/status").read().splitlines()
    return int(next(l for l in lines if l.startswith("VmHWM")).split()[1]) * 1024
"""
COMPACT = (
    PEAK
    + """
import json, sys, time
import contextlib
from hslake.compact import compact
with contextlib.suppress(ImportError):  # as the command does
    from hslake.compact.memory import keep_memory
    keep_memory()
import hslake.segment.write, hslake.lake, hslake.query
lake, staging = sys.argv[1:3]
start, begun = time.perf_counter(), time.process_time()
report = compact(lake, [staging])
seconds, cpu = time.perf_counter() - start, time.process_time() - begun
print(json.dumps({"seconds": seconds, "cpu": cpu, "tokens": report.tokens, "rss": peak(),
    "raw": report.raw_bytes, "stored": report.stored_bytes}))
"""
)
UPLOAD = (
    PEAK
    + """
import json, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from hslake.store import open_store
store, files = open_store(sys.argv[1]), sys.argv[2:]
start, begun = time.perf_counter(), time.process_time()
with ThreadPoolExecutor(2) as pool:
    list(pool.map(lambda f: store.put(f"copy/{Path(f).parts[-5]}-{Path(f).parts[-3]}",
                                      Path(f).read_bytes()), files))
seconds, cpu = time.perf_counter() - start, time.process_time() - begun
print(json.dumps({"seconds": seconds, "cpu": cpu, "rss": peak()}))
"""
)


def states(rng: np.random.Generator, rows: int, hidden: int, real: np.ndarray | None) -> np.ndarray:
    """Bit patterns uint16 [STREAMS, rows, hidden]."""
    if real is not None:  # [token, stream, width]: real vectors side by side
        copies = -(-hidden // real.shape[2])
        picked = rng.integers(0, len(real), (rows, copies))
        wide = real[picked].transpose(2, 0, 1, 3).reshape(STREAMS, rows, -1)
        return np.ascontiguousarray(wide[:, :, :hidden])
    # Channels differ in scale: an exponent has about 2.6 bits of entropy then, as in real states.
    scale = np.exp(np.random.default_rng(1).normal(0, 0.35, hidden)).astype(np.float32)
    values = rng.standard_normal((STREAMS, rows, hidden), dtype=np.float32) * scale
    return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def stage(folder: Path, codec: str, args: argparse.Namespace, lengths: list[int]) -> Path:
    """A planned, empty lake."""
    lake = folder / f"lake-{codec}"
    hslake.create(
        lake, streams=[2, 30, 58, "final"], hidden_size=args.hidden, num_layers=61, codec=codec
    )
    rng = np.random.default_rng(0)
    rows = [
        {
            "sample_id": f"A1-{i:06d}",
            "source": "A1",
            "split": "train",
            "input_ids": rng.integers(0, 1000, n).tolist(),
            "loss_mask": [1] * n,
        }
        for i, n in enumerate(lengths)
    ]
    plan = folder / "plan.parquet"
    pq.write_table(pa.Table.from_pylist(rows), plan)
    plan_files(str(lake), [plan])
    return lake


def fill(lake: Path, staging: Path, args: argparse.Namespace, lengths: list[int]) -> None:
    """Write every planned sample into the staging of a writer that has ended."""
    opened = hslake.open(lake)
    planned = opened.sql("select sample_id, input_ids from plan order by sample_id").fetchall()
    real = None if args.states is None else np.load(args.states)["hidden_states"]
    writer = StagingWriter(
        staging,
        opened.spec,
        part_tokens=args.part_tokens,
        max_parts=-(-sum(lengths) // (args.part_tokens - max(lengths))) + 1,
        fingerprint=opened.spec.model.fingerprint,
        engine={"engine": "bench"},
    )
    rng = np.random.default_rng(2)
    for name, ids in planned:
        place = writer.begin(RequestId(opened.spec.lake8, new_attempt(), len(ids), "A1", name))
        for at in range(0, len(ids), CHUNK):
            n = min(CHUNK, len(ids) - at)
            rows, bits = place.rows(at, n), states(rng, n, args.hidden, real)
            for k in range(STREAMS):
                rows.hidden[k][...] = bits[k]
            rows.input_ids[...] = ids[at : at + n]
            sums = [checksum.rows_checksum(b, at) for b in bits]
            stats = [checksum.row_stats(checksum.to_float32(b, "bfloat16")) for b in bits]
            writer.wrote(place, at, n, sums, stats)
    writer.close()


def link(source: Path, to: Path) -> None:
    """The same files in another folder."""
    shutil.copytree(source, to, copy_function=os.link)


def measured(code: str, cores: int, *args: object, repo: Path = ROOT) -> dict[str, Any]:
    """Run Python with a checkout on so many cores; what it printed."""
    command = [*taskset(cores), sys.executable, "-P", "-c", code, *map(str, args)]
    path = os.pathsep.join([str(repo), str(repo / "patch")])
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        raise SystemExit(f"{args[0]}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def taskset(cores: int) -> list[str]:
    """A command's prefix that keeps it on so many cores."""
    mine = sorted(os.sched_getaffinity(0))[:cores]
    return ["nice", "-n", "10", "taskset", "-c", ",".join(map(str, mine))]


def copy(files: list[Path], target: Path, cores: int) -> dict[str, Any]:
    """`cp` and fsync of every file, as quick as that goes: one process, files one by one."""
    target.mkdir()
    names = [str(f) for f in files]
    begun = os.times()
    start = time.perf_counter()
    for i, name in enumerate(names):
        subprocess.run([*taskset(cores), "cp", name, str(target / str(i))], check=True)
    subprocess.run(
        [*taskset(cores), "sync", *(str(p) for p in target.iterdir()), target], check=True
    )
    seconds = time.perf_counter() - start
    ended = os.times()
    cpu = sum(ended[2:4]) - sum(begun[2:4])
    shutil.rmtree(target)
    return {"seconds": seconds, "cpu": cpu}


def s3_lake(lake: Path, url: str) -> None:
    """Put an empty lake's files to `url`."""
    from hslake.store import open_store

    store = open_store(url)
    for path in lake.rglob("*"):
        if path.is_file():
            store.put(path.relative_to(lake).as_posix(), path.read_bytes())


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Every case, in turns."""
    work, staging = Path(args.target), Path(args.staging)
    work.mkdir(parents=True)
    staging.mkdir(parents=True)
    rng = np.random.default_rng(3)
    lengths: list[int] = []
    raw_row = STREAMS * args.hidden * 2
    while sum(lengths) * raw_row < args.gb * 1e9:
        lengths.append(int(rng.lognormal(6.5, 0.7).__ceil__()) % 4096 + 1)
    found: dict[str, list[dict[str, Any]]] = {}
    try:
        lakes = {codec: stage(work, codec, args, lengths) for codec in args.codecs}
        first = lakes[args.codecs[0]]
        fill(first, staging / "template", args, lengths)
        spec = json.loads((first / "hslake.json").read_text())
        for lake in lakes.values():  # the parts are of the first one: all get its id
            own = json.loads((lake / "hslake.json").read_text())
            own["lake_id"] = spec["lake_id"]
            own.pop("digest", None)
            (lake / "hslake.json").write_text(json.dumps(own))
        files = sorted((staging / "template").glob("*/part-*/hidden_states/c/*/0/0"))
        raw = sum(lengths) * raw_row
        size = sum(f.stat().st_size for f in files)
        for turn in range(args.repeats):
            for cores in args.cores:
                cases: list[tuple[str, Any]] = [("cp", None), *lakes.items()]
                if args.baseline:
                    cases += [(f"{c} before", p) for c, p in lakes.items()]
                if args.s3:
                    cases += [("s3 upload", None), *((f"s3 {c}", p) for c, p in lakes.items())]
                for name, lake in cases[turn % len(cases) :] + cases[: turn % len(cases)]:
                    here = staging / "run"
                    if name == "cp":
                        row = copy(files, work / "copy", cores)
                        row |= {"raw": size, "stored": size}
                    elif name == "s3 upload":
                        url = f"{args.s3}/{time.time_ns()}"
                        row = measured(UPLOAD, cores, url, *files) | {"raw": size, "stored": size}
                        forget(url)
                    else:
                        link(staging / "template", here)
                        url = str(work / "lake-run")
                        if name.startswith("s3"):
                            url = f"{args.s3}/{time.time_ns()}"
                            s3_lake(lake, url)
                        else:
                            shutil.copytree(lake, url)
                        repo = Path(args.baseline) if name.endswith("before") else ROOT
                        row = measured(COMPACT, cores, url, here, repo=repo)
                        if row["raw"] != raw or any(here.glob("*/part-*")):
                            raise SystemExit(f"{name}: not everything was compacted: {row}")
                        forget(url) if name.startswith("s3") else shutil.rmtree(url)
                        shutil.rmtree(here)
                    found.setdefault(f"{name}, {cores} cores", []).append(row)
                    print(name, cores, {k: round(v, 3) for k, v in row.items()}, flush=True)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        shutil.rmtree(work, ignore_errors=True)
    return {"samples": len(lengths), "tokens": sum(lengths), "raw_bytes": raw, "runs": found}


def forget(url: str) -> None:
    """Delete everything under an S3 URL."""
    from hslake.store import open_store

    store = open_store(url)
    with contextlib.suppress(Exception):
        store.fs.rm(store._key(""), recursive=True)


def summary(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """For each case the median GB/s of raw bytes, its ratio to `cp` of the same turn and cores,
    stored / raw, CPU seconds a raw GB and peak memory."""
    rows: dict[str, Any] = {}
    for case, turns in runs.items():
        name, cores = case.split(", ")
        base = runs[f"{'s3 upload' if name.startswith('s3') else 'cp'}, {cores}"]
        rates = [t["raw"] / t["seconds"] / 1e9 for t in turns]
        ratios = [
            rate / (b["raw"] / b["seconds"] / 1e9) for rate, b in zip(rates, base, strict=True)
        ]
        rows[case] = {
            "gb_per_s": round(statistics.median(rates), 3),
            "ratio_to_cp": round(statistics.median(ratios), 3),
            "stored_over_raw": round(turns[0]["stored"] / turns[0]["raw"], 4),
            "cpu_s_per_gb": round(statistics.median(t["cpu"] / t["raw"] * 1e9 for t in turns), 3),
            "peak_rss_mb": round(max(t.get("rss", 0) for t in turns) / 1e6),
        }
    return rows


def main() -> None:
    """Run the comparison and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--staging", required=True, help="folder to make for the part files")
    parser.add_argument("--target", required=True, help="folder to make for lakes and copies")
    parser.add_argument("--s3", help="URL to make lakes under as well")
    parser.add_argument("--states", help="npz with hidden_states [token, 4, width] bit patterns")
    parser.add_argument("--gb", type=float, default=1.5, help="raw states to compact")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--part-tokens", type=int, default=8192)
    parser.add_argument("--codecs", nargs="+", default=list(CODECS), choices=CODECS)
    parser.add_argument("--cores", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--baseline", help="another checkout of hslake, measured as well")
    parser.add_argument("--key", help="put the result under this key, beside what is there")
    parser.add_argument("--out", default=str(ROOT / "benchmarks/results/compact.json"))
    args = parser.parse_args()
    report = run(args)
    shown = {k: v for k, v in vars(args).items() if k not in ("staging", "target", "out")}
    shown |= {k: shown[k] and Path(shown[k]).name for k in ("states", "baseline")}
    shown["s3"] = bool(args.s3)
    found = {"machine": machine(), "settings": shown, "summary": summary(report["runs"]), **report}
    out = Path(args.out)
    if args.key:
        found = {**(json.loads(out.read_text()) if out.exists() else {}), args.key: found}
    out.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    show(found[args.key] if args.key else found)


def show(report: dict[str, Any]) -> None:
    """Print the summary as a table."""
    table = Table(
        title=f"{report['raw_bytes'] / 1e9:.2f} GB of states in {report['samples']} samples"
    )
    for column in ("case", "GB/s", "× cp", "stored / raw", "CPU s/GB", "peak MB"):
        table.add_column(column)
    for case, row in report["summary"].items():
        table.add_row(case, *(str(v) for v in row.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
