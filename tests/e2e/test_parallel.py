"""A DeepSeek-V3 shaped model on one process, on two (TP), and on two with attention of their own
(DP attention): who writes, that nothing is missing, and that every row is right."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hslake
from examples.sglang_cpu import cpu_server, tiny_deepseek
from hslake.compact import compact
from hslake.ids import RequestId, new_attempt
from hslake.staging.runs import RUNS
from hslake.verify import verify
from tests.e2e import client
from tests.e2e.conftest import CHUNK, LENGTHS, Stage, capture_all, set_stage
from tests.e2e.reference import States, assert_same_states, reference_states, row_errors
from tests.e2e.traffic import Traffic, events

TOLERANCE = 5e-5
LAST = tiny_deepseek.LAYERS
LONG = 8192


@dataclass(frozen=True)
class Layout:
    """Processes of one server, what it captures, and the streams that must come of it."""

    name: str
    capture: str
    streams: tuple[str, ...]
    tp: int = 1
    dp: int = 1
    chunk: int = CHUNK
    long: bool = False  # also a sample of LONG tokens, which fills a part to its last row

    @property
    def args(self) -> list[str]:
        dp = ["--dp-size", str(self.dp), "--enable-dp-attention"] if self.dp > 1 else []
        return ["--skip-tokenizer-init", "--tp-size", str(self.tp), *dp]


LAYOUTS = (
    Layout("tp1", f"final,{LAST},0", ("0", str(LAST), "final")),  # nothing of SGLang's own capture
    Layout("tp2", "eagle3", ("2", "3", "4", "final"), tp=2, chunk=1024, long=True),
    Layout("tp2dp2", f"5,{LAST},0,1", ("0", "1", "5", str(LAST)), tp=2, dp=2),
)


@pytest.fixture(scope="module")
def samples() -> dict[str, list[int]]:
    rng = np.random.default_rng(3)
    lengths = (*LENGTHS, 50, 77, 3, 40)
    return {
        f"s{i:02d}": rng.integers(2, tiny_deepseek.VOCAB, n).tolist() for i, n in enumerate(lengths)
    }


@pytest.fixture(scope="module")
def long_sample() -> list[int]:
    return np.random.default_rng(4).integers(2, tiny_deepseek.VOCAB, LONG).tolist()


@pytest.fixture(scope="module")
def truth(
    deepseek: Path, samples: dict[str, list[int]], long_sample: list[int]
) -> dict[str, States]:
    # In float64 the long one would take 6 GB.
    long = reference_states(deepseek, torch.float32, {"long": long_sample})
    return reference_states(deepseek, torch.float64, samples) | long


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda layout: layout.name)
def stage(
    request: pytest.FixtureRequest,
    ram: Path,
    sglang_python: Path,
    deepseek: Path,
    samples: dict[str, list[int]],
    long_sample: list[int],
) -> Iterator[Stage]:
    layout: Layout = request.param
    planned = {**samples, "long": long_sample} if layout.long else samples
    made = set_stage(
        ram / layout.name,
        sglang_python,
        deepseek,
        planned,
        capture=layout.capture,
        dtype="float32",
        args=layout.args,
        env=cpu_server.env(2 // layout.tp, deepseek=True, ranks=layout.tp),
        chunk=layout.chunk * layout.dp,  # SGLang gives each DP rank its share
        max_total_tokens=2 * LONG,
        part_tokens=LONG if layout.long else 1024,
    )
    made.facts |= {"layout": layout, "planned": planned}
    lake8 = hslake.open(made.lake).spec.lake8
    alone = samples["s08"]
    with made.server:
        with Traffic(made.url, vocab=tiny_deepseek.VOCAB, new_tokens=8) as traffic:
            capture_all(made, requests=6)
        # With nothing else to do, the other DP rank runs along on an idle batch.
        rid = RequestId(lake8, new_attempt(), len(alone), "A1", "alone")
        client.generate(made.url, alone, rid=rid.encode())
        made.facts |= {
            "traffic": traffic,
            "events": events(made.url),
            "status": client.get(made.url + "/hslake/status"),
            "shared memory": list(made.server._loads),
        }
        made.facts["updated"] = other_weights(made, deepseek, alone)
    made.facts["runs left"] = [p.name for p in (made.staging / RUNS).iterdir()]
    compact(made.lake, [made.staging])
    yield made


def other_weights(stage: Stage, model: Path, ids: list[int]) -> dict[str, Any]:
    """Give the server weights; what it says then, and whether it still serves."""
    body = {"model_path": str(model)}
    told = client.post(stage.url + "/update_weights_from_disk", body)
    rid = RequestId(hslake.open(stage.lake).spec.lake8, new_attempt(), len(ids), "A1", "late")
    client.generate(stage.url, ids, rid=rid.encode())
    late = [e for e in events(stage.url) if e["sample_id"] == "late"]
    status = client.get(stage.url + "/hslake/status")
    metrics = client.text(stage.url + "/hslake/metrics")
    return {"told": told, "late": late, "status": status, "metrics": metrics}


def writers(stage: Stage) -> list[dict[str, Any]]:
    return stage.facts["status"]["writers"]


def test_one_writer_for_each_dp_rank(stage: Stage) -> None:
    layout = stage.facts["layout"]
    ranks = [(w["engine"]["tp"], w["engine"]["dp_rank"]) for w in writers(stage)]
    assert sorted(ranks) == [(str(layout.tp), str(i)) for i in range(layout.dp)]
    assert all(w["samples_captured"] > 0 for w in writers(stage)), "one rank got no request"
    assert stage.facts["status"]["armed"] is True and stage.facts["traffic"].failures == []


def test_other_weights_disarm_every_rank(stage: Stage) -> None:
    found = stage.facts["updated"]
    assert found["told"]["success"], found["told"]
    status = found["status"]
    assert status["armed"] is False and "update_weights_from_disk" in status["error"]
    for writer in status["writers"]:
        assert writer["armed"] is False and "other weights" in writer["error"]
    assert "\nhslake_armed 0.0\n" in found["metrics"]
    assert found["late"] == []
    log = stage.server.log.read_text("utf-8", "replace")
    assert log.count("hslake: DISARMED") == stage.facts["layout"].tp  # one process a rank
    assert "Failed to apply hooks" not in log


def test_nothing_stays_in_shared_memory(stage: Stage) -> None:
    found = stage.facts["shared memory"]
    queues = [path for path in found if "shm_mq" in path.name]
    assert len(queues) == (1 if stage.facts["layout"].tp > 1 else 0)
    assert found and not any(path.exists() for path in found)
    assert stage.facts["runs left"] == []


def test_every_sample_once_from_whichever_rank(stage: Stage) -> None:
    samples = stage.facts["planned"]
    ended = [(e["sample_id"], e["state"]) for e in stage.facts["events"]]
    assert sorted(ended) == sorted((name, "captured") for name in [*samples, "alone"])
    lake = hslake.open(stage.lake)
    rows = lake.sql("select sample_id, writer from samples").fetchall()
    assert sorted(r[0] for r in rows) == sorted(samples)
    assert {r[1] for r in rows} == {w["writer"] for w in writers(stage)}
    assert verify(stage.lake, level="full").ok


def test_every_row_of_every_stream(stage: Stage, truth: dict[str, States]) -> None:
    lake = hslake.open(stage.lake)
    assert lake.spec.streams == stage.facts["layout"].streams
    for name, ids in stage.facts["planned"].items():
        sample = lake.read(name)
        assert sample.input_ids.tolist() == ids
        for i, stream in enumerate(lake.spec.streams):
            what = f"{name} stream {stream}"
            assert_same_states(sample.hidden_states[i], truth[name][stream], TOLERANCE, what)
            if stream != "final":
                wrong = truth[name][str(int(stream) - 1 if int(stream) else 1)]
                assert row_errors(sample.hidden_states[i], wrong).min() > 100 * TOLERANCE


def test_the_samples_can_be_judged(
    deepseek: Path, truth: dict[str, States], samples: dict[str, list[int]]
) -> None:
    for name, states in reference_states(deepseek, torch.float32, samples).items():
        for stream, found in states.items():
            assert_same_states(found, truth[name][stream], TOLERANCE / 2, f"{name} stream {stream}")
