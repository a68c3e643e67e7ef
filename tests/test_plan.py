"""Registering samples: idempotent, all or nothing, safe for two at once."""

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hslake import query
from hslake.errors import HslakeError, InvalidInput, Missing, NoSpace
from hslake.ids import token_hash
from hslake.plan import plan_files
from hslake.spec import ModelInfo, make_spec
from hslake.store import open_store
from hslake.tables import catalog

PER_TOKEN = 2 * 4 * 2


@pytest.fixture
def url(tmp_path: Path) -> str:
    """An empty lake, under a name that SQL and URLs would have to quote."""
    spec = make_spec(
        ModelInfo("toy", "Toy", 8, 4, 1000, {"config": None, "weights": None}), ("2", "final")
    )
    store = open_store(str(tmp_path / "the lake's #1 [x] 100%"))
    store.put_new("hslake.json", spec.to_json().encode())
    for name in ("manifest", "plan"):
        catalog.create_table(store, name)
    return store.root


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def planned(url: str) -> list[dict[str, Any]]:
    return sorted(
        catalog.open_table(open_store(url), "plan").arrow().to_pylist(),
        key=lambda r: r["sample_id"],
    )


def test_rows_of_the_plan(url: str, tmp_path: Path) -> None:
    file = write(
        tmp_path / "a.jsonl",
        {"sample_id": "A1-0", "input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "source": "A1",
         "note": "?"},
        {"sample_id": "x", "input_ids": [4], "split": "validation"},
    )  # fmt: skip
    report = plan_files(url, [file], source="B3")
    assert (report.added, report.tokens, report.supervised_tokens, report.longest) == (2, 4, 3, 3)
    assert report.raw_bytes == 4 * PER_TOKEN == report.plan_raw_bytes
    assert (report.ratio, report.ratio_basis) == (0.689, "typical")
    assert report.unused_columns == ["note"]
    assert report.groups == [
        {"source": "A1", "split": "train", "samples": 1, "tokens": 3, "supervised_tokens": 2},
        {"source": "B3", "split": "validation", "samples": 1, "tokens": 1, "supervised_tokens": 1},
    ]
    first, second = planned(url)
    assert first["token_hash"] == token_hash([1, 2, 3])
    assert (first["op"], first["length"], first["supervised_tokens"]) == ("add", 3, 2)
    assert (first["input_ids"], first["loss_mask"]) == ([1, 2, 3], [0, 1, 1])
    assert (second["source"], second["split"], second["loss_mask"]) == ("B3", "validation", [1])
    assert first["commit_version"] == 1 and first["planned_at"] is not None


def test_again_adds_nothing(url: str, tmp_path: Path) -> None:
    rows = [{"input_ids": [i, i + 1], "source": "A1"} for i in range(20)]
    file = write(tmp_path / "a.jsonl", *rows)
    assert plan_files(url, [file]).added == 20
    before = planned(url)
    # In another order, another format, another name and mixed with new ones: the same samples.
    pq.write_table(pa.Table.from_pylist([*rows[::-1], {"input_ids": [9], "source": "A1"}]),
                   tmp_path / "b.parquet")  # fmt: skip
    # SQL reads a folder of such a name too.
    files = {"manifest": [], "plan": catalog.open_table(open_store(url), "plan").files()}
    with query.connect_files(files) as con:
        assert query.execute(con, "select count(*) n from plan").to_pylist() == [{"n": 20}]
    again = plan_files(url, [tmp_path / "b.parquet", file])
    assert (again.rows, again.added, again.unchanged, again.repeated) == (41, 1, 20, 20)
    assert (again.plan_samples, again.plan_tokens) == (21, 41)
    assert [r for r in planned(url) if r["commit_version"] == 1] == before
    version = catalog.open_table(open_store(url), "plan").version
    assert plan_files(url, [file]).added == 0
    assert catalog.open_table(open_store(url), "plan").version == version


def test_default_ids_tell_masks_apart(url: str, tmp_path: Path) -> None:
    file = write(
        tmp_path / "a.jsonl",
        {"input_ids": [1, 2], "loss_mask": [0, 1]},
        {"input_ids": [1, 2], "loss_mask": [1, 1]},
        {"input_ids": [1, 2]},
    )
    report = plan_files(url, [file], source="A1")
    assert (report.added, report.repeated) == (2, 1)
    assert all(r["sample_id"].startswith("A1-") for r in planned(url))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": [1, 9]}, "input_ids: 'a' has other tokens"),
        ({"loss_mask": [1, 0]}, "loss_mask: 'a' has another mask"),
        ({"source": "B3"}, "source: 'a' has 'B3', planned 'A1'"),
        ({"split": "validation"}, "split: 'a' has 'validation', planned 'train'"),
    ],
)
def test_a_changed_sample_is_an_error(
    url: str, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    row = {"sample_id": "a", "input_ids": [1, 2], "loss_mask": [0, 1], "source": "A1"}
    plan_files(url, [write(tmp_path / "a.jsonl", row)])
    file = write(tmp_path / "b.jsonl", {"input_ids": [5], "source": "A1"}, row | change)
    with pytest.raises(InvalidInput, match=f"b.jsonl: row 2: {message}"):
        plan_files(url, [file])
    assert len(planned(url)) == 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"sample_id": "a/b"}, "sample_id: 'a/b' contains '/'"),
        ({"sample_id": "a'b"}, "sample_id: .* contains"),
        ({"sample_id": 'a"b'}, "sample_id: .* contains"),
        ({"sample_id": "a\nb"}, "sample_id: .* contains"),
        ({"sample_id": "a\x07b"}, "sample_id: .* contains"),
        ({"sample_id": "é" * 101}, "sample_id: .* has 202 bytes"),
        ({"sample_id": ""}, "sample_id: found ''"),
        ({"sample_id": 7}, "sample_id: found 7"),
        ({"sample_id": "__hslake_probe__1"}, "sample_id: .* reserved"),
        ({"sample_id": "first"}, r"sample_id: 'first' is a duplicate of .*bad\.jsonl: row 1"),
        ({"source": "a/b"}, "source: 'a/b' contains"),
        ({"source": 3}, "source: found 3"),
        ({"source": "x" * 41}, "source: .* has 41 bytes"),
        ({"split": "a b\n"}, "split: "),
        ({"input_ids": [1000]}, "input_ids: token 0 is 1000, expected 0 to 999"),
        ({"loss_mask": [1]}, "loss_mask: has 1 values for 2 tokens"),
    ],
)
def test_nothing_of_a_bad_file_is_planned(
    url: str, tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    good = {"sample_id": "first", "input_ids": [1], "source": "A1"}
    bad = {"input_ids": [1, 2], "source": "A1"} | row
    file = write(tmp_path / "bad.jsonl", good, bad)
    with pytest.raises(InvalidInput, match=f"bad.jsonl: row 2: {message}") as caught:
        plan_files(url, [file])
    assert caught.value.exit_code == 2
    assert planned(url) == []


def test_missing_source_and_files(url: str, tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", {"input_ids": [1]})
    with pytest.raises(InvalidInput, match="row 1: source: missing; give --source"):
        plan_files(url, [file])
    with pytest.raises(InvalidInput, match="no files"):
        plan_files(url, [])
    with pytest.raises(Missing, match="no such file"):
        plan_files(url, [file, tmp_path / "none.parquet"], source="A1")
    with pytest.raises(Missing, match="no lake"):
        plan_files(str(tmp_path / "nowhere"), [file], source="A1")
    with pytest.raises(InvalidInput, match="split-validation"):
        plan_files(url, [file], source="A1", split_validation=1.5)
    assert planned(url) == []


def test_duplicates_across_files(url: str, tmp_path: Path) -> None:
    row = {"sample_id": "a", "input_ids": [1], "source": "A1"}
    one, two = write(tmp_path / "1.jsonl", row), write(tmp_path / "2.jsonl", row)
    with pytest.raises(InvalidInput, match=r"2\.jsonl: row 1: .*duplicate of .*1\.jsonl: row 1"):
        plan_files(url, [one, two])


def test_dry_run_writes_nothing(url: str, tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", {"input_ids": [1, 2]}, {"input_ids": [3]})
    report = plan_files(url, [file], source="A1", dry_run=True)
    assert report.dry_run and report.added == 2 and report.plan_tokens == 3
    assert planned(url) == []


def test_split_by_hash_of_the_prompt(url: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = [{"input_ids": rng.integers(0, 1000, 5).tolist(), "source": "A1"} for _ in range(400)]
    rows[0]["split"] = "test"
    file = write(tmp_path / "a.jsonl", *rows)
    plan_files(url, [file], split_validation=0.25)
    splits = {tuple(r["input_ids"]): r["split"] for r in planned(url)}
    assert list(splits.values()).count("validation") == pytest.approx(100, abs=30)
    assert splits[tuple(rows[0]["input_ids"])] == "test"
    # The same tokens under another id go to the same side.
    ids = [{**r, "sample_id": f"x{i}", "split": None} for i, r in enumerate(rows)]
    plan_files(url, [write(tmp_path / "b.jsonl", *ids)], split_validation=0.25)
    for row in planned(url):
        if row["sample_id"].startswith("x") and row["sample_id"] != "x0":
            assert row["split"] == splits[tuple(row["input_ids"])]
    # A row that says nothing of its split accepts the planned one, whatever the share now is.
    for share in (None, 0.9):
        again = plan_files(
            url, [write(tmp_path / "c.jsonl", *ids[1:]), file], split_validation=share
        )
        assert (again.added, again.unchanged) == (0, 799)


def test_planned_again_after_a_tombstone(url: str, tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", {"sample_id": "a", "input_ids": [1], "source": "A1"})
    plan_files(url, [file])
    gone = pa.table({"op": ["tombstone"], "sample_id": ["a"]})
    catalog.commit(open_store(url), "plan", lambda state: gone, "gone")
    other = write(tmp_path / "b.jsonl", {"sample_id": "a", "input_ids": [2], "source": "A1"})
    left_out = plan_files(url, [other])
    assert (left_out.added, left_out.deleted) == (0, 1)  # nothing that was deleted slips back in
    assert plan_files(url, [other], again=True).added == 1
    assert plan_files(url, [other]).unchanged == 1
    with pytest.raises(InvalidInput, match="other tokens"):
        plan_files(url, [file])


def test_two_at_once(url: str, tmp_path: Path) -> None:
    shared = [{"input_ids": [i], "source": "A1"} for i in range(30)]
    files = [
        write(tmp_path / f"{n}.jsonl", *shared, {"input_ids": [100 + n], "source": "A1"})
        for n in range(4)
    ]
    clash = [
        write(tmp_path / f"c{n}.jsonl", {"sample_id": "c", "input_ids": [n], "source": "A1"})
        for n in range(2)
    ]
    failed: list[HslakeError] = []

    def call(file: Path) -> None:
        try:
            plan_files(url, [file])
        except HslakeError as error:
            failed.append(error)

    threads = [threading.Thread(target=call, args=(f,)) for f in [*files, *clash]]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    ids = [r["sample_id"] for r in planned(url)]
    assert len(ids) == len(set(ids)) == 35
    assert len(failed) == 1 and "other tokens" in str(failed[0])


def test_a_full_temporary_disk_is_named(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **options: object) -> None:
        raise OSError(28, "Error writing bytes to file")

    monkeypatch.setattr("hslake.plan.spill.pq.write_table", full)
    file = write(tmp_path / "a.jsonl", {"sample_id": "a", "input_ids": [1]})
    with pytest.raises(NoSpace, match=r"\(TMPDIR\), for the rows of these files: No space left"):
        plan_files(url, [file], "A1")
    assert not planned(url)
