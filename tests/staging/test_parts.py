"""Parts made ahead of need: what is promised meanwhile, and what becomes of their memory."""

import errno
import os
from pathlib import Path

import pytest

from hslake.checksum import RowStats
from hslake.errors import NoSpace
from hslake.ids import RequestId, new_attempt
from hslake.staging import StagingWriter, read_part, read_status, scan
from hslake.staging import space as space_module
from hslake.staging.frames import FrameWriter
from tests.staging.test_writer import put, spec


class Locks:
    """A page lock that keeps account."""

    def __init__(self):
        self.held, self.calls, self.room = {}, 0, None

    def __call__(self, address, size):
        if self.room is not None and sum(self.held.values()) + size > self.room:
            raise NoSpace("no more memory can be locked")
        self.calls += 1
        self.held[address] = size
        return lambda: self.held.pop(address)


def writer(root, *, tokens=16, parts=3, ahead=True, locks=None, clock=None, **more):
    more |= {"clock": clock} if clock else {}
    return StagingWriter(
        root,
        spec(),
        part_tokens=tokens,
        max_parts=parts,
        fingerprint={"config": None, "weights": None},
        engine={"hook_version": "1"},
        page_lock=locks,
        ahead=ahead,
        **more,
    )


def make_ahead(w):
    path = w.wanted_part()
    if path is None:
        return False
    w.add_part(w.make_part(path))
    return True


ONE_PART = 3 * 16 * 8 * 2 + 16 * 4  # bytes of its maps


def short_of_room(root, **more):
    """A writer that got one part of three, its locks, and a clock to move on."""
    locks, now = Locks(), [1000.0]
    locks.room = ONE_PART
    w = writer(root, locks=locks, clock=lambda: now[0], **more)
    assert len(w._parts.all) == 1
    return w, locks, now


def test_all_parts_are_made_at_the_start(tmp_path):
    w = writer(tmp_path)
    assert len(w._parts.all) == 3 and w.wanted_part() is None
    for name in "abc":
        put(w, name, 10, 1)
    with pytest.raises(NoSpace, match="all 3 parts are full"):
        put(w, "d", 10, 1)


def test_a_part_that_is_being_made_is_not_wanted_again(tmp_path):
    w, locks, now = short_of_room(tmp_path)
    put(w, "a", 10, 1)
    locks.room, now[0] = None, 1010.0
    path = w.wanted_part()
    assert path is not None and w.wanted_part() is None
    with pytest.raises(NoSpace, match="the next part is still being made"):
        put(w, "b", 10, 2)
    w.add_part(w.make_part(path))
    put(w, "b", 10, 2)
    assert read_part(path).reserved[0].sample_id == "b"


def test_a_part_that_cannot_be_made_is_promised_to_nobody(tmp_path):
    w, locks, now = short_of_room(tmp_path)
    assert w.free_rows() == 16
    put(w, "a", 10, 1)
    assert w.free_rows() == 6
    with pytest.raises(NoSpace, match="10 rows asked, no more memory can be locked"):
        put(w, "b", 10, 2)
    assert w.wanted_part() is None  # not again and again
    now[0] = 1010.0
    path = w.wanted_part()
    with pytest.raises(NoSpace, match="locked") as caught:
        w.make_part(path)
    w.refuse_part(str(caught.value))
    assert not path.exists() and w.wanted_part() is None
    now[0] = 1020.0
    locks.room = None
    assert make_ahead(w) and w.free_rows() == 2 * 16  # "a"'s part was sealed for want of room
    assert make_ahead(w) and not make_ahead(w)


def test_memory_is_locked_once_and_unlocked_at_the_end(tmp_path):
    locks = Locks()
    w = writer(tmp_path, parts=1, locks=locks)
    maps = locks.calls
    assert maps == len(w.spec.streams) + 1
    address = w._parts.all[0].memory.hidden[0].ctypes.data
    for round_ in range(3):
        put(w, f"s{round_}", 16, round_)
        w.tick()
        (w._parts.all[0].path / "DONE").touch()
        w.tick()
    assert w._parts.all[0].path.name == "part-000004"
    assert locks.calls == maps and w._parts.all[0].memory.hidden[0].ctypes.data == address
    w.close()
    assert not locks.held


def test_a_recycled_part_reads_as_what_was_written_last(tmp_path):
    w = writer(tmp_path, parts=1)
    put(w, "a", 16, 1)
    (w._parts.all[0].path / "DONE").touch()
    w.tick()
    put(w, "b", 12, 2)
    (path,) = scan(tmp_path)[0].parts
    assert [r.sample_id for r in read_part(path).reserved] == ["b"]


def test_what_cannot_be_recycled_gives_its_memory_back(tmp_path, monkeypatch):
    locks = Locks()
    w = writer(tmp_path, parts=1, locks=locks)
    put(w, "a", 16, 1)
    (w._parts.all[0].path / "DONE").touch()

    def full(*args):
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "posix_fallocate", full)
    w.tick()
    assert not w._parts.all and not locks.held
    assert not list(w.folder.glob("part-*"))
    monkeypatch.undo()
    assert make_ahead(w)
    put(w, "b", 16, 2)


def test_a_part_that_comes_after_the_end_is_closed(tmp_path):
    w, locks, now = short_of_room(tmp_path)
    locks.room, now[0] = None, 1010.0
    made = w.make_part(w.wanted_part())
    w.close()
    w.add_part(made)
    assert not locks.held


def test_journals_and_events_leave_a_reserve(tmp_path, monkeypatch):
    """Under a memory cgroup an allocation too many ends in SIGKILL, so it is asked for first; and
    however many attempts are lost meanwhile, one that has begun can end."""
    w = writer(tmp_path)
    place = w.begin(RequestId(w.spec.lake8, "attempt", 4, "A1", "x"))
    monkeypatch.setattr(space_module, "cgroup_headroom", lambda: 8 << 20)
    size = (w.folder / "events").stat().st_size
    for i in range(2000):
        w.drop(RequestId(w.spec.lake8, f"attempt{i}", 4, "A1", "x"), "y" * 1000)
    assert (w.folder / "events").stat().st_size == size
    assert w.wrote(place, 0, 4, [0] * 3, [RowStats()] * 3)
    w.tick()
    (seen,) = read_status(tmp_path)["writers"]
    assert seen["dropped"] == 2000 and 100 < seen["cursor"] < 2000
    assert seen["events"][-1]["state"] == "captured"


def test_events_are_written_once_and_the_status_is_never_ahead(tmp_path, monkeypatch):
    w = writer(tmp_path, buffered=True)
    rids = [RequestId(w.spec.lake8, f"attempt{i}", 4, "A1", "x") for i in range(4)]
    for rid in rids:
        w.drop(rid, "no room")
    w.refuse_part("a look at the status in between")
    (seen,) = read_status(tmp_path)["writers"]
    assert seen["error"] is None and seen["last_seq"] == 0
    append, calls = FrameWriter._append, []

    def fails_once(self, batch):
        calls.append(batch)
        if len(calls) == 3:
            raise NoSpace("full")
        append(self, batch)

    monkeypatch.setattr(FrameWriter, "_append", fails_once)
    with pytest.raises(NoSpace):
        w.flush()
    w.flush()
    w.tick()
    (seen,) = read_status(tmp_path)["writers"]
    assert [e["seq"] for e in seen["events"]] == [1, 2, 3, 4] and seen["error"] is None


def test_a_closed_writer_does_nothing_more(tmp_path):
    w = writer(tmp_path, parts=1)
    put(w, "a", 16, 1)
    w.close()
    (path,) = scan(tmp_path)[0].parts
    (path / "DONE").touch()
    w.tick()
    w.close()
    assert path.exists()


def test_many_that_began_at_once_can_end_on_a_full_filesystem(tmp_path, monkeypatch):
    w = writer(tmp_path, tokens=4000, parts=1, buffered=True)
    names = [f"{i:04d}-" + "s" * 190 for i in range(900)]
    places = [w.begin(RequestId(w.spec.lake8, new_attempt(), 1, "A1", n)) for n in names]
    monkeypatch.setattr(space_module, "cgroup_headroom", lambda: 8 << 20)
    for place in places:
        assert w.wrote(place, 0, 1, [0] * 3, [RowStats()] * 3)
    w.flush()
    (seen,) = read_status(tmp_path)["writers"]
    assert seen["cursor"] == 900


def test_what_cannot_be_had_is_no_capacity_and_is_said_loudly(tmp_path, caplog):
    """Parts that find no room at the start are not counted on, until there is room."""
    w, locks, now = short_of_room(tmp_path)
    (said,) = [r for r in caplog.records if r.levelname == "ERROR"]
    assert "ONLY 1 OF 3 PARTS" in said.getMessage()
    assert "no more memory can be locked" in said.getMessage()
    (seen,) = read_status(tmp_path)["writers"]
    assert seen["capacity_rows"] == 16 == seen["free_rows"]
    locks.room, now[0] = None, 1010.0
    while make_ahead(w):
        pass
    w.set_figures({})
    w.tick()
    now[0] += 1
    w.tick()
    (seen,) = read_status(tmp_path)["writers"]
    assert seen["capacity_rows"] == 48 == seen["free_rows"]
    w.close()


def test_the_filesystem_of_a_folder(tmp_path):
    mounts = tmp_path / "mountinfo"
    (tmp_path / "ram disk" / "below").mkdir(parents=True)
    lines = [
        ("/", "ext4"),
        (str(tmp_path / "ram disk").replace(" ", "\\040"), "tmpfs"),
        (str(tmp_path / "ram"), "xfs"),  # only its name begins alike
    ]
    mounts.write_text("".join(f"1 2 0:3 / {p} rw - {kind} dev rw\n" for p, kind in lines))
    assert space_module.filesystem(tmp_path / "ram disk" / "below", mounts) == "tmpfs"
    assert space_module.filesystem(tmp_path, mounts) == "ext4"
    assert space_module.filesystem(tmp_path, tmp_path / "nowhere") is None
    assert space_module.filesystem(Path("/dev/shm")) == "tmpfs"
