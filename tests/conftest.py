"""The order of the modules. With `pytest -n 2` each process takes the next one: the longest first,
or one process works at the last of them for minutes while the other has nothing to do."""

from pathlib import Path

import pytest

# Those that hold the most work.
LONGEST = ("test_s3", "test_stores", "test_points", "test_protocol", "test_kills", "test_servers")
_TURN = {name: turn for turn, name in enumerate(LONGEST)}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _TURN.get(Path(item.path).stem, len(LONGEST)))
