"""Views and named queries over hand-made manifests, and what the connection refuses."""

import re
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb
import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import hslake
from hslake import query, schemas
from hslake.audit import audit
from hslake.errors import Corrupt, InvalidInput, Unavailable
from hslake.spec import Estimate, ModelInfo, make_spec
from hslake.status import status
from hslake.versions import log
from tests.lakes import make_lake

SPEC = make_spec(
    ModelInfo("toy", "ToyForCausalLM", 8, 4, 1000, {"config": None, "weights": None}),
    ("2", "final"),
    estimate=Estimate(1000, 10_000),
)
PER_TOKEN = 2 * 4 * 2
AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def planned(sample_id: str, length: int, version: int = 1, **more: Any) -> dict[str, Any]:
    row = {
        "op": "add",
        "sample_id": sample_id,
        "source": sample_id[:2],
        "split": "train",
        "length": length,
        "supervised_tokens": length // 2,
        "token_hash": f"hash-{sample_id}",
        "input_ids": list(range(length)),
        "loss_mask": [1] * length,
        "planned_at": AT,
        "commit_version": version,
    }
    return row | more


def added(
    sample_id: str, length: int, segment: str, start: int, version: int = 1, **more: Any
) -> dict[str, Any]:
    row = {
        "op": "add",
        "sample_id": sample_id,
        "source": sample_id[:2],
        "split": "train",
        "length": length,
        "supervised_tokens": length // 2,
        "segment_id": segment,
        "token_start": start,
        "attempt": "a1b2",
        "token_hash": f"hash-{sample_id}",
        "checksum": [1, 2],
        "rms": [1.0, 1.0],
        "absmax": [2.0, 2.0],
        "nonfinite": [0, 0],
        "segment_tokens": 1024,
        "segment_raw_bytes": 1000,
        "segment_stored_bytes": 700,
        "inventory_digest": f"digest-{segment}",
        "committed_at": AT,
        "commit_version": version,
    }
    return row | more


def hidden(sample_id: str, segment: str, version: int = 2) -> dict[str, Any]:
    row = {"op": "hide", "sample_id": sample_id, "segment_id": segment, "reason": "checksum"}
    row["length"] = {"A1-1": 200}.get(sample_id, 50)
    return row | {"committed_at": AT, "commit_version": version}


PLAN = [
    planned("A1-0", 100),
    planned("A1-1", 200),
    planned("A1-2", 300, split="validation"),
    planned("B3-0", 50),
    planned("B3-1", 60),
    planned("B3-1", 0, version=2, op="tombstone"),
    planned("B3-2", 70),
    planned("B3-2", 0, version=2, op="tombstone"),
    planned("B3-2", 80, version=3),
]
MANIFEST = [
    added("A1-0", 100, "seg-1", 0),
    added("A1-1", 200, "seg-1", 256),
    hidden("A1-1", "seg-1"),
    added("A1-1", 200, "seg-2", 0, version=3),
    added("B3-0", 50, "seg-2", 256, version=3),
    hidden("B3-0", "seg-2", version=4),
    {"op": "condemn", "segment_id": "seg-9", "committed_at": AT, "commit_version": 5},
]


def files(folder: Path, manifest: list[dict], plan: list[dict]) -> dict[str, list[str]]:
    """Each table in two Parquet files, as two commits would leave it."""
    found: dict[str, list[str]] = {}
    for name, rows in (("manifest", manifest), ("plan", plan)):
        schema = schemas.arrow_schema(name)
        schema = pa.schema([f.with_nullable(True) for f in schema])
        found[name] = []
        for part, some in enumerate((rows[:2], rows[2:])):
            if some:
                path = folder / f"{name}-{part}'s.parquet"
                pq.write_table(pa.Table.from_pylist(some, schema=schema), path)
                found[name].append(str(path))
    return found


@pytest.fixture
def con(tmp_path: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    with query.connect_files(files(tmp_path, MANIFEST, PLAN), SPEC) as con:
        yield con


@pytest.fixture
def empty() -> Iterator[duckdb.DuckDBPyConnection]:
    with query.connect_files({"manifest": [], "plan": []}, SPEC) as con:
        yield con


def rows(con: duckdb.DuckDBPyConnection, text: str, **params: Any) -> list[dict[str, Any]]:
    sql, values = query.resolve(text, params)
    return query.execute(con, sql, values).to_pylist()


# -- views --------------------------------------------------------------------------------------


def test_samples_are_adds_without_hides(con: duckdb.DuckDBPyConnection) -> None:
    found = rows(con, "select sample_id, segment_id from samples order by 1")
    assert found == [
        {"sample_id": "A1-0", "segment_id": "seg-1"},
        {"sample_id": "A1-1", "segment_id": "seg-2"},
    ]
    columns = [r["column_name"] for r in rows(con, "describe samples")]
    expected = [n for n in schemas.arrow_schema("manifest").names if n not in ("op", "reason")]
    assert columns == expected


def test_segments(con: duckdb.DuckDBPyConnection) -> None:
    found = rows(con, "select * from segments order by segment_id")
    assert [(r["segment_id"], r["samples"], r["tokens"], r["hidden_samples"]) for r in found] == [
        ("seg-1", 1, 100, 1),
        ("seg-2", 1, 200, 1),
    ]
    assert found[0]["stored_bytes"] == 700 and found[0]["inventory_digest"] == "digest-seg-1"


def test_plan_without_tombstones(con: duckdb.DuckDBPyConnection) -> None:
    found = rows(con, "select sample_id, length, len(input_ids) as n from plan order by 1")
    assert [(r["sample_id"], r["length"], r["n"]) for r in found] == [
        ("A1-0", 100, 100),
        ("A1-1", 200, 200),
        ("A1-2", 300, 300),
        ("B3-0", 50, 50),
        ("B3-2", 80, 80),
    ]


def test_coverage_counts_samples_not_sums(tmp_path: Path) -> None:
    # Two planned, two committed, yet one is missing: the other was never planned, and a sample
    # with other tokens is another sample.
    manifest = [added("A1-0", 100, "s", 0), added("A1-9", 200, "s", 256)]
    manifest += [added("B3-0", 50, "s", 512, token_hash="other")]
    with query.connect_files(files(tmp_path, manifest, PLAN[:4]), SPEC) as con:
        found = {(r["source"], r["split"]): r for r in rows(con, "select * from coverage")}
    one = found["A1", "train"]
    assert (one["planned"], one["committed"], one["missing"]) == (2, 1, 1)
    assert (one["planned_tokens"], one["committed_tokens"]) == (300, 100)
    assert one["fraction"] == pytest.approx(1 / 3)
    assert found["B3", "train"]["missing"] == 1
    assert found["A1", "validation"]["committed"] == 0


def test_versions(con: duckdb.DuckDBPyConnection) -> None:
    found = rows(con, "select * from versions order by commit_version")
    keys = ("commit_version", "added", "hidden", "segments", "condemned_segments", "stored_bytes")
    assert [tuple(r[k] for k in keys) for r in found] == [
        (1, 2, 0, 1, 0, 700),
        (2, 0, 1, 0, 0, 0),
        (3, 2, 0, 1, 0, 700),
        (4, 0, 1, 0, 0, 0),
        (5, 0, 0, 0, 1, 0),
    ]
    assert found[0]["committed_at"] == AT


# -- named queries ------------------------------------------------------------------------------

NAMES = {
    "coverage", "gaps", "duplicates", "lengths", "sources", "integrity", "storage_growth",
    "forecast", "epoch", "non_finite", "constant_streams", "rms_outliers", "equal_states",
}  # fmt: skip


def test_every_named_query_runs(
    con: duckdb.DuckDBPyConnection, empty: duckdb.DuckDBPyConnection
) -> None:
    assert set(query.named()) >= NAMES
    for name, found in query.named().items():
        assert found.description
        rows(con, name)
        rows(empty, name)


def test_coverage_query(con: duckdb.DuckDBPyConnection) -> None:
    found = rows(con, "coverage")
    assert [(r["source"], r["split"], r["planned"], r["missing"]) for r in found] == [
        ("A1", "train", 2, 0),
        ("A1", "validation", 1, 1),
        ("B3", "train", 2, 2),
        ("(total)", "", 5, 3),
    ]
    assert found[-1]["percent"] == pytest.approx(100 * 300 / 730, abs=1e-3)


def test_gaps(con: duckdb.DuckDBPyConnection) -> None:
    assert [r["sample_id"] for r in rows(con, "gaps")] == ["A1-2", "B3-2", "B3-0"]
    found = rows(con, "gaps", source="B3", limit="1")
    assert [(r["sample_id"], r["all_missing"]) for r in found] == [("B3-2", 2)]


def test_lengths_sources_growth_forecast(con: duckdb.DuckDBPyConnection) -> None:
    found = rows(con, "lengths", width="100")
    assert [(r["from_tokens"], r["to_tokens"], r["planned"], r["committed"]) for r in found] == [
        (0, 99, 2, 0),
        (100, 199, 1, 1),
        (200, 299, 1, 1),
        (300, 399, 1, 0),
    ]
    (source,) = rows(con, "sources")
    assert (source["source"], source["samples"], source["tokens"]) == ("A1", 2, 300)
    assert source["raw_bytes"] == 300 * PER_TOKEN
    growth = rows(con, "storage_growth")
    assert [(r["version"], r["total_tokens"], r["total_stored_bytes"]) for r in growth] == [
        (1, 300, 700),
        (2, 100, 700),
        (3, 350, 1400),
        (4, 300, 1400),
        (5, 300, 1400),
    ]
    (forecast,) = rows(con, "forecast")
    assert (forecast["ratio"], forecast["basis"]) == (0.7, "measured")
    assert forecast["forecast_stored_bytes"] == round(1400 + 430 * PER_TOKEN * 0.7)
    assert forecast["of_estimate"] == pytest.approx(forecast["forecast_stored_bytes"] / 10_000)
    (given,) = rows(con, "forecast", ratio="0.5")
    assert (given["ratio"], given["basis"]) == (0.5, "given")


def test_forecast_before_the_first_commit(tmp_path: Path) -> None:
    with query.connect_files(files(tmp_path, [], PLAN[:2]), SPEC) as con:
        (found,) = rows(con, "forecast")
    assert (found["ratio"], found["basis"]) == (0.689, "typical")
    assert found["forecast_stored_bytes"] == round(300 * PER_TOKEN * 0.689)


def test_uncompressed_padding_is_forecast(tmp_path: Path) -> None:
    spec = make_spec(SPEC.model, SPEC.streams, codec="none", estimate=SPEC.estimate)
    with query.connect_files(files(tmp_path, [], PLAN[:2]), spec) as con:
        (found,) = rows(con, "forecast")
    chunks = sum(-(-row["length"] // spec.geometry.chunk_tokens) for row in PLAN[:2])
    expected = chunks * spec.geometry.chunk_tokens * PER_TOKEN
    assert found["forecast_stored_bytes"] == expected and found["basis"] == "typical"
    with query.connect_files(files(tmp_path / "empty", [], []), spec) as con:
        (found,) = rows(con, "forecast")
    assert (found["ratio"], found["forecast_stored_bytes"]) == (1.0, 0)


def test_integrity_finds_each_damage(tmp_path: Path) -> None:
    with query.connect_files(files(tmp_path, MANIFEST, PLAN), SPEC) as con:
        assert {r["failures"] for r in rows(con, "integrity")} == {0}
    bad = [
        added("A1-0", 100, "s", 0),
        added("A1-0", 100, "t", 0),
        added("A1-1", 200, "s", 10, token_hash="other"),
        added("Z9-0", 10, "s", 512, nonfinite=[0, 1], absmax=[0.0, 1.0], rms=[1.0]),
        added("B3-0", 50, "s", 1000, inventory_digest="another"),
        hidden("B3-9", "s"),
        {"op": "condemn", "segment_id": "t", "committed_at": AT, "commit_version": 5},
    ]
    with query.connect_files(files(tmp_path, bad, PLAN), SPEC) as con:
        found = rows(con, "integrity")
    assert [r["failures"] for r in found] == [1, 1, 1, 1, 1, 1, 2, 1, 1, 1, 1], found
    assert found[0]["example"] == "A1-0"


def test_duplicates(tmp_path: Path) -> None:
    bad = [added("A1-0", 100, "s", 0), added("A1-0", 100, "t", 0)]
    bad += [added("B3-7", 10, "s", 256, token_hash="hash-A1-0")]
    with query.connect_files(files(tmp_path, bad, []), SPEC) as con:
        found = rows(con, "duplicates")
    assert [(r["kind"], r["key"], r["copies"], r["members"]) for r in found] == [
        ("same sample_id", "A1-0", 2, ["s", "t"]),
        ("same tokens", "hash-A1-0", 2, ["A1-0", "B3-7"]),
    ]


def anomalies(tmp_path: Path, manifest: list[dict], name: str, **params: Any) -> list[dict]:
    tmp_path.mkdir(exist_ok=True)
    with query.connect_files(files(tmp_path, manifest, []), SPEC) as con:
        return rows(con, name, **params)


def test_non_finite(tmp_path: Path) -> None:
    odd = [added("B3-1", 10, "s", 256, nonfinite=[0, 4]), added("B3-2", 5, "s", 0)]
    (found,) = anomalies(tmp_path, odd, "non_finite")
    assert (found["sample_id"], found["stream"], found["values"]) == ("B3-1", "final", 4)
    assert found["fraction"] == 4 / (10 * SPEC.hidden_size)
    assert anomalies(tmp_path / "x", odd, "non_finite", source="A1") == []


def test_constant_streams(tmp_path: Path) -> None:
    odd = [
        added("A1-0", 10, "s", 0, rms=[0.0, 1.0], absmax=[0.0, 2.0]),
        added("A1-1", 10, "s", 256, rms=[1.0, 3.0], absmax=[2.0, 3.0001]),
        added("A1-2", 10, "s", 512, rms=[1.0, 3.0], absmax=[2.0, 3.1]),
    ]
    found = anomalies(tmp_path, odd, "constant_streams")
    assert [(r["sample_id"], r["stream"], r["kind"]) for r in found] == [
        ("A1-0", "2", "zero"),
        ("A1-1", "final", "constant"),
    ]
    assert len(anomalies(tmp_path / "x", odd, "constant_streams", spread="0.1")) == 3


def test_rms_outliers(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    many = [
        added(f"A1-{i}", 10, "s", 256 * i, rms=[float(a), 50 * float(b)])
        for i, (a, b) in enumerate(rng.lognormal(0, 0.1, (200, 2)))
    ]
    assert anomalies(tmp_path, many, "rms_outliers") == []
    # As large as the other stream's is: of their own stream they are not.
    many[7] |= {"rms": [50.0, 50.0]}
    many[9] |= {"rms": [1.0, 1.0]}
    found = anomalies(tmp_path / "x", many, "rms_outliers")
    assert {(r["sample_id"], r["stream"]) for r in found} == {("A1-7", "2"), ("A1-9", "final")}
    assert all(abs(r["deviations"]) > 12 for r in found)
    assert anomalies(tmp_path / "y", many, "rms_outliers", deviations="1000") == []
    # Where nearly all are equal, nothing is an outlier for its last digit.
    alike = [added(f"A1-{i}", 10, "s", 0, rms=[1 + (i == 3) / 100, 0.0]) for i in range(50)]
    assert anomalies(tmp_path / "z", alike, "rms_outliers") == []


def test_equal_states(tmp_path: Path) -> None:
    odd = [
        added("A1-0", 10, "s", 0, checksum=[5, 6]),
        added("A1-1", 10, "s", 256, checksum=[5, 6]),
        added("A1-2", 10, "s", 512, checksum=[5, 7], token_hash="same"),
        added("A1-3", 10, "s", 768, checksum=[8, 7], token_hash="same"),
        added("A1-4", 10, "t", 0, checksum=[0, 0], absmax=[0.0, 0.0]),
        added("A1-5", 10, "t", 256, checksum=[0, 0], absmax=[0.0, 0.0]),
        added("A1-6", 10, "t", 512, checksum=[9, 9], token_hash="twice"),
        added("A1-7", 10, "t", 768, checksum=[9, 9], token_hash="twice"),
    ]
    found = anomalies(tmp_path, odd, "equal_states")
    assert [(r["kind"], r["samples"], r["members"]) for r in found] == [
        ("equal states, other tokens", 2, ["A1-0", "A1-1"]),
        ("equal tokens, other states", 2, ["A1-2", "A1-3"]),
    ]


# -- parameters and refusals --------------------------------------------------------------------


def test_parameters() -> None:
    assert query.resolve("select $k", {"k": "3"}) == ("select $k", {"k": 3})
    assert query.resolve("gaps", {"source": "1"})[1]["source"] == "1"
    with pytest.raises(InvalidInput, match="no parameter 'sauce'; its parameters: source"):
        query.resolve("gaps", {"sauce": "A1"})
    with pytest.raises(InvalidInput, match="limit: found 'many', expected a whole number"):
        query.resolve("gaps", {"limit": "many"})
    with pytest.raises(InvalidInput, match="did you mean 'coverage'"):
        query.resolve("covrage", {})


def test_examples_of_the_documentation_run(con: duckdb.DuckDBPyConnection) -> None:
    text = (Path(__file__).parent.parent / "docs" / "sql.md").read_text("utf-8")
    found = [b for b in re.findall(r"```sql\n(.*?)```", text, re.S) if not b.startswith("--")]
    assert len(found) > 5
    for sql in found:
        query.execute(con, sql)


def test_headers() -> None:
    found = query.parse("-- name: x\n-- description: d\n-- params: a=1, b=0.5, c=%\nselect 1", "x")
    assert found.params == {"a": 1, "b": 0.5, "c": "%"}
    for text in ("select 1", "-- name: x\nselect 1", "-- name: a-b\n-- description: d"):
        with pytest.raises(InvalidInput, match=r"x\.sql"):
            query.parse(text, "x.sql")
    with pytest.raises(InvalidInput, match="expected name=default"):
        query.parse("-- name: x\n-- description: d\n-- params: a\nselect 1", "x.sql")


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("selec 1", "syntax error"),
        ("select nope from samples", "nope"),
        ("select * from nope", "nope"),
        ("select $k", "parameters: k"),
        ("select 'x'::int from samples", "Could not convert"),
        ("select error('stop') from range(3)", "stop"),
        ("", "0 statements"),
        ("select 1; select 2", "2 statements"),
        ("copy (select 1) to 'out.parquet'", "COPY statement"),
        ("create table x as select 1", "CREATE statement"),
        ("attach 'x.db'", "ATTACH statement"),
        ("set threads = 1", "expected a SELECT"),
        ("pragma version", "expected a SELECT"),
        ("install httpfs", "expected a SELECT"),
        ("call pragma_version()", "CALL statement"),
        ("insert into spec select * from spec", "INSERT statement"),
        ("explain analyze copy (select 1) to 'out.parquet'", "cannot"),
        ("select * from read_text('/etc/hostname')", "Cannot access file"),
        ("select * from '/etc/hostname'", ""),
        ("select * from glob('/*')", "Cannot access"),
        ("select * from duckdb_secrets()", "Cannot access"),
        ("select * from sniff_csv('/etc/hostname')", "Cannot access"),
    ],
)
def test_refused(con: duckdb.DuckDBPyConnection, sql: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=f"(?i){message}"):
        query.execute(con, sql)
    assert not Path("out.parquet").exists()


def test_python_variables_are_out_of_reach(con: duckdb.DuckDBPyConnection) -> None:
    secret = pa.table({"a": [1]})
    assert secret.num_rows
    with pytest.raises(InvalidInput, match="secret"):
        query.execute(con, "select * from secret")


def test_reads_through_fsspec(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    urls: dict[str, list[str]] = {}
    for name, paths in files(tmp_path, MANIFEST, PLAN).items():
        urls[name] = [f"memory://lake/{name}-{i}.parquet" for i in range(len(paths))]
        for url, path in zip(urls[name], paths, strict=True):
            memory.pipe(url.removeprefix("memory:/"), Path(path).read_bytes())
    with query.connect_files(urls, SPEC, memory) as con:
        assert rows(con, "select count(*) as n from samples") == [{"n": 2}]
        with pytest.raises(InvalidInput, match="Cannot access"):
            query.execute(con, "select * from read_text('memory://lake/other.txt')")


def test_files_are_opened_a_few_times_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A lake has a manifest file for every segment: views that open them all when they are made, or
    # a query that goes through them ten times, take seconds.
    memory = fsspec.filesystem("memory")
    urls: dict[str, list[str]] = {}
    for name, paths in files(tmp_path, MANIFEST, PLAN).items():
        urls[name] = [f"memory://opens/{name}-{i}.parquet" for i in range(len(paths))]
        for url, path in zip(urls[name], paths, strict=True):
            memory.pipe(url.removeprefix("memory:/"), Path(path).read_bytes())
    opened: Counter[str] = Counter()
    real = type(memory)._open

    def count(self: object, path: str, *args: object, **more: object) -> object:
        opened[Path(path).name] += 1
        return real(self, path, *args, **more)

    monkeypatch.setattr(type(memory), "_open", count)
    changes = {"manifest": urls["manifest"][1:], "plan": urls["plan"][1:]}
    with query.connect_files(urls, SPEC, memory, changes) as con:
        assert opened["manifest-0.parquet"] == opened["plan-0.parquet"] == 1
        # DuckDB opens a file up to four times for each time a query names its table.
        for name, scans in (("gaps", 1), ("duplicates", 1), ("coverage", 2), ("integrity", 4)):
            opened.clear()
            found = rows(con, name)
            assert max(opened.values()) <= 4 * scans, (name, opened)
            with query.connect_files(urls, SPEC, memory) as all_changes:
                assert rows(all_changes, name) == found


def test_spills_to_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HSLAKE_DUCKDB_MEMORY", "64MB")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    with query.connect_files({"manifest": [], "plan": []}, SPEC) as con:
        found = query.execute(
            con, "select count(distinct md5(i::varchar)) as n from range(2000000) t(i)"
        )
        assert found.to_pylist() == [{"n": 2_000_000}]
        seen = list(tmp_path.iterdir())
    assert [p.name.startswith("hslake-duckdb-") for p in seen] == [True]
    assert not list(tmp_path.iterdir()) and not Path(".tmp").exists()


def test_a_damaged_table_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_lake(tmp_path, lengths=[10, 300])
    file = next((Path(made.url) / "manifest").glob("*.parquet"))
    whole = file.read_bytes()
    end = pq.ParquetFile(file).metadata.row_group(0).column(28).data_page_offset
    for data in (bytes(end - 4), b"\xff" * (end - 4)):  # DuckDB need not name the file
        file.write_bytes(whole[:4] + data + whole[end:])
        for read in (
            lambda: query.run(made.url, "select * from samples"),
            lambda: log(made.url),
            lambda: audit(made.url),
            lambda: status(made.url),
        ):
            with pytest.raises(Corrupt, match=file.name):
                read()
    file.write_bytes(whole)
    lake = hslake.open(made.url)
    with pytest.raises(InvalidInput, match="the query failed"):  # nothing is damaged
        query.run(lake, "select error(sample_id) from samples")
    # What is kept from us is no damage.
    monkeypatch.setattr(query, "open_store", _keeps_out)
    file.write_bytes(b"")
    with pytest.raises(Unavailable):
        query.run(hslake.open(made.url), "coverage")


def _keeps_out(url: str) -> None:
    raise Unavailable(url)
