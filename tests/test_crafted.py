"""Files and answers made to break whoever reads them."""

import asyncio
import json
import shutil
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hslake import pins
from hslake.cli import app
from hslake.compact import compact
from hslake.errors import Corrupt
from hslake.fingerprint import read_entries
from hslake.gcstaging import gc_staging
from hslake.ids import RequestId, new_attempt
from hslake.runlog import RunLog
from hslake.segment.layout import new_segment_id
from hslake.server import (
    RequestFailed,
    RequestRefused,
    Server,
    ServerDown,
    new_session,
    parse_status,
    whole_status,
)
from hslake.staging import read_status
from hslake.status import local_statuses
from hslake.store import open_store
from hslake.verify import verify
from hslake.versions import delete, vacuum
from hslake.versions.repairing import repair
from tests.fakeserver import FakeServer
from tests.lakes import damage_sample, make_lake

DEEP = b'{"a":' * 100_000, b"[" * 100_000


@pytest.mark.parametrize("deep", DEEP, ids=["objects", "lists"])
def test_deep_json_in_staging_stops_nobody(tmp_path: Path, deep: bytes) -> None:
    made = make_lake(tmp_path, lengths=[10])
    (bad,) = made.plan([20])
    made.stage([bad])
    (writer,) = (p for p in made.staging.iterdir() if p.name[0] != ".")
    for file in (*writer.glob("part-*/zarr.json"), writer / "status.json"):
        file.write_bytes(deep)
    run = made.staging / ".hook/run"
    run.mkdir(parents=True)
    (run / "0.json").write_bytes(deep)
    (good,) = made.plan([30])
    made.stage([good])
    report = compact(made.url, [made.staging])
    assert report.samples == 1 and any("zarr.json" in text for text in report.damage)
    assert {f.state for f in gc_staging([made.staging]).folders} == {"kept"}
    assert local_statuses(made.staging)
    assert (
        CliRunner().invoke(app, ["status", made.url, "--staging", str(made.staging)]).exit_code != 3
    )


@pytest.mark.parametrize("deep", DEEP, ids=["objects", "lists"])
def test_deep_json_in_the_lake(tmp_path: Path, deep: bytes) -> None:
    made = make_lake(tmp_path, lengths=[10])
    (Path(made.url) / "manifest/_delta_log/_last_checkpoint").write_bytes(deep)
    assert repair(made.url).moved and repair(made.url).ok
    for path in Path(made.url).glob("segments/*/zarr.json"):
        path.write_bytes(deep)
    assert not verify(made.url, "manifest").ok


@pytest.mark.parametrize("deep", [*DEEP, b"[]", b"{"])
def test_safetensors_headers(tmp_path: Path, deep: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(deep).to_bytes(8, "little") + deep)
    with pytest.raises(Corrupt, match="download it again"):
        read_entries(file)


class _Cached(Server):
    """What a proxy with a cache makes of a server: the first answer, whatever is asked."""

    async def _get_or_post(self, method: str, path: str, *args: Any) -> Any:
        return await super()._get_or_post(method, path.partition("?")[0], *args)


def test_a_server_that_tells_the_same_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_lake(tmp_path, lengths=[5])
    monkeypatch.setattr("hslake.server.status.EVENTS_A_CALL", 1)

    (name,) = made.plan([10])
    truth = made.samples[name]
    rid = RequestId(made.lake.spec.lake8, new_attempt(), 10, truth.source, name)

    async def ask(url: str) -> Any:
        async with new_session() as session:
            await Server(url, session).generate(rid, truth.input_ids)
            while not any(w.events for w in (await Server(url, session).status()).writers):
                await asyncio.sleep(0.05)
            return await asyncio.wait_for(whole_status(_Cached(url, session)), 60)

    with FakeServer(made.url, made.staging) as server:
        found = asyncio.run(ask(server.url))
    assert isinstance(found, ServerDown) and "tells events again" in str(found)


def test_a_server_that_has_more_and_tells_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_lake(tmp_path, lengths=[5])

    async def call(self: Server, *args: Any) -> tuple[int, bytes]:
        await asyncio.sleep(0)
        document = read_status(made.staging)
        document["writers"][0]["events"] = []
        document |= {"others": [], "others_more": True}
        return 200, json.dumps(document).encode()

    async def ask() -> Any:
        async with new_session() as session:
            return await asyncio.wait_for(whole_status(Server("http://here:1", session)), 20)

    made.stage(made.plan([10]))
    monkeypatch.setattr(Server, "_get_or_post", call)
    found = asyncio.run(ask())
    assert isinstance(found, ServerDown) and "more events wait, and tells" in str(found)


@pytest.mark.parametrize("value", [4.0, 1e30, 10**30, True, -1])
def test_a_status_with_figures_that_are_none(tmp_path: Path, value: object) -> None:
    made = make_lake(tmp_path, lengths=[5])
    made.stage(made.plan([10]))
    for field in ("free_rows", "capacity_rows", "largest_reservation", "cursor"):
        document = read_status(made.staging)
        document["writers"][0][field] = value
        with pytest.raises(ServerDown, match=field):
            parse_status(document, "here")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e308, -1.0, "now"])
def test_a_status_of_a_time_that_is_none(tmp_path: Path, value: object) -> None:
    made = make_lake(tmp_path, lengths=[5])
    made.stage(made.plan([10]))
    for field in ("updated_at", "committed_at"):
        document = read_status(made.staging)
        document["compactor"] = {"committed_at": None, "troubles": []}
        of = document["writers"][0] if field == "updated_at" else document["compactor"]
        of[field] = value
        with pytest.raises(ServerDown, match=field):
            parse_status(document, "here")


def test_room_of_a_writer_that_says_it_has_a_billion_parts(tmp_path: Path) -> None:
    made = make_lake(tmp_path, lengths=[5])
    made.stage(made.plan([10]))
    document = read_status(made.staging)
    rows = 2**50
    document["writers"][0] |= {"free_rows": rows, "capacity_rows": rows, "largest_reservation": 1,
                               "parts": [], "alive": True, "armed": True}  # fmt: skip
    (writer,) = parse_status(document, "here").writers
    assert writer.room(1) == 1  # parts of one row: nobody knows where what is on its way ends
    document["writers"][0] |= {"largest_reservation": 2**20}
    (writer,) = parse_status(document, "here").writers
    assert writer.room(2**19) == rows // 2


def test_verify_beside_a_delete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a delete moves and removes while it is looked at is not damaged."""
    made = make_lake(tmp_path, lengths=[10, 20])
    first, _ = made.samples
    look = pins.read_pins

    def deleted_meanwhile(lake: Any) -> Any:
        delete(made.url, f"sample_id = '{first}'")
        return look(lake)

    monkeypatch.setattr("hslake.verify.read_pins", deleted_meanwhile)
    report = verify(made.url, quarantine=True)
    assert report.ok and not report.quarantined, report.damage
    assert any("removed while this ran" in w for w in report.warnings)


def test_verify_beside_a_delete_still_sees_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_lake(tmp_path, lengths=[10])
    (second,) = made.add([20])
    damage_sample(made.lake, second)
    look = pins.read_pins

    def deleted_meanwhile(lake: Any) -> Any:
        delete(made.url, f"sample_id <> '{second}'")
        return look(lake)

    monkeypatch.setattr("hslake.verify.read_pins", deleted_meanwhile)
    assert set(verify(made.url).by_sample()) == {second}
    vacuum(made.url)


def test_vacuum_leaves_alone_what_is_no_segment(tmp_path: Path) -> None:
    """A copy that somebody made of a segment, and folders whose names look like hex numbers."""
    made = make_lake(tmp_path, lengths=[10])
    segments = Path(made.url) / "segments"
    (segment,) = segments.iterdir()
    shutil.copytree(segment, segments / f"{segment.name}.bak")
    shutil.copytree(segment, segments / segment.name.upper())
    for name in ("deadbeef", "0123_4567", "notes", str(uuid.uuid4())):
        (segments / name).mkdir()
        (segments / name / "notes.txt").write_text("mine")
    (segments / "0ff1ce").mkdir()
    orphan = segments / new_segment_id()
    shutil.copytree(segment, orphan)
    before = {p.name for p in segments.iterdir()}
    report = vacuum(made.url, timedelta(days=-1))
    assert report.segments == (orphan.name,)
    assert before - {p.name for p in segments.iterdir()} == {orphan.name}


def test_vacuum_on_a_lake_whose_log_lost_its_newest_entry(tmp_path: Path) -> None:
    """Restored from a copy, the entry must find its segment."""
    made = make_lake(tmp_path, lengths=[10])
    (name,) = made.add([20])
    entry = Path(made.url) / f"manifest/_delta_log/{made.lake.version:020d}.json"
    kept = entry.read_bytes()
    entry.unlink()
    report = vacuum(made.url, timedelta(days=-1))
    assert not report.removed and "lost entries" in "".join(report.kept.values())
    entry.write_bytes(kept)
    assert made.lake.read(name).input_ids.tolist() == made.samples[name].input_ids
    assert verify(made.url).ok


@pytest.mark.parametrize("status", [400, 500, 200])
def test_a_message_that_no_table_can_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """Of a server: it goes into the run log, which a lone surrogate would block for good."""
    said = "\ud800 \x1b[31mred\n" + "x" * 10_000
    answer: dict[str, Any] = {"error": {"message": said}}
    if status == 200:
        answer = {"meta_info": {"finish_reason": {"type": "abort", "message": said}}}

    async def call(self: Server, *args: Any, **options: Any) -> tuple[int, bytes]:
        return status, json.dumps(answer).encode()

    async def ask() -> None:
        async with new_session() as session:
            await Server("http://here:1", session).generate(
                RequestId("0" * 8, "abcd", 1, "A", "a"), [1]
            )

    monkeypatch.setattr(Server, "_call", call)
    with pytest.raises((RequestRefused, RequestFailed), match="\ufffd \ufffd\\[31mred x") as found:
        asyncio.run(ask())
    log = RunLog(open_store(make_lake(tmp_path, lengths=[5]).url))
    log.refuse("a", "0" * 32, str(found.value), "http://here:1")
    log.flush()
    assert not log.kept and len(str(found.value)) < 400
