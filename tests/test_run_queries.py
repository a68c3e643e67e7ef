"""Named queries about runs: what a run told comes out again, spread over the right times."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hslake import query
from hslake.schemas import arrow_schema

BEGUN = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)
NAMES = ("runs", "rates", "retries", "refusals")


def row(op: str, run: str, seq: int, after_s: float, **more: Any) -> dict[str, Any]:
    return {
        "op": op,
        "run_id": run,
        "seq": seq,
        "told_at": BEGUN + timedelta(seconds=after_s),
        "elapsed_ms": int(after_s * 1000),
        "command": "extract",
        "commit_version": 1,
        **more,
    }


def figures(tokens: int, retried: int = 0, dropped: int = 0) -> dict[str, int]:
    return {
        "captured": tokens // 100,
        "captured_tokens": tokens,
        "retried": retried,
        "dropped": dropped,
        "refused": 0,
    }


RUNS = [
    row("start", "one", 1, 0, **figures(0)),
    row("progress", "one", 2, 150, **figures(15_000, 2, 1)),
    row("refuse", "one", 3, 160, sample_id="A1-0", token_hash="h0", reason="HTTP 400: no"),
    row("canary", "one", 4, 170, sample_id="A1-1", token_hash="h1", attempt="a", log_probs=[-1.0]),
    row("end", "one", 5, 300, **figures(30_000, 4, 1), outcome="complete", reason="all there"),
    row("start", "two", 1, 1000, **figures(0)),
    row("progress", "two", 2, 1100, **figures(1_000)),
    row("progress", "two", 3, 900, **figures(2_000)) | {"elapsed_ms": 1_200_000},  # clock set back
]


@pytest.fixture
def con(tmp_path: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    table = pa.Table.from_pylist(RUNS, schema=arrow_schema("runs"))
    pq.write_table(table, tmp_path / "runs.parquet")
    add = {
        "op": "add",
        "sample_id": "A1-1",
        "length": 600,
        "committed_at": BEGUN + timedelta(seconds=130),
        "commit_version": 1,
    }
    schema = arrow_schema("manifest")
    whole = {f.name: add.get(f.name) for f in schema}
    free = pa.schema([f.with_nullable(True) for f in schema])
    pq.write_table(pa.Table.from_pylist([whole], schema=free), tmp_path / "manifest.parquet")
    plan = {f.name: None for f in arrow_schema("plan")}
    plan |= {"op": "add", "sample_id": "A1-0", "token_hash": "h0", "source": "A1", "length": 9}
    free = pa.schema([f.with_nullable(True) for f in arrow_schema("plan")])
    pq.write_table(pa.Table.from_pylist([plan], schema=free), tmp_path / "plan.parquet")
    files = {name: [str(tmp_path / f"{name}.parquet")] for name in ("runs", "manifest", "plan")}
    with query.connect_files(files) as made:
        yield made


def ask(con: duckdb.DuckDBPyConnection, name: str, **params: Any) -> list[dict[str, Any]]:
    return query.execute(con, *query.resolve(name, params)).to_pylist()


def test_runs_newest_first(con: duckdb.DuckDBPyConnection) -> None:
    two, one = ask(con, "runs")
    assert (one["run_id"], one["outcome"], one["canaries"]) == ("one", "complete", 1)
    assert (one["seconds"], one["tokens_per_second"], one["retried"]) == (300.0, 100.0, 4)
    assert (two["outcome"], two["ended_at"], two["captured"]) == ("none said", None, 20)
    assert [r["run_id"] for r in ask(con, "runs", limit=1)] == ["two"]
    assert ask(con, "runs", command="tune") == []


def test_rates_of_intervals(con: duckdb.DuckDBPyConnection) -> None:
    found = {r["since"]: r for r in ask(con, "rates", seconds=100.0)}
    first = found[BEGUN]
    assert first["captured_tokens_per_second"] == 100.0 and first["committed_samples"] == 0
    second = found[BEGUN + timedelta(seconds=100)]
    assert second["committed_tokens_per_second"] == 6.0 and second["committed_samples"] == 1
    # What was told at 150 and at 300 lies in all of the intervals between, and all of it.
    whole = sum(100.0 * (r["captured_tokens_per_second"] or 0.0) for r in found.values())
    assert whole == pytest.approx(32_000, rel=1e-3)
    assert sum(r["retried"] or 0.0 for r in found.values()) == pytest.approx(4.0, abs=0.2)
    assert BEGUN + timedelta(seconds=500) not in found  # nobody ran then
    only = ask(con, "rates", seconds=100.0, run="two")
    assert sum(r["captured_tokens_per_second"] or 0.0 for r in only) == pytest.approx(20.0)
    (long,) = ask(con, "rates", seconds=86_400.0)
    assert long["captured_tokens_per_second"] == pytest.approx(32_000 / 86_400, abs=0.01)


def test_retries_and_refusals(con: duckdb.DuckDBPyConnection) -> None:
    one = next(r for r in ask(con, "retries") if r["run_id"] == "one")
    assert (one["retried"], one["dropped"], one["dropped_percent"]) == (4, 1, 0.332)
    (refused,) = ask(con, "refusals")
    assert (refused["sample_id"], refused["source"], refused["still_missing"]) == (
        "A1-0",
        "A1",
        True,
    )
    assert ask(con, "refusals", reason="too long%") == []


def test_a_lake_without_runs(con: duckdb.DuckDBPyConnection) -> None:
    with query.connect_files({}) as empty:
        for name in NAMES:
            assert ask(empty, name) == []
