"""The simulated server does what the driver and the hook expect of a real one, and the audit sees
what is wrong with a lake."""

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable, write_deltalake

import hslake
from hslake.compact import compact
from hslake.extract import ExtractOptions, extract
from hslake.extract.drive import Limits
from hslake.ids import RequestId, new_attempt
from hslake.staging import scan
from hslake.staging.part import SEALED
from hslake.verify.quarantine import hide
from tests.sim.audit import audit
from tests.sim.conftest import Start
from tests.sim.samples import lengths_of
from tests.sim.states import rows_of, states_of
from tests.sim.trouble import Trouble, parse_trouble

LIMITS = Limits(backoff=0.05, ack_timeout=2.0, request_timeout=30.0, patience=60.0)


def post(url: str, body: dict[str, Any]) -> tuple[int, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), method="POST")
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.loads(answer.read() or "null")
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def status(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url + "/hslake/status", timeout=30) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def test_every_sample_arrives_through_all_troubles(lake: str, staging: Path, start: Start) -> None:
    trouble = (
        "error=0.05,late_error=0.05,refuse=0.02,abort=0.05,broken=0.05,silent=0.03,drop=0.05,"
        "late=0.05,late_s=0.1,retract=0.2,freeze=0.02,freeze_s=0.3"
    )
    servers = [start("--trouble", trouble, "--traffic", 20, "--mixed") for _ in range(2)]
    report = extract(lake, [s.url for s in servers], ExtractOptions(limits=LIMITS))
    assert report.complete, report.message
    assert report.retried, "nothing went wrong"
    for server in servers:
        server.stop()
    compact(lake, [staging])
    found = audit(lake)
    assert found.ok and found.read == found.live == 40, found
    assert found.tokens == report.planned_tokens
    assert not scan(staging)


def test_it_answers_as_sglang_does(lake: str, staging: Path, start: Start) -> None:
    server = start("--context", 500)
    url, lake8 = server.url, hslake.open(lake).spec.lake8
    rid = RequestId(lake8, new_attempt(), 300, "A1", "long").encode()
    sampling = {"sampling_params": {"max_new_tokens": 1}}
    logprobs = {"return_logprob": True, "logprob_start_len": 297}
    code, answer = post(
        f"{url}/generate", {"rid": rid, "input_ids": [5] * 300, **sampling, **logprobs}
    )
    assert code == 200 and answer["meta_info"]["finish_reason"]["type"] == "length"
    said = answer["meta_info"]["input_token_logprobs"]
    assert [s[1] for s in said] == [5, 5, 5] and said[0][0] is None and said[1][0] < 0
    assert post(f"{url}/generate", {"input_ids": [1] * 500, **sampling})[0] == 400
    assert post(f"{url}/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 9}})
    refused = RequestId(lake8, new_attempt(), 1, "A1", "refused-1").encode()
    assert post(f"{url}/generate", {"rid": refused, "input_ids": [1], **sampling})[0] == 400
    for path in ("health", "health_generate", "get_server_info", "server_info"):
        assert urllib.request.urlopen(f"{url}/{path}", timeout=30).status == 200
    (writer,) = status(url)["writers"]
    assert [e["sample_id"] for e in writer["events"]] == ["long"]
    assert writer["engine"]["chunk_size"] == "256"
    server.stop()
    (found,) = scan(staging)
    assert any((part / SEALED).exists() for part in found.parts), "it did not end in order"


def test_a_crash_and_a_disarmed_hook_show(lake: str, start: Start) -> None:
    crashing, failing = start("--trouble", "crash=1"), start("--trouble", "disarm=1")
    rid = RequestId(hslake.open(lake).spec.lake8, new_attempt(), 3, "A1", "x").encode()
    body = {"rid": rid, "input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 1}}
    with pytest.raises(OSError):
        post(f"{crashing.url}/generate", body)
    assert post(f"{failing.url}/generate", body)[0] == 200
    found = status(failing.url)
    assert found["armed"] is False and "simulated failure" in found["error"]
    assert found["writers"][0]["samples_captured"] == 0


@pytest.fixture
def filled(lake: str, staging: Path, start: Start) -> str:
    server = start()
    assert extract(lake, [server.url], ExtractOptions(limits=LIMITS)).complete
    server.stop()
    compact(lake, [staging], segment_tokens=2048)
    assert audit(lake).ok
    return lake


def test_the_audit_sees_what_is_wrong(filled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = hslake.open(filled)
    segment, count = lake.sql("select segment_id, count(*) from samples group by 1").fetchall()[0]
    shards = Path(filled) / "segments" / segment / "hidden_states/c"
    shards.rename(Path(filled) / "elsewhere")
    found = audit(filled)
    assert len(found.torn) == count and not found.lost and not found.ok
    (Path(filled) / "elsewhere").rename(shards)
    with monkeypatch.context() as patch:
        patch.setattr("tests.sim.audit.rows_of", lambda *a: rows_of(*a)[::-1])
        assert len(audit(filled, sample=0).torn) == 40  # by the checksums alone

    rows = DeltaTable(f"{filled}/manifest").to_pyarrow_table()
    (name, other), of = rows["sample_id"].to_pylist()[:2], rows["segment_id"].to_pylist()
    hide(lake, {(of[0], name): "a test"})
    twice = rows.filter(pc.field("sample_id") == other)
    at = rows.schema.get_field_index("sample_id")
    stranger = twice.set_column(at, rows.schema.field(at), pa.array(["nobody"]))
    write_deltalake(
        DeltaTable(f"{filled}/manifest"), pa.concat_tables([twice, stranger]), mode="append"
    )
    found = audit(filled)
    assert found.lost == [name] and found.duplicated == [other] and found.strangers == ["nobody"]


def test_states_tell_token_position_stream_and_channel_apart(lake: str) -> None:
    spec = hslake.open(lake).spec
    a = states_of(spec, [7, 7, 8])
    assert a.shape == (2, 3, 8) and a.dtype == np.uint16
    assert len({row.tobytes() for stream in a for row in stream}) == 6
    assert all(len(set(row.tolist())) == 8 for stream in a for row in stream)


def test_lengths_are_those_of_the_design() -> None:
    found = lengths_of(10_000, mean=878, longest=8192, seed=0)
    assert abs(found.mean() - 878) < 1 and found.max() == 8192 and found.min() >= 1


def test_troubles_are_read() -> None:
    assert parse_trouble("error=0.5,freeze_s=3") == Trouble(error=0.5, freeze_s=3.0)
    for text in ("eror=1", "error=x", "error"):
        with pytest.raises(hslake.errors.InvalidInput, match="trouble"):
            parse_trouble(text)
