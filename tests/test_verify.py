"""What `verify` must not pass, at each level; `tests/test_lake.py` damages the states."""

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import hslake
from hslake.errors import Corrupt, Missing, Unavailable
from hslake.segment import inventory, shard
from hslake.segment.layout import hidden_grid, new_segment_id
from hslake.segment.write import fill
from hslake.store import Store
from hslake.verify import VerifyReport, states, verify
from tests.faults import flips, flipworld
from tests.lakes import MadeLake, damage_sample, make_lake, replace_table_file


@pytest.fixture
def made(tmp_path: Path) -> MadeLake:
    return make_lake(tmp_path, lengths=[10, 300, 20])


def change_row(made: MadeLake, column: str, value: Any) -> str:
    """Write `value` into the manifest row of a sample as if it had been committed so."""
    (path,) = map(Path, made.lake.manifest_table().files())
    rows = pq.read_table(path).to_pylist()
    name = rows[1]["sample_id"]
    rows[1][column] = value
    replace_table_file(path, rows)
    return name


@pytest.mark.parametrize("level", ["manifest", "checksum", "full"])
@pytest.mark.parametrize(
    "column, value, told",
    [
        ("checksum", None, "no checksum"),
        ("checksum", [1, 2], "expected 4"),
        ("length", None, "no length"),
        ("segment_tokens", None, "no segment_tokens"),
        ("inventory_digest", None, "no inventory_digest"),
        ("supervised_tokens", None, "no supervised_tokens"),
        ("supervised_tokens", 1, "supervised_tokens 1 in the manifest"),
        ("source", "X", "source 'X' in the manifest, 'B3' in the plan"),
        ("split", "test", "split 'test' in the manifest"),
        ("length", 299, "length 299 in the manifest, 300 in the plan"),
    ],
)
def test_manifest_rows(made: MadeLake, level: str, column: str, value: Any, told: str) -> None:
    name = change_row(made, column, value)
    report = verify(made.url, level)
    assert not report.ok and report.samples == 3
    found = [d for d in report.damage if told in d.what]
    assert [d.sample_ids for d in found] == [(name,)]
    assert {s for d in report.damage for s in d.sample_ids} == {name}


def test_rows_without_a_name(made: MadeLake) -> None:
    change_row(made, "segment_id", None)
    damage = verify(made.url, quarantine=True).damage
    assert len(damage) == 1, damage
    (found,) = damage
    assert "no segment_id" in found.what and found.sample_ids == ()


def test_a_row_that_leads_nowhere(made: MadeLake) -> None:
    name = change_row(made, "token_start", 7)
    assert name in {s for d in verify(made.url).damage for s in d.sample_ids}


def test_full_looks_at_every_small_object(made: MadeLake) -> None:
    segment = made.lake.location("A1-000000").segment_id
    folder = Path(made.url) / "segments" / segment
    for o in inventory.load(made.lake.store, segment):
        if o.key.startswith("hidden_states/c/"):
            continue
        path = folder / o.key
        whole = path.read_bytes()
        path.write_bytes(bytes(len(whole)) if o.key.endswith(".json") else b"\1" + whole[1:])
        damage = verify(made.url, "full").damage
        assert any(o.key in d.what for d in damage), o.key
        if o.key.endswith(".json"):
            assert len(damage) == 1 and damage[0].sample_ids == ()
            assert "3 of the 3 samples of the segment read back" in damage[0].what
        path.write_bytes(whole)
    assert verify(made.url, "full").ok


def test_a_stored_mask_that_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(store, spec, segment_id, samples, *more):
        turned = []
        for s in samples:
            s.loss_mask[:] = s.loss_mask[::-1]  # as many ones
            turned.append(s)
        return fill(store, spec, segment_id, iter(turned), *more)

    monkeypatch.setattr("hslake.compact.line.fill", wrong)
    made = make_lake(tmp_path, lengths=[200])
    (found,) = verify(made.url).damage
    assert found.sample_ids == ("A1-000000",) and "loss_mask differs from the plan's" in found.what


def damaged_names(report: VerifyReport) -> set[str]:
    return set(report.by_sample())


@pytest.mark.parametrize("level", ["manifest", "checksum", "full"])
def test_objects_that_are_gone_or_cut_or_longer(made: MadeLake, level: str) -> None:
    at = made.lake.location("B3-000001")
    path = Path(made.url) / f"segments/{at.segment_id}/hidden_states/c/0/0/0"
    whole = path.read_bytes()
    for data in (None, b"", whole[:-1], whole + b"\0"):
        path.unlink()
        if data is not None:
            path.write_bytes(data)
        report = verify(made.url, level)
        found = [d for d in report.damage if d.object == "hidden_states/c/0/0/0"]
        assert found == report.damage and damaged_names(report) == set(made.samples)
        assert report.by_segment()[at.segment_id]["objects"] == ["hidden_states/c/0/0/0"]
        with pytest.raises(Corrupt, match=r"B3-000001.*hidden_states/c/0/0/0") as caught:
            made.lake.read("B3-000001")  # zarr-python 3.1 reads zeros
        assert caught.value.segment_id == at.segment_id
        path.write_bytes(whole)
    assert verify(made.url, level).ok


def test_shards_in_each_others_place(tmp_path: Path) -> None:
    """Chunks and index are sound; which object it is stands in the shard."""
    made = make_lake(tmp_path, lengths=[300])
    made.add([300])
    places = [made.lake.location(n).segment_id for n in made.samples]
    for key in ("hidden_states/c/0/0/0", "input_ids/c/0", "loss_mask/c/0"):
        a, b = (Path(made.url) / f"segments/{s}/{key}" for s in places)
        one, other = a.read_bytes(), b.read_bytes()
        a.write_bytes(other)
        b.write_bytes(one)
        for name in made.samples:
            with pytest.raises(Corrupt, match="another object") as caught:
                made.lake.read(name, rows=slice(0, 10))
            assert caught.value.object == key and caught.value.sample_id == name
        for level in ("checksum", "full"):
            assert damaged_names(verify(made.url, level)) == set(made.samples)
        a.write_bytes(one)
        b.write_bytes(other)


def test_a_shard_without_a_name_reads(made: MadeLake) -> None:
    """As those of before."""
    at = made.lake.location("B3-000001")
    path = Path(made.url) / f"segments/{at.segment_id}/hidden_states/c/0/0/0"
    data = path.read_bytes()
    grid = hidden_grid(made.lake.spec)
    cut = len(data) - grid.index_bytes
    path.write_bytes(data[: cut - shard.NAME_BYTES] + data[cut:])
    truth = made.samples["B3-000001"].states
    assert np.array_equal(made.lake.read("B3-000001").hidden_states, truth)


def test_a_row_of_anothers_states_is_not_read(tmp_path: Path) -> None:
    made = make_lake(tmp_path, lengths=[300, 300])
    first, second = (made.lake.location(n) for n in made.samples)
    name = change_row(made, "token_start", first.token_start)
    assert second.sample_id == name
    with pytest.raises(Corrupt, match=f"{name}.*differ") as caught:
        made.lake.read(name)
    assert caught.value.sample_id == name
    with pytest.raises(Corrupt, match="final and input_ids differ"):
        made.lake.read(name, streams=["final"])
    for level in ("manifest", "full"):
        report = verify(made.url, level)
        assert any("overlap" in d.what and not d.sure for d in report.damage)
    assert verify(made.url, "manifest", quarantine=True).quarantined == 1  # the one, not both
    assert [r[0] for r in made.lake.sql("select sample_id from samples").fetchall()] == [
        first.sample_id
    ]


@pytest.mark.parametrize(
    "column, values",
    [
        ("rms", [1.0, 1.0, 1.0, 1.0]),
        ("absmax", [1.0, 1.0, 1.0, 1.0]),
        ("nonfinite", [0, 0, 1, 0]),
        ("rms", [float("nan")] * 4),
    ],
)
def test_statistics_that_are_not_those_of_the_states(
    made: MadeLake, column: str, values: list[float]
) -> None:
    name = change_row(made, column, values)
    assert verify(made.url, "checksum").ok  # bytes alone do not tell
    report = verify(made.url, "full", quarantine=True)
    assert damaged_names(report) == {name} and f": {column} is" in report.damage[0].what
    assert report.quarantined == 0  # its states are intact


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_statistics_of_odd_values(tmp_path: Path, dtype: str) -> None:
    made = make_lake(tmp_path, lengths=[300, 5], dtype=dtype, nan=True, hidden=24)
    assert verify(made.url).ok


def test_checksum_names_the_sample_and_no_other(made: MadeLake) -> None:
    damage_sample(made.lake, "B3-000001")
    for level in ("checksum", "full"):
        assert damaged_names(verify(made.url, level)) == {"B3-000001"}
    assert verify(made.url, "manifest").ok
    assert verify(made.url, "checksum", quarantine=True).quarantined == 1
    assert verify(made.url).ok


def test_where_and_sample(made: MadeLake) -> None:
    damage_sample(made.lake, "B3-000001")
    for level in ("manifest", "checksum", "full"):
        report = verify(made.url, level, where="length < 100")
        assert (report.samples, damaged_names(report)) == (2, set())
        assert verify(made.url, level, sample=2).samples == 2


def test_a_list_that_lags_behind(made: MadeLake, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a store's list says is asked again before it counts."""
    real = Store.sizes

    def late(store: Store, path: str = "") -> dict[str, int]:
        return dict.fromkeys(list(real(store, path))[::2], 1)

    monkeypatch.setattr(Store, "sizes", late)
    monkeypatch.setattr("hslake.verify.log_differs", lambda _: [])
    for level in ("manifest", "full"):
        assert verify(made.url, level).damage == []


def test_strays(made: MadeLake) -> None:
    segment = made.lake.location("B3-000001").segment_id
    folder = Path(made.url) / "segments"
    (folder / segment / "more").write_bytes(b"1")
    (folder / new_segment_id()).mkdir()
    (next(p for p in folder.iterdir() if p.name != segment) / "zarr.json").write_bytes(b"12")
    report = verify(made.url, "manifest")
    assert report.ok
    inside, orphan = sorted(report.warnings)
    assert "1 segments with 2 bytes" in inside or "1 segments with 2 bytes" in orphan
    assert "1 objects are in the folder" in inside + orphan


def failing(code: int, only: str) -> Any:
    real = os.open

    def call(path: Any, *args: Any, **more: Any) -> int:
        if only in os.fspath(path):
            raise OSError(code, os.strerror(code), str(path))
        return real(path, *args, **more)

    return call


def test_a_machine_that_refuses_hides_nothing(
    made: MadeLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    for code in (errno.EMFILE, errno.EACCES, errno.ETIMEDOUT, errno.ENOMEM):
        for level in ("checksum", "full"):
            with monkeypatch.context() as m:
                m.setattr(os, "open", failing(code, "hidden_states/c"))
                with pytest.raises(Unavailable):
                    verify(made.url, level, quarantine=True)
    assert made.lake.version == 1


def test_a_disk_that_fails_under_one_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are looked at all the same; what cannot be read now is not hidden."""
    made = make_lake(tmp_path, lengths=[300])
    (other,) = made.add([300])
    bad = made.lake.location("A1-000000").segment_id
    damage_sample(made.lake, other)
    for level in ("checksum", "full"):
        with monkeypatch.context() as m:
            m.setattr(os, "open", failing(errno.EIO, f"{bad}/hidden_states/c"))
            report = verify(made.url, level)
        assert damaged_names(report) == set(made.samples)
        assert {d.sure for d in report.damage if d.segment_id == bad} == {False}
    with monkeypatch.context() as m:
        m.setattr(os, "open", failing(errno.EIO, f"{bad}/hidden_states/c"))
        assert verify(made.url, quarantine=True).quarantined == 1
    assert [r[0] for r in made.lake.sql("select sample_id from samples").fetchall()] == [
        "A1-000000"
    ]


def test_an_unmounted_disk_hides_nothing(made: MadeLake) -> None:
    folder = Path(made.url) / "segments"
    folder.rename(folder.with_name("elsewhere"))
    assert len(damaged_names(verify(made.url, "manifest"))) == 3
    for level in ("manifest", "checksum", "full"):
        with pytest.raises(Unavailable, match="mounted"):
            verify(made.url, level, quarantine=True)
    folder.with_name("elsewhere").rename(folder)
    assert verify(made.url).ok


def test_damage_that_is_gone_at_the_second_look(
    made: MadeLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This machine's memory errs, not the store."""
    real, looks = states.rows_checksum, []

    def errs(rows: np.ndarray, position: int) -> int:
        looks.append(1)
        return real(rows, position) + (len(looks) == 1)

    monkeypatch.setattr(states, "rows_checksum", errs)
    report = verify(made.url, quarantine=True, threads=1)
    assert report.ok and not report.quarantined
    assert any("looked at again" in w for w in report.warnings)


def test_the_final_norm(tmp_path: Path) -> None:
    folder = flipworld.make(tmp_path / "w", "bfloat16", "standard").url
    assert verify(folder, "manifest").ok
    path = Path(folder) / "model/final_norm/c/0"
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    (found,) = verify(folder, "manifest").damage
    assert found.object == "model/final_norm/c/0" and not found.sample_ids


def test_an_entry_of_the_log_that_was_changed(made: MadeLake) -> None:
    entry = Path(made.url) / "manifest/_delta_log" / f"{1:020d}.json"
    whole = entry.read_text()
    for old, new in (
        ('"dataChange":true', '"dataChange":false'),
        ('\\"numRecords\\": 3', '\\"numRecords\\": 2'),
        ('\\"op\\": \\"add\\"', '\\"op\\": \\"ade\\"'),
        ('"version":1', '"version":3'),
    ):
        assert old in whole
        entry.write_text(whole.replace(old, new, 1))
        damage = verify(made.url, "manifest").damage
        assert damage and "manifest/" in damage[0].what, old
    entry.write_text(whole)
    assert verify(made.url).ok


def test_what_is_quarantined_comes_back(tmp_path: Path) -> None:
    """verify --quarantine hides it, extract asks for it again, compact adds it."""
    from tests.extract.world import make_world

    world = make_world(tmp_path, [20, 300, 7, 256, 90])
    with world.serve(part_tokens=4096) as server:
        assert world.extract(server).complete
        world.check_lake()
        lost = world.names[1], world.names[3]
        for name in lost:
            damage_sample(world.made.lake, name)
        report = verify(world.url, quarantine=True)
        assert damaged_names(report) == set(lost) and report.quarantined == 2
        assert verify(world.url).ok and verify(world.url).samples == 3
        with pytest.raises(Missing):
            hslake.open(world.url).read(lost[0])
        again = world.extract(server)
        assert again.complete and again.captured == 2
        world.check_lake()
    assert verify(world.url).ok and verify(world.url).samples == 5


@pytest.mark.parametrize("data", [None, b""])
def test_a_missing_or_empty_shard_in_the_loader(made: MadeLake, data: bytes | None) -> None:
    """In zarr-python 3.1 it reads as zeros."""
    pytest.importorskip("torch")
    from hslake.torch import HiddenStateDataset, HiddenStateLoader

    at = made.lake.location("B3-000001")
    for key in ("hidden_states/c/0/0/0", "input_ids/c/0", "loss_mask/c/0"):
        path = Path(made.url) / f"segments/{at.segment_id}/{key}"
        whole = path.read_bytes()
        path.unlink()
        if data is not None:
            path.write_bytes(data)
        dataset = HiddenStateDataset(made.url)
        for i in range(3):
            with pytest.raises(Corrupt, match=key):
                dataset[i]
        with pytest.raises(Corrupt, match=key):
            list(HiddenStateLoader(dataset, tokens_per_batch=1024))
        path.write_bytes(whole)


def test_small_flips(tmp_path: Path) -> None:
    """`python -m tests.faults.flips` in little."""
    tally = flips.flips(8, 3, 7, tmp_path, kinds=(("bfloat16", "bf16plane"),))
    assert tally.wrong == [] and tally.crashes == 0
    assert tally.by_kind["payload"] == 8 and tally.by_kind["journal"] == 3
