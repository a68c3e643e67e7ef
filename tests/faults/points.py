"""A crash at every externally visible step of hook writer, compactor, vacuum and plan:
`python -m tests.faults.points`.

Each scenario is run once to count its steps, then once for every step with a SIGKILL right before
it; after each the work is taken up again, and the oracle looks at the lake. Named points that were
never reached fail the run.
"""

import argparse
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import hslake
from hslake.compact import compact
from tests.faults.children import Faults
from tests.faults.driver import settle, told
from tests.faults.instruments import UNUSABLE
from tests.faults.results import RESULTS, record
from tests.faults.scenarios import SCENARIOS, Scenario, checkpoint, roots_of
from tests.faults.steps import KillAt
from tests.faults.world import (
    Verdict,
    judge,
)

NATIVE = (
    *(("compactor", call, 1) for call in ("create", "write", "link", "unlink")),
    *(("compactor", call, 2) for call in ("link", "unlink")),
    ("checkpoint", "rename", 2),  # the second entry of that scenario is followed by a checkpoint
)
"""(scenario, kind of system call, n): deaths inside Delta's own writing of the n-th log entry."""


def _native(scenario: str, call: str, nth: int) -> str:
    return f"commit: system call {call} of entry {nth}, {scenario}"


_PHASES = (
    *("birth", "make", "reserve", "write", "seal", "recycle", "status"),
    *("take", "encode", "upload", "commit", "free", "remove", "vacuum"),
)
NAMED = (
    "birth: mkdir stagingN/.ID.new",
    "birth: lockf stagingN/.ID.new/lock",
    "birth: rename stagingN/ID",
    "birth: fallocate stagingN/ID/events",
    "make: lockf stagingN/.room",
    "make: mkdir stagingN/ID/part-N",
    "make: fallocate stagingN/ID/part-N/hidden_states/c/N/N/N",
    "make: rename stagingN/ID/part-N/journal",
    "reserve: frame bytes payload, half",
    "reserve: frame bytes magic, none",
    "write: rows, half of them",
    "write: rows in place",
    "write: frame bytes header, half",
    "write: frame bytes payload, half",
    "write: frame bytes magic, none",
    "seal: open stagingN/ID/part-N/manifest.arrow.new",
    "seal: rename stagingN/ID/part-N/manifest.arrow",
    "status: rename stagingN/ID/status.json",
    "recycle: lockf stagingN/ID/part-N/read.lock",
    "recycle: remove stagingN/ID/part-N/zarr.json",
    "recycle: remove stagingN/ID/part-N/journal",
    "recycle: remove stagingN/ID/part-N/DONE",
    "recycle: rename stagingN/ID/part-N",
    "recycle: open stagingN/ID/part-N/zarr.json",
    "recycle: rename stagingN/ID/part-N/journal",
    "take: lockf stagingN/ID/compact.lock",
    "take: lockf stagingN/ID/part-N/read.lock",
    "encode: chunk",
    "upload: piece of segments/ID/hidden_states/c/N/N/N",
    "upload: fsync segments/ID/hidden_states/c/N/N/.N.X.tmp",
    "upload: rename segments/ID/hidden_states/c/N/N/N",
    "upload: rename segments/ID/inventory.json",
    "upload: stored segments/ID/inventory.json",
    "commit: rename manifest/part-N-X.parquet",
    "commit: before the entry of manifest",
    "commit: after the entry of manifest",
    "commit: fsync manifest/_delta_log",
    "free: open stagingN/ID/part-N/DONE",
    "free: utime stagingN/ID/part-N/DONE",
    "remove: rename stagingN/.ID.gone",
    "remove: remove stagingN/.ID.gone/lock",
    "remove: rmdir stagingN/.ID.gone",
    "vacuum commit: before the entry of manifest",
    "vacuum commit: after the entry of manifest",
    "vacuum: remove segments/ID/inventory.json",
    "vacuum: remove segments/ID/hidden_states/c/N/N/.N.X.tmp",
    "vacuum: rmdir segments/ID",
    "plan commit: before the entry of plan",
    "plan commit: after the entry of plan",
    *(_native(*each) for each in NATIVE),
)
"""Points at each of which a process must have died; beside them at one of each phase at least."""


@dataclass
class Outcome:
    """One run of a scenario: the steps' names (the last is where it died), whether it was killed,
    and what the oracle says afterwards."""

    steps: list[str]
    killed: bool
    verdict: Verdict
    usable: bool = True


# -- running them ------------------------------------------------------------------------------


def run(
    scenario: Scenario,
    folder: Path,
    *,
    kill_at: KillAt = None,
    lost_answers: bool = False,
    native: tuple[str, int] | None = None,
) -> Outcome:
    """One run under `folder`, which must be new: until the child's death or end, then until
    everything is in the lake, then the oracle."""
    folder.mkdir()
    trace = folder / "steps"
    faults = Faults(roots_of(folder), kill_at, str(trace), lost_answers=lost_answers, native=native)
    world, child, known = scenario(folder, faults)
    steps = trace.read_text().splitlines() if trace.exists() else []
    death = -signal.SIGSYS if native else -signal.SIGKILL
    verdict = Verdict()
    if child.exitcode == UNUSABLE:
        return Outcome(steps, False, verdict, usable=False)
    killed = child.exitcode == death
    if not killed and child.exitcode != 0:
        verdict.other.append(f"the child ended with {child.exitcode}")
    # What was acknowledged needs nobody to ask for it again.
    known |= told(world)
    report = compact(world.url, world.roots)
    live = {r[0] for r in hslake.open(world.url).sql("select sample_id from samples").fetchall()}
    lost = sorted(known - live)
    settle(world)
    found = judge(world)
    found.lost += lost
    found.other += [*verdict.other, *(f"compact: {m}" for m in report.messages())]
    return Outcome(steps, killed, found)


@dataclass
class Tally:
    """What a whole run found. `reached`: named point -> how often a process died there."""

    reached: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    kills: int = 0
    skipped: list[str] = field(default_factory=list)
    bad: list[tuple[str, Verdict]] = field(default_factory=list)

    def take(self, where: str, outcome: Outcome) -> None:
        self.runs += 1
        self.kills += outcome.killed
        if not outcome.verdict.ok:
            self.bad.append((where, outcome.verdict))
            print(f"BAD {where}: {outcome.verdict}", flush=True)

    def missing(self) -> list[str]:
        """Named points and phases at which nobody died."""
        phases = {name.partition(": ")[0] for name in self.reached}
        named = [p for p in NAMED if not self.reached[p] and p not in self.skipped]
        return named + [p for p in _PHASES if p not in phases]


def every_point(
    name: str, folders: Iterator[Path], tally: Tally, *, every: int = 1, lost_answers: bool = False
) -> None:
    """Kill scenario `name` at every step; or at the first of every name that is NAMED, or of every
    name at all if `every` is below 10, and at each `every`-th."""
    what = f"{name}, answers lost" if lost_answers else name
    whole = run(SCENARIOS[name], next(folders), lost_answers=lost_answers)
    tally.take(f"{what}, not killed", whole)
    seen: Counter[str] = Counter()
    for at, step in enumerate(whole.steps):
        seen[step] += 1
        if lost_answers and "commit" not in step:
            continue  # nothing differs there
        if at % every and seen[step] > (step in NAMED or every < 10):
            continue
        kill_at = (step, seen[step])
        outcome = run(SCENARIOS[name], next(folders), kill_at=kill_at, lost_answers=lost_answers)
        tally.take(f"{what}, {step} number {seen[step]}", outcome)
        if outcome.killed:
            tally.reached[step] += 1


def native_points(folders: Iterator[Path], tally: Tally) -> None:
    """Die inside Delta's own writing of a log entry."""
    for name, call, nth in NATIVE:
        outcome = run(
            {**SCENARIOS, "checkpoint": checkpoint}[name], next(folders), native=(call, nth)
        )
        where = _native(name, call, nth)
        if not outcome.usable:
            tally.skipped.append(where)  # no seccomp on this machine
            continue
        # Other threads may have gone on meanwhile: what counts is that the entry was begun.
        begun, ended = (
            sum(s == f"commit: {at} the entry of manifest" for s in outcome.steps)
            for at in ("before", "after")
        )
        if outcome.killed and (begun, ended) == (nth, nth - 1):
            tally.reached[where] += 1
        else:
            outcome.verdict.other.append("it did not die there")
        tally.take(where, outcome)


def fresh_folders(base: Path) -> Iterator[Path]:
    """New folders below `base`, each removed when the next one is asked for."""
    number = 0
    while True:
        number += 1
        folder = base / f"run{number}"
        yield folder
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.points",
        description=__doc__,
        epilog="example: python -m tests.faults.points --every 1",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--every", type=int, default=1, help="only each N-th step (default: all)")
    parser.add_argument("--scenario", choices=sorted(SCENARIOS), action="append")
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON file of the counts")
    options = parser.parse_args()
    tally, began = Tally(), time.monotonic()
    base = Path(tempfile.mkdtemp(prefix="hslake-points-", dir=_in_ram()))
    folders = fresh_folders(base)
    names = options.scenario or list(SCENARIOS)
    for name in names:
        every_point(name, folders, tally, every=options.every)
        if name == "compactor":
            native_points(folders, tally)
            every_point(name, folders, tally, every=options.every, lost_answers=True)
        print(f"{name}: {tally.runs} runs, {time.monotonic() - began:.0f} s", flush=True)
    shutil.rmtree(base, ignore_errors=True)
    for point, count in sorted(tally.reached.items()):
        print(f"{count:5}  {point}")
    for line in tally.skipped:
        print(f"skipped, as there is no seccomp here: {line}")
    missing = [] if options.scenario else tally.missing()
    for point in missing:
        print(f"NEVER REACHED {point}")
    counts = {
        "failpoints": len(tally.reached),
        "kills": tally.kills,
        "runs": tally.runs,
        "lost": sum(len(v.lost) for _, v in tally.bad),
        "duplicated": sum(len(v.duplicated) for _, v in tally.bad),
        "torn": sum(len(v.torn) for _, v in tally.bad),
        "other": sum(len(v.other) for _, v in tally.bad),
        "never_reached": len(missing),
        "seconds": round(time.monotonic() - began),
    }
    print(counts)
    if not options.scenario:
        record(options.out, "points", counts)
    return int(bool(tally.bad or missing))


def _in_ram() -> Path | None:
    ram = Path("/dev/shm")
    return ram if ram.is_dir() else None


if __name__ == "__main__":
    sys.exit(main())
