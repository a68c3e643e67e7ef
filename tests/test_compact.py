"""Staging to lake: everything complete arrives once, nothing else ever does."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from hslake import catalog
from hslake.checksum import RowStats
from hslake.compact import compact
from hslake.errors import InvalidInput, Missing
from hslake.ids import RequestId, new_attempt
from hslake.staging import StagingWriter, scan
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
    assert report.abandoned == {"already in the lake": 4}
    check(made)


def test_unplanned_and_wrong_tokens_never_enter(tmp_path):
    made = make_lake(tmp_path, 2)
    names = made.plan([10, 20])
    made.samples[names[0]].input_ids[3] += 1
    made.stage(names)
    made.samples[names[0]].input_ids[3] -= 1
    spec = made.lake.spec
    writer = StagingWriter(
        made.staging,
        spec,
        part_tokens=64,
        max_parts=1,
        fingerprint=spec.model.fingerprint,
        engine={},
    )
    probe = writer.begin(RequestId(spec.lake8, new_attempt(), 4, "A1", "__hslake_probe__1"))
    writer.wrote(probe, 0, 4, [0] * 4, [RowStats()] * 4)
    writer.close()
    report = compact(made.url, [made.staging])
    assert report.samples == 1
    assert report.abandoned == {"tokens differ from the plan": 1, "not in the plan": 1}
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


def test_parts_of_another_lake_or_model_are_refused(tmp_path):
    made, other = make_lake(tmp_path / "a", 2), make_lake(tmp_path / "b", 2)
    other.stage(other.plan([5]))
    with pytest.raises(InvalidInput, match="lake_id"):
        compact(made.url, [other.staging])
    spec = made.lake.spec
    wide = replace(spec, model=replace(spec.model, hidden_size=spec.hidden_size * 2))
    writer = StagingWriter(
        made.staging, wide, part_tokens=8, max_parts=1, fingerprint={}, engine={}
    )
    with pytest.raises(InvalidInput, match="hidden_size"):
        compact(made.url, [made.staging])
    writer.close()
    assert len(list(made.staging.iterdir())) == 1  # refused, not deleted


def test_missing_staging_is_named(tmp_path):
    made = make_lake(tmp_path, 1)
    with pytest.raises(Missing, match="nowhere"):
        compact(made.url, [tmp_path / "nowhere"])


def test_a_live_writers_open_part_is_read_and_left_alone(tmp_path):
    made = make_lake(tmp_path, 1)
    names = made.plan([12, 34])
    closed, StagingWriter.close = StagingWriter.close, lambda self: None
    try:
        made.stage(names)
    finally:
        StagingWriter.close = closed
    assert compact(made.url, [made.staging]).samples == 2
    assert len(scan(made.staging)) == 1
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
