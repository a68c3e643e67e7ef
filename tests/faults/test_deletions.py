"""A small count of `python -m tests.faults.deletions`."""

from pathlib import Path

from tests.faults.deletions import trial


def test_a_few_kills(tmp_path: Path) -> None:
    found = trial(tmp_path, 3, seed=1)
    assert found["kills"] == 3 and found["deleted"] > 0
    assert [found[k] for k in ("lost", "duplicated", "torn", "left")] == [0, 0, 0, 0]
