"""The staging writer against its reader: what is journalled is exactly what is in place."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hslake.checksum import RowStats, rows_checksum, sample_checksum
from hslake.errors import Corrupt, InvalidInput, NoSpace
from hslake.ids import RequestId, new_attempt
from hslake.spec import LakeSpec, ModelInfo, make_spec
from hslake.staging import StagingWriter, read_part, read_status, scan
from hslake.staging.folder import remove_remains
from hslake.staging.frames import FrameWriter, read_frames
from hslake.staging.locks import try_lock
from hslake.staging.reader import read_rows

H = 8


def spec() -> LakeSpec:
    model = ModelInfo("toy", "LlamaForCausalLM", 8, H, 100, {"config": "ab" * 32, "weights": None})
    return make_spec(model, ("2", "4", "final"))


def writer(root: Path, s: LakeSpec, tokens: int = 64, parts: int = 2, **more: Any) -> StagingWriter:
    return StagingWriter(
        root,
        s,
        part_tokens=tokens,
        max_parts=parts,
        fingerprint={"config": "ab" * 32, "weights": None},
        engine={"engine": "test", "engine_version": "1", "hook_version": "1"},
        **more,
    )


def put(w: StagingWriter, sample: str, length: int, seed: int, step: int = 7) -> np.ndarray:
    """Write one sample in pieces of `step` rows; returns its bits [stream, length, H]."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 1 << 16, (3, length, H), dtype=np.uint16)
    rid = RequestId(w.spec.lake8, new_attempt(), length, "A1", sample)
    r = w.begin(rid)
    for at in range(0, length, step):
        n = min(step, length - at)
        views = r.rows(at, n)
        for view, stream in zip(views.hidden, bits, strict=True):
            view[:] = stream[at : at + n]
        views.input_ids[:] = np.arange(at, at + n)
        sums = [rows_checksum(b[at : at + n], at) for b in bits]
        assert w.wrote(r, at, n, sums, [RowStats()] * 3) == (at + n == length)
    return bits


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6), step=st.integers(1, 50))
def test_every_complete_row_reads_back(lengths, step, tmp_path_factory):
    root = tmp_path_factory.mktemp("staging")
    s = spec()
    w = writer(root, s, tokens=64, parts=10)
    want = {f"s{i}": put(w, f"s{i}", n, i, step) for i, n in enumerate(lengths)}
    w.close()
    seen = set()
    for part in scan(root)[0].parts:
        info = read_part(part)
        assert info.damage is None and info.sealed
        for found in info.reserved:
            hidden, ids = read_rows(info, found)
            assert np.array_equal(np.stack(hidden), want[found.sample_id])
            assert ids.tolist() == list(range(found.length))
            assert [sample_checksum(np.ascontiguousarray(h)) for h in hidden] == list(
                found.checksum
            )
            seen.add(found.sample_id)
    assert seen == set(want)


def test_restart_at_zero_is_a_new_incarnation(tmp_path):
    w = writer(tmp_path, spec())
    rid = RequestId(w.spec.lake8, "attempt1", 4, "A1", "x")
    first = w.begin(rid)
    w.wrote(first, 0, 2, [0] * 3, [RowStats()] * 3)
    second = w.begin(rid)
    with pytest.raises(InvalidInput):
        w.wrote(first, 2, 2, [0] * 3, [RowStats()] * 3)
    assert w.wrote(second, 0, 4, [0] * 3, [RowStats()] * 3)
    states = [(r.incarnation, r.state) for r in read_part(scan(tmp_path)[0].parts[0]).reserved]
    assert states == [(0, "abandoned"), (1, "complete")]


def test_out_of_order_rows_drop_the_attempt(tmp_path):
    w = writer(tmp_path, spec())
    r = w.begin(RequestId(w.spec.lake8, "attempt1", 4, "A1", "x"))
    with pytest.raises(InvalidInput, match="0 of 4"):
        w.wrote(r, 2, 2, [0] * 3, [RowStats()] * 3)
    events = read_status(tmp_path)["writers"][0]["events"]
    assert [(e["state"], e["reason"]) for e in events] == [("dropped", "out of order")]


def test_full_staging_refuses_then_recycles_done_parts(tmp_path):
    w = writer(tmp_path, spec(), tokens=16, parts=2)
    put(w, "a", 16, 1)
    put(w, "b", 16, 2)
    with pytest.raises(NoSpace):
        put(w, "c", 16, 3)
    assert w.free_rows() == 0
    part = w.folder / "part-000001"
    (part / "DONE").touch()
    w.tick()
    assert w.free_rows() == 16
    assert not part.exists()
    want = put(w, "c", 16, 3)
    info = read_part(w.folder / "part-000003")
    assert np.array_equal(np.stack(read_rows(info, info.reserved[0])[0]), want)


def test_a_refusal_seals_the_part_once_nothing_arrives_in_it(tmp_path):
    w = writer(tmp_path, spec(), tokens=16, parts=1)
    put(w, "a", 10, 1)
    arriving = w.begin(RequestId(w.spec.lake8, "attempt1", 2, "A1", "x"))
    with pytest.raises(NoSpace):
        put(w, "b", 8, 2)
    part = w.folder / "part-000001"
    assert not read_part(part).sealed and w.free_rows() == 4  # left to shorter samples
    w.wrote(arriving, 0, 2, [0] * 3, [RowStats()] * 3)
    w.tick()
    assert read_part(part).sealed and w.free_rows() == 0
    (part / "DONE").touch()
    put(w, "b", 8, 2)  # recycled where it is needed, without a tick
    assert w.free_rows() == 8


def test_no_sample_is_put_into_a_part_that_is_being_sealed(tmp_path):
    now = 1000.0
    w = writer(tmp_path, spec(), tokens=16, parts=2, clock=lambda: now)
    put(w, "a", 4, 1)
    now = 2000.0  # idle, and a compactor was here
    os.utime(w.folder / "compact.lock", (now, now))
    put(w, "b", 4, 2)
    arriving = w.begin(RequestId(w.spec.lake8, "attempt1", 4, "A1", "x"))
    put(w, "c", 16, 3)  # passes over the first part
    w.wrote(arriving, 0, 4, [0] * 3, [RowStats()] * 3)
    put(w, "d", 4, 4)  # which still takes what fits until the next tick
    assert not read_part(w.folder / "part-000001").sealed
    w.tick()
    info = read_part(w.folder / "part-000001")
    assert info.sealed and [r.sample_id for r in info.reserved] == ["a", "b", "x", "d"]


def test_a_refusal_for_want_of_memory_seals_too(tmp_path, monkeypatch):
    w = writer(tmp_path, spec(), tokens=16, parts=4)
    put(w, "a", 10, 1)

    def no_room(folder, size):
        raise NoSpace("the filesystem has 0 bytes left")

    monkeypatch.setattr("hslake.staging.memory.check_room", no_room)
    with pytest.raises(NoSpace, match="8 rows asked, the filesystem has 0 bytes left"):
        put(w, "b", 8, 2)
    assert read_part(w.folder / "part-000001").sealed


def test_parts_recycled_together_stay_open_until_they_are_full(tmp_path):
    w = writer(tmp_path, spec(), tokens=16, parts=2)
    put(w, "a", 16, 1)
    put(w, "b", 16, 2)
    with pytest.raises(NoSpace):
        put(w, "c", 1, 3)
    for part in scan(tmp_path)[0].parts:
        (part / "DONE").touch()
    for _ in range(3):
        w.tick()
        assert w.free_rows() == 32
    put(w, "c", 4, 3)
    w.tick()
    assert w.free_rows() == 28


def test_an_idle_part_is_sealed_only_when_a_compactor_is_there(tmp_path):
    now = 1000.0
    w = writer(tmp_path, spec(), tokens=16, parts=2, clock=lambda: now, idle_s=5.0)
    lock = w.folder / "compact.lock"
    os.utime(lock, (now, now))
    part = w.folder / "part-000001"
    put(w, "a", 4, 1)
    now = 1100.0
    put(w, "b", 4, 2)
    now = 1110.0
    w.tick()
    assert not read_part(part).sealed  # nobody would empty it: keep it for what comes
    os.utime(lock, (1104.0, 1104.0))
    now = 1104.0
    w.tick()
    assert not read_part(part).sealed
    arriving = w.begin(RequestId(w.spec.lake8, "attempt1", 2, "A1", "x"))
    now = 1120.0
    os.utime(lock, (now, now))
    w.tick()
    assert not read_part(part).sealed
    w.abandon(arriving, "gone")
    now = 1130.0
    os.utime(lock, (now, now))
    w.tick()
    assert read_part(part).sealed and w.free_rows() == 16


def test_a_clock_that_is_put_back_holds_nothing_back(tmp_path):
    now = [100_000.0]
    w = writer(tmp_path, spec(), tokens=64, parts=1, clock=lambda: now[0])
    put(w, "whole", 10, 1)
    gone = w.begin(RequestId(w.spec.lake8, new_attempt(), 20, "A1", "gone"))
    now[0] -= 7200.0
    for _ in range(3):
        now[0] += 61.0
        os.utime(w.folder / "compact.lock", (now[0], now[0]))  # a compactor is there
        w.tick()
    assert w.get(gone.rid.attempt) is None
    assert read_part(w.folder / "part-000001").sealed


def test_incarnations_are_forgotten_with_their_part(tmp_path):
    w = writer(tmp_path, spec(), tokens=16, parts=2)
    rid = RequestId(w.spec.lake8, "attempt1", 16, "A1", "x")
    w.begin(rid)
    assert w.begin(rid).incarnation == 1  # in the second part: the first still tells of it
    first = w.folder / "part-000001"
    w.tick()
    (first / "DONE").touch()
    assert w.begin(rid).incarnation == 2
    (w.folder / "part-000002" / "DONE").touch()
    w.tick()
    assert sum(len(p.incarnations) for p in w._parts.all) == 1  # one attempt, one part


def test_a_writer_that_stopped_capturing_leaves_nothing_open(tmp_path):
    w = writer(tmp_path, spec())
    put(w, "a", 5, 1)
    w.begin(RequestId(w.spec.lake8, "attempt1", 2, "A1", "x"))
    w.set_health(False, "it broke")
    found = read_status(tmp_path)["writers"][0]
    assert found["alive"] and not found["armed"] and found["error"] == "it broke"
    assert [p["state"] for p in found["parts"]] == ["sealed"]
    assert found["events"][1]["reason"] == "stopped: the capture ended early"
    assert [r.state for r in read_part(scan(tmp_path)[0].parts[0]).reserved] == [
        "complete",
        "abandoned",
    ]


def test_too_long_and_foreign_are_refused(tmp_path):
    w = writer(tmp_path, spec(), tokens=16)
    with pytest.raises(InvalidInput, match="part-tokens"):
        w.begin(RequestId(w.spec.lake8, "attempt1", 17, "A1", "x"))
    with pytest.raises(InvalidInput, match="deadbeef"):
        w.begin(RequestId("deadbeef", "attempt1", 1, "A1", "x"))


def test_status_pages_events_from_the_cursor(tmp_path):
    w = writer(tmp_path, spec())
    put(w, "a", 3, 1)
    w.tick()
    first = read_status(tmp_path)["writers"][0]
    assert first["cursor"] == 1 and first["samples_captured"] == 1
    w.drop(RequestId(w.spec.lake8, "attempt2", 3, "A1", "b"), "no space")
    again = read_status(tmp_path, {w.writer_id: 1})["writers"][0]
    assert [(e["seq"], e["state"]) for e in again["events"]] == [(2, "dropped")]


def test_any_flipped_bit_in_a_journal_is_noticed(tmp_path):
    path = tmp_path / "events"
    f = FrameWriter(path, "events")
    rows = [
        {
            "seq": i,
            "attempt": "a",
            "sample_id": "s",
            "state": "captured",
            "reason": None,
            "part": "part-000001",
        }
        for i in range(1, 4)
    ]
    for row in rows:
        f.append(row)
    end = f._at
    f.close()
    data = path.read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(400):
        bit = int(rng.integers(0, end * 8))
        bad = bytearray(data)
        bad[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bad)
        got: list[dict] = []
        try:
            got.extend(read_frames(path, "events"))
            # Only zero padding between frames may flip unseen: then the rows are all right.
            assert got == rows
        except Corrupt:
            assert got == rows[: len(got)]


def test_a_frame_cut_short_by_a_kill_never_was(tmp_path):
    path = tmp_path / "events"
    f = FrameWriter(path, "events")
    row = {"attempt": "a", "sample_id": "s", "state": "dropped", "reason": None, "part": None}
    starts = []
    for seq in range(1, 4):
        starts.append(f._at)
        f.append({"seq": seq, **row})
    f.close()
    data = bytearray(path.read_bytes())
    data[starts[2] : starts[2] + 4] = bytes(4)  # the magic is written last
    path.write_bytes(data)
    assert [r["seq"] for r in read_frames(path, "events")] == [1, 2]
    data[starts[1] : starts[1] + 4] = bytes(4)  # no kill leaves a hole with more behind it
    path.write_bytes(data)
    with pytest.raises(Corrupt, match="bytes follow"):
        list(read_frames(path, "events"))
    # While its writer lives, the reader may just have looked between two writes.
    assert [r["seq"] for r in read_frames(path, "events", final=False)] == [1]


def test_a_killed_writer_frees_its_lock(tmp_path):
    code = (
        "import sys,time; sys.path.insert(0, sys.argv[2]);"
        "from tests.staging.test_writer import writer, spec, put; from pathlib import Path;"
        "w = writer(Path(sys.argv[1]), spec()); put(w, 'a', 5, 1); print('ok', flush=True);"
        "time.sleep(60)"
    )
    repo = str(Path(__file__).parents[2])
    p = subprocess.Popen([sys.executable, "-c", code, str(tmp_path), repo], stdout=subprocess.PIPE)
    assert p.stdout and p.stdout.readline() == b"ok\n"
    assert scan(tmp_path)[0].alive
    os.kill(p.pid, signal.SIGKILL)
    p.wait()
    found = scan(tmp_path)[0]
    assert not found.alive
    assert read_part(found.parts[0]).reserved[0].state == "complete"


def test_no_scan_sees_a_writer_before_it_holds_its_lock(tmp_path, monkeypatch):
    seen = []

    def looking(path, **more):
        seen.append(scan(tmp_path))
        return try_lock(path, **more)

    monkeypatch.setattr("hslake.staging.births.try_lock", looking)
    w = writer(tmp_path, spec())
    assert seen == [[]] and [x.writer_id for x in scan(tmp_path)] == [w.writer_id]
    (mine,) = tmp_path.iterdir()  # nothing of its birth is left
    code = "import sys, pathlib as p; from hslake.staging.locks import is_locked as l; "
    code += "sys.exit(int(l(p.Path(sys.argv[1]))))"
    args = [sys.executable, "-c", code, str(mine / "lock")]
    assert subprocess.run(args).returncode == 1  # looking at it here did not let go of it
    w.close()
    assert subprocess.run(args).returncode == 0


def test_staging_filled_by_somebody_else_stops_nothing(tmp_path, monkeypatch):
    w = writer(tmp_path, spec(), tokens=20, parts=1)
    full = True

    def unless_full(write):
        def guarded(self, *args, **more):
            if full:
                self.touch()
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(self, *args, **more)

        return guarded

    for name in ("write_text", "write_bytes"):
        monkeypatch.setattr(Path, name, unless_full(getattr(Path, name)))
    bits = put(w, "a", 20, 1)
    with pytest.raises(NoSpace):
        put(w, "b", 3, 2)
    w._clock = lambda: time.time() + 1
    w.tick()
    # What is complete gets out, and nobody is promised rows that are not there.
    (status,) = read_status(tmp_path)["writers"]
    assert status["samples_captured"] == 1 and status["free_rows"] == 0
    assert status["parts"][0]["state"] == "sealed"
    assert not list(tmp_path.rglob("*.tmp"))
    info = read_part(scan(tmp_path)[0].parts[0])
    assert info.sealed
    assert np.array_equal(np.stack(read_rows(info, info.reserved[0])[0]), bits)
    (info.path / "DONE").touch()
    w.tick()  # no part can be made of its pages
    assert scan(tmp_path)[0].parts == ()
    full = False
    put(w, "c", 20, 3)
    w.close()


def test_a_folder_that_is_gone_is_no_want_of_room(tmp_path):
    """The hook disarms at it, loudly."""
    w = writer(tmp_path, spec(), tokens=20, parts=2)
    put(w, "a", 15, 1)
    shutil.rmtree(w.folder)
    with pytest.raises(FileNotFoundError):
        put(w, "b", 10, 2)
        w.tick()


def test_close_lets_go_of_the_lock_whatever_happens(tmp_path, monkeypatch):
    s = spec()
    w, other = writer(tmp_path / "a", s), writer(tmp_path / "b", s)
    put(w, "a", 5, 1)

    def no_room(folder, size, **more):
        raise NoSpace("no room for a large table")

    monkeypatch.setattr("hslake.staging.part._SEAL_BYTES", 0)
    monkeypatch.setattr("hslake.staging.part.check_room", no_room)
    w.close()
    assert not scan(tmp_path / "a")[0].alive
    assert not list(tmp_path.rglob("manifest.arrow"))

    other.begin(RequestId(s.lake8, new_attempt(), 5, "A1", "b"))

    def full(writer, *rows):
        raise NoSpace("full")

    monkeypatch.setattr(FrameWriter, "append", full)
    with pytest.raises(NoSpace):
        other.close()
    assert not scan(tmp_path / "b")[0].alive


def test_a_sample_that_was_begun_can_be_ended_without_room(tmp_path, monkeypatch):
    w = writer(tmp_path, spec(), tokens=4000, parts=1)

    def full(fd, size):
        raise NoSpace("full")

    monkeypatch.setattr("hslake.staging.frames.allocate", full)
    captured = 0
    with pytest.raises(NoSpace, match="full"):
        for n in range(4000):
            put(w, f"s{n}", 1, n)
            captured += 1
    assert 200 < captured < 4000 and w.get("any") is None
    w.drop(RequestId(w.spec.lake8, new_attempt(), 1, "A1", "s"), "no space")  # still told
    w.close()
    (part,) = scan(tmp_path)[0].parts
    assert [r.state for r in read_part(part).reserved] == ["complete"] * captured


def test_a_sample_gone_silent_holds_back_what_is_complete_for_a_minute_only(tmp_path):
    now = [1000.0]
    w = writer(tmp_path, spec(), tokens=64, parts=1, clock=lambda: now[0])
    put(w, "whole", 10, 1)
    gone = w.begin(RequestId(w.spec.lake8, new_attempt(), 20, "A1", "gone"))
    part = w.folder / "part-000001"
    for seconds, sealed in ((30, False), (29, False), (2, False), (6, True)):
        now[0] += seconds
        os.utime(w.folder / "compact.lock", (now[0], now[0]))  # a compactor is there
        w.tick()
        assert (part / "manifest.arrow").exists() is sealed
    assert w.get(gone.rid.attempt) is None
    states = {r.sample_id: r.state for r in read_part(part).reserved}
    assert states == {"whole": "complete", "gone": "abandoned"}
    w.close()


def test_a_part_that_could_not_be_made_leaves_nothing(tmp_path, monkeypatch):
    w = writer(tmp_path, spec(), tokens=16, parts=2)
    put(w, "first", 16, 1)
    fds = len(list(Path("/proc/self/fd").iterdir()))

    def full(fd: int, size: int) -> None:
        raise NoSpace("tmpfs is full")

    with monkeypatch.context() as patch:
        patch.setattr("hslake.staging.frames.allocate", full)
        for _ in range(3):
            with pytest.raises(NoSpace, match="tmpfs is full"):
                w.begin(RequestId(w.spec.lake8, new_attempt(), 16, "A1", "second"))
    assert [p.name for p in w.folder.glob("part-*")] == ["part-000001"]
    assert len(list(Path("/proc/self/fd").iterdir())) == fds
    put(w, "second", 16, 2)
    w.close()


def test_a_folder_that_vanishes_under_a_scan_is_no_error(tmp_path, monkeypatch):
    w = writer(tmp_path, spec())
    other = writer(tmp_path, spec())
    real = Path.glob

    def vanishes(self: Path, pattern: str) -> Any:
        if self == w.folder:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(self))
        return real(self, pattern)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "glob", vanishes)
        assert [found.writer_id for found in scan(tmp_path)] == [other.writer_id]
    w.close()
    other.close()


def test_remains_of_kills_are_removed_and_births_are_not(tmp_path):
    gone, old, young, births = (
        tmp_path / f".{uuid.UUID(int=i)}.{end}"
        for i, end in enumerate(("gone", "new", "new", "new"))
    )
    for folder in (gone, old, young):
        (folder / "part-000001").mkdir(parents=True)
    births.mkdir()
    held = try_lock(births / "lock", create=True)
    for folder in (old, births):
        os.utime(folder, (0, 0))
    remove_remains(tmp_path)
    assert sorted(tmp_path.iterdir()) == [young, births]
    assert held is not None
    held.release()
