"""The command line: exit codes, messages, formats, help. Bad input leaves nothing behind."""

import csv
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

import hslake
from hslake.cli import app

COMMANDS = [
    "create",
    "plan",
    "serve",
    "capture-hf",
    "preflight",
    "tune",
    "extract",
    "compact",
    "status",
    "query",
    "verify",
    "audit",
    "log",
    "pin",
    "vacuum",
    "repair",
    "delete",
    "gc-staging",
    "draft-config",
    "demo",
]


def call(*args: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in args])


@pytest.fixture
def lake(tmp_path: Path) -> str:
    return hslake.create(tmp_path / "lake", hidden_size=8, num_layers=12, capture="eagle3").url


@pytest.fixture
def planned(lake: str, tmp_path: Path) -> str:
    rows = [{"sample_id": f"s{i}", "input_ids": [i] * (i + 1), "source": "A1"} for i in range(5)]
    assert call("plan", lake, write(tmp_path, *rows)).exit_code == 0
    return lake


def write(folder: Path, *rows: dict[str, Any], name: str = "rows.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


# -- help ---------------------------------------------------------------------------------------


def test_every_command_has_help_with_examples() -> None:
    root = call("--help")
    assert root.exit_code == 0
    for name in COMMANDS:
        assert f"  {name} " in root.stdout
        found = call(name, "--help")
        assert found.exit_code == 0 and "Examples:" in found.stdout, name
        assert f"hslake {name}" in found.stdout or name == "demo"
    for later in ("import", "export", "vocab", "bench"):
        assert call(later, "x").exit_code == 2


def test_help_is_quick() -> None:
    code = "import sys\nfrom hslake.cli import app\ntry: app(['--help'])\nexcept SystemExit: pass\n"
    code += "heavy = {'duckdb', 'deltalake', 'torch', 'pyarrow', 'zarr', 'rich', 'transformers'}\n"
    code += "sys.exit(', '.join(heavy & set(sys.modules)) or 0)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - start < 3  # half a second on a quiet machine


# -- exit codes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_no_arguments(name: str) -> None:
    if name == "demo":
        return
    found = call(name)
    assert found.exit_code == 2
    assert "Traceback" not in found.output


@pytest.mark.parametrize(
    "args",
    [
        ("query", "coverage"),
        ("audit",),
        ("verify",),
        ("log",),
        ("vacuum",),
        ("pin", "x"),
        ("draft-config", "--convention", "vllm"),
    ],
)
def test_no_lake(tmp_path: Path, args: tuple[str, ...]) -> None:
    found = call(args[0], tmp_path / "none", *args[1:])
    assert found.exit_code == 2
    assert "no lake at" in found.stderr and "hslake create" in found.stderr
    assert not (tmp_path / "none").exists()


def test_lake_of_a_newer_format(planned: str) -> None:
    path = Path(planned) / "hslake.json"
    spec = json.loads(path.read_text())
    path.write_text(json.dumps(spec | {"format_version": 2}))
    for args in (("query", planned, "coverage"), ("audit", planned), ("log", planned)):
        found = call(*args)
        assert found.exit_code == 2
        assert "format version 2" in found.stderr and "upgrade hslake" in found.stderr


BAD_ROWS = [
    ({"input_ids": []}, "input_ids"),
    ({"input_ids": [-1]}, "input_ids"),
    ({"input_ids": [2**31]}, "input_ids"),
    ({"input_ids": [1.5]}, "input_ids"),
    ({"input_ids": [True]}, "input_ids"),
    ({"input_ids": ["a"]}, "input_ids"),
    ({"loss_mask": [1]}, "loss_mask"),
    ({"loss_mask": [1, 2]}, "loss_mask"),
    ({"sample_id": "good"}, "sample_id"),
    ({"sample_id": "a/b"}, "sample_id"),
    ({"sample_id": "it's"}, "sample_id"),
    ({"sample_id": 'say "a"'}, "sample_id"),
    ({"sample_id": "a\nb"}, "sample_id"),
    ({"sample_id": "x" * 201}, "sample_id"),
]


@pytest.mark.parametrize(("bad", "field"), BAD_ROWS)
def test_bad_plan_rows(lake: str, tmp_path: Path, bad: dict[str, Any], field: str) -> None:
    good = {"sample_id": "good", "input_ids": [1, 2], "source": "A1"}
    file = write(tmp_path, good, {**good, "sample_id": "other", **bad})
    found = call("plan", lake, file)
    assert found.exit_code == 2
    assert f"error: {file}: row 2: {field}: " in found.stderr
    assert "Traceback" not in found.output
    assert hslake.open(lake).sql("select * from plan").fetchall() == []


def test_query_that_fails(planned: str) -> None:
    for sql in ("selec 1", "select nope from samples", "select * from nowhere", "drop table plan"):
        found = call("query", planned, sql)
        assert found.exit_code == 2 and found.stderr.startswith("error: the query")
        assert found.stdout == ""
    assert "did you mean 'coverage'" in call("query", planned, "covrage").stderr
    assert call("query", planned, "coverage", "--version", "99").exit_code == 2
    assert call("query", planned, "gaps", "--param", "limit").exit_code == 2
    assert call("query", planned, "gaps", "--param", "nope=1").exit_code == 2
    assert call("query", planned, "coverage", "--output", "/no/such/dir/x.csv").exit_code == 2


def test_create_refusals(lake: str, tmp_path: Path) -> None:
    size = ("--hidden-size", 8, "--num-layers", 12)
    before = (Path(lake) / "hslake.json").read_bytes()
    for args, message in (
        ((lake, *size, "--capture", "eagle3"), "there is a lake"),
        ((tmp_path / "x", *size), "--capture"),
        ((tmp_path / "x", "--capture", "eagle3"), "--model-config"),
        ((tmp_path / "x", *size, "--capture", "13"), "no stream"),
        ((tmp_path / "x", *size, "--capture-from", "a.json"), "--convention"),
        ((tmp_path / "x", *size, "--capture", "2", "--estimate-bytes", "much"), "3.5TB"),
        ((tmp_path / "x", *size, "--capture", "2", "--codec", "zip"), "--codec"),
        ((tmp_path / "x", "--model-config", tmp_path / "c.json", "--capture", "2"), "c.json"),
    ):
        found = call("create", *args)
        assert found.exit_code == 2 and message in found.stderr, (args, found.stderr)
    assert not (tmp_path / "x").exists()
    assert (Path(lake) / "hslake.json").read_bytes() == before


def test_missing_staging(lake: str, tmp_path: Path) -> None:
    found = call("compact", lake, "--staging", tmp_path / "none")
    assert found.exit_code == 2 and "none" in found.stderr


def test_a_bug_is_not_a_failed_check(lake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("hslake.audit.audit", broken)
    found = call("audit", lake)
    assert found.exit_code == 3
    assert "a bug in hslake: ZeroDivisionError: oops" in found.stderr
    assert "Traceback" not in found.output
    for more in (("--debug", "audit", lake), ("audit", lake)):
        if len(more) == 2:
            monkeypatch.setenv("HSLAKE_DEBUG", "1")
        assert isinstance(call(*more).exception, ZeroDivisionError)


# -- results ------------------------------------------------------------------------------------


def test_create_from_a_draft_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 30,
                    "hidden_size": 8, "vocab_size": 100, "torch_dtype": "float32"})
    )  # fmt: skip
    (tmp_path / "draft.json").write_text(
        json.dumps({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 14, 26]}})
    )
    found = call(
        "create", tmp_path / "lake", "--model-config", tmp_path / "config.json", "--capture-from",
        tmp_path / "draft.json", "--convention", "specforge", "--estimate-tokens", "1M", "--json",
    )  # fmt: skip
    assert found.exit_code == 0, found.stderr
    spec = json.loads(found.stdout)
    assert spec["streams"] == ["2", "15", "27", "final"] and spec["dtype"] == "float32"
    assert spec["estimate"] == {"tokens": 1_000_000, "bytes": None}
    ids = call("draft-config", tmp_path / "lake", "--convention", "specforge")
    assert ids.stdout == "1, 14, 26\n"
    ids = call("draft-config", tmp_path / "lake", "--convention", "vllm", "--json")
    assert json.loads(ids.stdout)["eagle_aux_hidden_state_layer_ids"] == [2, 15, 27]
    assert call("draft-config", tmp_path / "lake", "--convention", "mlx").exit_code == 2


def test_plan_reports(lake: str, tmp_path: Path) -> None:
    file = write(tmp_path, *({"input_ids": [i, i]} for i in range(3)))
    dry = call("plan", lake, file, "--source", "B3", "--dry-run")
    assert dry.exit_code == 0 and "would add 3 samples" in dry.stdout
    assert json.loads(call("plan", lake, file, "--source", "B3", "--json").stdout)["added"] == 3
    again = call("plan", lake, file, "--source", "B3")
    assert "added 0 samples of 3 rows in 1 files, 3 planned before" in again.stdout


def test_query_formats(planned: str, tmp_path: Path) -> None:
    sql = "select sample_id, length, input_ids, planned_at, null as n from plan order by 1"
    table = call("query", planned, sql)
    assert table.exit_code == 0 and table.stdout.splitlines()[0].startswith("sample_id  length")
    rows = json.loads(call("query", planned, sql, "--json").stdout)
    assert rows[1]["input_ids"] == [1, 1] and rows[1]["n"] is None
    parsed = list(csv.DictReader(io.StringIO(call("query", planned, sql, "-f", "csv").stdout)))
    assert [r["sample_id"] for r in parsed] == [f"s{i}" for i in range(5)]
    assert parsed[1]["input_ids"] == "[1, 1]"
    data = call("query", planned, sql, "-f", "parquet").stdout_bytes
    assert pq.read_table(io.BytesIO(data)).num_rows == 5
    for kind in ("table", "json", "csv", "parquet"):
        out = tmp_path / f"out.{kind}"
        done = call("query", planned, sql, "--format", kind, "--output", out)
        assert done.exit_code == 0 and done.stdout == "" and out.stat().st_size
    assert call("query", planned, "select 1 where false", "--json").stdout == "[]\n"


def test_output_is_whole_or_as_it_was(
    planned: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    out = tmp_path / "plan.csv"
    out.write_text("before")
    monkeypatch.setattr("hslake.cli.query._write", full)
    done = call("query", planned, "select 1", "-f", "csv", "--output", out)
    assert done.exit_code == 2 and "No space left" in done.output
    assert [p.name for p in tmp_path.glob("*plan.csv*")] == ["plan.csv"]
    assert out.read_text() == "before"


def test_named_queries_and_parameters(planned: str) -> None:
    listed = json.loads(call("query", "--list", "--json").stdout)
    assert {"coverage", "gaps", "epoch"} <= {q["name"] for q in listed}
    assert "coverage" in call("query", "--list").stdout
    for query in listed:
        assert call("query", planned, query["name"]).exit_code == 0
    rows = json.loads(call("query", planned, "gaps", "-p", "limit=2", "--json").stdout)
    assert [r["sample_id"] for r in rows] == ["s4", "s3"] and rows[0]["all_missing"] == 5
    sql = "select count(*) as n from plan where length > $n"
    assert json.loads(call("query", planned, sql, "-p", "n=3", "--json").stdout) == [{"n": 2}]
    found = CliRunner().invoke(app, ["query", planned, "-", "--json"], input="select 1 as one")
    assert json.loads(found.stdout) == [{"one": 1}]


def test_audit_limit(planned: str, tmp_path: Path) -> None:
    report = tmp_path / "out.html"
    found = call("audit", planned, "--fail-over", "1B", "--report", report, "--json")
    assert found.exit_code == 1 and "exceeds the limit" in found.stderr
    assert json.loads(found.stdout)["passed"] is False and "<svg" in report.read_text()
    assert call("audit", planned, "--fail-over", "3.5TB").exit_code == 0


def test_versions(planned: str) -> None:
    assert "names version 0" in call("pin", planned, "run-1").stdout
    assert json.loads(call("pin", planned, "--list", "--json").stdout)[0]["name"] == "run-1"
    assert call("pin", planned, "a/b").exit_code == 2
    assert call("pin", planned, "run-2", "--version", "7").exit_code == 2
    assert json.loads(call("log", planned, "--json").stdout) == []
    assert json.loads(call("vacuum", planned, "--dry-run", "--json").stdout)["segments"] == []
    assert call("vacuum", planned, "--retain", "soon").exit_code == 2


def test_tables_print_one_line_a_row(planned: str) -> None:
    found = call("query", planned, "select 'a' || chr(10) || chr(27) || '[31mb' as x")
    assert found.stdout.splitlines()[2:] == ["a\\n\\x1b[31mb"]
