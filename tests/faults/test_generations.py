"""A new generation of the plan over committed samples: replaced whole, once, whoever dies."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hslake import query
from hslake.compact import compact
from hslake.compactreport import CompactReport
from hslake.picks import Pick, plan_rows
from hslake.staging.reader import read_part, scan
from tests.faults.actors import Actor, instruments
from tests.faults.generations import LAST, SHOUT, judge, kill_at, make, replan
from tests.faults.publish import publish
from tests.lakes import MadeLake, Truth


def picks(made: MadeLake, plan: dict[str, Any]) -> list[list[Pick]]:
    """What each writer in staging holds, beside rows of the plan."""
    found = []
    for writer in sorted(scan(made.staging), key=lambda w: w.path.stat().st_mtime_ns):
        (path,) = writer.parts
        part = read_part(path, dead=True)
        found.append([Pick(part, r, plan[r.sample_id]) for r in part.reserved])
    return found


def test_a_capture_of_the_new_generation_takes_the_place(tmp_path: Path) -> None:
    made = make(tmp_path)
    old, before = dict(made.samples), made.lake
    new = replan(made, SHOUT)
    assert query.run(made.url, "select count(*) n from invalidated").to_pylist() == [{"n": 4}]
    row = query.run(made.url, "coverage").to_pylist()[0]
    assert (row["planned"], row["committed"], row["missing"]) == (4, 0, 4)
    assert judge(made, old).other == ["4 samples are invalidated"]  # and intact
    made.stage(sorted(made.samples), chunk=8)
    report = compact(made.url, [made.staging])
    assert (report.samples, report.replaced, report.duplicates) == (4, 4, 0)
    assert judge(made, new).ok
    assert query.run(made.url, "coverage").to_pylist()[0]["missing"] == 0
    assert before.read("s1").input_ids.tolist() == old["s1"].input_ids  # as pinned runs do
    again = compact(made.url, [made.staging])
    assert (again.samples, again.abandoned) == (0, {})


@pytest.mark.parametrize("options", [SHOUT, LAST], ids=["tokens", "mask"])
def test_states_of_the_old_generation_do_not_enter_as_the_new(tmp_path: Path, options) -> None:
    made = make(tmp_path)
    old = dict(made.samples)
    made.stage(sorted(made.samples), chunk=8)  # once more, and not compacted before
    states = dict(made.samples)
    new = replan(made, options)
    report = compact(made.url, [made.staging])
    assert report.damage == []
    if options is SHOUT:
        assert report.samples == 0
        assert report.abandoned == {"of a former generation of the plan": 4}
        assert judge(made, old).torn == []
    else:  # the same tokens: the states are right, and the mask is the new one's
        assert report.replaced == 4
        for name, truth in states.items():
            new[name] = type(truth)(truth.states, truth.input_ids, new[name].loss_mask, "A1",
                                    truth.split)  # fmt: skip
        assert judge(made, new).ok


def test_the_old_template_back_needs_no_capture(tmp_path: Path) -> None:
    made = make(tmp_path)
    old = dict(made.samples)
    replan(made, SHOUT)
    made.stage(sorted(made.samples), chunk=8)
    replan(made, {})
    assert query.run(made.url, "select * from invalidated").num_rows == 0
    assert query.run(made.url, "coverage").to_pylist()[0]["missing"] == 0
    report = compact(made.url, [made.staging])
    assert report.samples == 0 and report.damage == []
    assert judge(made, old).ok


@pytest.fixture(scope="module")
def raced(tmp_path_factory: pytest.TempPathFactory) -> tuple[MadeLake, Any, dict[str, Truth]]:
    """A lake with captures of both generations in staging and nothing committed; the rows of the
    plan that the first one was captured for, and the truth of the second."""
    made = make(tmp_path_factory.mktemp("raced"), 2, committed=False)
    made.stage(sorted(made.samples), chunk=8)
    plan = plan_rows(made.lake, set(made.samples), set())
    new = replan(made, SHOUT)
    made.stage(sorted(made.samples), chunk=8)
    return made, plan, new


@pytest.mark.parametrize("first", ["new", "old"])
def test_two_compactors_at_every_step(tmp_path: Path, raced, first: str) -> None:
    """One holds captures of the old generation and saw the old plan, or both hold the new one's."""
    template, old_plan, new = raced
    steps, after = 0, None
    while after != 0:
        folder = tmp_path / str(steps)
        shutil.copytree(template.staging.parent, folder)
        made = replace(template, url=str(folder / "lake"), staging=folder / "staging")
        lake = made.lake
        olds = picks(made, old_plan)[0]
        news = picks(made, plan_rows(lake, set(made.samples), set()))[1]
        with instruments():
            actor = Actor(lambda: publish(lake, olds if first == "old" else news, CompactReport()))  # noqa: B023
            for _ in range(steps):
                actor.step()
            publish(lake, news, CompactReport())
            after = 0
            while actor.at is not None:
                actor.step()
                after += 1
        assert actor.error is None
        verdict = judge(made, new)
        assert verdict.ok, (steps, verdict)
        steps += 1
    assert steps > 7


@pytest.mark.parametrize("step", ["commit: before the entry of manifest", 60])
def test_a_kill_before_a_step(tmp_path: Path, step) -> None:
    _, killed = kill_at(tmp_path / "run", (step, 1) if isinstance(step, str) else step, SHOUT)
    assert killed


def test_queries_say_what_a_generation_invalidated(tmp_path: Path) -> None:
    made = make(tmp_path)
    replan(made, SHOUT)
    one = {"s0", "s1"}
    made.stage(sorted(one), chunk=8)
    compact(made.url, [made.staging])
    (row,) = query.run(made.url, "generations").to_pylist()
    counts = {k: row[k] for k in ("generation", "planned", "committed", "invalidated")}
    assert counts == {"generation": 2, "planned": 4, "committed": 2, "invalidated": 2}
    left = query.run(made.url, "select * from invalidated order by sample_id").to_pylist()
    assert [(r["sample_id"], r["generation"], r["planned_generation"]) for r in left] == [
        ("s2", 1, 2), ("s3", 1, 2)]  # fmt: skip
    # Cut in another way, they are not planned any more, and in the lake until they are deleted.
    replan(made, {"max_length": 9, "over_long": "split"} | LAST)
    rows = query.run(made.url, "generations").to_pylist()
    assert rows[-1]["generation"] is None and rows[-1]["invalidated"] == 4
    assert all(r["failures"] == 0 for r in query.run(made.url, "integrity").to_pylist()
               if r["check"] != "not in the plan")  # fmt: skip
