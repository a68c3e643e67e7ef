"""`--until-complete`: a run that stays until all is committed."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hslake.compact import compact
from hslake.errors import Missing
from hslake.extract.run import Run
from hslake.ids import RequestId
from hslake.staging import read_part, scan
from tests.extract.world import FAST, World, make_world, wait_until

Compacting = Callable[[World], Callable[[], None]]


def test_it_ends_when_all_is_committed(world: World, compacting: Compacting) -> None:
    with world.serve(part_tokens=2048, idle_s=0.2) as server:
        compacting(world)
        report = world.extract(server, until_complete=True)
        assert report.complete and report.passed and report.waiting == 0
        assert report.message == "complete: all 60 planned samples are committed (60 committed)"
        assert world.extract(server, until_complete=True).complete  # nothing to do
    world.check_lake()


def test_it_does_not_sleep_when_all_is_committed(
    world: World, compacting: Compacting, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []

    async def sleep(run: Run, seconds: float) -> None:
        slept.append(seconds)
        await asyncio.sleep(0.05)

    monkeypatch.setattr(Run, "_sleep", sleep)
    with world.serve(part_tokens=2048, idle_s=0.2) as server:
        compacting(world)
        limits = replace(FAST, backoff_max=500.0)  # what failed would be left alone for as long
        assert world.extract(server, until_complete=True, limits=limits).complete
    assert max(slept, default=0.0) < 30


def test_it_waits_for_a_server_that_is_still_starting(
    world: World, compacting: Compacting, caplog: pytest.LogCaptureFixture
) -> None:
    with world.serve(part_tokens=2048, idle_s=0.2) as server:
        server.stop()
        with pytest.raises(Missing, match="no server answers"):
            world.extract(server)
        compacting(world)

        def start_late() -> None:
            wait_until(lambda: "waiting for a server" in caplog.text)
            server.start()

        threading.Thread(target=start_late).start()
        assert world.extract(server, until_complete=True).complete
    assert caplog.text.count("waiting for a server") == 1


def test_without_a_compactor_patience_ends(world: World) -> None:
    with world.serve(part_tokens=16_384) as server:
        report = world.extract(server, until_complete=True, limits=replace(FAST, patience=0.5))
        assert not report.complete and not report.passed and report.waiting == 60
        assert report.message.startswith("incomplete: 60 captured samples are not committed: ")
        assert "nothing was committed for " in report.message
        assert f"run `hslake compact {world.url} --staging DIR --watch`" in report.message


def test_ctrl_c_while_it_waits(world: World) -> None:
    with world.serve(part_tokens=16_384) as server:

        def interrupt() -> None:
            wait_until(lambda: len(server.captured) == 60)
            threading.Event().wait(0.5)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt).start()
        report = world.extract(server, until_complete=True)
        assert report.interrupted and not report.passed
        assert report.message.startswith("interrupted: 60 captured samples are not committed")


def test_what_the_compactor_gives_up_is_asked_for_again(tmp_path: Path) -> None:
    world = make_world(tmp_path, [100, 100, 100])
    with world.serve(part_tokens=100, max_parts=4, idle_s=0.2) as server:

        def damage_and_compact() -> None:
            wait_until(lambda: len(server.captured) == 3)
            sealed = [p for p in scan(world.staging)[0].parts if read_part(p).sealed]
            chunk = sealed[0] / "hidden_states/c/1/0/0"
            data = bytearray(chunk.read_bytes())
            data[5] ^= 4
            chunk.write_bytes(data)
            over = threading.Event()
            stop = threading.Timer(60, over.set)
            stop.start()
            compact(
                world.url,
                [world.staging],
                watch=True,
                stop=lambda: done.is_set() or over.is_set(),
                interval_s=0.05,
            )
            stop.cancel()

        done = threading.Event()
        thread = threading.Thread(target=damage_and_compact)
        thread.start()
        try:
            report = world.extract(server, until_complete=True)
        finally:
            done.set()
            thread.join(60)
        assert report.complete and report.committed == 3 and report.captured == 4
        assert sorted(server.captured.values()) == [1, 1, 2]
    world.check_lake()


def test_what_failed_is_asked_for_again(world: World, compacting: Compacting) -> None:
    bad = world.names[3]

    def script(rid: RequestId, nth: int) -> str:
        return "error" if rid.sample_id == bad and nth < 5 else "ok"

    with world.serve(part_tokens=2048, idle_s=0.2, script=script) as server:
        compacting(world)
        limits = replace(FAST, tries=2)
        report = world.extract(server, until_complete=True, limits=limits)
        assert report.complete and report.committed == 60
        assert sum(r.sample_id == bad for r in server.requests) == 6


def test_what_always_fails_ends_it_when_patience_does(world: World, compacting: Compacting) -> None:
    bad = world.names[3]
    script = lambda rid, nth: "error" if rid.sample_id == bad else "ok"  # noqa: E731
    with world.serve(part_tokens=2048, idle_s=0.2, script=script) as server:
        compacting(world)
        limits = replace(FAST, tries=2, patience=1.5)
        report = world.extract(server, until_complete=True, limits=limits)
        assert not report.passed and report.committed == 59
        assert list(report.missing) == ["failed 2 times, last: HTTP 500: CUDA error"]
