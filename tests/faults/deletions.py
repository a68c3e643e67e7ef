"""Deletes and vacuums killed at random, beside a compactor: what was not selected is never lost,
and run again they come to their end.

    python -m tests.faults.deletions --kills 100
    python -m tests.faults.deletions --kills 10 --seed 7 --out ""
"""

import argparse
import json
import multiprocessing
import random
import shutil
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from hslake import manifest
from hslake.compact import compact
from hslake.query import run
from hslake.verify import verify
from hslake.versions import delete, vacuum
from tests.faults.results import RESULTS, record
from tests.lakes import MadeLake, make_lake

GROUP = 6  # samples of a segment
NOW = timedelta(0)


def _where(names: list[str]) -> str:
    return f"sample_id in ({', '.join(map(repr, names))})"


def _delete(url: str, names: list[str], go: Any) -> None:
    go.set()
    delete(url, _where(names))


def _vacuum(url: str, names: list[str], go: Any) -> None:
    go.set()
    vacuum(url, NOW)


def _check(made: MadeLake, chosen: set[str], found: dict[str, Any]) -> None:
    """Whatever was killed: what nobody selected is there once, and reads as it went in."""
    lake = made.lake
    live = run(lake, "select sample_id from samples")["sample_id"].to_pylist()
    stay = made.samples.keys() - chosen
    found["lost"] += len(stay - set(live))
    found["duplicated"] += len(live) - len(set(live))
    for name in stay & set(live):
        same = np.array_equal(lake.read(name).hidden_states, made.samples[name].states)
        found["torn"] += not same
    found["torn"] += len(verify(made.url, "manifest").damage)


def trial(folder: Path, kills: int, seed: int) -> dict[str, Any]:
    """`lost`, `duplicated`, `torn` and `left` (of what was to be deleted) must be 0."""
    rng = random.Random(seed)
    made = make_lake(folder, lengths=[rng.randint(1, 40) for _ in range(GROUP)], streams=2)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["hslake.versions", "tests.lakes"])
    found: dict[str, Any] = {
        "kills": 0, "ended": 0, "lost": 0, "duplicated": 0, "torn": 0, "left": 0
    }  # fmt: skip
    chosen: list[list[str]] = []
    longest = 1.0
    while found["kills"] < kills:
        left = sorted(made.samples.keys() - {n for names in chosen for n in names})
        if len(left) < 2 * GROUP:
            made.add([rng.randint(1, 40) for _ in range(GROUP)])
            continue
        task = _vacuum if rng.random() < 0.2 else _delete
        if task is _delete and (not chosen or rng.random() < 0.7):
            chosen.append(rng.sample(left, rng.choice([1, 2])))
        names = rng.choice(chosen[-3:]) if chosen else []
        beside = rng.random() < 0.3
        if beside:
            made.stage(made.plan([rng.randint(1, 40) for _ in range(3)]))
        go = context.Event()
        process = context.Process(target=task, args=(made.url, names, go))
        process.start()
        assert go.wait(300)
        start = time.monotonic()
        if beside:
            compact(made.url, [made.staging])
        process.join(rng.uniform(0, longest))
        if process.exitcode is None:
            process.kill()
            found["kills"] += 1
        else:
            assert process.exitcode == 0, f"{task.__name__} failed"
            found["ended"] += 1
            longest = min(longest, 1.5 * (time.monotonic() - start))
        process.join()
        compact(made.url, [made.staging])
        _check(made, {n for some in chosen for n in some}, found)
    for names in chosen:
        delete(made.url, _where(names))
    vacuum(made.url, NOW)
    gone = {n for some in chosen for n in some}
    _check(made, gone, found)
    lake = made.lake
    holding = {r["segment_id"] for r in manifest.add_rows(lake.manifest_table(), gone)}
    stored = {p.split("/")[1] for p in lake.store.list("segments")}
    found["left"] += len(holding & stored) + len(stored - manifest.segments(
        lake.manifest_table(), "add"
    ))  # fmt: skip
    found["left"] += run(lake, f"select 1 from samples where {_where(sorted(gone))}").num_rows
    found["left"] += run(lake, f"select 1 from plan where {_where(sorted(gone))}").num_rows
    found["torn"] += len(verify(made.url).damage)
    return {**found, "deleted": len(gone), "samples": len(made.samples), "versions": lake.version}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", "--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", help="where to work (default: the temporary directory)")
    parser.add_argument("--out", default=str(RESULTS), help="where counts go; '': nowhere")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="hslake-deletions-", dir=args.folder))
    try:
        found = trial(folder, args.kills, args.seed)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(found, indent=1))
    if args.out:
        record(Path(args.out), "deletions", found)
    return 1 if any(found[k] for k in ("lost", "duplicated", "torn", "left")) else 0


if __name__ == "__main__":
    raise SystemExit(main())
