"""Every batch shape that a real server produces: mixed chunks beside decoding neighbours, aborted
and retracted requests, repeated ids, 0 and 1 new tokens, a prompt of one token, parts that roll."""

import re
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hslake
from hslake.compact import compact
from hslake.ids import RequestId, new_attempt, token_hash
from hslake.lake import Lake
from hslake.verify import verify
from tests.e2e import client
from tests.e2e.conftest import SINK, Stage, capture_all, set_stage
from tests.e2e.reference import States, assert_same_states, reference_states
from tests.e2e.traffic import Traffic, events, journal, wait_open

TOLERANCE = 2e-5
PART = 512
PARTS = 4
# Name -> tokens. The first ones are sent by hand, each in its own way; extract asks for the rest.
BY_HAND = {
    "zero-new-tokens": 40,
    "one-new-token": 33,
    "one-token": 1,
    "retracted-in-prefill": 260,
    "aborted": 261,
    "same-id-twice": 200,
    "retracted-in-decode-0": 66,
    "retracted-in-decode-1": 64,
    "retracted-in-decode-2": 70,
}
REST = {f"rest-{i:02d}": n for i, n in enumerate((1, 31, 32, 33, 64, 150, 97, 5, 128, 88, 300, 12))}
# Full with two of three decoding requests; --schedule-conservativeness lets in all three.
KV_TOKENS = 340
DECODE = 60


@pytest.fixture(scope="module")
def samples() -> dict[str, list[int]]:
    rng = np.random.default_rng(7)
    return {
        name: [SINK, *rng.integers(20, 45_000, n).tolist()[1:]]
        for name, n in {**BY_HAND, **REST}.items()
    }


class ByHand:
    """Sends single samples, each in its own way, and remembers the requests."""

    def __init__(self, stage: Stage, samples: dict[str, list[int]], pool: ThreadPoolExecutor):
        self.stage, self.samples, self.pool = stage, samples, pool
        self.url = stage.url
        self.lake8 = hslake.open(stage.lake).spec.lake8
        self.rids: dict[str, RequestId] = {}
        self.bodies: dict[str, dict[str, Any]] = {}

    def send(self, name: str, new_tokens: int = 1, **sampling: Any) -> "Future[Any]":
        ids = self.samples[name]
        rid = RequestId(self.lake8, new_attempt(), len(ids), "A1", name)
        self.rids[name] = rid
        self.bodies[name] = client.request(ids, new_tokens, rid=rid.encode())
        self.bodies[name]["sampling_params"] |= sampling
        return self.pool.submit(client.post, self.url + "/generate", self.bodies[name])

    def caught(self, name: str) -> "Future[Any]":
        """Like `send`, but returns once some rows and not all of them are in staging."""
        sent = self.send(name)
        wait_open(self.stage.staging, self.rids[name])
        return sent


def retract_in_prefill(by: ByHand) -> None:
    sent = by.caught("retracted-in-prefill")
    client.post(by.url + "/pause_generation", {"mode": "retract"})
    client.post(by.url + "/continue_generation", {"torch_empty_cache": False})
    by.stage.facts["retracted in prefill"] = sent.result(60)["meta_info"]["num_retractions"]


def retract_in_decode(by: ByHand) -> None:
    # For requests that ignore the end, SGLang sets all their tokens aside, and retracts nobody.
    how = {"ignore_eos": False, "min_new_tokens": DECODE}
    sent = [by.send(n, DECODE, **how) for n in BY_HAND if n.startswith("retracted-in-decode")]
    answers = [f.result(120) for f in sent]
    assert all(len(a["output_ids"]) == DECODE for a in answers)
    by.stage.facts["retracted in decode"] = [a["meta_info"]["num_retractions"] for a in answers]


def abort(by: ByHand) -> None:
    sent = by.caught("aborted")
    client.post(by.url + "/abort_request", {"rid": by.rids["aborted"].encode()})
    sent.exception(timeout=60)  # it may answer or fail, but it must end


def same_id_twice(by: ByHand) -> None:
    sent = by.caught("same-id-twice")
    body = by.bodies["same-id-twice"]
    by.stage.facts["same id at once"] = client.code(by.url + "/generate", body)
    sent.result(60)
    by.stage.facts["same id later"] = client.code(by.url + "/generate", body)


@pytest.fixture(scope="module")
def stage(
    ram: Path, sglang_python: Path, model_dir: Path, samples: dict[str, list[int]]
) -> Iterator[Stage]:
    """The whole run, once: what the tests look at is gathered on the way."""
    made = set_stage(
        ram / "shapes",
        sglang_python,
        model_dir,
        samples,
        capture="27,2,30",  # out of order, boundaries only, and the last one
        dtype="float32",
        args=["--enable-mixed-chunk", "--schedule-conservativeness", "0.01"],
        max_total_tokens=KV_TOKENS,
        part_tokens=PART,
        max_parts=PARTS,
    )
    facts, stop = made.facts, threading.Event()
    with made.server, ThreadPoolExecutor(8) as pool:
        by = ByHand(made, samples, pool)
        retract_in_decode(by)  # alone: the neighbours that it decodes beside are its own kind
        with Traffic(made.url, new_tokens=40) as traffic:
            for name, new_tokens in (
                ("zero-new-tokens", 0),
                ("one-new-token", 1),
                ("one-token", 1),
            ):
                by.send(name, new_tokens).result(60)
            retract_in_prefill(by)
            abort(by)
            same_id_twice(by)
            facts["journal"] = {n: journal(made.staging, r.attempt) for n, r in by.rids.items()}
            beside = pool.submit(
                compact, made.lake, [made.staging], watch=True, stop=stop.is_set, interval_s=0.2
            )
            try:
                capture_all(made, requests=6)
            finally:
                stop.set()
        facts["traffic"] = traffic
        facts["events"] = events(made.url)
        facts["status"] = client.get(made.url + "/hslake/status")
        facts["compact"] = beside.result(60)
    facts["log"] = made.server.log.read_text("utf-8", "replace")
    compact(made.lake, [made.staging])
    yield made


@pytest.fixture(scope="module")
def lake(stage: Stage) -> Lake:
    return hslake.open(stage.lake)


@pytest.fixture(scope="module")
def truth(model_dir: Path, samples: dict[str, list[int]]) -> dict[str, States]:
    return reference_states(model_dir, torch.float64, samples)


def test_the_samples_can_be_judged(
    model_dir: Path, truth: dict[str, States], samples: dict[str, list[int]]
) -> None:
    for name, states in reference_states(model_dir, torch.float32, samples).items():
        for stream in ("2", "27", "30"):
            assert_same_states(states[stream], truth[name][stream], TOLERANCE / 2, name)


def test_every_sample_is_there_once_and_right(
    lake: Lake, truth: dict[str, States], samples: dict[str, list[int]]
) -> None:
    assert lake.spec.streams == ("2", "27", "30")
    rows = lake.sql("select sample_id, token_hash from samples").fetchall()
    assert sorted(rows) == sorted((k, token_hash(v)) for k, v in samples.items())
    for name in samples:
        states = lake.read(name).hidden_states
        for i, stream in enumerate(lake.spec.streams):
            what = f"{name} stream {stream}"
            assert_same_states(states[i], truth[name][stream], TOLERANCE, what)
    assert verify(lake.url, level="full").ok


def test_no_attempt_ended_twice_and_nothing_foreign_came_in(
    stage: Stage, samples: dict[str, list[int]]
) -> None:
    ended = Counter(e["attempt"] for e in stage.facts["events"])
    assert ended and set(ended.values()) == {1}
    assert {e["sample_id"] for e in stage.facts["events"]} <= set(samples)
    captured = [e["sample_id"] for e in stage.facts["events"] if e["state"] == "captured"]
    assert sorted(captured) == sorted(samples)
    assert stage.facts["compact"].duplicates == 0 and not stage.facts["compact"].damage


def test_a_request_retracted_in_its_prefill_begins_again(stage: Stage) -> None:
    assert stage.facts["retracted in prefill"] == 1
    first, second = stage.facts["journal"]["retracted-in-prefill"]
    assert (first.state, first.reason) == ("abandoned", "superseded")
    assert second.state == "complete"


def test_requests_retracted_while_they_decoded_are_not_stored_again(stage: Stage) -> None:
    assert "KV cache pool is full. Retract requests." in stage.facts["log"]
    assert max(stage.facts["retracted in decode"]) >= 1
    for name in (n for n in BY_HAND if n.startswith("retracted-in-decode")):
        assert [r.state for r in stage.facts["journal"][name]] == ["complete"]


def test_an_aborted_request_is_asked_for_again(stage: Stage) -> None:
    (first,) = stage.facts["journal"]["aborted"]
    assert first.state == "open"
    attempts = [e["attempt"] for e in stage.facts["events"] if e["sample_id"] == "aborted"]
    assert first.attempt not in attempts  # its rows wait for their end until the part must go
    assert len(attempts) == 1


def test_the_same_id_twice_is_stored_once(stage: Stage) -> None:
    assert stage.facts["same id at once"] == 400
    assert stage.facts["same id later"] == 200
    assert [r.state for r in stage.facts["journal"]["same-id-twice"]] == ["complete"]


def test_parts_rolled_while_samples_came(stage: Stage) -> None:
    numbers = [int(e["part"].rpartition("-")[2]) for e in stage.facts["events"] if e["part"]]
    assert max(numbers) > PARTS, "no part was recycled: this run proves nothing"
    assert stage.facts["compact"].segments > 1


def test_mixed_chunks_really_ran(stage: Stage) -> None:
    assert re.search(r"Prefill batch.*#running-req: [1-9]", stage.facts["log"])


def test_nobody_else_noticed(stage: Stage) -> None:
    traffic, status = stage.facts["traffic"], stage.facts["status"]
    assert traffic.failures == []
    assert len(traffic.served) > 3 and traffic.healthy > 0
    assert status["armed"] is True and status["error"] is None
