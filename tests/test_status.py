"""Status: samples are counted where they are: missing, waiting in staging, committed."""

import json
import shutil
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import hslake
from hslake.cli import app
from hslake.compact import compact
from hslake.errors import Missing
from hslake.extract import ExtractOptions, extract
from hslake.plan import plan_files
from hslake.preflight import preflight
from hslake.status import status
from tests.fakeserver import FakeServer


@pytest.fixture
def lake(tmp_path: Path) -> str:
    made = hslake.create(
        tmp_path / "lake",
        streams=[2, 4, "final"],
        hidden_size=8,
        num_layers=8,
        estimate_tokens=1000,
        estimate_bytes=50_000,
    )
    rows = [
        {"sample_id": f"{s}-{i}", "source": s, "split": "train", "input_ids": [5] * (10 + i)}
        for s in ("A1", "B3")
        for i in range(10)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "plan.parquet")
    plan_files(made.url, [tmp_path / "plan.parquet"])
    return made.url


def test_from_plan_to_lake(lake: str, tmp_path: Path) -> None:
    staging = tmp_path / "staging"
    staging.mkdir()
    before = status(lake)
    assert (before.planned, before.missing, before.waiting) == (20, 20, None)
    assert before.tokens_left == before.planned_tokens == 290
    assert before.tokens_per_second is None and before.writers == []
    with FakeServer(lake, staging) as server:
        extract(lake, [server.url], ExtractOptions(where="source = 'B3'"))
        half = status(lake, servers=[server.url], staging=[staging])
        assert (half.committed, half.waiting, half.missing) == (0, 10, 10)
        assert [(c.source, c.waiting, c.missing) for c in half.coverage] == [
            ("A1", 0, 10),
            ("B3", 10, 0),
        ]
        assert len(half.writers) == 1 and half.servers[0].state == "up"
        writer = half.writers[0]
        assert writer.alive and writer.armed and writer.samples_captured == 10
        assert writer.capacity_rows - writer.free_rows == writer.tokens_captured == 145
        extract(lake, [server.url])
        url = server.url
    # The server has ended; its staging has not.
    ended = status(lake, servers=[url], staging=[staging])
    assert ended.waiting == 20 and not ended.writers[0].alive
    assert "no answer" in ended.servers[0].state
    compact(lake, [staging])
    after = status(lake, staging=[staging])
    assert (after.committed, after.waiting, after.missing, after.tokens_left) == (20, 0, 0, 0)
    assert after.tokens_per_second and after.stored_bytes > 0
    assert after.expected_bytes == 290 * 50
    with pytest.raises(Missing):
        status(lake, staging=[tmp_path / "nowhere"])


def test_only_what_is_seen_in_this_lakes_staging_waits(lake: str, tmp_path: Path) -> None:
    runner, staging, other = CliRunner(), tmp_path / "staging", tmp_path / "other"
    staging.mkdir()
    other.mkdir()
    twin = hslake.create(tmp_path / "twin", streams=[2, 4, "final"], hidden_size=8, num_layers=8)
    plan_files(twin.url, [tmp_path / "plan.parquet"])
    with FakeServer(lake, staging) as server, FakeServer(twin.url, other) as its:
        extract(lake, [server.url])
        assert status(twin.url, servers=[its.url]).waiting == 0
        assert status(twin.url, servers=[server.url]).waiting is None  # the same sample ids
        server.stop()
        (ended,) = staging.glob("*-*")
        server.start()  # another process: it shows what the last one captured
        assert status(lake, servers=[server.url]).waiting == 20
        server.tells_others = False  # those of before do not
        far = runner.invoke(app, ["status", lake, "--server", server.url])
        assert "servers that have ended" in far.output, far.output
        assert status(lake, servers=[server.url]).missing == 20
        near = status(lake, servers=[server.url], staging=[staging])
        assert (near.waiting, near.missing) == (20, 0)
        shutil.rmtree(ended)
        assert status(lake, servers=[server.url], staging=[staging]).missing == 20


def test_probes_are_not_captured_samples(lake: str, tmp_path: Path) -> None:
    staging = tmp_path / "staging"
    staging.mkdir()
    with FakeServer(lake, staging) as server:
        assert preflight(lake, [server.url]).passed
        extract(lake, [server.url])
        found = status(lake, servers=[server.url], staging=[staging])
        assert [w.samples_captured for w in found.writers] == [20]


def test_no_time_left_is_told_when_nothing_goes_on(
    lake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging = tmp_path / "staging"
    staging.mkdir()
    with FakeServer(lake, staging) as server:
        extract(lake, [server.url], ExtractOptions(limit=5))
        compact(lake, [staging])
        assert status(lake).eta_seconds and status(lake, servers=[server.url]).eta_seconds
    ended = status(lake, staging=[staging])  # the server has: what comes is asked of nobody
    assert ended.writers and ended.tokens_per_second and ended.eta_seconds is None
    monkeypatch.setattr("hslake.status.work.IDLE_S", 0.0)
    silent = status(lake)
    assert silent.tokens_per_second and silent.eta_seconds is None
    shown = CliRunner().invoke(app, ["status", lake]).output
    assert "not known: nothing is going on now" in shown and "STOPPED" in shown


def test_idle_time_is_not_averaged_in(
    lake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging, pause = tmp_path / "staging", 2.5
    staging.mkdir()
    monkeypatch.setattr("hslake.status.work.GAP_S", 1.0)
    begun = time.monotonic()
    with FakeServer(lake, staging) as server:
        for source in ("A1", "B3"):
            extract(lake, [server.url], ExtractOptions(where=f"source = '{source}'", limit=8))
            time.sleep(pause)
            compact(lake, [staging])
        whole, tokens = time.monotonic() - begun, 2 * sum(10 + i for i in range(10))
        found = status(lake, servers=[server.url])
        assert found.tokens_per_second and found.eta_seconds
        # Twice nobody captured or committed for so long.
        done = found.committed_tokens
        assert 0.5 * tokens < done < tokens
        assert found.tokens_per_second >= done / (whole - 2 * pause)
        monkeypatch.setattr("hslake.status.work.IDLE_S", 1.0)
        time.sleep(pause)  # shorter than from commit to commit, but most of that was a pause
        assert status(lake, servers=[server.url]).eta_seconds is None


def test_no_time_is_told_without_a_server(lake: str, tmp_path: Path) -> None:
    staging = tmp_path / "staging"
    staging.mkdir()
    with FakeServer(lake, staging) as server:
        extract(lake, [server.url], ExtractOptions(limit=5))
        compact(lake, [staging])
        url = server.url
    found = status(lake, servers=[url])
    assert found.tokens_per_second and found.eta_seconds is None


def test_a_url_that_is_not_the_servers_root(lake: str, tmp_path: Path) -> None:
    staging = tmp_path / "staging"
    staging.mkdir()
    with FakeServer(lake, staging) as server:
        with pytest.raises(Missing, match="must be the server's root") as caught:
            extract(lake, [f"{server.url}/hslake/status"])
        assert f"(here perhaps {server.url})" in str(caught.value)


def test_command(lake: str, tmp_path: Path) -> None:
    runner = CliRunner()
    shown = runner.invoke(app, ["status", lake, "--server", "http://127.0.0.1:9"])
    assert shown.exit_code == 0, shown.output
    assert "(total)" in shown.output and "290 left" in shown.output
    assert "no answer" in shown.output and "estimate is 50.00 kB" in shown.output
    found = json.loads(runner.invoke(app, ["status", lake, "--json"]).output)
    assert found["planned"] == 20 and len(found["coverage"]) == 2


def test_extract_command(lake: str, tmp_path: Path) -> None:
    runner = CliRunner()
    staging = tmp_path / "staging"
    staging.mkdir()
    with FakeServer(lake, staging, context=20) as server:
        call = ["extract", lake, "--server", server.url]
        some = runner.invoke(app, [*call, "--limit", "3"])
        assert some.exit_code == 0 and "done as far as asked" in some.output, some.output
        rest = runner.invoke(app, call)
        assert not server.violations and rest.exit_code == 0, rest.output
        assert rest.output.splitlines()[-1].startswith("complete: all 20 planned samples")
        again = runner.invoke(app, [*call, "--json"])
        assert json.loads(again.stdout)["complete"] is True
    (tmp_path / "b").mkdir()
    with FakeServer(lake, tmp_path / "b", context=15) as server:
        bad = runner.invoke(app, ["extract", lake, "--server", server.url])
        assert bad.exit_code == 1 and "error: incomplete: 10 of 20" in bad.output, bad.output
        assert bad.output.count("longer than the server takes") == 1  # one reason for all of them
