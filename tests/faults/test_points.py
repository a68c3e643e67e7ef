"""A crash at some of the points of `tests.faults.points`; the command kills at all of them."""

import pytest

from tests.faults import points
from tests.faults.scenarios import SCENARIOS

AT = {
    "writer": (
        "birth: rename stagingN/ID",
        "make: rename stagingN/ID/part-N/journal",
        "write: rows in place",
        "write: frame bytes payload, half",
        "seal: rename stagingN/ID/part-N/manifest.arrow",
        "recycle: remove stagingN/ID/part-N/journal",
        "recycle: rename stagingN/ID/part-N",
    ),
    "compactor": (
        "upload: fsync segments/ID/hidden_states/c/N/N/.N.X.tmp",
        "upload: rename segments/ID/inventory.json",
        "commit: before the entry of manifest",
        "commit: after the entry of manifest",
        "free: utime stagingN/ID/part-N/DONE",
        "remove: rename stagingN/.ID.gone",
    ),
    "vacuum": (
        "vacuum commit: after the entry of manifest",
        "vacuum: remove segments/ID/inventory.json",
    ),
    "plan": ("plan commit: after the entry of plan",),
}


CASES = [(scenario, step, 1) for scenario, some in AT.items() for step in some]
CASES.append(("writer", "write: frame bytes magic, none", 10))  # a sample's end, or its event


@pytest.mark.parametrize(("scenario", "step", "nth"), CASES)
def test_nothing_is_lost_repeated_or_torn_by_a_crash(tmp_path, scenario, step, nth):
    found = points.run(SCENARIOS[scenario], tmp_path / "run", kill_at=(step, nth))
    assert found.killed and found.steps[-1] == step
    assert found.verdict.ok, found.verdict


def test_a_commit_whose_answer_was_lost_is_not_made_again(tmp_path):
    found = points.run(SCENARIOS["compactor"], tmp_path / "run", lost_answers=True)
    assert "commit: after the entry of manifest" in found.steps and not found.killed
    assert found.verdict.ok, found.verdict


@pytest.mark.parametrize("call", ["write", "unlink"])
def test_death_while_delta_writes_its_log_entry(tmp_path, call):
    found = points.run(SCENARIOS["compactor"], tmp_path / "run", native=(call, 1))
    if not found.usable:
        pytest.skip("no seccomp on this machine")
    assert found.killed
    assert found.verdict.ok, found.verdict


def test_a_point_that_nobody_reaches_fails_the_run():
    tally = points.Tally()
    assert set(points.NAMED) <= set(tally.missing())
    tally.reached.update(points.NAMED)
    assert tally.missing() == []
