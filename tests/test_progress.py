"""Progress where standard error is no terminal, and at 80 columns where it is one."""

import io
import sys
import time

import pytest
import rich.console

from hslake import progress
from hslake.progress import NoteLines, Progress


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "FIRST_LINE_S", 0.2)
    monkeypatch.setattr(progress, "NEXT_LINE_S", 0.2)


def test_long_work_tells_where_it_stands_also_when_stuck(
    soon: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with Progress(107_000, "extract (tokens)") as bar:
        bar.advance(7_870)
        bar.note("staging is full")
        time.sleep(0.9)
    found = capsys.readouterr()
    lines = found.err.splitlines()
    assert found.out == "" and len(lines) >= 3
    assert lines[0].startswith("extract 7,870 of 107,000 tokens, ") and " tokens/s, " in lines[0]
    assert lines[1].startswith("extract 7,870 of 107,000 tokens, 0 tokens/s, ")
    assert all(line.endswith("; staging is full") for line in lines)
    assert not lines[-1].startswith("extract 7,870 of 107,000 tokens, 0 ")  # the rate of it all


def test_short_work_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(10, "plan") as bar:
        bar.advance(10)
    assert capsys.readouterr() == ("", "")


def test_notes_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with NoteLines(None, "compact") as bar:
        bar.advance(5)
        bar.note("committed 5")
    assert capsys.readouterr().err == "compact: committed 5\n"


def test_80_columns_show_the_whole_total_and_note(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(
        progress,
        "Console",
        lambda stderr: rich.console.Console(file=screen, width=80, force_terminal=True),
    )
    note = "3,120 left, 32 in flight, 1 of 2 servers, 17 retries, staging is full: run compact"
    with Progress(107_000_000, "extract (tokens)") as bar:
        bar.advance(7_870_000)
        bar.note(note)
    shown = screen.getvalue()
    assert "7870000/107000000" in shown and "…" not in shown
    assert note.split()[-1] in shown


def test_what_was_left_a_moment_ago_is_not_said_at_the_end(
    soon: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with Progress(2, "plan") as bar:
        bar.note("1 left")
        bar.advance()
        time.sleep(0.5)
        bar.advance()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith("; 1 left") and lines[-1].startswith("plan 2 of 2, ")
    assert "left" not in lines[-1]
