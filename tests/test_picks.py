"""What speaks against a staged sample: nothing damaged enters the lake, and all of it is told."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from hslake.compact import compact
from hslake.errors import Corrupt
from hslake.picks import mask_fits
from hslake.staging import scan
from hslake.tables import catalog
from tests.lakes import MadeLake, make_lake, replace_table_file


def newest_plan_file(made: MadeLake) -> Path:
    return Path(made.lake.plan_table().files()[-1])


def test_a_flipped_bit_in_the_plan_never_becomes_a_loss_mask(tmp_path):
    made = make_lake(tmp_path, 1)
    made.stage(made.plan([60 + i for i in range(12)]))
    path = newest_plan_file(made)
    with pq.ParquetFile(path) as file:
        group = file.metadata.row_group(0)
    columns = (group.column(i) for i in range(group.num_columns))
    column = next(c for c in columns if "loss_mask" in c.path_in_schema)
    whole = path.read_bytes()
    version = made.lake.version
    end = column.data_page_offset + column.total_compressed_size
    damaged = bytearray(whole)
    damaged[end - 5] ^= 4
    path.write_bytes(damaged)
    with pytest.raises(Corrupt, match=path.name):
        compact(made.url, [made.staging])
    assert made.lake.version == version
    path.write_bytes(whole)
    assert compact(made.url, [made.staging]).samples == 12  # staging was left as it was


def test_the_plans_files_are_checked_once(tmp_path, monkeypatch):
    made = make_lake(tmp_path, 1)
    read: list[str] = []
    whole = catalog.TableState._read

    def counted(state, url, schema):
        read.append(url)
        return whole(state, url, schema)

    monkeypatch.setattr(catalog.TableState, "_read", counted)
    sound: set[str] = set()
    made.lake.plan_table().check(sound)
    made.plan([5])
    read.clear()
    made.lake.plan_table().check(sound)
    assert read == [u for u in made.lake.plan_table().files() if u in read] and len(read) == 1


def test_a_mask_that_the_plan_contradicts_is_damage(tmp_path):
    made = make_lake(tmp_path, 1)
    (name,) = made.plan([9])
    made.stage([name])
    path = newest_plan_file(made)
    rows = pq.read_table(path).to_pylist()
    for row in rows:
        row["loss_mask"][0] ^= 1
    replace_table_file(Path(path), rows)
    report = compact(made.url, [made.staging])
    assert report.samples == 0 and report.abandoned == {"loss mask damaged": 1}
    assert not report.passed and name in report.damage[0] and "loss mask" in report.damage[0]


def test_masks():
    assert mask_fits([0, 1, 1], 3, 2)
    for mask, length, ones in (([0, 1], 3, 1), ([0, 2, 0], 3, 2), (None, 3, 0), ([0, 1, 0], 3, 2)):
        assert not mask_fits(mask, length, ones)


@pytest.mark.parametrize(
    "array, reason, told",
    [
        ("hidden_states/c/1/0/0", "checksum differs from the writer's", "states differ"),
        ("input_ids/c/0", "tokens differ from the plan", "input_ids are not"),
    ],
)
def test_rows_that_changed_in_staging_are_damage(tmp_path, array, reason, told):
    made = make_lake(tmp_path, 1)
    names = made.plan([10, 20])
    made.stage(names)
    part = scan(made.staging)[0].parts[0]
    data = bytearray((part / array).read_bytes())
    data[5] ^= 4
    (part / array).write_bytes(data)
    report = compact(made.url, [made.staging])
    assert report.samples == 1 and report.abandoned == {reason: 1}
    (damage,) = report.damage
    assert names[0] in damage and str(part) in damage and told in damage
    assert not report.passed
