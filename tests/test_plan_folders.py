"""Folders: what save_to_disk writes (as it is on disk, without `datasets`), folders of plan files,
columns under other names."""

import json
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hslake.errors import InvalidInput, Missing
from hslake.plan import plan_files
from hslake.plan.files import parse_columns, raw_rows, unused_columns
from hslake.plan.folders import plan_files_in
from tests.planlakes import new_lake, planned, write


def stream(path: Path, table: pa.Table) -> None:
    with pa.ipc.new_stream(path, table.schema) as out:
        out.write_table(table)


def save_to_disk(folder: Path, rows: list[dict[str, Any]], shards: int = 2, **state: Any) -> Path:
    """What datasets.Dataset.save_to_disk leaves."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05d}-of-{shards:05d}.arrow" for i in range(shards)]
    for i, name in enumerate(names):
        stream(folder / name, pa.Table.from_pylist(rows[i::shards]))
    known = {
        "_data_files": [{"filename": n} for n in names],
        "_fingerprint": "79a1",
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": "train",
    }
    (folder / "state.json").write_text(json.dumps(known | state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def rows(count: int) -> list[dict[str, Any]]:
    return [{"sample_id": f"s{i}", "input_ids": [i, i + 1]} for i in range(count)]


def test_a_dataset(tmp_path: Path) -> None:
    url, folder = new_lake(tmp_path), save_to_disk(tmp_path / "d", rows(7))
    report = plan_files(url, [folder], "A1", split_validation=1.0)
    assert (report.files, report.added, report.unused_columns) == (2, 7, [])
    # "train" is what every dataset is loaded as: no split that somebody chose.
    assert {r["split"] for r in planned(url).values()} == {"validation"}
    with pytest.raises(InvalidInput, match=r"data-00001-of-00002\.arrow: row 1: .*other tokens"):
        wrong = [{**r, "input_ids": [9] * 3} if i % 2 else r for i, r in enumerate(rows(7))]
        plan_files(url, [save_to_disk(tmp_path / "e", wrong)], "A1")


def test_a_dataset_dict(tmp_path: Path) -> None:
    url, folder = new_lake(tmp_path), tmp_path / "d"
    save_to_disk(folder / "train", rows(4))
    save_to_disk(folder / "test", [{**r, "sample_id": "t" + r["sample_id"], "input_ids": [9, i],
                                    "split": "other" if i else None}
                                   for i, r in enumerate(rows(2))])  # fmt: skip
    (folder / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    plan_files(url, [folder], "A1")
    splits = {n: r["split"] for n, r in planned(url).items()}
    # A row's own split comes first.
    assert splits == {"s0": "train", "s1": "train", "s2": "train", "s3": "train", "ts0": "test",
                      "ts1": "other"}  # fmt: skip
    (folder / "dataset_dict.json").write_text('{"splits": ["train", "gone"]}')
    with pytest.raises(Missing, match=r"gone/state\.json is not there"):
        plan_files(url, [folder], "A1")
    (folder / "dataset_dict.json").write_text('{"splits": ["../up"]}')
    with pytest.raises(InvalidInput, match=r"dataset_dict\.json: expected"):
        plan_files(url, [folder], "A1")


def test_an_indices_mapping(tmp_path: Path) -> None:
    folder = save_to_disk(
        tmp_path / "d", rows(1200), 1, _indices_files=[{"filename": "indices.arrow"}]
    )
    chosen = [1100, 3, 3, 0, *range(700, 1200)]
    stream(folder / "indices.arrow", pa.table({"indices": pa.array(chosen, pa.uint64())}))
    (file,) = plan_files_in(str(folder))
    found = [v["sample_id"] for _, v in raw_rows(file)]
    assert found == [f"s{i}" for i in chosen]
    stream(folder / "indices.arrow", pa.table({"indices": pa.array([1200], pa.uint64())}))
    with pytest.raises(InvalidInput, match=r"names rows that .* does not have"):
        list(raw_rows(file))
    two = save_to_disk(tmp_path / "e", rows(4), 2, _indices_files=[{"filename": "i.arrow"}])
    with pytest.raises(InvalidInput, match="flatten_indices"):
        plan_files_in(str(two))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ("[]", "expected a JSON object"),
        ("{", "is not JSON"),
        ("{}", "_data_files: expected a list"),
        ('{"_data_files": [{"filename": "../../secret.arrow"}]}', "expected the name of a file"),
        ('{"_data_files": [{"filename": "none.arrow"}]}', "none.arrow: there is no such file"),
    ],
)
def test_states_that_do_not_fit(tmp_path: Path, state: str, message: str) -> None:
    url, folder = new_lake(tmp_path), tmp_path / "d"
    folder.mkdir()
    (folder / "state.json").write_text(state)
    with pytest.raises((InvalidInput, Missing), match=message):
        plan_files(url, [folder], "A1")


def test_a_folder_elsewhere(tmp_path: Path) -> None:
    folder = save_to_disk(tmp_path / "d", rows(5))
    memory = fsspec.filesystem("memory")
    for path in folder.iterdir():
        memory.pipe(f"/planned/{path.name}", path.read_bytes())
    url = new_lake(tmp_path)
    assert plan_files(url, [f"memory://planned/{p.name}" for p in folder.glob("*.arrow")],
                      "A1").added == 5  # fmt: skip
    assert plan_files(url, ["memory://planned"], "A1").unchanged == 5
    indexed = save_to_disk(tmp_path / "i", rows(3), 1, _indices_files=[{"filename": "x.arrow"}])
    for path in indexed.iterdir():
        memory.pipe(f"/indexed/{path.name}", path.read_bytes())
    with pytest.raises(InvalidInput, match="of a local folder only"):
        plan_files(url, ["memory://indexed"], "A1")


def test_a_folder_of_plan_files(tmp_path: Path) -> None:
    url, folder = new_lake(tmp_path), tmp_path / "part.parquet"
    folder.mkdir()
    with pytest.raises(InvalidInput, match="it is empty"):
        plan_files(url, [folder], "A1")
    for i in range(3):
        pq.write_table(pa.Table.from_pylist(rows(6)[i::3]), folder / f"part-{i}.parquet")
    (folder / "_SUCCESS").touch()
    (folder / ".part-0.parquet.crc").touch()
    assert plan_files(url, [folder], "A1").added == 6
    for name in ("README.md", "more.jsonl", "sub/x.parquet"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
        with pytest.raises(InvalidInput, match="is a directory, and it holds"):
            plan_files(url, [folder], "A1")
        (folder / name).unlink()


def test_columns_under_other_names(tmp_path: Path) -> None:
    url = new_lake(tmp_path)
    row = {"uuid": "a", "tokens": [1, 2], "mask": [0, 1], "set": "A1", "input_ids": [7], "n": 1}
    names = parse_columns(["input_ids=tokens", "sample_id=uuid", "loss_mask=mask", "source=set"])
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    for file in (write(tmp_path / "a.jsonl", row), tmp_path / "a.parquet"):
        assert plan_files(url, [file], columns=names).unused_columns == ["input_ids", "n"]
        assert unused_columns(str(file)) == ("uuid", "tokens", "mask", "set", "n")
        with pytest.raises(InvalidInput, match="--column split=fold: there is no 'fold'"):
            plan_files(url, [file], columns={**names, "split": "fold"})
    (found,) = planned(url).values()
    assert (found["sample_id"], found["input_ids"], found["loss_mask"]) == ("a", [1, 2], [0, 1])
    for pair in ("tokens", "a=b", "split="):
        with pytest.raises(InvalidInput, match="--column: found"):
            parse_columns([pair])
    with pytest.raises(InvalidInput, match="given twice"):
        parse_columns(["split=a", "split=b"])
