"""Float32 server and lake against Hugging Face: every row of every stream of every sample."""

import json
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

import hslake
from examples.sglang_cpu import cpu_server
from hslake.compact import compact
from hslake.ids import RequestId, new_attempt, token_hash
from hslake.lake import Lake
from hslake.staging import read_part, scan
from hslake.streams import draft_ids
from hslake.verify import verify
from tests.e2e import client
from tests.e2e.conftest import Stage, capture_all, plain_server, set_stage
from tests.e2e.reference import States, assert_same_states, reference_states, row_errors

TOLERANCE = 1e-5
CONCURRENCY = 6


@pytest.fixture(scope="module")
def stage(
    ram: Path,
    sglang_python: Path,
    model_dir: Path,
    prompts: dict[str, list[int]],
    talk: list[list[int]],
    num_layers: int,
) -> Iterator[Stage]:
    """The whole capture, once: what the tests look at is gathered on the way."""
    folder = ram / "float32"
    folder.mkdir()
    capture = f"0,2,{num_layers // 2},{num_layers - 3},{num_layers},final"
    made = set_stage(folder, sglang_python, model_dir, prompts, capture=capture, dtype="float32")
    spec = hslake.open(made.lake).spec
    with made.server:
        # Ordinary traffic: the server's own warm-up and health checks, and other people's requests.
        client.code(made.url + "/health_generate")
        made.facts["answers"] = client.answers(made.url, talk)
        client.generate(made.url, talk[0], rid="hslake.somebody.else")
        made.facts["status before"] = client.get(made.url + "/hslake/status")
        made.facts["aborted"] = _abort_and_send_again(made.url, spec.lake8)
        # Canaries among the others: their rows are compared with the truth like all rows.
        capture_all(made, requests=CONCURRENCY, canaries=1.0)
        made.facts["status after"] = client.get(made.url + "/hslake/status")
        made.facts["compact"] = compact(made.lake, [made.staging])
        made.facts["alive"] = made.server.alive()
        made.facts["loads"] = list(made.server._loads)
    made.facts["left"] = [
        (w.alive, read_part(p).sealed) for w in scan(made.staging) for p in w.parts
    ]
    yield made


def _abort_and_send_again(url: str, lake8: str) -> RequestId:
    """Abort a long request in the middle of its chunks, then send the same one again to its end."""
    ids = np.random.default_rng(3).integers(20, 45_000, 700).tolist()
    rid = RequestId(lake8, new_attempt(), len(ids), "A1", "not-in-the-plan")
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(client.generate, url, ids, rid=rid.encode())
        time.sleep(0.5)
        client.post(url + "/abort_request", {"rid": rid.encode()})
        sent.exception(timeout=60)  # an aborted request may answer or fail, but it must end
    client.generate(url, ids, rid=rid.encode())
    return rid


@pytest.fixture(scope="module")
def lake(stage: Stage) -> Lake:
    return hslake.open(stage.lake)


@pytest.fixture(scope="module")
def truth(model_dir: Path, prompts: dict[str, list[int]]) -> dict[str, States]:
    return reference_states(model_dir, torch.float64, prompts)


def test_the_prompts_can_be_judged(
    model_dir: Path, truth: dict[str, States], prompts: dict[str, list[int]]
) -> None:
    """An ill-conditioned row is off in any float32 engine, and would say nothing about ours."""
    for name, states in reference_states(model_dir, torch.float32, prompts).items():
        for stream, found in states.items():
            assert_same_states(found, truth[name][stream], TOLERANCE / 2, f"{name} stream {stream}")


def test_every_row_of_every_stream_of_every_sample(
    lake: Lake, truth: dict[str, States], prompts: dict[str, list[int]]
) -> None:
    assert len(lake.spec.streams) == 6
    for name, ids in prompts.items():
        sample = lake.read(name)
        assert sample.input_ids.tolist() == ids
        for i, stream in enumerate(lake.spec.streams):
            assert_same_states(
                sample.hidden_states[i], truth[name][stream], TOLERANCE, f"{name} stream {stream}"
            )


def test_a_boundary_off_by_one_fails_the_same_assertion(
    lake: Lake, truth: dict[str, States], prompts: dict[str, list[int]]
) -> None:
    for name in prompts:
        sample = lake.read(name)
        for i, b in enumerate(lake.spec.boundaries):
            wrong = truth[name][str(b - 1 if b else 1)]
            with pytest.raises(AssertionError, match="off, allowed"):
                assert_same_states(sample.hidden_states[i], wrong, TOLERANCE, "control")
            # No single row would pass either.
            assert row_errors(sample.hidden_states[i], wrong).min() > 10 * TOLERANCE
        with pytest.raises(AssertionError, match="off, allowed"):
            before_norm = truth[name][str(lake.spec.num_layers)]
            assert_same_states(sample.hidden_states[-1], before_norm, TOLERANCE, "control")


def test_all_samples_are_there_once_with_the_plans_tokens(
    lake: Lake, stage: Stage, prompts: dict[str, list[int]]
) -> None:
    rows = lake.sql("select sample_id, token_hash, length, chunk_size from samples").fetchall()
    expected = {(k, token_hash(v), len(v), 32) for k, v in prompts.items()}
    assert set(rows) == expected and len(rows) == len(expected)
    (source,) = lake.sql("select source from samples where sample_id = 'B3-001'").fetchall()
    assert source == ("B3",)


def test_canaries_agree_far_within_the_tolerance(lake: Lake, model_dir: Path) -> None:
    report = verify(lake.url, "canary", model=model_dir)
    assert report.ok and report.samples >= 2 and report.agreement is not None
    assert report.agreement.figures.max_off is not None
    assert report.agreement.figures.max_off < 1e-4


def test_other_traffic_left_nothing_in_staging(stage: Stage) -> None:
    (writer,) = stage.facts["status before"]["writers"]
    assert stage.facts["status before"]["armed"] is True
    assert writer["samples_captured"] == 0 and writer["dropped"] == 0 and writer["events"] == []
    assert all(part["reserved"] == 0 for part in writer["parts"])


def test_the_aborted_request_counts_once(stage: Stage) -> None:
    (writer,) = stage.facts["status after"]["writers"]
    states = [e["state"] for e in writer["events"] if e["sample_id"] == "not-in-the-plan"]
    assert states.count("captured") == 1


def test_the_server_lived_and_the_hook_stayed_armed(
    stage: Stage, prompts: dict[str, list[int]]
) -> None:
    after = stage.facts["status after"]
    assert stage.facts["alive"] and after["armed"] is True and after["error"] is None
    (writer,) = after["writers"]
    assert writer["samples_captured"] >= len(prompts)


def test_an_orderly_end_seals_staging_and_cleans_up(stage: Stage) -> None:
    left = stage.facts["left"]
    assert left and set(left) == {(False, True)}
    assert stage.facts["loads"] and not any(path.exists() for path in stage.facts["loads"])
    assert compact(stage.lake, [stage.staging]).passed
    assert scan(stage.staging) == []


def test_the_same_answers_with_and_without_the_hook(
    stage: Stage, ram: Path, sglang_python: Path, model_dir: Path, talk: list[list[int]]
) -> None:
    with plain_server(ram, sglang_python, model_dir, "float32") as plain:
        assert client.code(plain.url + "/hslake/status") == 404  # inert without HSLAKE_STAGING
        assert client.answers(plain.url, talk) == stage.facts["answers"]


SETTER = """
import json, sys
from types import SimpleNamespace as N
from sglang.srt.models.llama import LlamaForCausalLM
model = N(pp_group=N(is_last_rank=True), config=N(num_hidden_layers=int(sys.argv[2])), model=N())
LlamaForCausalLM.set_eagle3_layers_to_capture(model, json.loads(sys.argv[1]))
print(json.dumps(list(model.model.layers_to_capture)))
"""


def test_draft_config_ids_select_the_same_boundaries_in_sglang(
    sglang_python: Path, num_layers: int
) -> None:
    boundaries = [2, num_layers // 2, num_layers - 3]
    ids = draft_ids([*map(str, boundaries), "final"], num_layers, "sglang==0.5.23")
    argv = [str(sglang_python), "-c", SETTER, json.dumps(ids), str(num_layers)]
    environment = {"PATH": "/usr/bin:/bin", **cpu_server.env(1)}
    out = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=120)
    assert out.returncode == 0, out.stderr[-2000:]
    assert json.loads(out.stdout.splitlines()[-1]) == boundaries
