"""Plain runs: what is captured, asked again, and bounded."""

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hslake.compact import compact
from tests.extract.world import FAST, World, make_world, once, wait_until


def test_captures_everything_once_and_waits_for_the_compactor(world: World) -> None:
    with world.serve(part_tokens=4096, max_parts=4) as server:
        report = world.extract(server)
        assert report.complete and report.passed and report.captured == len(world.names)
        assert report.waiting == len(world.names) and report.committed == 0
        assert report.message.startswith("complete: all 60 planned samples are captured")
        assert set(server.captured.values()) == {1} and len(server.requests) == 60
        assert not server.violations and server.no_space == 0
        assert server.most_open <= FAST.requests
        # Nothing is asked for again while it waits in staging, nor once it is committed.
        assert world.extract(server).captured == 0
        compact(world.url, [world.staging])
        again = world.extract(server)
        assert again.complete and again.committed == 60 and again.waiting == 0
        assert len(server.requests) == 60
    world.check_lake()


def test_drops_and_errors_are_asked_again(world: World) -> None:
    script = once(drop=15, error=15, silent=10, late_error=10, abort=10, refuse=10)
    with world.serve(part_tokens=8192, max_parts=4, script=script) as server:
        report = world.extract(server)
        assert report.complete and report.retried >= 20 and report.dropped >= 3
        assert set(server.captured) == set(world.names)
        # Only a server that fails after capturing is asked twice, unless its event came in time.
        assert set(server.captured.values()) <= {1, 2}
        assert not server.violations
        attempts = [r.attempt for r in server.requests]
        assert len(set(attempts)) == len(attempts)
    world.check_lake()


def test_never_more_than_staging_holds(
    tmp_path: Path, compacting: Callable[[World], Callable[[], None]]
) -> None:
    # 600 rows in all for 2,300 tokens: only the compactor lets it go on.
    world = make_world(tmp_path, [300, 1, 120, 180, 299, 7, 64, 250, 33, 90, 210, 5, 300, 280, 150])
    stop = compacting(world)
    with world.serve(part_tokens=300, max_parts=2, delay=0.005) as server:
        report = world.extract(server, limits=replace(FAST, requests=16))
        assert report.complete, report.message
        assert server.violations == [] and server.no_space == 0
        assert report.retried == 0
    stop()
    world.check_lake()


def test_a_single_part_does_not_stall(
    tmp_path: Path, compacting: Callable[[World], Callable[[], None]]
) -> None:
    # After each of them the rest of the part is too small for the next: only sealing helps.
    world = make_world(tmp_path, [200, 250, 180, 300, 220])
    stop = compacting(world)
    with world.serve(part_tokens=300, max_parts=1, idle_s=0.1) as server:
        report = world.extract(server)
        assert report.complete, report.message
        assert server.violations == [] and server.no_space == 0
    stop()
    world.check_lake()


def test_tokens_in_flight_are_bounded(world: World) -> None:
    with world.serve(part_tokens=16_384, delay=0.02) as server:
        world.extract(server, limits=replace(FAST, requests=64, tokens=600))
        # At most 600 tokens of samples of 150 on average.
        assert 1 < server.most_open <= 30
        assert set(server.captured.values()) == {1}


def test_full_staging_ends_with_the_reason(world: World) -> None:
    with world.serve(part_tokens=400, max_parts=2) as server:
        report = world.extract(server, limits=replace(FAST, patience=0.5))
        assert not report.complete and not report.passed
        todo = f"staging is full: run `hslake compact {world.url} --staging DIR --watch`"
        assert todo in report.message
        assert 0 < report.waiting < 60
        assert sum(report.missing.values()) == 60 - report.waiting
        assert server.violations == []


def test_full_staging_is_told_once_and_also_after_ctrl_c(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    def interrupt() -> None:
        wait_until(lambda: bool(caplog.records))
        time.sleep(2.5)  # longer than the driver's looks at a stall
        os.kill(os.getpid(), signal.SIGINT)

    with world.serve(part_tokens=400, max_parts=2) as server:
        threading.Thread(target=interrupt).start()
        given = {"limits": replace(FAST, stall=0.5), "staging": (world.staging,)}
        report = world.extract(server, **given)
    todo = f"staging is full: run `hslake compact {world.url} --staging {world.staging} --watch`"
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert warning.startswith("nothing captured for ") and warning.endswith(todo)
    assert report.interrupted and list(report.missing) == [f"interrupted while {todo}"]
    assert f"interrupted while {todo}" in report.message
