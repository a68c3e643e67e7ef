"""The staging writer against its reader: what is journalled is exactly what is in place."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hslake.checksum import RowStats, rows_checksum, sample_checksum
from hslake.errors import Corrupt, InvalidInput, NoSpace
from hslake.ids import RequestId, new_attempt
from hslake.spec import LakeSpec, ModelInfo, make_spec
from hslake.staging import StagingWriter, read_part, read_status, scan
from hslake.staging.frames import FrameWriter, read_frames
from hslake.staging.reader import read_rows

H = 8


def spec() -> LakeSpec:
    model = ModelInfo("toy", "LlamaForCausalLM", 8, H, 100, {"config": "ab" * 32, "weights": None})
    return make_spec(model, ("2", "4", "final"))


def writer(root: Path, s: LakeSpec, tokens: int = 64, parts: int = 2) -> StagingWriter:
    return StagingWriter(
        root,
        s,
        part_tokens=tokens,
        max_parts=parts,
        fingerprint={"config": "ab" * 32, "weights": None},
        engine={"engine": "test", "engine_version": "1", "hook_version": "1"},
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
            "seq": i, "attempt": "a", "sample_id": "s", "state": "captured", "reason": None,
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
