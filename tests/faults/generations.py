"""Samples of which the plan begins a new generation while the old ones are in the lake: compactors
killed before every step, and two of them at once: `python -m tests.faults.generations`."""

import argparse
import json
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import hslake
from hslake import query
from hslake.compact import compact
from hslake.errors import HslakeError
from hslake.plan import plan_files
from hslake.verify import verify
from tests.faults import children
from tests.faults.children import Faults, spawn
from tests.lakes import MadeLake, Truth, random_states
from tests.planlakes import planned, write
from tests.test_plantext import CHAT, PLAIN, save

SHOUT = {"template_args": {"shout": True}}
LAST = {"last_turn_only": True}
_TOKENS = 60  # of a segment: several commits


def make(folder: Path, count: int = 4, committed: bool = True) -> MadeLake:
    """A lake whose samples were planned from conversations, and captured and committed so."""
    folder.mkdir(parents=True, exist_ok=True)
    lake = hslake.create(
        folder / "lake", streams=[2, "final"], hidden_size=8, num_layers=4, name="generations"
    )
    made = MadeLake(lake.url, folder / "staging", random_states(2, 8, "bfloat16"))
    made.staging.mkdir()
    save(folder / "model", "{% if shout %}how {% endif %}" + PLAIN)
    write(folder / "chats.jsonl", *({
        "sample_id": f"s{i}", "messages": [*CHAT, {"role": "user", "content": "you " * i},
                                           {"role": "assistant", "content": "fine"}],
    } for i in range(count)))  # fmt: skip
    replan(made, {})
    if committed:
        made.stage(sorted(made.samples), chunk=8)
        compact(made.url, [made.staging])
    return made


def replan(made: MadeLake, options: dict[str, object], **more: object) -> dict[str, Truth]:
    """Plan the conversations with these options; what is then true of each sample."""
    folder = Path(made.url).parent
    plan_files(made.url, [folder / "chats.jsonl"], "A1", tokenizer=str(folder / "model"),
               **options, **more)  # type: ignore[arg-type]  # fmt: skip
    rng = np.random.default_rng(len(made.samples) + len(options))
    made.samples = {
        name: Truth(made.states(rng, row["length"]), row["input_ids"], row["loss_mask"], "A1",
                    row["split"])
        for name, row in sorted(planned(made.url).items())
    }  # fmt: skip
    return dict(made.samples)


@dataclass
class Verdict:
    """Samples that are `lost`, live more than once (`duplicated`) or not their truth (`torn`)."""

    lost: list[str] = field(default_factory=list)
    duplicated: list[str] = field(default_factory=list)
    torn: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not (self.lost or self.duplicated or self.torn or self.other)


def judge(made: MadeLake, *truths: dict[str, Truth]) -> Verdict:
    """Every sample is live once, bit for bit one of its truths; with one truth, nothing is
    invalidated."""
    found, lake = Verdict(), made.lake
    live = Counter(r[0] for r in lake.sql("select sample_id from samples").fetchall())
    found.lost = sorted(made.samples.keys() - live.keys())
    found.duplicated = sorted(n for n, k in live.items() if k > 1)
    for name in sorted(live):
        try:
            row = lake.read(name)
        except HslakeError as error:
            found.torn.append(f"{name}: {error}")
            continue
        if not any(
            row.input_ids.tolist() == t[name].input_ids
            and row.loss_mask.tolist() == t[name].loss_mask
            and np.array_equal(row.hidden_states.view(np.uint16), t[name].states)
            for t in truths
        ):
            found.torn.append(name)
    left = query.run(lake, "select sample_id from invalidated").num_rows
    if len(truths) == 1 and left:
        found.other.append(f"{left} samples are invalidated")
    found.other += [f"verify: {d.what}" for d in verify(made.url, "full").damage]
    # Nobody sees a version in which a sample is hidden and its new row not there yet.
    for row in query.run(lake, "select commit_version from manifest where op = 'hide'").to_pylist():
        then = hslake.open(made.url, version=row["commit_version"])
        count = then.sql("select count(distinct sample_id) from samples").fetchall()[0][0]
        if count != len(made.samples):
            found.other.append(f"version {row['commit_version']} has {count} samples")
    return found


def kill_at(folder: Path, step: int | None, options: dict[str, object]) -> tuple[list[str], bool]:
    """A compactor that has captures of the new generation dies before a step; then another one
    goes on. (the steps it did, whether it died)."""
    folder.mkdir(parents=True, exist_ok=True)
    made = make(folder)
    old = dict(made.samples)
    new = replan(made, options)
    made.stage(sorted(made.samples), chunk=8)
    trace = folder / "steps"
    faults = Faults((str(folder / "lake"), str(folder)), step, str(trace))
    child = spawn(children.compact_once, faults, made.url, [str(made.staging)], _TOKENS)
    child.join()
    between = judge(made, old, new)
    compact(made.url, [made.staging])
    after = judge(made, new)
    for verdict in (between, after):
        assert verdict.ok, f"step {step}: {verdict}"
    return trace.read_text().splitlines(), child.exitcode == -signal.SIGKILL


def every_step(base: Path, every: int, options: dict[str, object]) -> Iterator[tuple[str, bool]]:
    """(step, whether somebody died there) of each `every`-th step."""
    steps, _ = kill_at(base / "whole", None, options)
    for at in range(1, len(steps) + 1, every):
        folder = base / f"at{at}"
        _, killed = kill_at(folder, at, options)
        shutil.rmtree(folder)
        yield steps[at - 1], killed


def main() -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.generations",
        description=__doc__,
        epilog="example: python -m tests.faults.generations --every 1",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--every", type=int, default=1, help="only each N-th step (default: all)")
    parser.add_argument("--out", type=Path, help="JSON file of the counts")
    options = parser.parse_args()
    kills, bad = 0, []
    base = Path(tempfile.mkdtemp(prefix="hslake-generations-"))
    for name, chosen in (("tokens", SHOUT), ("mask", LAST)):
        (base / name).mkdir()
        try:
            for step, killed in every_step(base / name, options.every, chosen):
                kills += killed
                print(f"{name}: {step}{'' if killed else ' (not reached)'}", flush=True)
        except AssertionError as error:
            bad.append(str(error))
            print(f"BAD {error}", flush=True)
    shutil.rmtree(base)
    counts = {"kills": kills, "bad": bad}
    print(counts)
    if options.out:
        options.out.write_text(json.dumps(counts, indent=1) + "\n")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
