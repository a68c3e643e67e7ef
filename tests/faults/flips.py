"""Damage every kind of stored object: is it found, named, and harms no other sample?

    python -m tests.faults.flips --count 2000 --journals 500

`--count` single-bit flips in payload, over all codecs, bfloat16 and float32; an eighth as many
faults of every sort (flip, truncate, delete, zero, extend, swap) in each other kind of object; and
faults in staging, of which `--journals` are bits of journals. Each world is damaged in a process of
its own: a death by signal is a failure. Prints and records counts; exit 1 when anything is wrong.

What a fault must do: `verify` (level full) reports it, a payload flip with exactly the object and
the samples; a read of exactly those samples raises, naming the sample; every other sample reads bit
by bit as it went in. A fault that nothing reports is harmless only when all that the lake says is
what it was: rows, states, spec, norm, metadata and pins. Those are counted by kind.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hslake.verify import LEVELS
from tests.faults import flipworld
from tests.faults.flipworld import KINDS, Extent
from tests.faults.results import RESULTS, record

STATES = ("shard", "token shard", "payload", "tokens", "index", "chunks swapped")
BYTES = ("checksum", "full")
_BATCH = 25  # trials of one process
_AT_ONCE = 8  # payload flips of one trial, each in a sample of its own
_ROOT = Path(__file__).resolve().parents[2]
Trial = dict[str, Any]
Kinds = Sequence[tuple[str, str]]  # dtype, codec


@dataclass
class Tally:
    """What came of the faults."""

    flips: int = 0
    by_kind: Counter[str] = field(default_factory=Counter)
    levels: Counter[str] = field(default_factory=Counter)
    harmless: Counter[str] = field(default_factory=Counter)
    crashes: int = 0
    wrong: list[str] = field(default_factory=list)

    def counts(self) -> dict[str, Any]:
        return {
            "flips": self.flips,
            "undetected_flips": len(self.wrong),
            "crashes": self.crashes,
            "by_kind": dict(sorted(self.by_kind.items())),
            "found_at_level": dict(sorted(self.levels.items())),
            "harmless": dict(sorted(self.harmless.items())),
        }


# -- what to damage -----------------------------------------------------------------------------


def kind_of(path: str) -> str:
    """The kind of object that a path of a world is."""
    name = path.rsplit("/", 1)[-1]
    if "/_delta_log/" in path:
        table = path.split("/")[1]
        if name == "_last_checkpoint":
            return f"{table} _last_checkpoint"
        return f"{table} checkpoint" if name.endswith(".parquet") else f"{table} log entry"
    if name.endswith(".parquet"):
        return f"{path.split('/')[1]} parquet"
    if path.startswith("lake/segments/"):
        if name == "inventory.json":
            return name
        if name == "zarr.json":
            return "segment zarr.json"
        return "shard" if "/hidden_states/" in path else "token shard"
    if path.startswith("lake/model/"):
        return "model/final_norm"
    if path.startswith("lake/pins/"):
        return "pin"
    if path.startswith("staging/"):
        return "staging rows" if "/hidden_states/c/" in path else _staged(path, name)
    return name


def _staged(path: str, name: str) -> str:
    if "/input_ids/c/" in path:
        return "staging input_ids"
    if name == "zarr.json":
        return "part zarr.json" if path.count("/") == 3 else "part array zarr.json"
    return f"staging {name}"


def any_fault(rng: random.Random, world: Path, path: str, others: Sequence[str], n: int) -> Trial:
    """The `n`-th sort of fault in an object: sorts take turns."""
    size = (world / path).stat().st_size
    sorts = ["flip", "truncate", "delete", "zero", "extend", "swap", "flip"]
    sort = sorts[n % len(sorts)]
    if kind_of(path) == "pin" and sort == "delete":
        sort = "flip"  # removing the file is how a pin is given up: nobody is to object
    if sort == "swap" and not others:
        sort = "flip"
    if size == 0:
        sort = "delete" if n % 2 else "extend"
    fault: Trial = {"path": path, "fault": sort}
    if sort == "flip":
        fault["bit"] = rng.randrange(8 * size)
    elif sort == "truncate":
        fault["at"] = rng.choice([0, size // 2, size - 1, rng.randrange(size)])
    elif sort == "zero":
        start = rng.choice([0, rng.randrange(size)])
        fault |= {"at": start, "end": rng.choice([size, min(size, start + 1 + rng.randrange(64))])}
    elif sort == "extend":
        fault["data"] = rng.choice([bytes(4096), rng.randbytes(1), rng.randbytes(300)]).hex()
    elif sort == "swap":
        fault["with"] = rng.choice(others)
    return fault


def payload_trials(rng: random.Random, found: Sequence[Extent], count: int) -> Iterator[Trial]:
    """Single-bit flips in chunks of states, some at once, of different samples."""
    by_sample: dict[str, list[Extent]] = {}
    for e in found:
        if e.what == "payload":
            by_sample.setdefault(e.samples[0], []).append(e)
    while count:
        faults, expect = [], []
        for name in rng.sample(sorted(by_sample), min(_AT_ONCE, count, len(by_sample) - 1)):
            e = rng.choice(by_sample[name])
            bit = rng.randrange(8 * e.start, 8 * e.end)
            faults.append({"path": e.path, "fault": "flip", "bit": bit})
            expect.append([e.path, list(e.samples)])
        count -= len(faults)
        yield {
            "kind": "payload",
            "faults": faults,
            "expect": expect,
            "levels": BYTES,
        }


def precise_trials(rng: random.Random, found: Sequence[Extent], count: int) -> Iterator[Trial]:
    """Flips in token chunks and shard indexes, and chunks of one size that changed places."""
    for what in ("tokens", "index"):
        some = [e for e in found if e.what == what]
        for _ in range(count):
            e = rng.choice(some)
            bit = rng.randrange(8 * e.start, 8 * e.end)
            fault = {"path": e.path, "fault": "flip", "bit": bit}
            expect = [[e.path, list(e.samples)]]
            yield {"kind": what, "faults": [fault], "expect": expect, "levels": BYTES}
    chunks = [e for e in found if e.what == "payload"]
    pairs = [
        (a, b)
        for i, a in enumerate(chunks)
        for b in chunks[i + 1 :]
        if a.path == b.path and a.end - a.start == b.end - b.start
    ]
    for a, b in rng.sample(pairs, min(count, len(pairs))):
        at = {"at": [a.start, b.start], "size": a.end - a.start}
        fault = {"path": a.path, "fault": "swap chunks", **at}
        hit = sorted({*a.samples, *b.samples})
        expect = [[a.path, hit]]
        yield {"kind": "chunks swapped", "faults": [fault], "expect": expect, "levels": BYTES}


def object_trials(rng: random.Random, world: Path, count: int) -> Iterator[Trial]:
    """Faults of every sort in every kind of object of a lake."""
    kinds: dict[str, list[str]] = {}
    for path in sorted((world / "lake").rglob("*")):
        if path.is_file():
            name = path.relative_to(world).as_posix()
            kinds.setdefault(kind_of(name), []).append(name)
    for kind, paths in kinds.items():
        for n in range(count):
            path = paths[n % len(paths)] if n < len(paths) else rng.choice(paths)
            others = [p for p in paths if p != path and p.count("/") == path.count("/")]
            # What lies in no segment is looked at alike at every level.
            levels = LEVELS if path.startswith("lake/segments/") else ("manifest", "full")
            fault = any_fault(rng, world, path, others, n)
            yield {"kind": kind, "faults": [fault], "levels": levels}


def staging_trials(rng: random.Random, world: Path, count: int, journals: int) -> Iterator[Trial]:
    """Bits of journals, most of them where rows stand, and faults in all other files."""
    kinds: dict[str, list[str]] = {}
    for path in sorted((world / "staging").rglob("*")):
        if path.is_file():
            name = path.relative_to(world).as_posix()
            kinds.setdefault(kind_of(name), []).append(name)
    (journal,) = kinds["staging journal"]
    data = (world / journal).read_bytes()
    used = len(data.rstrip(b"\0"))
    for n in range(journals):
        end = used if n % 10 else len(data)
        fault = {"path": journal, "fault": "flip", "bit": rng.randrange(8 * end)}
        yield {"kind": "journal", "faults": [fault]}
    for kind, paths in kinds.items():
        for n in range(count):
            path = rng.choice(paths)
            others = [p for p in paths if p != path]
            yield {"kind": kind, "faults": [any_fault(rng, world, path, others, n)]}


# -- what came of it ----------------------------------------------------------------------------


def judge(trial: Trial, seen: dict[str, Any], tally: Tally) -> None:
    """Count one trial's faults, or say what is wrong."""
    name = f"{trial['where']} {trial['world']}: {trial['kind']} {trial['faults']}"
    number, kind = len(trial["faults"]), trial["kind"]
    tally.flips += number
    tally.by_kind[kind] += number
    wrong = _staging_wrong(trial, seen, tally) if trial["where"] == "staging" else None
    if trial["where"] == "lake":
        wrong = _lake_wrong(trial, seen, tally)
    if wrong:
        tally.wrong.append(f"{name}: {wrong}")
        print("WRONG", tally.wrong[-1], file=sys.stderr, flush=True)


def _staging_wrong(trial: Trial, seen: dict[str, Any], tally: Tally) -> str | None:
    if "error" in seen:
        return seen["error"]
    if seen["wrong"]:
        return f"committed wrongly: {seen['wrong']}"
    if seen["lost"] and not seen["told"]:
        return f"{seen['lost']} are lost and nothing was told"
    if not seen["asked again"] or not seen.get("whole again", True):
        return f"not whole again: {seen}"
    if not seen["told"]:
        tally.harmless[trial["kind"]] += 1  # and all samples are committed, and right
    return None


def _lake_wrong(trial: Trial, seen: dict[str, Any], tally: Tally) -> str | None:
    if "error" in seen:
        return seen["error"]
    number, kind = len(trial["faults"]), trial["kind"]
    for level, found in seen["levels"].items():
        tally.levels[f"{kind}: {level}"] += number if "damage" in found else 0
    full = seen["levels"]["full"]
    reads = seen["reads"]
    bad = {n for n, what in reads.items() if what != "same"}
    # Of a table's file nobody knows which samples it is about: it is named itself.
    odd = [n for n, w in reads.items() if w == "WRONG" or (w[:7] == "unnamed" and kind in STATES)]
    if odd:
        return f"reads {[(n, reads[n]) for n in odd]}"
    if "damage" not in full:
        if seen.get("content") == "same" and not bad:
            tally.harmless[kind] += number
            return None
        return f"not found by verify; reads {bad}, content {seen.get('content')}"
    if "open" in seen:
        return None
    told = {s for _, _, samples, _ in full["damage"] for s in samples}
    if kind in STATES and told != bad:
        return f"verify names {sorted(told)}, reads of {sorted(bad)} fail"
    if kind in ("segment zarr.json", "inventory.json", "pin", "model/final_norm") and bad:
        return f"reads of {sorted(bad)} fail"
    return _named(trial, seen, told) if "expect" in trial else None


def _named(trial: Trial, seen: dict[str, Any], told: set[str]) -> str | None:
    """Whether each level that looks at bytes names exactly what was hit."""
    hit = {s for _, samples in trial["expect"] for s in samples}
    if told != hit:
        return f"{sorted(hit)} were hit, verify names {sorted(told)}"
    for level in ("checksum", "full"):
        found = seen["levels"][level].get("damage", [])
        for path, samples in trial["expect"]:
            _, _, segment, key = path.split("/", 3)
            of = [d for d in found if d[0] == segment]
            names = {s for d in of if d[1] == key for s in d[2]}
            swapped = trial["kind"] == "chunks swapped" and level == "full"  # chunks are sound
            if not swapped and not set(samples) <= names:
                return f"{level}: {key} and {samples} are not named together: {found}"
        if {s for d in found for s in d[2]} != hit:
            return f"{level} names others: {found}"
    return None


# -- running ------------------------------------------------------------------------------------


def run(world: Path, trials: list[Trial], scratch: Path, tally: Tally) -> None:
    """Trials of one world in child processes; one that dies is a failure, the rest go on."""
    todo = trials
    while todo:
        batch, todo = todo[:_BATCH], todo[_BATCH:]
        left = batch
        while left:
            done = _child(world, left, scratch, tally)
            if done < len(left):
                tally.crashes += 1
                dead = left[done]
                tally.flips += len(dead["faults"])
                tally.wrong.append(f"the process died of {dead['kind']} {dead['faults']}")
                done += 1
            left = left[done:]


def _child(world: Path, trials: list[Trial], scratch: Path, tally: Tally) -> int:
    """How many of the trials were done before the process ended."""
    scratch.mkdir(exist_ok=True)
    listed = scratch / "trials.json"
    listed.write_text(json.dumps(trials))
    command = [sys.executable, "-m", "tests.faults.fliptrial", world, listed, scratch / "world"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=_ROOT) as child:
        assert child.stdout is not None
        done = 0
        for line in child.stdout:
            found = json.loads(line)
            if "seen" in found:
                judge(trials[done], found["seen"], tally)
                done += 1
    return done


def all_trials(
    rng: random.Random, folder: Path, count: int, journals: int, kinds: Kinds
) -> Iterator[tuple[Path, list[Trial]]]:
    """Worlds and what to do to them."""
    for k, (dtype, codec) in enumerate(kinds):
        world, staged = folder / f"{dtype}-{codec}", folder / f"{dtype}-{codec}-staged"
        found = flipworld.extents(flipworld.make(world, dtype, codec))
        flipworld.make_staged(staged, dtype, codec)
        share = _share(count, k, len(kinds))
        some = max(1, _share(count // 8, k, len(kinds)))
        lake = [
            *payload_trials(rng, found, share),
            *precise_trials(rng, found, max(1, some // 8)),
            *object_trials(rng, world, max(1, some // 14)),
        ]
        stage = list(
            staging_trials(rng, staged, max(1, some // 14), _share(journals, k, len(kinds)))
        )
        for where, of, trials in (("lake", world, lake), ("staging", staged, stage)):
            for n, trial in enumerate(trials):
                trial.update(id=n, where=where, world=of.name, again=n % 4 == 0)
            yield of, trials


def _share(count: int, k: int, of: int) -> int:
    return count // of + (k < count % of)


def flips(
    count: int, journals: int, seed: int, folder: Path, jobs: int = 2, kinds: Kinds = KINDS
) -> Tally:
    """Run all of it in worlds made below `folder`."""
    rng, tally = random.Random(seed), Tally()

    def work(item: tuple[int, tuple[Path, list[Trial]]]) -> Tally:
        number, (world, trials) = item
        mine = Tally()
        run(world, trials, folder / f"scratch-{number}", mine)
        return mine

    worlds = list(all_trials(rng, folder, count, journals, kinds))
    # The long ones in halves, so that all processes end at about the same time.
    items = [(w, t[i::jobs]) for w, t in worlds for i in range(jobs)]
    with ThreadPoolExecutor(jobs) as pool:
        for k, mine in enumerate(pool.map(work, enumerate(items))):
            print(f"{k + 1} of {len(items)}: {mine.counts()}", file=sys.stderr, flush=True)
            tally.flips += mine.flips
            tally.crashes += mine.crashes
            tally.wrong += mine.wrong
            for name in ("by_kind", "levels", "harmless"):
                getattr(tally, name).update(getattr(mine, name))
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=2000, help="flips in payload")
    parser.add_argument("--journals", type=int, default=500, help="flips in journals")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--scratch", type=Path, help="folder for the worlds")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
        tally = flips(args.count, args.journals, args.seed, Path(folder), args.jobs)
    counts = {**tally.counts(), "seed": args.seed, "seconds": round(time.monotonic() - begun)}
    print(json.dumps(counts, indent=1))
    record(args.out, "flips", counts)
    return bool(tally.wrong)


if __name__ == "__main__":
    sys.exit(main())
