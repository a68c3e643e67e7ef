"""Pins name what they named, or say that they do not."""

import json
from pathlib import Path

import pytest

import hslake
from hslake.errors import Conflict, Corrupt, InvalidInput, Missing
from hslake.pins import Pin, pin, pins, unpin
from hslake.tables import catalog
from hslake.verify import verify
from hslake.versions import log
from tests.lakes import MadeLake, make_lake


@pytest.fixture
def made(tmp_path: Path) -> MadeLake:
    made = make_lake(tmp_path, lengths=[20])
    made.add([30])
    return made


def entry(made: MadeLake, version: int) -> Path:
    return Path(made.url) / f"manifest/_delta_log/{version:020d}.json"


def test_a_pin_names_its_commit(made: MadeLake) -> None:
    first = pin(made.url, "run", 1)
    assert first.commit is not None and (Path(made.url) / "manifest" / first.commit).is_file()
    assert pin(made.url, "run", 1) == first and pins(made.lake) == [first]
    with pytest.raises(InvalidInput, match="version 1 already"):
        pin(made.url, "run", 2)
    assert pin(made.url, "empty", 0).commit is None
    # One of before pins named their commits.
    old = {"name": "old", "version": 2, "pinned_at": "2026-01-02T03:04:05+00:00"}
    (Path(made.url) / "pins/old.json").write_text(json.dumps(old))
    assert pins(made.lake)[1] == Pin(**old) and verify(made.url).ok
    assert [row["pins"] for row in log(made.url)] == [["old"], ["run"]]


def test_a_lost_entry_of_the_log_is_noticed(made: MadeLake) -> None:
    """The next commit takes its number, and the pin would name other samples."""
    pin(made.url, "run", 2)
    assert verify(made.url).warnings == []
    entry(made, 2).unlink()
    lost = verify(made.url, "manifest")
    warning, orphan = lost.warnings
    assert (
        "1 segments with" in orphan
        and "part-00000000000000000002-" in warning
        and "lost its newest entries" in warning
    )
    assert "has 0 to 1" in lost.damage[0].what and not lost.damage[0].sample_ids
    state = catalog.open_table(made.lake.store, "manifest")
    again = state.arrow().drop_columns(["commit_version"])
    catalog.commit(made.lake.store, "manifest", lambda _: again, "another")
    for level in ("manifest", "full"):
        found = verify(made.url, level)
        assert len(found.warnings) == 2 and "took the number" in found.damage[0].what
    with pytest.raises(Corrupt, match=r"run\.json names version 2 as part-.*took the number"):
        pins(hslake.open(made.url))


def test_a_commit_meanwhile_is_no_stray(made: MadeLake) -> None:
    before = made.lake.manifest_table()
    made.add([40])
    assert before.strays() == []


def test_a_name_taken_meanwhile(made: MadeLake, monkeypatch: pytest.MonkeyPatch) -> None:
    pin(made.url, "run", 1)

    def not_yet(*_: object) -> None:
        raise Missing("not yet")

    monkeypatch.setattr("hslake.pins._read", not_yet)
    with pytest.raises(Conflict):
        pin(made.url, "run", 2)


def test_a_removed_name_names_nothing_else(made: MadeLake) -> None:
    first = pin(made.url, "run", 1)
    assert hslake.open(made.url, version="run").version == 1
    assert unpin(made.url, "run") == first
    assert pins(made.lake) == []
    with pytest.raises(Missing, match="no pin 'run'; its pins: none"):
        hslake.open(made.url, version="run")
    with pytest.raises(Missing, match="no pin 'run'"):
        unpin(made.url, "run")
    with pytest.raises(InvalidInput, match="named version 1 already"):
        pin(made.url, "run", 2)
    assert pin(made.url, "run", 1).version == 1
    with pytest.raises(InvalidInput, match="a number is a version"):
        pin(made.url, "12")
    assert hslake.open(made.url, version="2").version == 2
    with pytest.raises(InvalidInput, match="a pin's name"):
        hslake.open(made.url, version="../hslake")
    # One that does not read any more can be removed, too.
    (Path(made.url) / "pins/run.json").write_text("{")
    with pytest.raises(Corrupt):
        hslake.open(made.url, version="run")
    assert unpin(made.url, "run") is None and pins(made.lake) == []
