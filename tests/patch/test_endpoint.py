"""What GET /hslake/status says about this server, and only about it."""

from pathlib import Path
from typing import Any

import pytest
from hslake_sglang import endpoint, report

from hslake.errors import InvalidInput
from hslake.staging import StatusReader
from tests.staging.test_writer import spec
from tests.staging.test_writer import writer as staging_writer

RUN = "run1"


def writer(name: str, **more: Any) -> dict[str, Any]:
    return {"writer": name, "alive": True, "armed": True, "error": None, **more}


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Every writer in staging, as read_status would find them."""
    writers: list[dict[str, Any]] = []
    document = {"format": 1, "armed": True, "error": None, "writers": writers}
    monkeypatch.setattr(StatusReader, "read", lambda reader, since: document)
    return writers


def test_only_the_writers_of_this_server(tmp_path: Path, found: list) -> None:
    found += [writer("mine"), writer("of another server"), writer("dead", alive=False)]
    report.tell_writer(tmp_path, RUN, "mine")
    report.tell_writer(tmp_path, "run2", "of another server")
    answer = endpoint.answer(StatusReader(tmp_path), RUN, None)
    assert [w["writer"] for w in answer["writers"]] == ["mine"]
    assert answer["armed"] is True and answer["error"] is None and answer["format"] == 1


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
