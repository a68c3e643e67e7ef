"""Parts made ahead of need: what is promised meanwhile, and what becomes of their memory."""

import errno
import os

import pytest

from hslake.checksum import RowStats
from hslake.errors import NoSpace
from hslake.ids import RequestId
from hslake.staging import StagingWriter, read_part, read_status, scan
from hslake.staging import space as space_module
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


def writer(root, *, tokens=16, parts=3, ahead=True, locks=None, clock=None):
    more = {"clock": clock} if clock else {}
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


def test_all_parts_are_made_at_the_start(tmp_path):
    w = writer(tmp_path)
    assert make_ahead(w) and make_ahead(w)
    assert not make_ahead(w) and len(w._parts.all) == 3  # the cap
    for name in "abc":
        put(w, name, 10, 1)
    with pytest.raises(NoSpace, match="all 3 parts are full"):
        put(w, "d", 10, 1)


def test_a_part_that_is_being_made_is_not_wanted_again(tmp_path):
    w = writer(tmp_path)
    put(w, "a", 10, 1)
    path = w.wanted_part()
    assert path is not None and w.wanted_part() is None
    with pytest.raises(NoSpace, match="the next part is still being made"):
        put(w, "b", 10, 2)
    w.add_part(w.make_part(path))
    put(w, "b", 10, 2)
    assert read_part(path).reserved[0].sample_id == "b"


def test_a_part_that_cannot_be_made_is_promised_to_nobody(tmp_path):
    now = [1000.0]
    locks = Locks()
    w = writer(tmp_path, locks=locks, clock=lambda: now[0])
    assert w.free_rows() == 3 * 16
    put(w, "a", 10, 1)
    locks.room = 0
    path = w.wanted_part()
    with pytest.raises(NoSpace, match="locked") as caught:
        w.make_part(path)
    w.refuse_part(str(caught.value))
    assert not path.exists() and w.free_rows() == 6
    with pytest.raises(NoSpace, match="10 rows asked, no more memory can be locked"):
        put(w, "b", 10, 2)
    assert w.wanted_part() is None  # not again and again
    now[0] += 10
    locks.room = None
    assert make_ahead(w) and w.free_rows() == 2 * 16  # "a"'s part was sealed for want of room


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
    w = writer(tmp_path, parts=2, locks=locks)
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
    locks = Locks()
    w = writer(tmp_path, locks=locks)
    put(w, "a", 10, 1)
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
