"""Samples whose writer has ended: there, gone, or nobody can tell."""

import shutil
import threading
from dataclasses import replace

import pytest

import hslake
from hslake.extract.report import LOST
from hslake.extract.whereabouts import Places, Whereabouts
from hslake.extract.worklist import captured_attempts
from hslake.status import local_statuses
from tests.extract.world import FAST, World, wait_until
from tests.fakeserver import FakeServer


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


def test_from_afar_a_server_that_came_back_tells_what_is_gone(world: World) -> None:
    with world.serve(part_tokens=8192, delay=0.03) as server:
        rebooting = emptied(world, server)
        report = world.extract(server)
        rebooting.join()
        assert report.complete and report.waiting == 60 and report.unconfirmed == 0
        assert report.captured > 60
    world.check_lake()


def test_from_afar_a_server_that_came_back_tells_what_is_there(world: World) -> None:
    """A new call, which has seen nothing of the old process."""
    with world.serve(part_tokens=8192) as server:
        assert world.extract(server, limit=25).captured == 25
        server.die()
        server.start()
        report = world.extract(server)
        assert report.complete and report.captured == 35 and report.waiting == 60
        assert set(server.captured.values()) == {1}
    world.check_lake()


def test_what_others_left_comes_in_pages(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hslake_sglang.endpoint._OTHERS_EVENTS", 7)
    with world.serve(part_tokens=16_384) as server:
        for _ in range(3):
            assert world.extract(server, limit=20).captured == 20
            server.die()
            server.start()
        report = world.extract(server)
        assert report.complete and report.captured == 0 and report.waiting == 60


def test_from_afar_nobody_says_that_lost_samples_wait(world: World) -> None:
    with world.serve(part_tokens=8192, delay=0.03) as server:
        server.tells_others = False
        rebooting = emptied(world, server)
        report = world.extract(server)
        rebooting.join()
        (status,) = local_statuses(world.staging)
        # A slow machine makes it ask twice for some.
        there = len(set(captured_attempts([status]).values()))
        assert report.waiting == there < 60 and report.unconfirmed == 60 - there
        assert not report.complete and not report.passed and "--staging DIR" in report.message
        assert report.message.startswith(f"unconfirmed: {report.unconfirmed} unconfirmed: captured")
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
