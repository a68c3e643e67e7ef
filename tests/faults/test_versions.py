"""A small count of `python -m tests.faults.versions`."""

from pathlib import Path

from tests.faults.versions import trial


def test_a_few_versions(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("tests.faults.versions.TOGETHER", 3)
    found = trial(tmp_path, 66, 4, races=1, seed=1)
    assert found["versions"] == 68 and found["pins"] == 4 + 5
    assert (found["lost"], found["duplicated"], found["wrong"]) == (0, 0, 0)
    assert found["vacuumed"] >= 1 and found["told_gone"] >= 1 and found["reads_beside"] > 0
