"""The whole preflight against a real float32 server, a compactor beside it; then rows, parts and
plans that are wrong, on the same server."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import hslake
from hslake.checks import FAIL, PASS, Check
from hslake.compact import compact
from hslake.extract import ExtractOptions, extract
from hslake.extract.drive import Limits
from hslake.lmhead import find_head
from hslake.plan import plan_files
from hslake.preflight import PreflightReport, preflight
from hslake.preflight.burst import compactor_seen
from hslake.preflight.invariance import compare
from hslake.preflight.probe import Probe, Rows, capture, fetch
from hslake.preflight.states import check_log_probs
from hslake.server import Server, new_session
from hslake.spec import LakeSpec
from hslake.staging import StagingWriter
from tests.e2e import client
from tests.e2e.conftest import CHUNK, Stage, set_stage

HSLAKE = [sys.executable, "-c", "from hslake.cli import main; main()"]
PART = 1024  # as set_stage makes them
TOO_LONG = 1200


@pytest.fixture(scope="module")
def stage(
    ram: Path,
    sglang_python: Path,
    model_dir: Path,
    prompts: dict[str, list[int]],
    num_layers: int,
) -> Iterator[Stage]:
    """Everything that is asked of the server, once; tests look at what is gathered on the way."""
    folder = ram / "preflight"
    folder.mkdir()
    capture_of = f"2,{num_layers // 2},{num_layers - 1},{num_layers},final"
    made = set_stage(folder, sglang_python, model_dir, prompts, capture=capture_of, dtype="float32")
    facts = made.facts
    with made.server:
        watch = [*HSLAKE, "compact", made.lake, "--staging", str(made.staging), "--watch"]
        compactor = subprocess.Popen(watch, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            _wait(lambda: compactor_seen([made.staging]))
            call = [*HSLAKE, "preflight", made.lake, "--server", made.url, "--burst", "8", "--json"]
            call += ["--staging", str(made.staging), "--model", str(model_dir)]
            facts["run"] = subprocess.run(call, capture_output=True, text=True, timeout=300)
            facts["rows came back"] = _wait(lambda: _free(made.url) == 3 * PART)
            facts["after preflight"] = _samples(made)
            facts["captured"] = asyncio.run(_two_probes(made, list(prompts.values())))
            facts["too long"] = _with_a_longer_plan(made)
            facts["foreign"] = _with_a_foreign_part(made, folder)
            limits = Limits(patience=60.0)
            facts["extract"] = extract(made.lake, [made.url], ExtractOptions(limits=limits))
            call = [*HSLAKE, "tune", made.lake, "--server", made.url, "--json", "--seconds", "1"]
            call += ["--staging", str(made.staging), "--repeats", "2", "--first", "2"]
            facts["tune"] = subprocess.run(
                [*call, "--most", "4"], capture_output=True, text=True, timeout=300
            )
        finally:
            compactor.terminate()
            compactor.wait(60)
        facts["compact"] = compact(made.lake, [made.staging])
        facts["alive"] = made.server.alive()
    yield made


def _samples(stage: Stage) -> set[str]:
    rows = hslake.open(stage.lake).sql("select sample_id from samples").fetchall()
    return {row[0] for row in rows}


def _wait(true: Any, seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.2)
    return bool(true())


def _free(url: str) -> int:
    return sum(w["free_rows"] for w in client.get(url + "/hslake/status")["writers"])


async def _two_probes(stage: Stage, prompts: list[list[int]]) -> list[tuple[Probe, Rows]]:
    """The longest prompt and the one before it, with log-probs, one after the other."""
    spec, found = hslake.open(stage.lake).spec, []
    async with new_session() as session:
        server = Server(stage.url, session)
        for ids in sorted(prompts, key=len)[-2:]:
            status = await server.status()
            made = await capture(server, status, spec, ids, 30.0, logprobs=True)
            assert isinstance(made, Probe), made
            rows = await fetch([stage.staging], made.sample_id)
            assert rows is not None
            found.append((made, rows))
    return found


def _look(stage: Stage) -> PreflightReport:
    return preflight(stage.lake, [stage.url], staging=[stage.staging])


def _with_a_longer_plan(stage: Stage) -> PreflightReport:
    path = stage.staging.parent / "longer.parquet"
    row = {"sample_id": "A1-long", "source": "A1", "input_ids": list(range(100, 100 + TOO_LONG))}
    pq.write_table(pa.Table.from_pylist([row]), path)
    plan_files(stage.lake, [path])
    return _look(stage)


def _with_a_foreign_part(stage: Stage, folder: Path) -> PreflightReport:
    other = hslake.create(folder / "other", streams=[1, "final"], hidden_size=8, num_layers=3)
    writer = StagingWriter(
        stage.staging, other.spec, part_tokens=16, max_parts=1, fingerprint={}, engine={}
    )
    writer.close()
    try:
        return _look(stage)
    finally:
        compact(other.url, [stage.staging])  # takes its own away


@pytest.fixture(scope="module")
def report(stage: Stage) -> dict[str, Any]:
    run = stage.facts["run"]
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads(run.stdout)


def _check(report: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [c for c in report["checks"] if c["name"] == name]
    return found


def test_a_good_set_up_is_go(report: dict[str, Any]) -> None:
    assert report["passed"] is True
    # 12 samples of 58 tokens at once are more than two parts hold for sure: that may be said.
    warned = [c for c in report["checks"] if c["result"] != PASS]
    # So may that staging, a temporary folder, is on a disk.
    assert {c["name"] for c in warned} <= {"in flight", "staging"}, warned


def test_final_agrees_with_the_servers_log_probs(report: dict[str, Any]) -> None:
    found = _check(report, "log-probs")["found"]
    assert found.startswith("188 tokens through model.embed_tokens.weight agree"), found


def test_the_same_prompt_alone_and_among_others(report: dict[str, Any]) -> None:
    found = _check(report, "batch invariance")["found"]
    assert found.startswith("180 tokens alone and among 7 others of 5 to 200"), found


def test_the_longest_sample_is_chunked(report: dict[str, Any]) -> None:
    assert "has 180 tokens" in _check(report, "longest sample")["found"]
    assert "in 6 chunks of 32" in _check(report, "longest sample")["found"]


def test_the_burst_measures_all_three(report: dict[str, Any], prompts: dict[str, Any]) -> None:
    pace = report["pace"]
    assert pace["tokens"] > 180 and pace["server_rate"] > 0
    assert pace["compactor_rate"] > 0 and pace["staging_rate"] > 0
    assert pace["bottleneck"] in ("server", "staging", "compactor")
    assert pace["tokens_left"] == sum(map(len, prompts.values()))
    assert pace["eta_seconds"] >= pace["tokens_left"] / pace["server_rate"] * 0.99
    # float32 states of a bfloat16 model: real ones lose a little.
    assert 0.5 < pace["ratio"] < 1.0
    assert "the longest sample (180 tokens) among them" in _check(report, "burst")["found"]


def test_probes_leave_nothing_behind(stage: Stage, prompts: dict[str, list[int]]) -> None:
    assert stage.facts["rows came back"] and stage.facts["after preflight"] == set()
    assert _samples(stage) == set(prompts)
    assert stage.facts["compact"].abandoned == {} and stage.facts["alive"]


def test_tune_of_a_covered_plan_measures_with_probes(stage: Stage) -> None:
    run = stage.facts["tune"]
    assert run.returncode == 0, run.stdout + run.stderr
    told = json.loads(run.stdout)
    (group,) = told["groups"]
    assert told["probes"] and told["samples"] == 0 and group["chunk"] == CHUNK
    assert {level["requests"] for level in group["levels"]} == {2, 4}
    assert all(level["rate"] > 0 for level in group["levels"]) and group["best"]
    assert f"--chunked-prefill-size {CHUNK}" in told["commands"][0]
    assert f"--concurrency {group['best']['requests']} " in told["commands"][1]


# -- negative controls --------------------------------------------------------------------------


def _judge(stage: Stage, model: Path, made: list[tuple[Probe, Rows]]) -> Check:
    return check_log_probs(made, hslake.open(stage.lake).spec, find_head(model))


def _final(rows: Rows, spec: LakeSpec, values: np.ndarray) -> Rows:
    at = spec.streams.index("final")
    return replace(rows, hidden=[*rows.hidden[:at], values, *rows.hidden[at + 1 :]])


def test_the_probes_agree_as_they_are(stage: Stage, model_dir: Path) -> None:
    assert _judge(stage, model_dir, stage.facts["captured"]).result == PASS


def test_rows_of_every_other_boundary_fail(stage: Stage, model_dir: Path) -> None:
    spec = hslake.open(stage.lake).spec
    for k, stream in enumerate(spec.streams[:-1]):
        wrong = [(p, _final(r, spec, r.hidden[k])) for p, r in stage.facts["captured"]]
        found = _judge(stage, model_dir, wrong)
        assert found.result == FAIL and found.todo, stream


@pytest.mark.parametrize("shift", [1, -1])
def test_rows_shifted_by_one_fail(stage: Stage, model_dir: Path, shift: int) -> None:
    spec = hslake.open(stage.lake).spec
    wrong = [
        (p, _final(r, spec, np.roll(r.hidden[-1], shift, axis=0)))
        for p, r in stage.facts["captured"]
    ]
    assert _judge(stage, model_dir, wrong).result == FAIL


def test_rows_of_another_request_fail(stage: Stage, model_dir: Path) -> None:
    spec = hslake.open(stage.lake).spec
    (short, rows), (_, longer) = stage.facts["captured"]
    wrong = _final(rows, spec, longer.hidden[-1][: len(short.ids)])
    assert _judge(stage, model_dir, [(short, wrong)]).result == FAIL


def test_one_row_of_its_neighbour_fails_both_checks(stage: Stage, model_dir: Path) -> None:
    spec = hslake.open(stage.lake).spec
    probe, rows = stage.facts["captured"][1]
    values = rows.hidden[-1].copy()
    values[100] = values[101]
    wrong = _final(rows, spec, values)
    found = _judge(stage, model_dir, [(probe, wrong)])
    assert found.result == FAIL and ": 1 of 179 tokens" in found.found
    assert compare(rows, rows, spec, "").result == PASS
    assert compare(rows, wrong, spec, "").result == FAIL


def test_a_sample_longer_than_a_part_is_no_go(stage: Stage) -> None:
    (found,) = stage.facts["too long"].failures
    assert found.name == "longest sample" and f"a staging part holds {PART:,}" in found.found
    # And extract says of that one sample what preflight foretold.
    assert list(stage.facts["extract"].missing.values()) == [1]


def test_a_foreign_part_is_no_go(stage: Stage) -> None:
    found = {c.name: c for c in stage.facts["foreign"].failures}
    assert set(found) == {"foreign parts", "longest sample"}
    assert "lake_id" in found["foreign parts"].found
