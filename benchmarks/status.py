"""`hslake status --watch` on a lake of DESIGN's size: the first look, and the looks after it.

    python benchmarks/status.py                # 100,000 samples in 1,334 commits, on disk and on S3

Makes the tables of such a lake (nothing behind them), puts a staging folder with 2,000 captured
samples beside it, and times a Watcher: the first look, a look when nothing was committed, and one
after a commit. On S3 (moto, in a process of its own) the requests of a look are counted too.
Writes benchmarks/results/status.json.
"""

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import hslake  # noqa: E402
from hslake.checksum import RowStats  # noqa: E402
from hslake.ids import RequestId, new_attempt  # noqa: E402
from hslake.staging import StagingWriter  # noqa: E402
from hslake.status import Watcher  # noqa: E402
from hslake.store import open_store  # noqa: E402
from hslake.store.core import Store  # noqa: E402
from hslake.tables import catalog  # noqa: E402
from queries import committed, make, planned  # noqa: E402
from tests.s3server import moto  # noqa: E402

CAPTURED = 2_000
LOOKS = 9


def fill(staging: Path, url: str) -> None:
    """Captured samples of the plan that nobody commits, of few rows so that they need no room."""
    lake = hslake.open(url)
    writer = StagingWriter(
        staging, lake.spec, part_tokens=512, max_parts=8, fingerprint={}, engine={}
    )
    names = [f"{r[0]}" for r in lake.sql("select sample_id from plan limit 2000").fetchall()]
    for name in names[:CAPTURED]:
        rid = RequestId(lake.spec.lake8, new_attempt(), 1, "A1", name)
        place = writer.begin(rid)
        zero = [0] * len(lake.spec.streams)
        writer.wrote(place, 0, 1, zero, [RowStats()] * len(zero))


def commit_one(url: str, nth: int) -> None:
    """One more segment's samples."""
    table = committed(planned(10**7 + 100 * nth, 75, 8), 1)
    adds = table.filter([op == "add" for op in table["op"].to_pylist()])
    catalog.commit(open_store(url), "manifest", lambda _: adds, f"benchmark-{uuid.uuid4().hex}")


def measure(url: str, staging: Path) -> dict[str, Any]:
    """Seconds of looks, and requests to the store."""
    counted = count_requests()
    with Watcher(url, staging=[staging]) as watcher:

        def look() -> tuple[float, int]:
            before, start = counted[0], time.perf_counter()
            watcher.look(strict=False)
            return time.perf_counter() - start, counted[0] - before

        first = look()
        idle = [look() for _ in range(LOOKS)]
        fresh = []
        for nth in range(LOOKS):
            commit_one(url, nth)
            fresh.append(look())
        report = watcher.look()
    return {
        "first_s": round(first[0], 3),
        "idle_s": round(statistics.median(s for s, _ in idle), 4),
        "after_commit_s": round(statistics.median(s for s, _ in fresh), 4),
        "store_calls": {
            "idle": int(statistics.median(n for _, n in idle)),
            "after_commit": int(statistics.median(n for _, n in fresh)),
        },
        "committed": report.committed,
        "waiting": report.waiting,
    }


def count_requests() -> list[int]:
    """Counts calls of the store's own methods; what Delta and DuckDB ask is not among them."""
    counted = [0]
    for name in ("exists", "read", "list", "read_range"):
        real = getattr(Store, name)

        def call(self: Store, *args: Any, _real: Any = real, **more: Any) -> Any:
            counted[0] += 1
            return _real(self, *args, **more)

        setattr(Store, name, call)
    return counted


def upload(folder: Path, url: str) -> None:
    """Copy the lake's files to an object store."""
    store = open_store(url)
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        store.put(path.relative_to(folder).as_posix(), path.read_bytes())


def main() -> None:
    """Make the lake, look at it, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--commits", type=int, default=1_334)
    parser.add_argument("--folder", type=Path, help="keep the lake here, use it when it is there")
    parser.add_argument("--no-s3", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/status.json")
    args = parser.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="hslake-status-"))
    try:
        if not (folder / "lake/hslake.json").exists():
            make(folder, args.rows, args.commits, 256)
        url, staging = str(folder / "lake"), folder / "staging"
        if not staging.exists():
            staging.mkdir()
            fill(staging, url)
        found: dict[str, Any] = {
            "machine": {"cpu": platform.machine(), "cores": os.cpu_count()},
            "load_before": round(os.getloadavg()[0], 2),
            "samples": args.rows,
            "commits": args.commits,
        }
        if not args.no_s3:
            with moto() as server:
                os.environ |= server.environment()
                server.client().create_bucket(Bucket="status")
                upload(folder / "lake", "s3://status/lake")
                found["s3"] = measure("s3://status/lake", staging)
        found["disk"] = measure(url, staging)
        found["peak_rss_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    finally:
        if args.folder is None:
            shutil.rmtree(folder)
    print(json.dumps(found, indent=1))
    args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
