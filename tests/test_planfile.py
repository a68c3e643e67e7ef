"""Plan files: three formats, the same rows; every kind of bad row named by file, row and field."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hslake.errors import InvalidInput, Missing
from hslake.plan.checks import check_mask, check_tokens
from hslake.plan.files import unused_columns
from hslake.plan.rows import BadRow, PlanRow
from hslake.plan.rows import read_rows as plan_rows

VOCAB = 1000


def read_rows(path: str, vocab: int | None = None) -> Iterator[PlanRow]:
    """The rows of a file; the first bad one is raised, as `plan` does."""
    for row in plan_rows(path, vocab):
        if isinstance(row, BadRow):
            raise row.error
        yield row


def write(folder: Path, kind: str, rows: list[dict]) -> str:
    path = folder / f"rows.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(r) + "\n" for r in rows))
        return str(path)
    if rows[0].get("input_ids") == [2**63]:  # beyond what Arrow infers
        table = pa.table({"input_ids": pa.array([[2**63]], pa.list_(pa.uint64()))})
    else:
        table = pa.Table.from_pylist(rows)
    if kind == "parquet":
        pq.write_table(table, path)
    elif kind == "arrow":
        with pa.ipc.new_file(path, table.schema) as out:
            out.write_table(table)
    else:  # the stream format, as Hugging Face datasets writes
        path = folder / "stream.arrow"
        with pa.ipc.new_stream(path, table.schema) as out:
            out.write_table(table)
    return str(path)


ROW = st.integers(1, 30).flatmap(
    lambda n: st.fixed_dictionaries(
        {
            "input_ids": st.lists(st.integers(0, VOCAB - 1), min_size=n, max_size=n),
            "loss_mask": st.lists(st.integers(0, 1), min_size=n, max_size=n),
            "source": st.sampled_from(["A1", "B3"]),
            "split": st.sampled_from(["train", "validation"]),
        }
    )
)


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(ROW, min_size=1, max_size=8))
def test_formats_read_the_same(tmp_path: Path, rows: list[dict]) -> None:
    for i, row in enumerate(rows):
        row["sample_id"] = f"s{i}"
    for kind in ("parquet", "arrow", "stream", "jsonl"):
        found = list(read_rows(write(tmp_path, kind, rows), VOCAB))
        assert [r.input_ids.tolist() for r in found] == [r["input_ids"] for r in rows]
        assert [r.loss_mask.tolist() for r in found] == [r["loss_mask"] for r in rows]
        assert [(r.sample_id, r.source, r.split) for r in found] == [
            (r["sample_id"], r["source"], r["split"]) for r in rows
        ]
        assert all(r.input_ids.dtype == np.int32 for r in found)
        assert [r.where.rsplit(": ", 1)[1] for r in found] == [
            f"row {i + 1}" for i in range(len(rows))
        ]


@given(st.lists(st.integers(-(2**70), 2**70), max_size=6), st.one_of(st.none(), st.just(VOCAB)))
def test_tokens_are_kept_or_refused(ids: list[int], vocab: int | None) -> None:
    limit = (2**31 - 1) if vocab is None else vocab - 1
    if ids and all(0 <= i <= limit for i in ids):
        assert check_tokens(ids, vocab, "x").tolist() == ids
    else:
        with pytest.raises(InvalidInput, match=r"^x: "):
            check_tokens(ids, vocab, "x")


BAD = [
    ({"input_ids": []}, "input_ids: is empty"),
    ({"input_ids": None}, "input_ids: missing"),
    ({}, "input_ids: missing"),
    ({"input_ids": [1, -1]}, "input_ids: token 1 is -1"),
    ({"input_ids": [VOCAB]}, f"input_ids: token 0 is {VOCAB}, expected 0 to 999: the model's"),
    ({"input_ids": [2**31]}, "input_ids: token 0 is 2147483648"),
    ({"input_ids": [2**63]}, "input_ids: "),
    ({"input_ids": [1.0]}, r"input_ids: item 0 is 1\.0 \(float\)"),
    ({"input_ids": [True]}, r"input_ids: item 0 is True \(bool\)"),
    ({"input_ids": ["1"]}, r"input_ids: item 0 is '1' \(str\)"),
    ({"input_ids": [1, None]}, r"input_ids: item 1 is None"),
    ({"input_ids": "1 2"}, "input_ids: found '1 2', expected a list"),
    ({"input_ids": 5}, "input_ids: found 5, expected a list"),
    ({"input_ids": [[1]]}, "input_ids: item 0"),
    ({"input_ids": [1, 2], "loss_mask": [1]}, "loss_mask: has 1 values for 2 tokens"),
    ({"input_ids": [1], "loss_mask": []}, "loss_mask: has 0 values"),
    ({"input_ids": [1], "loss_mask": [2]}, "loss_mask: value 0 is 2, expected 0 or 1"),
    ({"input_ids": [1], "loss_mask": [-1]}, "loss_mask: value 0 is -1"),
    ({"input_ids": [1], "loss_mask": [0.5]}, "loss_mask: item 0 is 0.5"),
    ({"text": "hello"}, "text: text needs a tokenizer"),
]


@pytest.mark.parametrize("kind", ["parquet", "arrow", "jsonl"])
@pytest.mark.parametrize(("row", "message"), BAD)
def test_bad_row(tmp_path: Path, kind: str, row: dict, message: str) -> None:
    # The bad row alone decides the column's type, so that Parquet can hold it.
    if kind != "jsonl" and not row:
        row = {"source": "A1"}
    path = write(tmp_path, kind, [row])
    with pytest.raises(InvalidInput, match=f"row 1: {message}") as caught:
        list(read_rows(path, VOCAB))
    assert str(caught.value).startswith(path)


def test_row_number_of_a_later_row(tmp_path: Path) -> None:
    rows = [{"input_ids": [1]}] * 1500 + [{"input_ids": [-5]}]
    for kind in ("parquet", "arrow", "jsonl"):
        with pytest.raises(InvalidInput, match="row 1501: input_ids: token 0 is -5"):
            list(read_rows(write(tmp_path, kind, rows), VOCAB))


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[1]",
        "3",
        '{"input_ids": [NaN]}',
        "\xff",
        '{"input_ids": [' + "9" * 6000 + "]}",
        '{"input_ids": [1], "input_ids": [2]}',
    ],
)
def test_bad_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"input_ids": [1]}\n\n' + line.encode("latin-1") + b"\n")
    with pytest.raises(InvalidInput, match=r"x.jsonl: row 3"):
        list(read_rows(str(path), VOCAB))


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow"])
@pytest.mark.parametrize("content", [b"", b"PAR1", b"ARROW1\0\0garbage", b"junk" * 100])
def test_damaged_file(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InvalidInput, match=name):
        list(read_rows(str(path), VOCAB))


def test_truncated_files(tmp_path: Path) -> None:
    rows = [{"input_ids": list(range(50)), "source": "A1"}] * 40
    for kind in ("parquet", "arrow", "stream"):
        path = Path(write(tmp_path, kind, rows))
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(InvalidInput, match=path.name):
            list(read_rows(str(path), VOCAB))
    packed = tmp_path / "x.jsonl.gz"
    packed.write_bytes(gzip.compress(b'{"input_ids": [1, 2]}\n' * 500)[:-20])
    with pytest.raises(InvalidInput, match=r"x\.jsonl\.gz"):
        list(read_rows(str(packed), VOCAB))


def test_names(tmp_path: Path) -> None:
    with pytest.raises(Missing, match="no such file"):
        list(read_rows(str(tmp_path / "none.parquet")))
    with pytest.raises(InvalidInput, match=r"cannot tell its format.*one JSON array: `jq -c"):
        list(read_rows(str(tmp_path / "sharegpt.json")))
    with pytest.raises(InvalidInput, match="cannot tell its format"):
        list(read_rows(str(tmp_path / "x.txt")))
    (tmp_path / "d.parquet").mkdir()
    with pytest.raises(InvalidInput, match="directory"):
        list(read_rows(str(tmp_path / "d.parquet")))


def test_other_list_types_and_compression(tmp_path: Path) -> None:
    for kind in (pa.large_list(pa.int64()), pa.list_(pa.uint32()), pa.list_(pa.int16(), 2)):
        table = pa.table({"input_ids": pa.array([[1, 2], [3, 4]], kind), "extra": [1, 2]})
        path = tmp_path / "t.parquet"
        pq.write_table(table.slice(1), path)
        assert [r.input_ids.tolist() for r in read_rows(str(path), VOCAB)] == [[3, 4]]
        assert unused_columns(str(path)) == ("extra",)
    packed = tmp_path / "x.jsonl.gz"
    packed.write_bytes(gzip.compress(b'\xef\xbb\xbf{"input_ids": [7], "n": 1}\n'))
    assert [r.input_ids.tolist() for r in read_rows(str(packed), VOCAB)] == [[7]]
    assert unused_columns(str(packed)) == ("n",)


def test_default_mask_and_bool_mask() -> None:
    assert check_mask(None, 3, "x").tolist() == [1, 1, 1]
    assert check_mask([True, False], 2, "x").tolist() == [1, 0]


def test_values_that_python_cannot_hold(tmp_path: Path) -> None:
    """Parquet's reader does not look whether text is UTF-8."""
    offsets = np.array([0, 1, 4], np.int32)
    text = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(offsets), pa.py_buffer(b"aa\xff\xfe")]
    )
    days = pa.array([0, 2**30], pa.date32())
    for column, what in ((text, "string"), (days, "date32")):
        table = pa.table({"sample_id": column, "input_ids": [[1], [2]]})
        pq.write_table(table, tmp_path / "a.parquet")
        with pytest.raises(InvalidInput, match=rf"a.parquet: row 2: sample_id: .* type {what}"):
            list(plan_rows(str(tmp_path / "a.parquet")))
