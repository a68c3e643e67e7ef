"""The driver as a process of its own on two real servers: killed and started again in the middle,
then both servers are killed and one of them comes back."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hslake_sglang.process import ServerProcess

import hslake
from examples.sglang_cpu import cpu_server
from hslake.ids import token_hash
from hslake.staging import scan
from hslake.verify import verify
from tests.e2e import client
from tests.e2e.conftest import CHUNK, SINK, Stage, set_stage
from tests.e2e.reference import assert_same_states, reference_states
from tests.e2e.traffic import wait_for
from tests.sim.fleet import Process
from tests.sim.fleet import hslake as command

TOLERANCE = 1e-5
FILLERS = 40  # beside the samples that are compared with Hugging Face, so that there is a middle
PART, PARTS = 1024, 3


@pytest.fixture(scope="module")
def samples(prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    rng = np.random.default_rng(8)
    fillers = {
        f"B5-{i:03d}": [SINK, *rng.integers(20, 45_000, 40 + i).tolist()] for i in range(FILLERS)
    }
    return {**prompts, **fillers}


@pytest.fixture(scope="module")
def stage(
    ram: Path, sglang_python: Path, model_dir: Path, samples: dict[str, list[int]]
) -> Iterator[Stage]:
    """The whole run, once."""
    folder = ram / "killed"
    made = set_stage(
        folder, sglang_python, model_dir, samples,
        capture="eagle3", dtype="float32", part_tokens=PART, max_parts=PARTS,
    )  # fmt: skip
    other = ServerProcess.for_lake(
        made.lake,
        made.staging,
        cpu_server.args(model_dir, chunk=CHUNK, max_total_tokens=4096),
        log=folder / "other.log",
        python=sglang_python,
        env=cpu_server.env(1),
        part_tokens=PART,
        max_parts=PARTS,
    )
    staging = ("--staging", made.staging)
    urls = ("--server", made.url, "--server", other.url)
    extract = command("extract", made.lake, *urls, *staging, "--json", "--until-complete")
    driver = Process("driver", [*extract, "--concurrency", "2"], folder / "driver.log")
    compactor = Process(
        "compactor",
        command("compact", made.lake, *staging, "--watch", "--interval", 0.2, "--max-age", 1),
        folder / "compactor.log",
    )
    try:
        for server in (made.server.start(), other.start()):
            server.wait_ready()
        compactor.start()
        _in_turns(made, other, driver)
        made.facts["code"] = driver.wait(240)
        made.facts["log"] = driver.log.read_text("utf-8", "replace")
    finally:
        driver.kill()
        made.server.stop()
        other.stop()
        compactor.send(signal.SIGTERM)
        made.facts["compactor"] = compactor.wait(60)
        compactor.kill()
    yield made


def _in_turns(stage: Stage, other: ServerProcess, driver: Process) -> None:
    """Kill the driver in the middle; start it again, and kill and restart servers under it."""
    urls = [stage.url, other.url]
    driver.start()
    wait_for("some samples from each server", lambda: min(map(captured, urls)) >= 2)
    driver.kill()
    stage.facts["at the driver's death"] = sum(map(captured, urls))
    driver.start()
    more = stage.facts["at the driver's death"] + 6
    wait_for("some more samples", lambda: sum(map(captured, urls)) >= more)
    stage.facts["at the servers' end"] = sum(map(captured, urls))
    for server in (stage.server, other):  # asked to end, one would first do all that is left
        assert server._process is not None
        os.killpg(server._process.pid, signal.SIGKILL)
    stage.server.stop()
    other.stop()
    stage.server.start()


def captured(url: str) -> int:
    writers = client.get(url + "/hslake/status")["writers"]
    return sum(e["state"] == "captured" for w in writers for e in w["events"])


def report(stage: Stage) -> dict[str, Any]:
    log = stage.facts["log"]
    found: dict[str, Any] = json.loads(log[log.rindex("\n{\n") :].split("\n}\n")[0] + "\n}")
    return found


def test_the_driver_ends_complete(stage: Stage, samples: dict[str, list[int]]) -> None:
    assert stage.facts["code"] == 0, stage.facts["log"][-3000:]
    last = stage.facts["log"].strip().splitlines()[-1]
    assert last.startswith(f"complete: all {len(samples)} planned samples"), last
    assert stage.facts["compactor"] == 0


def test_everybody_died_in_the_middle(stage: Stage, samples: dict[str, list[int]]) -> None:
    first, second = stage.facts["at the driver's death"], stage.facts["at the servers' end"]
    assert 4 <= first < second < len(samples)
    uses = {s["url"]: s for s in report(stage)["servers"]}
    assert uses[stage.url]["outages"] >= 1 and uses[stage.url]["captured"] > 0


def test_every_sample_is_there_once(stage: Stage, samples: dict[str, list[int]]) -> None:
    lake = hslake.open(stage.lake)
    rows = lake.sql("select sample_id, token_hash, length from samples").fetchall()
    expected = {(k, token_hash(v), len(v)) for k, v in samples.items()}
    assert set(rows) == expected and len(rows) == len(expected)
    writers = lake.sql("select distinct writer from samples").fetchall()
    assert len(writers) == 3  # two servers, one of them in two lives
    assert verify(stage.lake, level="full").ok
    assert scan(stage.staging) == []


def test_every_row_is_hugging_faces(
    stage: Stage, model_dir: Path, prompts: dict[str, list[int]]
) -> None:
    lake = hslake.open(stage.lake)
    for name, truth in reference_states(model_dir, torch.float64, prompts).items():
        sample = lake.read(name)
        assert sample.input_ids.tolist() == prompts[name]
        for i, stream in enumerate(lake.spec.streams):
            what = f"{name} stream {stream}"
            assert_same_states(sample.hidden_states[i], truth[stream], TOLERANCE, what)
