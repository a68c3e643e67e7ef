"""What `verify` must not pass, at each level; `tests/test_lake.py` damages the states."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hslake.segment import inventory
from hslake.segment.write import fill
from hslake.verify import verify
from tests.lakes import MadeLake, make_lake


@pytest.fixture
def made(tmp_path: Path) -> MadeLake:
    return make_lake(tmp_path, lengths=[10, 300, 20])


def change_row(made: MadeLake, column: str, value: Any) -> str:
    """Write `value` into the manifest row of a sample, as damage that no page checksum catches."""
    (path,) = (f for f in made.lake.manifest_table().files())
    rows = pq.read_table(path).to_pylist()
    name = rows[1]["sample_id"]
    rows[1][column] = value
    pq.write_table(pa.Table.from_pylist(rows, schema=pq.read_schema(path)), path)
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
    (found,) = verify(made.url, quarantine=True).damage
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
