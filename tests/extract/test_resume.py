"""Runs that are cut short, and go on."""

import asyncio
import os
import signal
import threading

import pytest

from hslake.extract import ExtractOptions, extract_async
from tests.extract.world import FAST, World, wait_until


async def test_cancelled_and_resumed(world: World) -> None:
    with world.serve(part_tokens=16_384, delay=0.03) as server:
        run = asyncio.create_task(
            extract_async(world.url, [server.url], ExtractOptions(limits=FAST))
        )
        while len(server.captured) < 10:
            await asyncio.sleep(0.01)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        assert server.aborted  # what was on its way is not computed for nobody
        await asyncio.sleep(0.2)
        done = len(server.captured)
        report = await extract_async(world.url, [server.url], ExtractOptions(limits=FAST))
        assert report.complete and report.captured == 60 - done
        assert set(server.captured.values()) == {1}
    await asyncio.to_thread(world.check_lake)


def test_ctrl_c_reports_and_resumes(world: World) -> None:
    with world.serve(part_tokens=16_384, delay=0.03) as server:

        def interrupt() -> None:
            wait_until(lambda: len(server.captured) >= 10)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt).start()
        report = world.extract(server)
        assert report.interrupted and not report.passed and 1 <= report.captured < 60
        assert 10 <= report.waiting < 60  # also what was acknowledged in the last moment
        assert report.message.startswith("interrupted: ")
        assert report.message.endswith("The same command again continues")
        assert report.waiting + sum(report.missing.values()) == 60
        assert world.extract(server).complete
    world.check_lake()
