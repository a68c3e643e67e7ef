"""`compact --listen`: what drivers and Prometheus are told, and an extract through it."""

import asyncio
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import hslake
from hslake.compact import compact
from hslake.compact.listen import Listener, parse_address
from hslake.compactreport import CompactReport
from hslake.errors import InvalidInput
from hslake.extract import ExtractOptions, extract
from hslake.server import ServerDown, new_session, parse_status, whole_status
from hslake.server.listeners import merged, server_at
from tests.fakeserver import FakeServer
from tests.lakes import MadeLake, make_lake


@pytest.fixture
def made(tmp_path: Path) -> MadeLake:
    return make_lake(tmp_path, lengths=[5])


@pytest.fixture
def listener(made: MadeLake) -> Iterator[Listener]:
    report = CompactReport(samples=3, tokens=30, abandoned={'say "why"': 2}, troubles=["503"])
    with Listener("127.0.0.1:0", [made.staging], report, made.lake.spec.lake_id) as found:
        yield found


def get(url: str, **headers: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_it_tells_what_a_server_would(made: MadeLake, listener: Listener, tmp_path: Path) -> None:
    writer = made.writer(100)
    made.put(writer, made.plan([10])[0])
    writer.tick()
    other = make_lake(tmp_path / "other", 1)
    other.stage(other.plan([5]))
    next(other.staging.iterdir()).rename(made.staging / next(other.staging.iterdir()).name)
    code, text = get(listener.address + "/hslake/status")
    found = parse_status(json.loads(text), "here")
    assert code == 200 and [w.writer for w in found.writers] == [writer.writer_id]
    assert found.armed and found.lake_id == made.lake.spec.lake_id
    assert [e.state for e in found.writers[0].events] == ["captured"]
    own = found.raw["compactor"]
    assert (own["samples"], own["tokens"], own["troubles"]) == (3, 30, ["503"])
    assert own["version"] == hslake.__version__
    _, text = get(f"{listener.address}/hslake/status?since={writer.writer_id}:1")
    assert json.loads(text)["writers"][0]["events"] == []
    assert get(listener.address + "/hslake/status?since=x")[0] == 400
    assert get(listener.address + "/health") == (200, '{"status": "ok"}')
    _, page = get(listener.address + "/hslake/metrics")
    values = {
        (s.name, s.labels.get("writer"), s.labels.get("reason")): s.value
        for family in text_string_to_metric_families(page)
        for s in family.samples
    }
    assert values["hslake_compactor_tokens_total", None, None] == 30
    assert values["hslake_compactor_abandoned_total", None, 'say "why"'] == 2
    assert values["hslake_free_rows", writer.writer_id, None] == 90
    writer.close()


def test_staging_that_is_gone_is_an_answer(made: MadeLake, listener: Listener) -> None:
    made.staging.rmdir()
    code, text = get(listener.address + "/hslake/status")
    assert code == 200 and str(made.staging) in json.loads(text)["error"]


def test_a_key_is_asked_for(made: MadeLake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HSLAKE_API_KEY", "sesame")
    with Listener("127.0.0.1:0", [made.staging], CompactReport(), "ab" * 16) as found:
        assert get(found.address + "/hslake/status")[0] == 401
        assert get(found.address + "/hslake/metrics", authorization="Bearer other")[0] == 401
        assert get(found.address + "/hslake/status", authorization="Bearer sesame")[0] == 200
        assert get(found.address + "/health")[0] == 200


def test_addresses() -> None:
    assert parse_address("0.0.0.0:9650") == ("0.0.0.0", 9650)
    assert parse_address("[::1]:0") == ("::1", 0)
    for wrong in ("9650", "host", "host:x", ":1", "h:70000"):
        with pytest.raises(InvalidInput, match="HOST:PORT"):
            parse_address(wrong)


def test_a_port_that_is_taken_is_said(made: MadeLake, listener: Listener) -> None:
    taken = listener.address.removeprefix("http://")
    with pytest.raises(InvalidInput, match="cannot be had"):
        with Listener(taken, [made.staging], CompactReport(), "ab" * 16):
            pass


def test_a_server_whose_writers_are_elsewhere(made: MadeLake, tmp_path: Path) -> None:
    """The server shows none of its writers: what it captures is acknowledged by the listener."""
    made.plan([10, 20, 30])

    class Blind(FakeServer):
        async def _status(self, request: Any) -> Any:
            from aiohttp import web

            answer = json.loads((await super()._status(request)).body)
            return web.json_response({**answer, "writers": [], "armed": True, "error": None})

    report = CompactReport()
    over = threading.Event()
    work = threading.Thread(
        target=compact,
        args=(made.url, [made.staging]),
        kwargs={"watch": True, "stop": over.is_set, "report": report, "max_age_s": 0.0},
    )
    lake_id = made.lake.spec.lake_id
    with Blind(made.url, made.staging) as server:
        with Listener("127.0.0.1:0", [made.staging], report, lake_id) as listener:
            work.start()
            try:
                both = f"{server.url},{listener.address}"
                found = extract(made.url, [both], ExtractOptions(staging=(made.staging,)))
            finally:
                over.set()
                work.join(60)
    assert found.passed and found.captured == 3, found
    assert not server.violations
    compact(made.url, [made.staging])
    assert made.lake.sql("select count(*) from samples").fetchall() == [(4,)]


def test_a_server_is_down_with_its_listener(made: MadeLake) -> None:
    async def ask(url: str) -> Any:
        async with new_session() as session:
            return await whole_status(server_at(url, session, status_timeout=5.0))

    with FakeServer(made.url, made.staging) as server:
        assert asyncio.run(ask(server.url)).writers
        assert isinstance(asyncio.run(ask(f"{server.url},http://127.0.0.1:9")), ServerDown)


def test_listeners_of_another_lake_are_refused(made: MadeLake) -> None:
    documents = []
    for lake in ("ab" * 16, "cd" * 16):
        document = {
            "format": 1, "armed": True, "error": None, "lake_id": lake, "engine": {},
            "hook_version": None, "writers": [],
        }  # fmt: skip
        documents.append(parse_status(document, "x"))
    with pytest.raises(ServerDown, match="several lakes"):
        merged(documents, ["a", "b"])
