"""Extraction against simulated servers: what is captured, asked again, refused, resumed."""

import asyncio
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web

import hslake
from hslake.compact import compact
from hslake.drive import Limits
from hslake.errors import CheckFailed, InvalidInput, Missing
from hslake.extract import ExtractOptions, ExtractReport, extract, extract_async
from hslake.extractreport import LOST
from hslake.ids import RequestId
from hslake.staging import read_part, read_status, scan
from hslake.status import local_statuses
from hslake.verify import hide
from hslake.whereabouts import Places, Whereabouts
from hslake.worklist import captured_attempts
from tests.fakeserver import FakeServer, states_of
from tests.lakes import MadeLake, random_states

FAST = Limits(
    requests=8,
    patience=20,
    request_timeout=20,
    ack_timeout=0.5,
    backoff=0.02,
    backoff_max=0.2,
    poll_min=0.005,
    poll_max=0.05,
    strikes=2,
)


@dataclass
class World:
    """A lake with a plan, its staging, and whatever runs on it."""

    made: MadeLake
    names: list[str]

    @property
    def url(self) -> str:
        return self.made.url

    @property
    def staging(self) -> Path:
        return self.made.staging

    def serve(self, **options: object) -> FakeServer:
        return FakeServer(self.url, self.staging, **options)  # type: ignore[arg-type]

    def extract(self, *servers: FakeServer, **options: object) -> ExtractReport:
        given = ExtractOptions(**{"limits": FAST, **options})  # type: ignore[arg-type]
        return extract(self.url, [s.url for s in servers], given)

    def check_lake(self) -> None:
        """Everything planned is in the lake, once, and is what the server computed."""
        compact(self.url, [self.staging])
        lake = hslake.open(self.url)
        rows = lake.sql("select sample_id from samples").fetchall()
        assert sorted(r[0] for r in rows) == sorted(self.names)
        for name in self.names:
            sample, ids = lake.read(name), self.made.samples[name].input_ids
            np.testing.assert_array_equal(sample.input_ids, ids)
            np.testing.assert_array_equal(sample.hidden_states, states_of(lake.spec, ids))


def make_world(folder: Path, lengths: list[int]) -> World:
    lake = hslake.create(
        folder / "lake", streams=[2, 4, 6, "final"], hidden_size=8, num_layers=8, name="test"
    )
    made = MadeLake(lake.url, folder / "staging", random_states(4, 8, "bfloat16"))
    made.staging.mkdir()
    return World(made, made.plan(lengths) if lengths else [])


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


def once(**actions: int) -> Callable[[RequestId, int], str]:
    """A script: shares of the samples (in percent) that meet each action at their first attempt."""
    rng = random.Random(5)

    def script(rid: RequestId, nth: int) -> str:
        at = rng.randrange(100)
        for action, share in actions.items():
            if nth == 0 and at < share:
                return action.replace("_", "-")
            at -= share
        return "ok"

    return script


# -- plain runs ---------------------------------------------------------------------------------


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


# -- servers ------------------------------------------------------------------------------------


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
        assert report.captured == 60  # heard once each: what it left may still come
        assert not report.missing and report.waiting + report.unconfirmed == 60
        # The new process does not show what the old one left: from afar nobody knows.
        assert report.unconfirmed > 0 and not report.complete and not report.passed
        assert report.message.startswith(f"unconfirmed: {report.unconfirmed} unconfirmed: captured")
    world.check_lake()


def emptied(world: World, server: FakeServer, *, restarts: bool = True) -> threading.Thread:
    """Kills the server after some captures and empties its staging, as a reboot would."""

    def reboot() -> None:
        wait_until(lambda: len(server.captured) >= 20)
        server.die()
        shutil.rmtree(world.staging)
        world.staging.mkdir()
        if restarts:
            server.start()

    thread = threading.Thread(target=reboot)
    thread.start()
    return thread


def test_what_went_with_its_staging_is_asked_for_again(world: World) -> None:
    with world.serve(part_tokens=8192, delay=0.03) as server:
        rebooting = emptied(world, server)
        report = world.extract(server, staging=(world.staging,))
        rebooting.join()
        assert report.complete and report.waiting == 60 and report.unconfirmed == 0
        assert report.captured > 60
    world.check_lake()


def test_from_afar_nobody_says_that_lost_samples_wait(world: World) -> None:
    with world.serve(part_tokens=8192, delay=0.03) as server:
        rebooting = emptied(world, server)
        report = world.extract(server)
        rebooting.join()
        (status,) = local_statuses(world.staging)
        # A slow machine makes it ask twice for some.
        there = len(set(captured_attempts([status]).values()))
        assert report.waiting == there < 60 and report.unconfirmed == 60 - there
        assert not report.complete and not report.passed and "--staging DIR" in report.message
        assert world.extract(server).complete  # a new run takes what is there at its word only
    world.check_lake()


def test_what_is_lost_and_cannot_be_asked_for_again_is_told(world: World) -> None:
    with world.serve(part_tokens=8192, delay=0.03) as server:
        rebooting = emptied(world, server, restarts=False)
        limits = replace(FAST, patience=0.5)
        report = world.extract(server, staging=(world.staging,), limits=limits)
        rebooting.join()
    lost = report.missing[LOST]
    assert lost > 0 and report.waiting == report.unconfirmed == 0
    assert sum(report.missing.values()) == 60 and f"{lost} captured, but" in report.message


def test_a_staging_folder_that_goes_meanwhile(world: World) -> None:
    with world.serve(part_tokens=8192, delay=0.03) as server:

        def remove() -> None:
            wait_until(lambda: len(server.captured) >= 20)
            server.die()
            shutil.rmtree(world.staging)

        removing = threading.Thread(target=remove)
        removing.start()
        limits = replace(FAST, patience=0.5)
        report = world.extract(server, staging=(world.staging,), limits=limits)
        removing.join()
    assert report.missing[LOST] > 0 and report.waiting == report.unconfirmed == 0


def test_where_samples_of_vanished_writers_are(world: World) -> None:
    with world.serve(part_tokens=16_384) as server:
        world.extract(server)
        (status,) = local_statuses(world.staging)
    lake, names = hslake.open(world.url), set(world.names)
    (writer,) = status.raw["writers"]
    rank = replace(status, writers=(), raw={**status.raw, "writers": [{**writer, "writer": "b"}]})
    other = {**writer, "writer": "c", "engine": {**writer["engine"], "run": "later"}}
    later = replace(status, writers=(), raw={**status.raw, "writers": [other]})
    nobody: frozenset[str] = frozenset()
    everywhere = Whereabouts()
    assert everywhere.look(lake, names, [status]) == Places(frozenset(names), nobody, nobody)
    # Its server goes on without it; a later process of the same address says nothing of it.
    assert everywhere.look(lake, names, [rank]) == Places(nobody, nobody, frozenset(names))
    for statuses in ([later], []):
        places = everywhere.look(lake, names, statuses)
        assert places == Places(nobody, frozenset(names), nobody)
    # Its events are damaged: that does not make its parts go away.
    unread = replace(status, writers=(replace(status.writers[0], events=(), cursor=0),))
    places = everywhere.look(lake, names, [unread])
    assert places == Places(nobody, frozenset(names), nobody)
    # Seen on this machine, it would be shown if it were there.
    here = Whereabouts((world.staging,))
    here.look(lake, names, [status])
    assert here.look(lake, names, [later]) == Places(nobody, nobody, frozenset(names))


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


# -- samples that cannot be captured ------------------------------------------------------------


def test_too_long_for_parts_or_context(tmp_path: Path) -> None:
    world = make_world(tmp_path, [50, 1500, 60, 700])
    with world.serve(part_tokens=1024, context=600) as server:
        report = world.extract(server)
        assert not report.passed and report.captured == 2
        assert {m.sample_id for m in report.missing_samples} == {world.names[1], world.names[3]}
        assert "2 longer than the server takes (599 tokens)" in report.message
        assert len(server.requests) == 2
    with world.serve(part_tokens=1024) as server:
        report = world.extract(server, staging=(world.staging,))
        assert report.captured == 1
        assert "1 longer than a staging part (1,024 tokens)" in report.message


def test_what_no_server_can_take_is_named_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = make_world(tmp_path, [50, 1500, 60, 700, 900])
    told: list[str] = []

    def script(rid: RequestId, nth: int) -> str:
        told.extend(r.getMessage() for r in caplog.records if r.name == "hslake.extract")
        return "ok"

    long = f"never asked for: {world.names[1]!r} (1,500 tokens): longer than a staging part (1,024"
    with world.serve(part_tokens=1024, script=script) as server:
        report = world.extract(server, limit=1, order="length desc")
        assert report.captured == 0 and report.planned == 5 and not report.passed
        report = world.extract(server, order="length desc")
        assert report.captured == 4 and told[0].startswith(long), told
    # Neither are they waited for: nothing else is left to do.
    with world.serve(part_tokens=512) as server:
        begun = time.monotonic()
        report = world.extract(server, where="length > 600")
        assert report.waiting == 0 and report.missing == {
            "longer than a staging part (512 tokens): start the server with larger parts": 3
        }
        assert time.monotonic() - begun < FAST.patience
    others = [r.getMessage() for r in caplog.records if r.name == "hslake.extract"][-1]
    assert all(f"{n!r} (" in others for n in (world.names[1], world.names[3], world.names[4]))


def test_the_larger_of_two_servers_gets_the_long_ones(tmp_path: Path) -> None:
    world = make_world(tmp_path, [50, 1500, 60, 700, 1400] * 3)
    with world.serve(part_tokens=512, max_parts=20) as small:
        with world.serve(part_tokens=2048, max_parts=20) as large:
            report = world.extract(small, large)
            assert report.complete, report.message
            assert {r.length for r in small.requests} <= {50, 60}
    world.check_lake()


def test_refused_and_hopeless_samples_are_named(world: World) -> None:
    bad, worse = world.names[7], world.names[9]

    def script(rid: RequestId, nth: int) -> str:
        return {bad: "refuse", worse: "error"}.get(rid.sample_id, "ok")

    with world.serve(part_tokens=8192, script=script) as server:
        report = world.extract(server, limits=replace(FAST, tries=3))
        assert report.captured == 58 and not report.passed
        why = {m.sample_id: m.reason for m in report.missing_samples}
        assert why[bad] == "refused by the server: HTTP 400: bad tokens"
        assert why[worse] == "failed 3 times, last: HTTP 500: CUDA error"
        assert sum(r.sample_id == bad for r in server.requests) == 2
        assert sum(r.sample_id == worse for r in server.requests) == 3


def test_a_server_that_never_captures(world: World) -> None:
    with world.serve(part_tokens=8192, script=lambda rid, nth: "silent") as server:
        limits = replace(FAST, tries=2, ack_timeout=0.1)
        report = world.extract(server, limits=limits, limit=5)
        assert report.captured == 0
        assert (
            report.missing["failed 2 times, last: the server answered but acknowledged no capture"]
            == 5
        )


def test_what_a_dying_server_captured_unheard_counts_and_is_within_the_limit(world: World) -> None:
    server = world.serve(part_tokens=8192)
    capture = server._capture

    async def last(rid: RequestId, ids: list[int]) -> None:
        await capture(rid, ids)
        # Dead before anybody could read the event.
        server.dying = asyncio.create_task(server._stop(orderly=False))
        await asyncio.sleep(5)

    server._capture = last  # type: ignore[method-assign]
    limits = replace(FAST, patience=0.5, requests=1)
    with server:
        report = world.extract(server, limits=limits, limit=1, staging=(world.staging,))
    (name,) = server.captured
    tokens = len(world.made.samples[name].input_ids)
    assert (report.captured, report.captured_tokens) == (1, tokens)
    # The one that was asked for is there: that it was not heard is no reason to take another.
    assert report.waiting == 1 and report.passed
    assert report.message.startswith("done as far as asked: ")


# -- selection ----------------------------------------------------------------------------------


def test_where_order_and_limit(world: World) -> None:
    with world.serve(part_tokens=16_384) as server:
        report = world.extract(
            server,
            where="source = 'A1' and length > 20 -- the first source",
            order="length desc",
            limit=4,
            limits=replace(FAST, requests=1),
        )
        assert report.captured == 4 and report.passed and not report.complete
        assert report.message.startswith("done as far as asked: ")
        sent = [r.length for r in server.requests]
        assert sent == sorted(sent, reverse=True) and {r.source for r in server.requests} == {"A1"}
        longest = max(len(s.input_ids) for s in world.made.samples.values() if s.source == "A1")
        assert sent[0] == longest
        rest = world.extract(server, where="source = 'A1'")
        assert rest.complete and rest.planned == 20 and rest.captured == 16
        with pytest.raises(InvalidInput, match="--where 'sorce = 1'"):
            world.extract(server, where="sorce = 1")
        with pytest.raises(InvalidInput, match="selects no planned sample"):
            world.extract(server, where="length > 100000")
        with pytest.raises(InvalidInput, match="--order 'nothing'"):
            world.extract(server, order="nothing")


def test_nothing_planned(tmp_path: Path) -> None:
    world = make_world(tmp_path, [])
    with world.serve() as server, pytest.raises(Missing, match="hslake plan"):
        world.extract(server)


def test_the_default_order_mixes_and_is_fixed(world: World) -> None:
    orders = []
    for _ in range(2):
        with world.serve(part_tokens=16_384, script=lambda rid, nth: "drop") as server:
            world.extract(server, limits=replace(FAST, requests=1, tries=1))
            orders.append([r.sample_id for r in server.requests])
    assert orders[0] == orders[1] != sorted(orders[0])


# -- interruption -------------------------------------------------------------------------------


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


# -- what staging says --------------------------------------------------------------------------


def test_what_the_compactor_gave_up_is_asked_for_again_while_the_server_lives(
    tmp_path: Path,
) -> None:
    world = make_world(tmp_path, [100, 100, 100])
    with world.serve(part_tokens=100, max_parts=4) as server:
        assert world.extract(server).captured == 3
        sealed = [p for p in scan(world.staging)[0].parts if read_part(p).sealed]
        assert len(sealed) == 2
        lost = read_part(sealed[0]).reserved[0].sample_id
        chunk = sealed[0] / "hidden_states/c/1/0/0"
        data = bytearray(chunk.read_bytes())
        data[5] ^= 4
        chunk.write_bytes(data)
        report = compact(world.url, [world.staging])
        assert report.abandoned == {"checksum differs from the writer's": 1}
        # The writer still holds rows of the third, but the part of the lost one is gone.
        again = world.extract(server)
        assert again.captured == 1 and again.complete
        assert server.captured[lost] == 2
    world.check_lake()


def test_events_that_the_summary_does_not_know_yet_count(world: World) -> None:
    with world.serve(part_tokens=16_384) as server:
        world.extract(server)
        (status,) = local_statuses(world.staging)
        (writer,) = status.writers
        old = replace(writer, last_seq=0, parts=())  # written just before the part was made
        assert len(captured_attempts([replace(status, writers=(old,))])) == 60
        gone = replace(writer, parts=())
        assert captured_attempts([replace(status, writers=(gone,))]) == {}
        done = replace(writer, last_seq=0, parts=(replace(writer.parts[0], state="done"),))
        assert captured_attempts([replace(status, writers=(done,))]) == {}


def test_another_lakes_staging_does_not_count(world: World, tmp_path: Path) -> None:
    other = make_world(tmp_path / "other", [10])
    with other.serve(part_tokens=1024) as its, world.serve(part_tokens=16_384) as server:
        other.extract(its)
        with pytest.raises(InvalidInput, match=r"part-000001: lake_id is .* another lake"):
            world.extract(server, staging=(other.staging,))
        with pytest.raises(Missing, match="nowhere"):
            world.extract(server, staging=(tmp_path / "nowhere",))
        assert server.requests == []


def test_what_another_lake_captures_meanwhile_is_not_ours(world: World, tmp_path: Path) -> None:
    """The same sample ids in the same staging folder: the other's writer comes after our look."""
    (tmp_path / "other").mkdir()
    other = make_world(tmp_path / "other", [7, 8, 9])
    its = replace(other.made, staging=world.staging)
    lost = other.names[0]
    assert lost in world.names
    staged = []

    def script(rid: RequestId, nth: int) -> str:
        if rid.sample_id != lost:
            return "ok"
        if not staged:
            its.stage(other.names)
            staged.append(lost)
        return "error"

    with world.serve(part_tokens=16_384, script=script) as server:
        report = world.extract(server, limits=replace(FAST, tries=2), staging=(world.staging,))
        assert staged and not report.complete and report.waiting == len(world.names) - 1
        assert [s.sample_id for s in report.missing_samples] == [lost]


def test_what_nobody_can_read_of_a_dead_writer_is_asked_for_again(world: World) -> None:
    with world.serve(part_tokens=16_384) as server:
        assert world.extract(server).complete
        (part,) = scan(world.staging)[0].parts
        metadata = (part / "zarr.json").read_text()
        (part / "zarr.json").write_text("{")
        # A living writer's: its server may write it anew.
        assert world.extract(server, staging=(world.staging,)).captured == 0
    with world.serve(part_tokens=16_384) as server:
        for text in ("{", metadata.replace('"lake_id"', '"lake"')):
            (part / "zarr.json").write_text(text)
            (told, *_) = (s for s in local_statuses(world.staging) if s.writers)
            assert "done" in {p.state for w in told.writers for p in w.parts if not w.alive}
        (part / "zarr.json").write_text("{")
        report = world.extract(server, staging=(world.staging,))
        assert report.complete and report.captured == len(world.names)
        damage = compact(world.url, [world.staging]).damage
        assert len(damage) == 1 and str(part / "zarr.json") in damage[0]
        again = world.extract(server, staging=(world.staging,))
        assert again.complete and again.committed == len(world.names) and again.captured == 0


def test_a_quarantined_sample_is_asked_for_again(world: World) -> None:
    with world.serve(part_tokens=16_384) as server:
        world.extract(server)
        compact(world.url, [world.staging])
        lake = hslake.open(world.url)
        segments = [lake.location(name).segment_id for name in world.names[:2]]
        hide(lake, dict.fromkeys(zip(segments, world.names, strict=False), "damaged"))
        report = world.extract(server)
        assert report.captured == 2
        assert {n for n, c in server.captured.items() if c == 2} == set(world.names[:2])


def test_events_come_in_pages(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hslake.staging.status._MAX_EVENTS", 7)
    monkeypatch.setattr("hslake.serverstatus.EVENTS_A_CALL", 7)
    with world.serve(part_tokens=16_384) as server:
        assert world.extract(server).complete
        assert world.extract(server).captured == 0  # all pages are read before anything is sent
        assert set(server.captured.values()) == {1}
    cursor = read_status(world.staging)["writers"][0]["cursor"]
    assert cursor == 7


def wait_until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)
