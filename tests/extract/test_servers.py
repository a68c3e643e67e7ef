"""Servers that share the work, die, come back, or are wrong."""

import asyncio
import os
import signal
import threading
import time
from dataclasses import replace

import pytest
from aiohttp import web

from hslake.errors import CheckFailed, InvalidInput, Missing
from hslake.extract import ExtractOptions, extract
from hslake.ids import RequestId
from tests.extract.world import FAST, World, wait_until


def test_two_servers_share_the_work(world: World) -> None:
    with world.serve(part_tokens=8192, delay=0.01) as a:
        with world.serve(part_tokens=8192, delay=0.01) as b:
            report = world.extract(a, b)
            assert report.complete
            assert sum((a.captured + b.captured).values()) == 60
            assert min(len(a.requests), len(b.requests)) >= 10
            assert [s.captured for s in report.servers] == [len(a.captured), len(b.captured)]
    world.check_lake()


def test_a_dead_server_is_set_aside_and_comes_back(world: World) -> None:
    with world.serve(part_tokens=8192, delay=0.03) as server:

        def kill() -> None:
            wait_until(lambda: len(server.captured) >= 10)
            server.die()
            time.sleep(0.3)
            server.start()

        killer = threading.Thread(target=kill)
        killer.start()
        report = world.extract(server)
        killer.join()
        assert report.servers[0].outages == 1 and server.lives == 2
        # The new process shows what the old one left: nothing is asked for twice.
        assert report.complete and report.captured == report.waiting == 60
    world.check_lake()


def test_a_server_that_never_answers_is_told_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    with world.serve(part_tokens=8192, delay=0.05) as server:
        nobody = "http://127.0.0.1:9"
        report = extract(world.url, [server.url, nobody], ExtractOptions(limits=FAST))
    assert report.complete
    told = [r.getMessage() for r in caplog.records if r.getMessage().startswith("not used until")]
    assert len(told) == 1 and nobody in told[0]


def test_the_other_server_takes_over(world: World) -> None:
    dead = threading.Event()

    def kill() -> None:
        wait_until(lambda: len(a.requests) >= 4)
        a.die()
        dead.set()

    def after_the_death(rid: RequestId, nth: int) -> str:
        assert dead.wait(20)  # or b might do all the work before a gets any
        return "ok"

    with (
        world.serve(part_tokens=8192, delay=0.03) as a,
        world.serve(part_tokens=8192, script=after_the_death) as b,
    ):
        killer = threading.Thread(target=kill)
        killer.start()
        report = world.extract(a, b)
        killer.join()
        # Whether a was set aside before b had done the rest is a matter of milliseconds.
        # So is whether a is still seen, or what it captured is unconfirmed.
        assert not report.missing and report.servers[1].state == "up"
        assert report.servers[0].captured + report.servers[1].captured == 60
        assert report.servers[1].captured >= 56
    world.check_lake()


def test_all_servers_gone_for_good(world: World) -> None:
    with world.serve(part_tokens=8192, delay=0.03) as server:
        threading.Thread(
            target=lambda: (wait_until(lambda: len(server.captured) >= 5), server.die())
        ).start()
        report = world.extract(server, limits=replace(FAST, patience=0.5))
        assert not report.passed and "no server answers" in report.message
        # Its staging is still there: with it, only the rest is asked for.
        with world.serve(part_tokens=8192) as fresh:
            more = world.extract(fresh, staging=(world.staging,))
            assert more.complete and len(fresh.requests) == 60 - len(server.captured)
    world.check_lake()


def test_a_server_whose_hook_fails_is_set_aside(world: World) -> None:
    with world.serve(part_tokens=8192, delay=0.02) as a, world.serve(part_tokens=8192) as b:
        threading.Thread(
            target=lambda: (wait_until(lambda: len(a.captured) >= 4), a.disarm("it broke"))
        ).start()
        report = world.extract(a, b)
        assert report.complete and "it broke" in report.servers[0].state
    world.check_lake()


def test_a_server_too_busy_to_answer_was_asked(world: World) -> None:
    server = world.serve(part_tokens=8192)

    async def busy(request: object) -> web.Response:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        await asyncio.sleep(30)
        return web.Response()

    server._info = busy  # type: ignore[method-assign]
    with server:
        report = world.extract(server)
    assert report.interrupted and report.servers[0].state == f"{server.url} has not answered yet"


def test_no_server_and_wrong_servers(world: World) -> None:
    with pytest.raises(Missing, match="no server answers"):
        extract(world.url, ["http://127.0.0.1:9"])
    with pytest.raises(InvalidInput, match="expected an address"):
        extract(world.url, ["localhost"])
    with pytest.raises(InvalidInput, match="no server given"):
        extract(world.url, [])
    with world.serve() as server:
        server.status_lake_id = "0" * 32
        with pytest.raises(InvalidInput, match="it captures for lake 0000"):
            world.extract(server)
        server.status_lake_id = None
        server.disarm("no final norm found")
        with pytest.raises(CheckFailed, match="not armed: no final norm found"):
            world.extract(server)
        assert server.requests == []
