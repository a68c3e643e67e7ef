"""The fixtures of these tests."""

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hslake.compact import compact
from tests.extract.world import World, make_world


@pytest.fixture
def world(tmp_path: Path) -> World:
    rng = random.Random(3)
    return make_world(tmp_path, [rng.randint(1, 300) for _ in range(60)])


@pytest.fixture
def compacting() -> Iterator[Callable[[World], Callable[[], None]]]:
    """Starts a compactor in a thread, as `compact --watch` would be in its process; returns what
    ends it."""
    ends: list[Callable[[], None]] = []

    def start(world: World) -> Callable[[], None]:
        stop = threading.Event()
        thread = threading.Thread(
            target=compact,
            args=(world.url, [world.staging]),
            kwargs={"watch": True, "stop": stop.is_set, "interval_s": 0.05},
        )
        thread.start()

        def end() -> None:
            stop.set()
            thread.join(30)

        ends.append(end)
        return end

    yield start
    for end in ends:
        end()
