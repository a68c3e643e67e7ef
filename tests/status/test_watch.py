"""`hslake status --watch` as a process: on a terminal, without one, as JSON lines, and Ctrl-C."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hslake.cli import app
from tests.lakes import MadeLake, make_lake

# Where the tests run in the background of a shell, Ctrl-C is ignored, and that is inherited.
CODE = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from hslake.cli import main
main()
"""
HSLAKE = [sys.executable, "-c", CODE]
WAIT_S = 60.0


@pytest.fixture
def made(tmp_path: Path) -> MadeLake:
    found = make_lake(tmp_path, lengths=[10, 20, 300])
    found.plan([50, 60])
    return found


def interrupted(process: subprocess.Popen[bytes]) -> int:
    process.send_signal(signal.SIGINT)
    return process.wait(WAIT_S)


def test_json_lines(made: MadeLake) -> None:
    call = [*HSLAKE, "status", made.url, "--watch", "0.1", "--json"]
    process = subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    told = [json.loads(process.stdout.readline()) for _ in range(3)]
    made.plan([70])
    deadline = time.monotonic() + WAIT_S
    while told[-1]["planned"] < 6 and time.monotonic() < deadline:
        told.append(json.loads(process.stdout.readline()))
    assert interrupted(process) == 0 and process.stderr.read() == b""
    assert [t["planned"] for t in told[:3]] == [5, 5, 5] and told[-1]["planned"] == 6
    assert told[0]["at"] < told[1]["at"] and told[0]["runs"] == []


def test_blocks_of_lines_where_there_is_no_terminal(made: MadeLake) -> None:
    process = subprocess.Popen(
        [*HSLAKE, "status", "--watch", "0.1", made.url], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    seen = 0
    for line in process.stdout:
        assert b"\x1b" not in line
        seen += b"(total)" in line
        if seen == 2:
            break
    assert interrupted(process) == 0


def test_a_screen_on_a_terminal(made: MadeLake) -> None:
    ours, its = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    call = [*HSLAKE, "status", made.url, "--watch", "0.2"]
    process = subprocess.Popen(call, stdout=its, stderr=its, stdin=its, env=env)
    os.close(its)
    found, deadline = b"", time.monotonic() + WAIT_S

    def read() -> bytes:
        if not select.select([ours], [], [], 0.1)[0]:
            return b""
        try:
            return os.read(ours, 65_536)
        except OSError:  # nobody is at the other end any more
            return b""

    while found.count(b"tokens, ") < 3 and time.monotonic() < deadline:
        found += read()
    Path(made.url).rename(made.staging.parent / "moved")  # shown, and outlived
    while b"NOT READ" not in found and time.monotonic() < deadline:
        found += read()
    process.send_signal(signal.SIGINT)
    while process.poll() is None and time.monotonic() < deadline:
        found += read()
    os.close(ours)
    assert process.returncode == 0
    text = found.decode()
    assert "NOT READ" in text and "Traceback" not in text
    assert re.search(r"\x1b\[\d*A", text)  # the cursor goes up: refreshed in place
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert all(len(line) <= 80 for line in re.split(r"[\r\n]+", plain))


def test_what_follows_watch(made: MadeLake) -> None:
    runner = CliRunner()
    for bad in (
        ["status", made.url, "5"],
        ["status", made.url, "soon", "--watch"],
        ["status", made.url, "--watch", "0"],
        ["status", made.url, "--watch", "nan"],
    ):
        found = runner.invoke(app, bad)
        assert found.exit_code == 2 and "error:" in found.output, (bad, found.output)
    missing = runner.invoke(app, ["status", str(made.staging / "no"), "--watch"])
    assert missing.exit_code == 2


def test_once(made: MadeLake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hslake.status.work.IDLE_S", 0.0)
    shown = CliRunner().invoke(app, ["status", made.url]).output
    first, bar, done, rate, slow, todo = shown.splitlines()[:6]
    assert first.startswith("STOPPED") and "75.00 %" in bar and "110 left" in bar
    assert "not known" in done and "tokens/s" in rate
    assert "nothing running: no run of extract is live" in slow and "nothing" in todo
