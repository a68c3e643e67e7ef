"""What GET /hslake/status and /hslake/metrics say about this server, and only about it."""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from hslake_sglang import endpoint, metrics, report
from prometheus_client.parser import text_string_to_metric_families

from hslake.errors import InvalidInput
from hslake.ids import RequestId
from hslake.staging import StatusReader
from hslake.staging.drops import KINDS, OTHER
from tests.staging.test_writer import put, spec
from tests.staging.test_writer import writer as staging_writer

RUN = "run1"


def writer(name: str, **more: Any) -> dict[str, Any]:
    known = {"lake_id": "ab" * 16, "engine": {"run": RUN}}
    return {"writer": name, "alive": True, "armed": True, "error": None, **known, **more}


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Every writer in staging, as read_status would find them."""
    writers: list[dict[str, Any]] = []
    document = {"format": 1, "armed": True, "error": None, "writers": writers}
    monkeypatch.setattr(StatusReader, "read", lambda reader, since, **more: document)
    return writers


def test_only_the_writers_of_this_server(tmp_path: Path, found: list) -> None:
    found += [writer("mine"), writer("of another server"), writer("dead", alive=False)]
    report.tell_writer(tmp_path, RUN, "mine")
    report.tell_writer(tmp_path, "run2", "of another server")
    answer = endpoint.answer(StatusReader(tmp_path), RUN, None)
    assert [w["writer"] for w in answer["writers"]] == ["mine"]
    assert answer["armed"] is True and answer["error"] is None and answer["format"] == 1


def test_nothing_of_other_servers_writers_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Theirs may be large, and a poll is answered in SGLang's own process."""
    mine, other = (staging_writer(tmp_path, spec()) for _ in range(2))
    report.tell_writer(tmp_path, RUN, mine.writer_id)
    for w in (mine, other):
        put(w, "a", 5, 1)
        w.tick()
    opened: list[str] = []
    os_open = os.open

    def seen(path: Any, *more: Any, **options: Any) -> int:
        opened.append(os.fspath(path))
        return os_open(path, *more, **options)

    monkeypatch.setattr(os, "open", seen)
    answer = endpoint.answer(StatusReader(tmp_path), RUN, None)
    assert [e["sample_id"] for w in answer["writers"] for e in w["events"]] == ["a"]
    assert any(mine.writer_id in path for path in opened)
    assert not any(other.writer_id in path for path in opened)
    monkeypatch.undo()
    for w in (mine, other):
        w.close()


def test_a_worker_that_never_armed_is_told(tmp_path: Path, found: list) -> None:
    assert "no hook has armed" in endpoint.answer(StatusReader(tmp_path), RUN, None)["error"]
    found.append(writer("mine"))
    report.tell_writer(tmp_path, RUN, "mine")
    report.tell_error(tmp_path, RUN, "the served model differs")
    answer = endpoint.answer(StatusReader(tmp_path), RUN, None)
    assert answer["armed"] is False and answer["error"] == "the served model differs"


@pytest.mark.parametrize("more", [{"alive": False}, {"armed": False, "error": "disk on fire"}])
def test_a_writer_that_died_or_disarmed_is_not_armed(tmp_path: Path, found, more) -> None:
    found += [writer("a"), writer("b", **more)]
    for name in "ab":
        report.tell_writer(tmp_path, RUN, name)
    answer = endpoint.answer(StatusReader(tmp_path), RUN, None)
    assert answer["armed"] is False and len(answer["writers"]) == 2
    assert str(more.get("error", "writer b is dead")) in answer["error"]


def test_a_deleted_writer_is_noticed(tmp_path: Path, found: list) -> None:
    report.tell_writer(tmp_path, RUN, "gone")
    answer = endpoint.answer(StatusReader(tmp_path), RUN, None)
    assert answer["armed"] is False and "deleted" in answer["error"]


def test_telling_never_raises(tmp_path: Path) -> None:
    report.tell_error(tmp_path / "file" / "below", RUN, "x")
    (tmp_path / "file2").write_text("")
    report.tell_error(tmp_path / "file2", RUN, "x")


def test_cursors() -> None:
    assert endpoint.parse_since(None) == {} == endpoint.parse_since("")
    assert endpoint.parse_since("a-1:5,b:70") == {"a-1": 5, "b": 70}
    for wrong in ("a", "a:", ":3", "a:-1", "a:x", "a:²", "a:٣", f"a:{'1' * 5000}"):
        with pytest.raises(InvalidInput, match="since"):
            endpoint.parse_since(wrong)


def test_a_damaged_summary_is_told(tmp_path: Path) -> None:
    made = staging_writer(tmp_path, spec())
    report.tell_writer(tmp_path, RUN, made.writer_id)
    (made.folder / "status.json").write_text("{}")
    answer = endpoint.answer(StatusReader(tmp_path), RUN, None)
    assert answer["armed"] is False and "status.json" in answer["error"]
    made.close()


# -- over HTTP ---------------------------------------------------------------------------------


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    app = FastAPI()
    endpoint.mount(app, tmp_path, RUN)
    return TestClient(app)


def scraped(client: TestClient) -> dict[str, dict[tuple[str, ...], float]]:
    """Samples of /hslake/metrics by name, then by their label values but for writer and lake."""
    answer = client.get(endpoint.METRICS_PATH)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(answer.text):
        assert family.documentation
        for sample in family.samples:
            labels = tuple(v for k, v in sample.labels.items() if k not in ("writer", "lake"))
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


def test_status_over_http(tmp_path: Path, client: TestClient) -> None:
    made = staging_writer(tmp_path, spec())
    report.tell_writer(tmp_path, RUN, made.writer_id)
    made.set_health(True, None)
    put(made, "a", 5, 1)
    made.tick()
    document = client.get(endpoint.PATH).json()
    assert document["armed"] is True
    assert [e["sample_id"] for e in document["writers"][0]["events"]] == ["a"]
    later = client.get(endpoint.PATH, params={"since": f"{made.writer_id}:1"}).json()
    assert later["writers"][0]["events"] == [] and later["writers"][0]["cursor"] == 1
    refused = client.get(endpoint.PATH, params={"since": "nonsense"})
    assert refused.status_code == 400 and "since" in refused.json()["error"]
    assert client.post(endpoint.PATH).status_code == 405
    made.close()


def test_metrics_of_a_writer(tmp_path: Path, client: TestClient) -> None:
    s = spec()
    made = staging_writer(tmp_path, s, tokens=16)
    report.tell_writer(tmp_path, RUN, made.writer_id)
    made.set_health(True, None)
    put(made, "a", 16, 1)
    put(made, "b", 3, 2)
    for n in range(2):
        made.drop(RequestId(s.lake8, f"attempt{n}", 3, "A1", "s"), "no space: all 2 parts are full")
    made.drop(RequestId(s.lake8, "attempt9", 3, "A1", "s"), "a new kind: of reason")
    made.tick()
    path = made.folder / "status.json"
    status = json.loads(path.read_text())
    status["hook"] = {
        **{"forwards": 7, "forward_s": 3.5, "in_flight": 2, "wait_s": 1.5, "wait_max_s": 0.75},
        **{"copies": 9, "copy_s": 4.5, "copy_max_s": 2.25, "gpu_bytes": 1 << 30, "gpu_retries": 4},
    }
    status["engine"] = {**status["engine"], "dp_rank": "3"}
    path.write_text(json.dumps(status))
    found = scraped(client)
    assert found["hslake_armed"] == {(): 1} == found["hslake_writers"]
    waiting = found.pop("hslake_oldest_sealed_part_age_seconds")
    assert 0 < waiting[("3",)] < 600
    assert {name: v[("3",)] for name, v in found.items() if v.keys() == {("3",)}} == {
        "hslake_captured_samples_total": 2,
        "hslake_captured_tokens_total": 19,
        "hslake_captured_bytes_total": 19 * s.bytes_per_token,
        "hslake_free_rows": status["free_rows"],
        "hslake_capacity_rows": status["capacity_rows"],
        "hslake_forwards_total": 7,
        "hslake_forward_seconds_total": 3.5,
        "hslake_forwards_in_flight": 2,
        "hslake_wait_seconds_total": 1.5,
        "hslake_wait_max_seconds": 0.75,
        "hslake_copy_max_seconds": 2.25,
        "hslake_gpu_alloc_retries_total": 4,
        "hslake_copy_seconds_count": 9,
        "hslake_copy_seconds_sum": 4.5,
        "hslake_gpu_memory_bytes": 1 << 30,
        "hslake_writer_armed": 1,
        "hslake_writer_alive": 1,
        "hslake_status_timestamp_seconds": status["updated_at"],
    }
    dropped = found["hslake_dropped_attempts_total"]
    assert {labels[1]: n for labels, n in dropped.items() if n} == {"no_space": 2, "other": 1}
    assert len(dropped) == len(KINDS) + 1  # each of them is there from the start
    states = {"open": 1, "sealed": 1, "done": 0}
    assert found["hslake_parts"] == {("3", k): v for k, v in states.items()}
    labels = f'{{dp_rank="3",lake="{s.lake_id}",writer="{made.writer_id}"}}'
    text = client.get(endpoint.METRICS_PATH).text
    assert f"hslake_captured_tokens_total{labels} 19.0" in text
    made.close()


def test_a_server_without_any_writer_is_a_zero_not_a_gap(
    tmp_path: Path, client: TestClient
) -> None:
    found = scraped(client)
    assert found["hslake_armed"] == {(): 0} == found["hslake_writers"]
    other = staging_writer(tmp_path, spec())
    other.set_health(True, None)
    assert scraped(client)["hslake_armed"] == {(): 0}  # that one belongs to another server
    other.close()


def test_a_writer_without_the_hooks_figures_and_a_disarmed_one(
    tmp_path: Path, client: TestClient
) -> None:
    made = staging_writer(tmp_path, spec())
    report.tell_writer(tmp_path, RUN, made.writer_id)
    made.set_health(True, None)
    assert scraped(client)["hslake_armed"] == {(): 1}
    assert scraped(client)["hslake_forwards_total"] == {("",): 0}
    made.set_health(False, "the capture failed")
    found = scraped(client)
    assert found["hslake_armed"] == {(): 0} and found["hslake_writer_armed"] == {("",): 0}
    assert found["hslake_writer_alive"] == {("",): 1}
    made.close()


def test_a_scrape_reads_no_events(tmp_path: Path, client: TestClient, monkeypatch) -> None:
    made = staging_writer(tmp_path, spec())
    report.tell_writer(tmp_path, RUN, made.writer_id)
    put(made, "a", 5, 1)
    limits: list[int] = []
    read = StatusReader.read

    def seen(reader: StatusReader, since: Any, *, limit: int = -1, only: Any) -> dict[str, Any]:
        limits.append(limit)
        return read(reader, since, limit=limit, only=only)

    monkeypatch.setattr(StatusReader, "read", seen)
    scraped(client)
    assert limits == [0]
    made.close()


@pytest.mark.parametrize("polled", [True, False])
def test_deleted_staging_is_a_zero_and_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, polled: bool
) -> None:
    """Gone, and then made anew: the alert fires, and nobody is told that nothing ever armed."""
    root = tmp_path / "staging"
    made = staging_writer(root, spec())
    report.tell_writer(root, RUN, made.writer_id)
    app = FastAPI()
    endpoint.mount(app, root, RUN)
    client = TestClient(app)
    if polled:
        assert scraped(client)["hslake_armed"] == {(): 1}
    shutil.rmtree(root)
    for what in (f"staging {root} is gone", f"writer {made.writer_id} of this server is missing"):
        caplog.clear()
        for _ in range(3):
            answer = client.get(endpoint.PATH)
            assert answer.status_code == 200 and answer.json()["armed"] is False
            assert what in answer.json()["error"] and "restart" in answer.json()["error"]
            assert "no hook has armed" not in answer.json()["error"]
            assert scraped(client)["hslake_armed"] == {(): 0}
        (told,) = [r for r in caplog.records if r.levelname == "ERROR"]
        assert what in told.getMessage() and not told.exc_info
        root.mkdir(exist_ok=True)


def test_why_nothing_armed_survives_deleted_staging(tmp_path: Path) -> None:
    root = tmp_path / "staging"
    root.mkdir()
    report.tell_error(root, RUN, "the served model differs")
    app = FastAPI()
    endpoint.mount(app, root, RUN)
    shutil.rmtree(root)
    root.mkdir()
    assert TestClient(app).get(endpoint.PATH).json()["error"] == "the served model differs"


def test_what_cannot_be_read_now_is_not_remembered(
    tmp_path: Path, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = staging_writer(tmp_path, spec())
    report.tell_writer(tmp_path, RUN, made.writer_id)

    def broken(reader: StatusReader, since: Any, **more: Any) -> dict[str, Any]:
        raise OSError("staging is on fire")

    with monkeypatch.context() as patch:
        patch.setattr(StatusReader, "read", broken)
        found = client.get(endpoint.PATH).json()
        assert found["armed"] is False and "staging is on fire" in found["error"]
        assert scraped(client)["hslake_armed"] == {(): 0}
    found = client.get(endpoint.PATH).json()
    assert found["armed"] is True and found["error"] is None
    made.close()


def test_our_own_mistakes_are_http_errors(client: TestClient, monkeypatch) -> None:
    monkeypatch.setattr(StatusReader, "read", lambda *args, **more: 1 / 0)
    for path in (endpoint.PATH, endpoint.METRICS_PATH):
        answer = client.get(path)
        assert answer.status_code == 500 and "ZeroDivisionError" in answer.text


def test_without_prometheus_client_the_status_still_works(
    tmp_path: Path, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    answer = client.get(endpoint.METRICS_PATH)
    assert answer.status_code == 501 and "prometheus_client" in answer.text
    assert client.get(endpoint.PATH).status_code == 200


def test_every_figure_of_the_docs_exists() -> None:
    docs = (Path(__file__).parents[2] / "docs/sglang.md").read_text()
    document = {"armed": True, "writers": []}
    page = metrics.text(document, {"hook_version": "1", "sglang_version": "2"}).decode()
    for family in text_string_to_metric_families(page):
        assert f"`{family.name}" in docs, family.name
    assert 'hslake_info{hook_version="1",sglang_version="2"} 1.0' in page
    for kind in (*KINDS, OTHER):
        assert f"`{kind.replace(' ', '_')}`" in docs


def test_each_server_names_its_own_lake(tmp_path: Path) -> None:
    root = tmp_path / "staging"
    writers = [staging_writer(root, spec()) for _ in "ab"]
    for i, w in enumerate(writers):
        report.tell_writer(root, str(i), w.writer_id)
        found = endpoint.answer(StatusReader(root), str(i), None)
        assert found["lake_id"] == w.spec.lake_id
    for w in writers:
        w.close()
