"""Files and answers made to break whoever reads them."""

import asyncio
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
from hslake.segment.layout import new_segment_id
from hslake.server import Server, ServerDown, new_session, whole_status
from hslake.status import local_statuses
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
