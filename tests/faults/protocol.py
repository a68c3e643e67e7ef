"""The commit protocol against a model: compactors, quarantines and vacuums in any interleaving,
with crashes, lost answers, refusals and wrong clocks: `python -m tests.faults.protocol`."""

import argparse
import atexit
import functools
import json
import logging
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from hslake import manifest, versions
from hslake.compactreport import CompactReport
from hslake.errors import HslakeError
from hslake.ids import RequestId, new_attempt
from hslake.lake import open_lake
from hslake.picks import Pick, plan_rows
from hslake.segment import inventory
from hslake.staging.reader import read_part, scan
from hslake.tables import catalog
from hslake.verify import hide, verify
from tests.faults.actors import Actor, instruments
from tests.faults.hook import Hook, capture
from tests.faults.publish import publish
from tests.faults.results import RESULTS, record
from tests.faults.world import EVERYTHING, World, copy_world, judge_samples, length_of, make_world

SAMPLES = 3
ATTEMPTS = 2
_DAY = 86_400.0
Seen: Counter[str] = Counter()


@functools.cache
def template() -> World:
    """A lake with `SAMPLES` planned samples, and each of them captured `ATTEMPTS` times."""
    folder = tempfile.mkdtemp(prefix="hslake-protocol-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    world = make_world(Path(folder) / "w", SAMPLES)
    for _ in range(ATTEMPTS):
        hook = Hook(world.roots[0], world.spec, settings={"part_tokens": 2048, "max_parts": 1})
        for name in world.names:
            rid = RequestId(world.spec.lake8, new_attempt(), length_of(name), "A1", name)
            capture(hook, rid)
        hook.finish()
    return world


def captured(world: World) -> list[dict[str, Pick]]:
    """The picks of every attempt, by sample id."""
    plan = plan_rows(open_lake(world.url), set(world.names), set())
    found = []
    for writer in scan(world.roots[0]):
        (path,) = writer.parts
        part = read_part(path, dead=True)
        found.append({r.sample_id: Pick(part, r, plan[r.sample_id]) for r in part.reserved})
    return found


@dataclass
class Model:
    """What the manifest must mean, version by version."""

    version: int = 0
    rows: dict[int, frozenset[tuple[str, str, str]]] = field(default_factory=dict)
    live: dict[str, str] = field(default_factory=dict)  # sample -> its segment
    named: set[str] = field(default_factory=set)
    condemned: set[str] = field(default_factory=set)
    added: set[tuple[str, str]] = field(default_factory=set)  # (sample, segment), ever

    def take(self, version: int, rows: list[tuple[str, str, str]]) -> None:
        """Fold the (op, sample, segment) of one new version in."""
        assert rows and version == self.version + 1, f"version {version} after {self.version}"
        assert len(set(rows)) == len(rows), f"version {version} repeats rows"
        for op, sample, segment in rows:
            if op == "add":
                assert sample not in self.live, f"{sample} is live twice at version {version}"
                assert segment not in self.condemned, f"a condemned segment holds {sample}"
                assert (sample, segment) not in self.added, f"{sample} was added twice"
                self.live[sample] = segment
                self.named.add(segment)
                self.added.add((sample, segment))
            elif op == "hide":
                assert self.live.pop(sample, None) == segment, f"{sample} was not live there"
            else:
                assert op == "condemn" and segment not in self.live.values(), f"{segment} is live"
                self.condemned.add(segment)
        self.version, self.rows[version] = version, frozenset(rows)


class Protocol(RuleBasedStateMachine):
    """Rules start actors, let them do steps, and make things go wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="hslake-protocol-"))
        self.actors: list[Actor] = []
        self.buried: list[Actor] = []
        self.model = Model()
        self._instruments = instruments()

    @initialize()
    def begin(self) -> None:
        self.world = copy_world(template(), self.folder / "w")
        self.attempts = captured(self.world)
        self.lake = open_lake(self.world.url)
        self._instruments.__enter__()

    # -- who comes -----------------------------------------------------------------------------

    def _start(self, work: Any, skew_days: float) -> None:
        self.actors.append(Actor(work, skew_days * _DAY))

    @precondition(lambda self: len(self.actors) < 4)
    @rule(
        names=st.sets(st.integers(0, SAMPLES - 1), min_size=1),
        attempt=st.integers(0, ATTEMPTS - 1),
        stale=st.booleans(),
        skew=st.sampled_from([0.0, 0.0, -100.0, 100.0]),
    )
    def compactor(self, names: set[int], attempt: int, stale: bool, skew: float) -> None:
        """Publishes samples; `stale`: without a look at what is live already."""
        batch = [self.attempts[attempt][self.world.names[i]] for i in sorted(names)]
        url = self.world.url

        def work() -> set[str]:
            lake, report = open_lake(url), CompactReport()
            live = set() if stale else manifest.live_ids(lake.manifest_table())
            left = [p for p in batch if p.row.sample_id not in live]
            if left:
                publish(lake, left, report)
            return {p.row.sample_id for p in left}

        self._start(work, skew)

    @precondition(lambda self: len(self.actors) < 4 and self.model.live)
    @rule(names=st.sets(st.integers(0, SAMPLES - 1), min_size=1))
    def quarantine(self, names: set[int]) -> None:
        """Hides samples where they are live now."""
        chosen = {self.world.names[i] for i in names}
        damaged = {(seg, s): "damaged" for s, seg in self.model.live.items() if s in chosen}
        lake = open_lake(self.world.url)
        if damaged:
            self._start(lambda: hide(lake, damaged), 0.0)

    @precondition(lambda self: len(self.actors) < 4)
    @rule(skew=st.sampled_from([0.0, 100.0]))
    def sweep(self, skew: float) -> None:
        """A vacuum of everything unnamed, whatever its age."""
        url = self.world.url
        self._start(lambda: versions.vacuum(url, retain=timedelta(0)), skew)

    # -- what they do, and what befalls them ---------------------------------------------------

    @precondition(lambda self: len(self.actors) > 1)
    @rule(turns=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), min_size=8, max_size=20))
    def go_on(self, turns: list[tuple[int, int]]) -> None:
        """Several in turn, some steps each."""
        for which, steps in turns:
            if self.actors:
                actor = self.actors[which % len(self.actors)]
                self._steps(actor, steps)
                self._look(actor)

    @precondition(lambda self: len(self.actors) == 4)
    @rule(which=st.integers(0, 3))
    def finish(self, which: int) -> None:
        self._finish(self.actors[which % len(self.actors)])

    @precondition(lambda self: self.actors)
    @rule(which=st.integers(0, 3), what=st.sampled_from(["lost", "refused"]))
    def go_wrong(self, which: int, what: str) -> None:
        """What befalls the next append of one of them."""
        self.actors[which % len(self.actors)].fault = what
        Seen[f"answer {what}"] += 1

    @precondition(lambda self: len(self.actors) > 2)
    @rule(which=st.integers(0, 3), steps=st.integers(0, 30))
    def crash(self, which: int, steps: int) -> None:
        actor = self.actors[which % len(self.actors)]
        self._steps(actor, steps)
        if actor.at is None:
            self._look(actor)
            return
        Seen[f"crash before {actor.at}"] += 1
        actor.crash()
        self.actors.remove(actor)
        self.buried.append(actor)

    def _steps(self, actor: Actor, steps: int) -> None:
        while steps and actor.at is not None:
            Seen[actor.at] += 1
            actor.step()
            steps -= 1

    def _finish(self, actor: Actor) -> None:
        self._steps(actor, 100_000)
        self._look(actor)

    def _look(self, actor: Actor) -> None:
        """What an actor that has ended says must be so."""
        if actor.at is not None:
            return
        self.actors.remove(actor)
        self.buried.append(actor)
        self.manifest_is_the_models()
        if actor.error is not None and not isinstance(actor.error, HslakeError):
            raise actor.error
        if isinstance(actor.result, set):
            ever = {sample for sample, _ in self.model.added}
            assert actor.result <= ever, f"{actor.result - ever} were said to be committed"

    # -- what must hold ------------------------------------------------------------------------

    @invariant()
    def manifest_is_the_models(self) -> None:
        if not hasattr(self, "world"):
            return
        state = catalog.open_table(self.lake.store, "manifest")
        assert state.version >= self.model.version, "versions went back"
        rows: dict[int, list[tuple[str, str, str]]] = {}
        for row in state.arrow(["commit_version", "op", "sample_id", "segment_id"]).to_pylist():
            found = (row["op"], row["sample_id"] or "", row["segment_id"])
            rows.setdefault(row["commit_version"], []).append(found)
        for version, old in self.model.rows.items():
            assert frozenset(rows.get(version, ())) == old, f"version {version} has changed"
        for version in range(self.model.version + 1, state.version + 1):
            self.model.take(version, rows.get(version, []))
        self._objects()

    def _objects(self) -> None:
        """Every segment that is named is there, and no transaction is in the log twice."""
        store = self.lake.store
        for segment in set(self.model.live.values()):
            objects = inventory.load(store, segment)
            problems = inventory.check(store, segment, objects, content=False)
            assert not problems, problems
        ids = [
            action["txn"]["appId"]
            for path in store.local("manifest/_delta_log").glob("*.json")
            for line in path.read_text().splitlines()
            if "txn" in (action := json.loads(line))
        ]
        assert len(ids) == len(set(ids)), "a transaction was committed twice"

    def teardown(self) -> None:
        """Whoever lives comes to an end; then nothing is missing after one more compactor."""
        try:
            if hasattr(self, "world"):
                while self.actors:
                    self._finish(self.actors[0])
                self._settle()
        finally:
            for actor in (*self.actors, *self.buried):
                actor.bury()
            if hasattr(self, "world"):
                self._instruments.__exit__(None, None, None)
            shutil.rmtree(self.folder, ignore_errors=True)

    def _settle(self) -> None:
        self.manifest_is_the_models()
        lake = open_lake(self.world.url)
        for name, pick in self.attempts[0].items():
            if name not in self.model.live:
                publish(lake, [pick], CompactReport())
        versions.vacuum(self.world.url, retain=EVERYTHING)
        self.manifest_is_the_models()
        assert sorted(self.model.live) == sorted(self.world.names)
        torn = judge_samples(self.world)
        assert not torn, torn
        found = verify(self.world.url, "full")
        assert found.ok, found.damage
        assert set(lake.store.folders("segments")) == self.model.named - self.model.condemned
        Seen["lakes"] += 1


def check(examples: int, steps: int = 30, start: int = 0, *, shrink: bool = False) -> None:
    """Run the state machine over `examples` random courses, the same for the same `start`. Raises
    what it finds; with `shrink`, after a search for a shorter course that shows it (minutes)."""
    phases = [Phase.generate, *([Phase.shrink] if shrink else [])]
    run_state_machine_as_test(
        seed(start)(Protocol),
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            phases=phases,
            suppress_health_check=list(HealthCheck),
        ),
    )


def main() -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.protocol",
        description=__doc__,
        epilog="example: python -m tests.faults.protocol --count 300",
    )
    parser.add_argument("--count", type=int, default=300, help="courses (default: 300)")
    parser.add_argument("--steps", type=int, default=30, help="rules of one (default: 30)")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument("--shrink", action="store_true", help="shorten a course that fails")
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON file of the counts")
    options = parser.parse_args()
    logging.disable()  # that segments were written again, as they should be
    began = time.monotonic()
    check(options.count, options.steps, options.seed, shrink=options.shrink)
    for what, count in sorted(Seen.items()):
        print(f"{count:7}  {what}")
    crashes = sum(n for what, n in Seen.items() if what.startswith("crash"))
    counts = {
        "courses": Seen["lakes"],
        "crashes": crashes,
        "answers_lost": Seen["answer lost"],
        "answers_refused": Seen["answer refused"],
        "lost": 0,
        "duplicated": 0,
        "torn": 0,
        "seconds": round(time.monotonic() - began),
    }
    print(counts)
    record(options.out, "protocol", counts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
