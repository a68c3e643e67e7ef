"""A few of the kills of `tests.faults.extraction`."""

from pathlib import Path

from tests.faults.extraction import episode


def test_a_few_kills_lose_repeat_and_tear_nothing(tmp_path: Path) -> None:
    done = episode(tmp_path, 3, seed=4, each=60)
    assert done.kills.total() >= 3
    assert done.wrong == []
    assert done.found.planned and done.found.live == done.found.planned
    assert done.found.ok, done.found.examples()
