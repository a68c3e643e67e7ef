"""What staging says is captured, and what it does not say any more."""

from dataclasses import replace
from pathlib import Path

import pytest

import hslake
from hslake.compact import compact
from hslake.errors import InvalidInput, Missing
from hslake.extract.worklist import captured_attempts
from hslake.ids import RequestId
from hslake.staging import read_part, read_status, scan
from hslake.status import local_statuses
from hslake.verify import hide
from tests.extract.world import FAST, World, make_world


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
    monkeypatch.setattr("hslake.server.status.EVENTS_A_CALL", 7)
    with world.serve(part_tokens=16_384) as server:
        assert world.extract(server).complete
        assert world.extract(server).captured == 0  # all pages are read before anything is sent
        assert set(server.captured.values()) == {1}
    cursor = read_status(world.staging)["writers"][0]["cursor"]
    assert cursor == 7
