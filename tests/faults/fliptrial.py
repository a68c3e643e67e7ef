"""One trial: damage a world, look at it in every way there is, say what was seen.

    python -m tests.faults.fliptrial WORLD TRIALS.json SCRATCH

runs in a process of its own, as damage that kills it must not kill the rest. Prints a line of JSON
before ("begin") and after each trial.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hslake
from hslake.compact import compact
from hslake.errors import Corrupt, HslakeError
from hslake.verify import LEVELS, verify
from tests.faults.flipworld import Content, content, copy, load, same
from tests.lakes import MadeLake


@contextmanager
def damaged(folder: Path, faults: list[dict[str, Any]]) -> Iterator[None]:
    """The faults done to files below `folder`, and undone."""
    paths = [f["path"] for f in faults] + [f["with"] for f in faults if "with" in f]
    before = {p: (folder / p).read_bytes() for p in dict.fromkeys(paths)}
    try:
        for fault in faults:
            _do(folder, fault)
        yield
    finally:
        for path, data in before.items():
            (folder / path).unlink(missing_ok=True)
            (folder / path).write_bytes(data)


def _do(folder: Path, fault: dict[str, Any]) -> None:
    path = folder / fault["path"]
    data = bytearray(path.read_bytes())
    kind = fault["fault"]
    if kind == "flip":
        data[fault["bit"] // 8] ^= 1 << fault["bit"] % 8
    elif kind == "truncate":
        del data[fault["at"] :]
    elif kind == "zero":
        data[fault["at"] : fault["end"]] = bytes(fault["end"] - fault["at"])
    elif kind == "extend":
        data += bytes.fromhex(fault["data"])
    elif kind == "swap":
        other = folder / fault["with"]
        path.write_bytes(other.read_bytes())
        other.write_bytes(data)
        return
    elif kind == "swap chunks":
        (a, b), size = fault["at"], fault["size"]
        data[a : a + size], data[b : b + size] = data[b : b + size], data[a : a + size]
    if kind == "delete":
        path.unlink()
    else:
        path.write_bytes(data)


def try_lake(made: MadeLake, folder: Path, trial: dict[str, Any], whole: Content) -> dict[str, Any]:
    """What every level of verify and a read of every sample say of a damaged lake."""
    seen: dict[str, Any] = {"levels": {}, "reads": {}}
    with damaged(folder, trial["faults"]):
        for level in trial.get("levels", LEVELS):
            seen["levels"][level] = _verified(made.url, level)
        try:
            lake = hslake.open(made.url)
        except HslakeError as error:
            seen["open"] = str(error)
            return seen
        for name in made.samples:
            try:
                seen["reads"][name] = "same" if same(made, lake, name) else "WRONG"
            except HslakeError as error:
                seen["reads"][name] = type(error).__name__
                # Missing comes of a damaged manifest, which knows nothing of it.
                if isinstance(error, Corrupt) and name not in str(error):
                    seen["reads"][name] = f"unnamed: {error}"
        if not any("damage" in v for v in seen["levels"].values()):
            try:
                seen["content"] = "same" if content(lake).equals(whole) else "differs"
            except HslakeError as error:
                seen["content"] = str(error)
    return seen


def _verified(url: str, level: str) -> dict[str, Any]:
    """What a level finds; without "damage" when all is well."""
    try:
        report = verify(url, level)
    except HslakeError as error:
        return {"damage": [["", "", [], f"{type(error).__name__}: {error}"]]}
    damage = [[d.segment_id, d.object, list(d.sample_ids), d.what] for d in report.damage]
    return {"warnings": report.warnings} | ({"damage": damage} if damage else {})


def try_staging(world: Path, scratch: Path, trial: dict[str, Any]) -> dict[str, Any]:
    """What a compactor makes of damaged staging; then the samples that it lost are staged again."""
    copy(world, scratch)
    made = load(scratch)
    for fault in trial["faults"]:
        _do(scratch, fault)
    told: list[str] = []
    try:
        report = compact(made.url, [made.staging])
        told += report.messages()
        told += [f"{n} x {why}" for why, n in report.abandoned.items()]
    except HslakeError as error:
        told.append(f"{type(error).__name__}: {error}")
    seen: dict[str, Any] = {"told": told, "wrong": _wrong(made)}
    lake = made.lake
    live = {r[0] for r in lake.sql("select sample_id from samples").fetchall()}
    gaps = {r[0] for r in lake.sql("select p.sample_id from plan p anti join samples s on "
        "s.sample_id = p.sample_id and s.token_hash = p.token_hash").fetchall()}  # fmt: skip
    seen["lost"] = sorted(made.samples.keys() - live)
    seen["asked again"] = gaps == made.samples.keys() - live
    if not trial["again"]:
        return seen
    if seen["lost"]:
        made.staging = scratch / "again"
        made.staging.mkdir()
        made.stage(seen["lost"])
        compact(made.url, [made.staging])
        seen["wrong"] += _wrong(made)
    report = verify(made.url)
    seen["whole again"] = report.ok and report.samples == len(made.samples)
    return seen


def _wrong(made: MadeLake) -> list[str]:
    """Live samples that are not what went in, also in what is told of their capture."""
    lake = made.lake
    rows = lake.sql(
        "select sample_id, engine, engine_version, hook_version, chunk_size, tp from samples"
    ).fetchall()
    wrong = []
    for name, *capture in rows:
        right = capture == ["test", "0", hslake.__version__, 100, 1]
        if not right or not same(made, lake, name):
            wrong.append(name)
    return wrong


def main() -> None:
    world, trials, scratch = (Path(a) for a in sys.argv[1:4])
    todo = json.loads(trials.read_text())
    staged = any(t["where"] == "staging" for t in todo)
    if not staged:
        copy(world, scratch)
        made = load(scratch)
        whole = content(made.lake)
    for trial in todo:
        print(json.dumps({"begin": trial["id"]}), flush=True)
        try:
            if staged:
                seen = try_staging(world, scratch, trial)
            else:
                seen = try_lake(made, scratch, trial, whole)
        except Exception as error:  # not ours: that is what is looked for
            seen = {"error": f"{type(error).__name__}: {error}"[:2000]}
            if os.environ.get("FLIPS_TRACE"):
                import traceback

                traceback.print_exc()
        print(json.dumps({"id": trial["id"], "seen": seen}), flush=True)


if __name__ == "__main__":
    main()
