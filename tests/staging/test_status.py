"""Status: nothing is missed, and looking costs what is new, not what has been."""

import json
import os
import threading
from pathlib import Path

import pytest

from hslake.errors import Corrupt
from hslake.ids import RequestId
from hslake.server import parse_status
from hslake.staging import StatusReader, read_status
from hslake.staging.frames import FrameTail, FrameWriter, read_frames
from tests.staging.test_writer import put, spec, writer


def event(seq: int) -> dict:
    return {
        "seq": seq, "attempt": f"a{seq}", "sample_id": f"s{seq}", "state": "captured",
        "reason": None, "part": "part-000001",
    }  # fmt: skip


def rid(n: int) -> RequestId:
    return RequestId(spec().lake8, f"attempt{n}", 3, "A1", f"s{n}")


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every read of a frame file by a FrameTail."""
    sizes: list[int] = []
    pread = os.pread

    def counted(fd: int, n: int, offset: int) -> bytes:
        data = pread(fd, n, offset)
        sizes.append(len(data))
        return data

    monkeypatch.setattr(os, "pread", counted)
    return sizes


def test_a_poll_costs_what_is_new(tmp_path: Path, bytes_read: list[int]) -> None:
    s = spec()
    w = writer(tmp_path, s)
    reader, cursor, costs = StatusReader(tmp_path), 0, []
    for batch in range(40):
        for n in range(100):
            w.drop(RequestId(s.lake8, f"attempt{batch}-{n}", 3, "A1", "s"), "no space")
        w.tick()
        bytes_read.clear()
        found = reader.read({w.writer_id: cursor})["writers"][0]
        assert [e["seq"] for e in found["events"]] == list(range(cursor + 1, cursor + 101))
        cursor = found["cursor"]
        costs.append(sum(bytes_read))
    assert max(costs[1:]) <= costs[0] * 2
    bytes_read.clear()
    for _ in range(10):
        assert reader.read({w.writer_id: cursor})["writers"][0]["events"] == []
    assert sum(bytes_read) <= 10 << 16


def test_100_000_events_in_pages(tmp_path: Path, bytes_read: list[int]) -> None:
    file = FrameWriter(tmp_path / "events", "events")
    for seq in range(1, 100_001):
        file.append(event(seq))
    tail, seen = FrameTail(tmp_path / "events", "events"), 0
    while rows := tail.read(seen, 5000):
        assert rows[0]["seq"] == seen + 1 and len(rows) == 5000
        seen += len(rows)
    assert seen == 100_000
    # The headers once and every frame once, not the file for every page.
    assert sum(bytes_read) < 2.2 * file._at
    bytes_read.clear()
    file.append(event(100_001))
    assert [r["seq"] for r in tail.read(seen, 5000)] == [100_001]
    assert sum(bytes_read) < 1 << 18
    assert tail.read(17, 2) == [event(18), event(19)]  # another client, further back
    file.close()


def test_events_do_not_each_rewrite_the_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = writer(tmp_path, spec(), clock=lambda: 1000.0)
    writes = []
    rename = Path.rename

    def counted(self: Path, target: Path) -> Path:
        writes.append(target)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", counted)
    for n in range(1000):
        w.drop(rid(n), "no space")
    assert writes == []
    found = read_status(tmp_path)["writers"][0]
    # The events file is the truth; the summary says how far it knows it.
    assert found["cursor"] == 1000 and found["last_seq"] == 0
    w.tick()
    assert len(writes) == 1
    found = read_status(tmp_path)["writers"][0]
    assert found["last_seq"] == found["dropped"] == 1000
    w.tick()
    assert len(writes) == 1  # nothing new to say


def test_nobody_misses_an_event_while_they_are_written(tmp_path: Path) -> None:
    w = writer(tmp_path, spec())
    reader = StatusReader(tmp_path)
    stop = threading.Event()
    seen: list[list[int]] = [[], []]

    def poll(mine: list[int]) -> None:
        cursor = 0
        while True:
            last = stop.is_set()
            found = reader.read({w.writer_id: cursor})["writers"][0]
            assert found["error"] is None and found["last_seq"] <= found["cursor"]
            mine += [e["seq"] for e in found["events"]]
            cursor = found["cursor"]
            if last:
                return

    threads = [threading.Thread(target=poll, args=(mine,)) for mine in seen]
    for t in threads:
        t.start()
    for n in range(3000):
        w.drop(rid(n), "no space")
    w.tick()
    stop.set()
    for t in threads:
        t.join()
    assert seen == [list(range(1, 3001))] * 2


def test_captured_events_name_their_part_and_parts_tell_what_the_compactor_did(
    tmp_path: Path,
) -> None:
    w = writer(tmp_path, spec(), tokens=16)
    put(w, "a", 16, 1)
    put(w, "b", 3, 2)
    w.drop(rid(3), "no space")
    w.tick()
    found = read_status(tmp_path)["writers"][0]
    parts = [e["part"] for e in found["events"]]
    assert parts == ["part-000001", "part-000002", None]
    assert [p["state"] for p in found["parts"]] == ["sealed", "open"]
    (w.folder / "part-000001" / "DONE").touch()  # the summary does not know it yet
    assert [p["state"] for p in read_status(tmp_path)["writers"][0]["parts"]] == ["done", "open"]


def test_damage_in_the_events_is_told(tmp_path: Path) -> None:
    w = writer(tmp_path, spec())
    for n in range(3):
        w.drop(rid(n), "no space")
    w.tick()
    path = w.folder / "events"
    data = bytearray(path.read_bytes())
    second = data.index(b"attempt1")
    whole = bytes(data)
    data[second] ^= 1
    path.write_bytes(data)
    with pytest.raises(Corrupt):
        list(read_frames(path, "events"))
    assert "CRC" in read_status(tmp_path)["error"]
    # Wiped events look like a clean end, but the writer says how many there are.
    path.write_bytes(whole[: whole.index(b"attempt1") // 8 * 8 - 512].ljust(len(whole), b"\0"))
    error = read_status(tmp_path)["error"]
    assert "its writer has written 3" in error, error
    status = json.loads((w.folder / "status.json").read_text())
    assert status["error"] is None  # it is the reader that found it


def test_a_damaged_summary_is_an_error_of_its_writer(tmp_path: Path) -> None:
    w, other = writer(tmp_path, spec()), writer(tmp_path, spec())
    put(w, "a", 5, 1)
    w.tick()
    path = w.folder / "status.json"
    sound = path.read_text()
    for text in ("{}", "[]", "", "nul", sound.replace('"parts"', '"pasts"'), '{"last_seq": "x"}',
                 sound.replace(w.writer_id, other.writer_id), "\udcff"):  # fmt: skip
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
        document = read_status(tmp_path)
        by_id = {x["writer"]: x for x in document["writers"]}
        assert by_id.keys() == {w.writer_id, other.writer_id}, text
        found = by_id[w.writer_id]
        assert str(path) in found["error"] and not found["armed"] and not document["armed"]
        assert [e["sample_id"] for e in found["events"]] == ["a"]
        assert [p["name"] for p in found["parts"]] == ["part-000001"]
        assert document["lake_id"] == other.spec.lake_id
        assert found["lake_id"] == w.spec.lake_id  # its part tells, or it would pass for any lake's
        parse_status(document, "here")
    path.write_text(sound)
    assert read_status(tmp_path)["error"] is None


def test_the_hooks_figures_are_passed_on_and_nought_without_them(tmp_path: Path) -> None:
    w = writer(tmp_path, spec())
    w.tick()
    path = w.folder / "status.json"
    status = {k: v for k, v in json.loads(path.read_text()).items() if k != "hook"}
    path.write_text(json.dumps(status))
    hook = read_status(tmp_path)["writers"][0]["hook"]
    assert set(hook) == {
        *("forwards", "forward_s", "in_flight", "wait_s", "wait_max_s"),
        *("copies", "copy_s", "copy_max_s", "gpu_bytes", "gpu_retries"),
    }
    assert not any(hook.values())
    path.write_text(json.dumps({**status, "hook": {"forwards": 3, "wait_s": 0.5, "new": 1}}))
    assert read_status(tmp_path)["writers"][0]["hook"] == {
        **hook, "forwards": 3, "wait_s": 0.5, "new": 1,
    }  # fmt: skip
    for wrong in ({"forwards": -1}, {"wait_s": "long"}, {"copies": 1.5}, []):
        path.write_text(json.dumps({**status, "hook": wrong}))
        found = read_status(tmp_path)["writers"][0]
        assert "status.json" in found["error"] and found["hook"] == hook
    w.close()


def test_a_look_may_leave_the_events_out(tmp_path: Path) -> None:
    w = writer(tmp_path, spec())
    for n in range(3):
        w.drop(rid(n), "no space")
    w.tick()
    reader = StatusReader(tmp_path)
    found = reader.read(limit=0)["writers"][0]
    assert found["events"] == [] and found["cursor"] == 0 and found["dropped"] == 3
    assert [e["seq"] for e in reader.read(limit=2)["writers"][0]["events"]] == [1, 2]
    assert len(reader.read()["writers"][0]["events"]) == 3
    w.close()
