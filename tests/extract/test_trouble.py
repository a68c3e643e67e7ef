"""Stores that fail meanwhile, the run log, several drivers, and drivers that are killed."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import hslake
from hslake import query
from hslake.errors import Conflict, Corrupt, InvalidInput, Unavailable
from hslake.extract import ExtractOptions, extract_async, look, run
from hslake.runlog import RunLog
from tests.extract.world import FAST, World, wait_until


def failing(monkeypatch: pytest.MonkeyPatch, errors: list[Exception], after: int) -> list[int]:
    """The lake opens `after` times (for the server, the run and its first look), then raises each
    of `errors` once."""
    opened = [0]
    real = hslake.open

    def flaky(url: str) -> Any:
        opened[0] += 1
        if opened[0] > after and errors:
            raise errors.pop(0)
        return real(url)

    monkeypatch.setattr(run.hslake, "open", flaky)
    return opened


def test_what_may_mend_between_passes_is_waited_for(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    errors = [Unavailable("the store is down"), Conflict("again"), OSError(5, "I/O error")]
    failing(monkeypatch, errors, after=3)
    monkeypatch.setattr(look, "_PAUSE_MAX_S", 0.1)
    with world.serve(part_tokens=16_384) as server:
        report = world.extract(server)
        assert report.complete and report.captured == 60 and not errors
        assert set(server.captured.values()) == {1}
    said = [r.getMessage() for r in caplog.records]
    assert any(s.startswith("the store is down; tried again") for s in said)
    world.check_lake()


def test_patience_with_a_store_ends(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, [Unavailable("the store is down")] * 1000, after=3)
    monkeypatch.setattr(look, "_PAUSE_MAX_S", 0.1)
    with world.serve(part_tokens=16_384) as server:
        with pytest.raises(Unavailable, match="the store is down"):
            world.extract(server, limits=replace(FAST, patience=0.5))
    monkeypatch.undo()
    (run,) = query.run(world.made.lake, "select * from runs").to_pylist()
    assert run["outcome"] == "failed" and "the store is down" in run["reason"]


def test_at_the_start_a_store_that_fails_is_an_error_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, [Unavailable("wrong key")], after=1)
    with world.serve(part_tokens=16_384) as server, pytest.raises(Unavailable, match="wrong key"):
        world.extract(server)


def test_damage_ends_the_run(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, [Corrupt("a log entry is torn")], after=3)
    with world.serve(part_tokens=16_384) as server, pytest.raises(Corrupt, match="torn"):
        world.extract(server)


def test_ctrl_c_while_the_store_fails(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = failing(monkeypatch, [Unavailable("the store is down")] * 1000, after=3)
    with world.serve(part_tokens=16_384) as server:

        def interrupt() -> None:
            wait_until(lambda: opened[0] > 4)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt).start()
        report = world.extract(server)
        assert report.interrupted and "interrupted while the store is down" in report.message


# -- the run log --------------------------------------------------------------------------------


def test_the_run_log_tells_a_run(world: World) -> None:
    with world.serve(part_tokens=16_384) as server:
        world.extract(server, where="source = 'A1'")
        (run,) = query.run(world.made.lake, "select * from runs").to_pylist()
        assert run["outcome"] == "complete" and run["reason"].startswith("complete: all 20 ")
        assert (run["planned"], run["missing"], run["captured"]) == (20, 0, 20)
        assert json.loads(run["options"])["where"] == "source = 'A1'"
        (told,) = json.loads(run["servers"])
        assert told["url"] == server.url and told["captured"] == 20


def test_a_run_log_that_cannot_be_written_ends_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self: RunLog) -> None:
        raise RuntimeError("no permission")

    monkeypatch.setattr(RunLog, "flush", broken)
    with world.serve(part_tokens=16_384) as server:
        assert world.extract(server).complete
    told = [r.getMessage() for r in caplog.records if "run log" in r.getMessage()]
    assert len(told) == 1 and "no permission" in told[0]


# -- several drivers, and killed ones ------------------------------------------------------------


async def test_two_drivers_at_once(
    world: World, compacting: Callable[[World], Callable[[], None]]
) -> None:
    stop = compacting(world)
    options = ExtractOptions(limits=FAST, until_complete=True)
    with world.serve(part_tokens=4096, delay=0.01, idle_s=0.2) as server:
        reports = await asyncio.gather(
            *(extract_async(world.url, [server.url], options) for _ in range(2))
        )
        assert all(r.complete and r.committed == 60 for r in reports)
    await asyncio.to_thread(stop)
    await asyncio.to_thread(world.check_lake)


def start(world: World, url: str) -> subprocess.Popen[str]:
    command = ["extract", world.url, "--server", url, "--concurrency", "4", "--json"]
    return subprocess.Popen(
        [sys.executable, "-c", "from hslake.cli import main; main()", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(hslake.__file__).parents[1])},
    )


def test_a_driver_that_is_killed_is_gone_on_with(world: World) -> None:
    with world.serve(part_tokens=16_384, delay=0.05) as server:
        first = start(world, server.url)
        try:
            wait_until(lambda: len(server.captured) >= 10, 60)
        finally:
            first.kill()
            first.communicate()
        wait_until(lambda: not server._open)  # what is on its way is computed all the same
        before = sum(server.captured.values())
        assert 10 <= before < 60
        out, _ = start(world, server.url).communicate(timeout=120)
        report = json.loads(out)
        assert report["complete"] and report["captured"] == 60 - before
        assert set(server.captured.values()) == {1}
    world.check_lake()


def test_sigterm_ends_in_order(world: World) -> None:
    with world.serve(part_tokens=16_384, delay=0.05) as server:
        run = start(world, server.url)
        try:
            wait_until(lambda: len(server.captured) >= 10, 60)
        finally:
            run.terminate()
        out, _ = run.communicate(timeout=60)
        assert run.returncode == 130 and json.loads(out)["interrupted"]
        (told,) = query.run(world.made.lake, "select outcome from runs").to_pylist()
        assert told["outcome"] == "interrupted"


def test_options_are_checked() -> None:
    with pytest.raises(InvalidInput, match="--limit"):
        ExtractOptions(limit=0)
