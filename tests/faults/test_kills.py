"""A few of the random kills of `tests.faults.kills`."""

import pytest

from tests.faults.kills import episode


@pytest.mark.parametrize("hosts", [1, 2])
def test_random_kills_lose_repeat_and_tear_nothing(tmp_path, hosts):
    done = episode(tmp_path, 12, seed=hosts, hosts=hosts)
    assert done.kills.total() >= 12 and done.at_step
    assert done.died == []  # of anything but our kills
    assert done.verdict.ok, done.verdict
