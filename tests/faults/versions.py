"""Ten thousand versions, a hundred pins, and vacuums beside slow commits and readers.

    python -m tests.faults.versions --versions 10000 --pins 100
    python -m tests.faults.versions --versions 300 --pins 10 --races 5 --out ""

One lake: every version adds one sample that reads (100 share a segment), every tenth segment is
hidden whole afterwards. At 100, 1,000, … versions the times of opening, committing, querying and
`log` are taken. Then every pinned and many other versions are opened and compared with what they
must hold, vacuums run beside a compactor whose commits are slow, and beside readers of pinned
versions. Counts go to benchmarks/results/faults.json, times to versions.json beside it.
"""

import argparse
import json
import multiprocessing
import os
import platform
import random
import shutil
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
from deltalake import Transaction

import hslake
from hslake import manifest
from hslake.checksum import sample_checksum
from hslake.compact import compact
from hslake.errors import Missing
from hslake.ids import token_hash
from hslake.lake import Lake
from hslake.pins import pin, pins
from hslake.query import run
from hslake.segment.write import SegmentInfo, SegmentSample, new_segment_id, write_segment
from hslake.tables import catalog, rollup, tablefile
from hslake.verify import hide, verify
from hslake.versions import log, vacuum
from tests.faults.results import RESULTS, record
from tests.lakes import MadeLake, make_lake, random_states

HIDDEN, TOKENS, TOGETHER = 8, 10, 100
STOPS, MEASURED = (100, 1000, 10_000), 40  # times are taken at these versions, of so many commits
NOW = timedelta(0)


@dataclass
class Made:
    """The lake of many versions: `versions[i]` added sample i, `ends[i]` hid it."""

    lake: Lake
    versions: list[int] = field(default_factory=list)
    ends: dict[int, int] = field(default_factory=dict)
    times: dict[str, dict[str, float]] = field(default_factory=dict)

    def visible(self, version: int) -> int:
        """How many samples `version` must show."""
        added = sum(v <= version for v in self.versions)
        return added - sum(end <= version for end in self.ends.values())


def states(i: int) -> list[np.ndarray]:
    """The states of sample `i`, bits [TOKENS, HIDDEN] for each of three streams."""
    rng = np.random.default_rng(i)
    return [rng.integers(0, 0x3F80, (TOKENS, HIDDEN), np.uint16) for _ in range(3)]


def tokens(i: int) -> np.ndarray:
    return np.full(TOKENS, i % 1000, np.int32)


def grow(folder: Path, count: int, say: Callable[[str], object] = print) -> Made:
    """Make the lake, a version at a time, and take times on the way."""
    lake = hslake.create(
        folder / "many", streams=[2, 4, "final"], hidden_size=HIDDEN, num_layers=8, name="test"
    )
    made = Made(lake)
    mask = np.ones(TOKENS, np.uint8)
    took: list[float] = []
    quick: catalog.TableState | None = None
    while len(made.versions) < count:
        first = len(made.versions)
        some = range(first, min(first + TOGETHER, count))
        info = write_segment(
            lake.store,
            lake.spec,
            new_segment_id(),
            (
                SegmentSample(f"s{i}", s, tokens(i), mask, [sample_checksum(x) for x in s])
                for i in some
                for s in [states(i)]
            ),
        )
        starts = dict(info.placements)
        for i in some:
            row = _row(i, starts[f"s{i}"], info)
            if any(i < stop <= i + MEASURED for stop in STOPS) or i < MEASURED:
                start = time.perf_counter()
                made.versions.append(_add(lake, row))
                took.append(time.perf_counter() - start)
                quick = None
            else:
                quick = quick or catalog.open_table(lake.store, "manifest")
                made.versions.append(_add_quickly(quick, row))
            if i + 1 in STOPS:
                made.times[str(i + 1)] = found = measure(lake.url, took[-MEASURED:])
                say(f"{i + 1} versions: {json.dumps(found)}")
        if (first // TOGETHER) % 10 == 9:
            hide(lake.refresh(), {(info.segment_id, f"s{i}"): "test" for i in some})
            end, quick = lake.refresh().version, None
            made.ends |= dict.fromkeys(some, end)
    return made


def _row(i: int, start: int, info: SegmentInfo) -> dict[str, Any]:
    return {
        "op": "add", "sample_id": f"s{i}", "source": "A1", "split": "train", "length": TOKENS,
        "supervised_tokens": TOKENS, "segment_id": info.segment_id, "token_start": start,
        "attempt": f"{i:08x}", "token_hash": token_hash(tokens(i)),
        "checksum": [sample_checksum(s) for s in states(i)], "rms": [1.0] * 3,
        "absmax": [1.0] * 3, "nonfinite": [0] * 3, "segment_tokens": info.tokens,
        "segment_raw_bytes": info.raw_bytes, "segment_stored_bytes": info.stored_bytes,
        "inventory_digest": info.inventory_digest, "committed_at": datetime.now(UTC),
    }  # fmt: skip


def _add(lake: Lake, row: dict[str, Any]) -> int:
    """One commit, as a compactor makes it."""

    def build(state: catalog.TableState) -> Any:
        manifest.refuse_condemned(state, row["segment_id"])
        return None if row["sample_id"] in manifest.live_ids(state) else manifest.rows([row])

    return catalog.commit(lake.store, "manifest", build, f"segment-{row['sample_id']}")


def _add_quickly(state: catalog.TableState, row: dict[str, Any]) -> int:
    """The same files and log entry without opening the table anew, and without looking for the
    sample: nobody else commits here, and ten thousand commits are not what is measured."""
    table, rows = state._table, manifest.rows([row])
    assert rows is not None
    version = table.version() + 1
    data = tablefile.fill(rows, "manifest", version)
    name, body = f"part-{version:020d}-{uuid.uuid4().hex}.parquet", tablefile.encode(data)
    state.store.local(f"manifest/{name}").write_bytes(body)
    txn = Transaction(f"segment-{row['sample_id']}", version)
    catalog._append(state, [catalog._add_action(name, len(body), data)], txn)
    table.update_incremental()
    assert table.version() == version
    if version % rollup.FACTOR == 0:
        catalog._roll_up(state.store, "manifest", version)
    return version


def measure(url: str, commits: list[float]) -> dict[str, float]:
    """Seconds: medians of a few goes."""

    def of(go: Callable[[], object], times: int = 5) -> float:
        found = []
        for _ in range(times):
            start = time.perf_counter()
            go()
            found.append(time.perf_counter() - start)
        return round(statistics.median(found), 4)

    newest = hslake.open(url).version
    count = "select count(*) from samples"
    return {
        "commit_s": round(statistics.median(commits), 4),
        "open_s": of(lambda: hslake.open(url)),
        "open_old_s": of(lambda: hslake.open(url, version=newest // 2)),
        "open_and_count_s": of(lambda: run(url, count)),
        "open_and_count_old_s": of(lambda: run(url, count, version=newest // 2)),
        "log_50_s": of(lambda: log(url, 50)),
        "files": len(hslake.open(url).manifest_table().row_files()),
    }


# -- old versions and pins ------------------------------------------------------------------------


def check_versions(made: Made, count: int, rng: random.Random) -> dict[str, int]:
    """Open pinned and other versions, and compare what they show and hold with the truth."""
    url, newest = made.lake.url, made.lake.refresh().version
    for version in rng.sample(range(1, newest + 1), min(count, newest)):
        pin(url, f"pin-{version}", version)
    found = {"pins": 0, "queries": 0, "samples_read": 0, "wrong": 0}
    names = [p.name for p in pins(made.lake)]
    for version in [*names, *rng.sample(range(newest + 1), min(count, newest))]:
        lake = hslake.open(url, version=version)
        rows = run(lake, "select count(*) as n, count(distinct sample_id) as d from samples")
        n = made.visible(lake.version)
        found["wrong"] += rows.to_pylist() != [{"n": n, "d": n}]
        found["queries"] += 1
        found["pins"] += isinstance(version, str)
        if n and isinstance(version, str):
            found["wrong"] += not _reads(made, lake, rng)
            found["samples_read"] += 1
    return found


def _reads(made: Made, lake: Lake, rng: random.Random) -> bool:
    """Whether a sample that the version must show reads back as it went in."""
    some = [
        i
        for i, v in enumerate(made.versions)
        if v <= lake.version < made.ends.get(i, lake.version + 1)
    ]
    i = rng.choice(some)
    sample = lake.read(f"s{i}")
    return bool(
        np.array_equal(sample.hidden_states, np.stack(states(i)))
        and np.array_equal(sample.input_ids, tokens(i))
    )


# -- beside a vacuum ------------------------------------------------------------------------------


def _read_on(url: str, version: str, ready: Any, end: Any, out: Any) -> None:
    """A training run on a pinned version: reads everything it shows, again and again."""
    lake = hslake.open(url, version=version)
    names = run(lake, "select sample_id from samples order by md5(sample_id)")[0].to_pylist()[:200]
    reads = wrong = 0
    ready.set()
    while True:
        last = end.is_set()  # one whole round after the vacuum
        for name in names:
            sample = lake.read(name)
            reads += 1
            wrong += not np.array_equal(sample.hidden_states, np.stack(states(int(name[1:]))))
        if last or not names:
            out.put((reads, wrong))
            return


def readers_beside(made: Made, rng: random.Random, count: int = 2) -> dict[str, int]:
    """Readers of pinned versions that need hidden segments, beside a vacuum of all else."""
    url, context = made.lake.url, multiprocessing.get_context("spawn")
    found = {"reads_beside": 0, "wrong": 0, "vacuumed": 0, "told_gone": 0}
    ends = sorted(set(made.ends.values()))
    if not ends:
        return found
    kept = rng.choice(ends)
    pin(url, "training", kept - 1)
    out, end = context.Queue(), context.Event()
    ready = [context.Event() for _ in range(count)]
    readers = [context.Process(target=_read_on, args=(url, "training", r, end, out)) for r in ready]
    for reader in readers:
        reader.start()
    for event in ready:
        event.wait(300)
    found["vacuumed"] = len(vacuum(url, NOW).segments)
    end.set()
    for _ in readers:
        reads, wrong = out.get(timeout=600)
        found["reads_beside"] += reads
        found["wrong"] += wrong
    for reader in readers:
        reader.join()
        found["wrong"] += reader.exitcode != 0
    # Versions that nobody kept can be queried, and say what they lack.
    pinned = [p.version for p in pins(made.lake)]
    for i, version in ((i, e - 1) for i, e in made.ends.items()):
        first, last = made.versions[i // TOGETHER * TOGETHER], made.ends[i] - 1
        if not any(first <= p <= last for p in pinned) and i % TOGETHER == 0:
            lake = hslake.open(url, version=version)
            found["wrong"] += run(lake, "select 1 from samples").num_rows != made.visible(version)
            try:
                lake.read(f"s{i}")
                found["wrong"] += 1
            except Missing as error:
                found["told_gone"] += "not whole any more" in str(error)
    return found


def _compact_slowly(url: str, staging: str, seed: int, out: Any) -> None:
    """A compactor that sleeps before its commits, as one on a slow store does."""
    rng, real = random.Random(seed), catalog.commit

    def slow(*args: Any) -> int:
        time.sleep(rng.uniform(0.0, 0.1))
        return real(*args)

    catalog.commit = slow
    out.put(compact(url, [staging], segment_tokens=40).samples)


def vacuum_beside(folder: Path, races: int, rng: random.Random) -> dict[str, int]:
    """Vacuums of age 0, without a pause, beside slow commits: they take unfinished segments away,
    and every sample is in the lake all the same, once, bit for bit."""
    made: MadeLake = make_lake(folder, 2, streams=3, states=random_states(3, HIDDEN, "bfloat16"))
    context = multiprocessing.get_context("spawn")
    found = {"races": races, "vacuums": 0, "taken": 0, "lost": 0, "duplicated": 0, "wrong": 0}
    for _ in range(races):
        made.stage(made.plan([rng.randint(1, 30) for _ in range(6)]))
        out = context.Queue()
        args = (made.url, str(made.staging), rng.randrange(2**31), out)
        process = context.Process(target=_compact_slowly, args=args)
        process.start()
        while process.is_alive():
            found["taken"] += len(vacuum(made.url, NOW).segments)
            found["vacuums"] += 1
            time.sleep(rng.uniform(0.1, 0.4))  # a compactor gives up when it loses five in a row
        process.join()
        compact(made.url, [made.staging])  # what a compactor that gave up has left
    vacuum(made.url, NOW)
    lake = made.lake
    live = run(lake, "select sample_id from samples")["sample_id"].to_pylist()
    found["lost"] = len(made.samples.keys() - set(live))
    found["duplicated"] = len(live) - len(set(live))
    for name in set(live):
        found["wrong"] += not np.array_equal(
            lake.read(name).hidden_states, made.samples[name].states
        )
    found["wrong"] += len(verify(made.url).damage)
    stored = {p.split("/")[1] for p in lake.store.list("segments")}
    found["wrong"] += stored != manifest.segments(lake.manifest_table(), "add")
    return found


# -- all of it ------------------------------------------------------------------------------------


def trial(folder: Path, versions: int, count: int, races: int, seed: int) -> dict[str, Any]:
    """Everything once; `lost`, `duplicated` and `wrong` must be 0."""
    rng = random.Random(seed)
    made = grow(folder, versions)
    found: dict[str, Any] = {"versions": made.lake.refresh().version, "times": made.times}
    for part in (
        check_versions(made, count, rng),
        readers_beside(made, rng),
        check_versions(made, 0, rng),  # the pins once more, after the vacuum
        vacuum_beside(folder / "beside", races, rng),
    ):
        for name, value in part.items():
            found[name] = found.get(name, 0) + value
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--versions", "--count", type=int, default=10_000)
    parser.add_argument("--pins", type=int, default=100)
    parser.add_argument("--races", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", help="where to work (default: the temporary directory)")
    parser.add_argument("--out", default=str(RESULTS), help="counts; times beside it; '': none")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="hslake-versions-", dir=args.folder))
    try:
        found = trial(folder, args.versions, args.pins, args.races, args.seed)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    times = found.pop("times")
    print(json.dumps(found, indent=1))
    if args.out:
        record(Path(args.out), "versions", found)
        machine = {"cores": os.cpu_count(), "load": os.getloadavg()[0], "cpu": platform.machine()}
        beside = Path(args.out).with_name("versions.json")
        beside.write_text(json.dumps({"machine": machine, "by_versions": times}, indent=1) + "\n")
    return 1 if found["lost"] or found["duplicated"] or found["wrong"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
