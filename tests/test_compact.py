"""Staging to lake: everything complete arrives once, nothing else ever does."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from typer.testing import CliRunner

from hslake.checksum import RowStats
from hslake.cli import app
from hslake.compact import Condemned, compact
from hslake.compactreport import CompactReport
from hslake.errors import Missing
from hslake.ids import RequestId, new_attempt
from hslake.staging import StagingWriter, read_part, scan
from hslake.staging.locks import try_lock
from hslake.tables import catalog
from hslake.verify import verify
from hslake.versions import vacuum
from tests.lakes import MadeLake, make_lake


def check(made: MadeLake) -> None:
    """Every sample of the truth is live, once, bit for bit; verify agrees."""
    lake = made.lake
    ids = [r[0] for r in lake.sql("select sample_id from samples").fetchall()]
    assert sorted(ids) == sorted(made.samples)
    for name, truth in made.samples.items():
        found = lake.read(name)
        bits = np.ascontiguousarray(found.hidden_states).view(truth.states.dtype)
        assert np.array_equal(bits, truth.states)
        assert found.input_ids.tolist() == truth.input_ids
        assert found.loss_mask.tolist() == truth.loss_mask
    assert verify(made.url, "full").ok


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("codec", ["standard", "none"])
def test_bits_survive(tmp_path, dtype, codec):
    check(make_lake(tmp_path, 6, dtype=dtype, codec=codec))


def test_bf16plane_survives(tmp_path):
    check(make_lake(tmp_path, 6, codec="bf16plane"))


def test_nothing_to_do_twice(tmp_path):
    made = make_lake(tmp_path, 4)
    version = made.lake.version
    assert compact(made.url, [made.staging]).samples == 0
    assert made.lake.version == version
    assert list(made.staging.iterdir()) == []  # the dead writer's folder is gone


def test_a_sample_staged_again_is_not_added_again(tmp_path):
    made = make_lake(tmp_path, 4)
    made.stage(sorted(made.samples))
    report = compact(made.url, [made.staging])
    assert report.samples == 0
    assert report.duplicates == 4 and report.abandoned == {}
    check(made)


def test_unplanned_and_wrong_tokens_never_enter(tmp_path):
    made = make_lake(tmp_path, 2)
    names = made.plan([10, 20])
    made.samples[names[0]].input_ids[3] += 1
    made.stage(names)
    made.samples[names[0]].input_ids[3] -= 1
    spec = made.lake.spec
    writer = made.writer(64)
    probe = writer.begin(RequestId(spec.lake8, new_attempt(), 4, "A1", "__hslake_probe__1"))
    writer.wrote(probe, 0, 4, [0] * 4, [RowStats()] * 4)
    writer.close()
    report = compact(made.url, [made.staging])
    assert report.samples == 1
    assert report.abandoned == {"tokens differ from the plan": 1}  # of the probe, nothing
    made.stage([names[0]])
    compact(made.url, [made.staging])
    check(made)


def test_a_byte_that_changed_in_staging_is_refused(tmp_path):
    made = make_lake(tmp_path, 2)
    names = made.plan([10, 20])
    made.stage(names)
    part = scan(made.staging)[0].parts[0]
    chunk = part / "hidden_states/c/1/0/0"
    data = bytearray(chunk.read_bytes())
    data[5] ^= 4
    chunk.write_bytes(data)
    report = compact(made.url, [made.staging])
    assert report.abandoned == {"checksum differs from the writer's": 1}
    made.stage([names[0]])
    compact(made.url, [made.staging])
    check(made)


def test_parts_of_another_lake_or_model_are_refused_and_the_rest_goes_on(tmp_path):
    made, other = make_lake(tmp_path / "a", 2), make_lake(tmp_path / "b", 2)
    other.stage(other.plan([5]))
    (foreign,) = other.staging.iterdir()
    foreign = foreign.rename(made.staging / foreign.name)
    spec = made.lake.spec
    wide = replace(spec, model=replace(spec.model, hidden_size=spec.hidden_size * 2))
    writer = StagingWriter(
        made.staging, wide, part_tokens=8, max_parts=1, fingerprint={}, engine={}
    )
    made.stage(made.plan([30, 40]))
    report = compact(made.url, [made.staging])
    assert report.samples == 2 and not report.passed
    assert len(report.refused) == 2 and report.damage == []
    told = "\n".join(report.refused)
    assert str(foreign / "part-000001") in told and "lake_id is" in told
    assert f"{writer.folder / 'part-000001'}: hidden_size is 16, the lake's is 8" in told
    # Refused, not touched: only the writer whose parts were taken is gone.
    assert {p.name for p in made.staging.iterdir()} == {foreign.name, writer.writer_id}
    assert not list(made.staging.glob("*/*/DONE"))
    writer.close()
    foreign.rename(other.staging / foreign.name)
    assert compact(other.url, [other.staging]).samples == 1
    check(made)
    check(other)


def damage_journal(part: Path, text: bytes) -> None:
    """Flip a bit at the first place of `text` in the part's journal."""
    data = bytearray((part / "journal").read_bytes())
    data[data.index(text)] ^= 1
    (part / "journal").write_bytes(data)


def test_a_damaged_journal_is_told_kept_and_freed(tmp_path):
    made = make_lake(tmp_path, 2)
    names = made.plan([10, 20, 30])
    made.stage(names)
    writer = scan(made.staging)[0]
    before = (writer.parts[0] / "journal").read_bytes()
    damage_journal(writer.parts[0], names[2].encode())
    report = compact(made.url, [made.staging])
    assert report.samples == 2 and not report.passed
    assert len(report.damage) == 1 and str(writer.parts[0] / "journal") in report.damage[0]
    assert not writer.path.exists()
    kept = made.staging / "damaged" / f"{writer.writer_id}.part-000001"
    assert sum(a != b for a, b in zip((kept / "journal").read_bytes(), before, strict=True)) == 1
    assert compact(made.url, [made.staging]).passed  # told once: the part is gone
    made.stage([names[2]])
    compact(made.url, [made.staging])
    check(made)


def test_a_part_whose_metadata_or_rows_do_not_read_stops_nobody(tmp_path):
    made = make_lake(tmp_path, 2)
    names = made.plan([10, 20, 30])
    for name in names:
        made.stage([name])
    by_name = {read_part(w.parts[0]).reserved[0].sample_id: w for w in scan(made.staging)}
    (by_name[names[0]].parts[0] / "zarr.json").write_text("{")
    (by_name[names[1]].parts[0] / "hidden_states/c/0/0/0").write_bytes(b"short")
    report = compact(made.url, [made.staging])
    assert report.samples == 1 and report.abandoned == {"rows do not read": 1}
    assert len(report.damage) == 2 and not report.passed
    assert [w.writer_id for w in scan(made.staging)] == [by_name[names[0]].writer_id]
    made.stage(names[:2])
    compact(made.url, [made.staging])
    check(made)


def test_a_part_that_lost_its_journal_is_told(tmp_path):
    made = make_lake(tmp_path, 2)
    names = made.plan([10, 20])
    for name in names:
        made.stage([name])
    part = scan(made.staging)[0].parts[0]
    (lost,) = (r.sample_id for r in read_part(part).reserved)
    (part / "journal").unlink()
    report = compact(made.url, [made.staging])
    assert report.samples == 1 and not report.passed
    assert len(report.damage) == 1 and str(part / "journal") in report.damage[0]
    made.stage([lost])
    assert compact(made.url, [made.staging]).passed
    check(made)


@pytest.mark.parametrize("step", range(12))
def test_a_part_half_recycled_or_half_made_is_no_damage(tmp_path, monkeypatch, step):
    made = make_lake(tmp_path, 1)
    writer = made.writer(8)
    (name,) = made.plan([8])
    made.put(writer, name)
    writer.set_health(False, "sealed")
    assert compact(made.url, [made.staging]).samples == 1
    taken = iter(range(step))  # of the changes to the folder that a recycling makes

    def until(whole):
        def changed(*args, **more):
            if next(taken, None) is None:
                raise KeyboardInterrupt
            return whole(*args, **more)

        return changed

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        for method in ("unlink", "rename", "touch", "write_text"):
            patch.setattr(Path, method, until(getattr(Path, method)))
        writer.tick()
    writer._lock.release()
    report = compact(made.url, [made.staging])
    assert report.passed, report.damage
    check(made)


def test_stopped_between_segments_frees_nothing_that_is_not_committed(tmp_path):
    made = make_lake(tmp_path, 1)
    made.stage(made.plan([100] * 6))
    so_far = CompactReport()
    report = compact(
        made.url,
        [made.staging],
        segment_tokens=100,
        stop=lambda: so_far.segments >= 2,
        report=so_far,
    )
    # What was begun by then is finished: two segments may be behind the one that is encoded.
    assert report.stopped and 2 <= report.segments == report.samples < 6
    assert not list(made.staging.glob("*/*/DONE"))
    rest = compact(made.url, [made.staging], segment_tokens=100)
    assert rest.samples == 6 - report.samples and not rest.stopped
    check(made)


def test_a_watching_compactor_tells_its_writers_that_it_is_there(tmp_path):
    made = make_lake(tmp_path, 1)
    spec = made.lake.spec
    writer = made.writer(8)
    lock = writer.folder / "compact.lock"
    os.utime(lock, (5, 5))
    # A request that was cut short leaves its reservation open.
    writer.begin(RequestId(spec.lake8, new_attempt(), 4, "A1", "A1-000009"))
    shown = CliRunner().invoke(app, ["compact", made.url, "--staging", str(made.staging)])
    assert "1 samples still arriving; one that was cut short is given up after" in shown.stdout
    assert time.time() - lock.stat().st_mtime < 60
    writer.close()


def test_missing_staging_is_named(tmp_path):
    made = make_lake(tmp_path, 1)
    with pytest.raises(Missing, match="nowhere"):
        compact(made.url, [tmp_path / "nowhere"])


def test_a_live_writers_open_part_is_read_and_left_alone(tmp_path):
    made = make_lake(tmp_path, 1)
    names = made.plan([12, 34])
    kept = []
    closed, StagingWriter.close = StagingWriter.close, lambda self: kept.append(self)
    try:
        made.stage(names)
    finally:
        StagingWriter.close = closed
    assert compact(made.url, [made.staging]).samples == 2
    assert len(scan(made.staging)) == 1
    check(made)
    # Sealed in the end, its rows are those that were committed: no duplicates.
    kept[0].close()
    report = compact(made.url, [made.staging])
    assert (report.samples, report.duplicates, report.abandoned) == (0, 0, {})
    assert scan(made.staging) == []


def test_watch_waits_for_whole_parts_and_a_trickle_still_arrives(tmp_path):
    made = make_lake(tmp_path, 1)
    spec = made.lake.spec
    names = made.plan([10, 10, 10])
    stop = threading.Event()
    watcher = threading.Thread(
        target=compact,
        args=(made.url, [made.staging]),
        kwargs={"watch": True, "stop": stop.is_set, "interval_s": 0.05},
    )
    watcher.start()
    try:
        writer = StagingWriter(
            made.staging,
            spec,
            part_tokens=100,
            max_parts=1,
            fingerprint=spec.model.fingerprint,
            engine={},
            idle_s=1.0,
        )
        before = made.lake.version
        for name in names:
            made.put(writer, name)
            time.sleep(0.2)
            writer.tick()
        assert made.lake.version == before  # passes came by, but more may follow
        deadline = time.monotonic() + 30
        while writer.free_rows() < 100 and time.monotonic() < deadline:
            time.sleep(0.05)
            writer.tick()
        assert writer.free_rows() == 100  # sealed, committed and recycled while the writer lives
        assert made.lake.version == before + 1
        writer.close()
    finally:
        stop.set()
        watcher.join(30)
    check(made)


KILL = """
import sys; sys.path[:0] = [sys.argv[3]]
from hslake.compact import compact
print("go", flush=True)
compact(sys.argv[1], [sys.argv[2]], segment_tokens=300)
"""


def test_killed_compactors_lose_and_repeat_nothing(tmp_path):
    made = make_lake(tmp_path, 2)
    made.stage(made.plan([50 + 7 * i for i in range(24)]))
    repo = str(Path(__file__).parents[1])
    rng = np.random.default_rng(0)
    for _ in range(6):
        args = [sys.executable, "-c", KILL, made.url, str(made.staging), repo]
        process = subprocess.Popen(args, stdout=subprocess.PIPE)
        assert process.stdout and process.stdout.readline() == b"go\n"
        time.sleep(float(rng.uniform(0.0, 0.3)))
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
    compact(made.url, [made.staging])
    check(made)
    table = catalog.open_table(made.lake.store, "manifest").arrow(["sample_id"])
    assert table.num_rows == len(made.samples)


def test_two_compactors_at_once_add_once(tmp_path):
    made = make_lake(tmp_path, 2)
    made.stage(made.plan([30 + i for i in range(16)]))
    repo = str(Path(__file__).parents[1])
    args = [sys.executable, "-c", KILL, made.url, str(made.staging), repo]
    both = [subprocess.Popen(args, stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [p.wait() for p in both] == [0, 0]
    compact(made.url, [made.staging])
    check(made)


def test_a_writer_that_another_process_compacts_is_named(tmp_path, caplog):
    made = make_lake(tmp_path, 1)
    made.stage(made.plan([12]))
    (writer,) = scan(made.staging)
    lock = try_lock(writer.path / "compact.lock")
    assert lock is not None
    report = compact(made.url, [made.staging])
    assert (report.samples, report.skipped, report.passed) == (0, [writer.writer_id], True)
    shown = CliRunner().invoke(app, ["compact", made.url, "--staging", str(made.staging)])
    assert f"writer {writer.writer_id}: being compacted by another process" in shown.stdout
    found = CliRunner().invoke(app, ["compact", made.url, "--staging", str(made.staging), "--json"])
    assert json.loads(found.stdout)["skipped"] == [writer.writer_id]
    looks = iter([False] * 30)
    caplog.clear()
    compact(made.url, [made.staging], watch=True, interval_s=0.1, stop=lambda: next(looks, True))
    (told,) = [r.getMessage() for r in caplog.records]
    assert told == f"writer {writer.writer_id} is being compacted by another process: skipped"
    lock.release()
    assert compact(made.url, [made.staging]).skipped == []
    check(made)


def test_vacuum_removes_orphans_only(tmp_path):
    from datetime import timedelta

    made = make_lake(tmp_path, 3)
    store = made.lake.store
    orphan = "01900000-0000-7000-8000-000000000000"
    store.put(f"segments/{orphan}/zarr.json", b"{}")
    assert vacuum(made.url, dry_run=True).segments == (orphan,)
    assert store.exists(f"segments/{orphan}/zarr.json")
    assert vacuum(made.url, timedelta(0)).segments == (orphan,)
    assert not store.exists(f"segments/{orphan}/zarr.json")
    check(made)


@pytest.mark.parametrize("gone", [True, False])
def test_a_segment_that_a_vacuum_takes_away_is_written_again(tmp_path, monkeypatch, gone):
    from datetime import timedelta

    from hslake.compact.line import finish

    made = make_lake(tmp_path, 2)
    store = made.lake.store
    made.stage(made.plan([30, 40]))
    taken: list[str] = []

    def then_vacuum(filled, paranoid):
        info = finish(filled, paranoid)
        if len(taken) < 2:
            time.sleep(0.002)  # older than 0 s
            taken.extend(vacuum(made.url, timedelta(0)).segments)
            if gone:
                store.size(f"segments/{info.segment_id}/inventory.json")
        return info

    monkeypatch.setattr("hslake.compact.line.finish", then_vacuum)
    report = compact(made.url, [made.staging])
    assert len(taken) == 2 and report.samples == 2 and report.segments == 1
    check(made)


def test_a_vacuum_that_never_rests_is_a_conflict(tmp_path, monkeypatch):
    made = make_lake(tmp_path, 2)
    made.stage(made.plan([30]))

    def condemned(state, segment_id):
        raise Condemned(segment_id)

    monkeypatch.setattr("hslake.compact.line.refuse_condemned", condemned)
    with pytest.raises(Condemned):
        compact(made.url, [made.staging])
    monkeypatch.undo()
    assert compact(made.url, [made.staging]).samples == 1
    check(made)


def test_a_sample_planned_again_after_its_tombstone_is_taken(tmp_path):
    made = make_lake(tmp_path, 1)
    (name,) = made.plan([9])
    store = made.lake.store
    add = catalog.open_table(store, "plan").arrow()
    add = add.filter(pc.equal(add["sample_id"], name)).drop_columns(["commit_version"])
    gone = add.set_column(0, "op", pa.array(["tombstone"]))
    catalog.commit(store, "plan", lambda state: gone, "tombstone")
    made.stage([name])
    assert compact(made.url, [made.staging]).abandoned == {"not in the plan": 1}
    catalog.commit(store, "plan", lambda state: add, "again")
    made.stage([name])
    assert compact(made.url, [made.staging]).samples == 1
    check(made)


def test_vacuum_removes_what_killed_writers_left(tmp_path):
    from datetime import timedelta

    made = make_lake(tmp_path, 3)
    store = made.lake.store
    named = next(p for p in store.list("segments") if p.endswith("/zarr.json")).split("/")[1]
    unborn = "01900000-0000-7000-8000-000000000000"
    unfinished = f".0.{'a' * 32}.tmp"
    left = [
        f".hslake-probe-{'b' * 32}",
        f"manifest/.part.{'c' * 32}.tmp",
        f"segments/{unborn}/hidden_states/c/0/0/{unfinished}",
        f"segments/{named}/hidden_states/c/0/0/{unfinished}",
    ]
    foreign = ["segments/.notes.tmp", f"segments/{named}/.0.tmp"]
    for path in left + foreign:
        store.local(path).parent.mkdir(parents=True, exist_ok=True)
        store.local(path).write_bytes(b"123")
    assert store.leftovers(0) == {}
    assert vacuum(made.url).leftovers == ()  # too young
    assert vacuum(made.url, timedelta(0), dry_run=True).leftovers == ()  # perhaps being written
    for path in left:
        os.utime(store.local(path), (0, time.time() - 3600))
    dry = vacuum(made.url, timedelta(0), dry_run=True)
    assert (sorted(dry.leftovers), dry.bytes, dry.removed) == (left, 12, False)
    assert all(store.local(p).exists() for p in left)
    done = vacuum(made.url, timedelta(0))
    assert (sorted(done.leftovers), done.segments, done.removed) == (left, (), True)
    assert not any(store.local(p).exists() for p in left)
    assert all(store.local(p).exists() for p in foreign)
    assert not store.local(f"segments/{unborn}").exists()
    assert store.local(f"segments/{named}").is_dir()
    check(made)


def test_another_lakes_writer_is_not_touched(tmp_path, monkeypatch):
    made, other = make_lake(tmp_path, 1), make_lake(tmp_path / "other", 1)
    writer = StagingWriter(
        made.staging, made.lake.spec, part_tokens=16, max_parts=2,
        fingerprint=made.lake.spec.model.fingerprint, engine={}, idle_s=0.0,
    )  # fmt: skip
    made.put(writer, made.plan([5])[0])
    lock = writer.folder / "compact.lock"
    os.utime(lock, (5, 5))
    locked = []
    for module in ("compact.sources", "ownership"):
        monkeypatch.setattr(
            f"hslake.{module}.try_lock",
            lambda path, **how: locked.append(path) or try_lock(path, **how),
        )
    looks = iter([False] * 3)
    report = compact(
        other.url, [made.staging], watch=True, interval_s=0.0, stop=lambda: next(looks, True)
    )
    assert len(report.refused) == 1 and "belongs to another lake" in report.refused[0]
    assert report.skipped == [] and not [p for p in locked if writer.folder in p.parents]
    writer.tick()  # nobody was here for it: its part stays open
    assert lock.stat().st_mtime == 5 and not read_part(writer.folder / "part-000001").sealed
    assert compact(made.url, [made.staging]).samples == 1
    writer.close()


def test_a_writer_without_parts_is_its_own_lakes(tmp_path):
    made, other = make_lake(tmp_path, 1), make_lake(tmp_path / "other", 1)
    writer = made.writer(8)
    shutil.rmtree(writer.folder / "part-000001")
    lock = writer.folder / "compact.lock"
    os.utime(lock, (5, 5))
    assert compact(other.url, [made.staging]).passed and lock.stat().st_mtime == 5
    (writer.folder / "status.json").rename(tmp_path / "status.json")
    assert compact(made.url, [made.staging]).passed and lock.stat().st_mtime == 5  # just born
    (tmp_path / "status.json").rename(writer.folder / "status.json")
    assert compact(made.url, [made.staging]).passed and lock.stat().st_mtime > 5
    writer._lock.release()  # it dies
    assert compact(other.url, [made.staging]).passed and writer.folder.exists()
    assert compact(made.url, [made.staging]).passed and not writer.folder.exists()


@pytest.mark.parametrize("lock", ["lock", "compact.lock"])
def test_a_writer_without_its_lock_file_is_told_and_left_alone(tmp_path, lock):
    made = make_lake(tmp_path, 1)
    names = made.plan([10])
    made.stage(names)
    (folder,) = (w.path for w in scan(made.staging))
    (folder / lock).unlink()
    report = compact(made.url, [made.staging])
    assert not report.passed and f"{folder / lock} is gone" in report.damage[0]
    (folder / lock).touch()
    assert compact(made.url, [made.staging]).samples == 1
    check(made)


def test_a_damaged_journal_on_full_staging_stops_nothing(tmp_path, monkeypatch):
    made = make_lake(tmp_path, 1)
    made.stage(made.plan([10, 20]))
    (journal,) = made.staging.glob("*/part-*/journal")
    data = bytearray(journal.read_bytes())
    at = len(bytes(data).rstrip(b"\0")) - 1
    data[at] ^= 1
    journal.write_bytes(bytes(data))

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "link", full)
    report = compact(made.url, [made.staging])
    assert report.damage and report.samples == 1
    assert not list(made.staging.glob("*/part-*"))  # taken, and freed


def test_a_part_that_lost_its_lock_is_told(tmp_path: Path) -> None:
    """Or its samples would wait for ever, unseen."""
    made = make_lake(tmp_path, lengths=[20])
    names = made.plan([30, 40])
    made.stage(names)
    (lock,) = made.staging.glob("*/part-*/read.lock")
    lock.unlink()
    report = compact(made.url, [made.staging])
    assert len(report.damage) == 1 and f"touch {lock}" in report.damage[0]
    assert not report.samples
    lock.touch()
    assert compact(made.url, [made.staging]).samples == 2
    check(made)
