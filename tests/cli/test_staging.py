"""Commands with the wrong staging: what is said, which exit code, and that nothing is touched."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from pytest import LogCaptureFixture
from typer.testing import CliRunner, Result

import hslake
from hslake.cli import app
from hslake.staging import StagingWriter
from tests.lakes import MadeLake, make_lake

REPO = Path(__file__).parents[2]
DEAD = "http://127.0.0.1:9"  # nobody listens there


def call(*args: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in args])


def commands(lake: str, staging: Path, model: Path) -> dict[str, tuple[tuple[object, ...], int]]:
    """Every command that takes a staging folder, and its exit code when that is a wrong one."""
    return {
        "compact": (("compact", lake, "--staging", staging), 2),
        "serve": (("serve", lake, "--staging", staging, "--", "--model-path", model), 2),
        "preflight": (("preflight", lake, "--server", DEAD, "--staging", staging), 1),
        "capture-hf": (("capture-hf", lake, model, "--staging", staging), 2),
        "extract": (("extract", lake, "--server", DEAD, "--staging", staging), 2),
        "status": (("status", lake, "--staging", staging), 2),
    }


COMMANDS = list(commands("", Path(), Path()))


def files(*folders: Path) -> dict[str, int]:
    """Every file below `folders` and when it was last changed."""
    return {
        str(p): p.stat().st_mtime_ns for f in folders for p in f.rglob("*") if p.is_file()
    }  # fmt: skip


@pytest.fixture
def made(tmp_path: Path) -> MadeLake:
    return make_lake(tmp_path / "mine", 2)


@pytest.mark.parametrize("command", [*COMMANDS, "gc-staging", "watch"])
def test_a_lake_is_no_staging_folder(made: MadeLake, tmp_path: Path, command: str) -> None:
    """Else the answer would be for ever that nothing was waiting."""
    for staging in (Path(made.url), Path(make_lake(tmp_path / "other", 1).url)):
        args, code = {
            **commands(made.url, staging, tmp_path),
            "gc-staging": (("gc-staging", staging), 2),
            "watch": (("compact", made.url, "--staging", staging, "--watch"), 2),
        }[command]
        before = files(tmp_path)
        found = call(*args)
        assert found.exit_code == code, found.output
        assert f"{staging} is a lake" in found.output or "are in each other" in found.output
        assert files(tmp_path) == before


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_that_is_not_there(made: MadeLake, tmp_path: Path, command: str) -> None:
    nowhere = tmp_path / "nowhere"
    (tmp_path / "file").write_text("")
    before = files(Path(made.url))
    for wrong in (nowhere, tmp_path / "file"):
        args, code = commands(made.url, wrong, tmp_path)[command]
        found = call(*args)
        assert found.exit_code == code, found.output
        assert str(wrong) in found.output and "Traceback" not in found.output
        assert any(t in found.output for t in ("not there", "does not exist", "is a file"))
    assert files(Path(made.url)) == before and not nowhere.exists()


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("wrong", ["lake", "model"])
def test_staging_of_another_lake_or_model(
    made: MadeLake, tmp_path: Path, command: str, wrong: str
) -> None:
    if wrong == "lake":
        other = make_lake(tmp_path / "other", 1)
        other.stage(other.plan([5]))
        staging, text = other.staging, "lake_id is"
    else:
        staging, text = made.staging, "fingerprint"
        path = Path(made.url) / "hslake.json"
        document = json.loads(path.read_text())
        document["model"]["fingerprint"]["config"] = "ab" * 32
        del document["digest"]
        path.write_text(json.dumps(document))
        spec = hslake.open(made.url).spec
        theirs = replace(spec.model, fingerprint={})
        writer = StagingWriter(
            staging,
            replace(spec, model=theirs),
            part_tokens=8,
            max_parts=1,
            fingerprint={"config": "cd" * 32, "weights": None},
            engine={},
        )
        writer.close()
    before = files(Path(made.url), staging)
    args, code = commands(made.url, staging, tmp_path)[command]
    found = call(*args)
    # A compactor has other parts to take; that one was refused is a failed check.
    assert found.exit_code == (1 if command == "compact" else code), found.output
    assert text in found.output and "Traceback" not in found.output
    assert str(staging) in found.output and "part-000001" in found.output
    assert files(Path(made.url), staging) == before


def test_compact_says_it_once(made: MadeLake, tmp_path: Path, caplog: LogCaptureFixture) -> None:
    other = make_lake(tmp_path / "other", 1)
    other.stage(other.plan([5]))
    found = call("compact", made.url, "--staging", other.staging)
    assert found.exit_code == 1 and found.stderr.count("lake_id is") == 1
    assert caplog.records == []  # a log line would show on standard error, too


def test_compact_names_damage_and_exits_1(made: MadeLake) -> None:
    made.stage(made.plan([5, 6]))
    (journal,) = made.staging.glob("*/part-000001/journal")
    data = bytearray(journal.read_bytes())
    data[data.rindex(b"A1-")] ^= 1
    journal.write_bytes(data)
    found = call("compact", made.url, "--staging", made.staging, "--json")
    assert found.exit_code == 1 and str(journal) in found.stderr
    assert "hslake extract" in found.stderr
    report = json.loads(found.stdout)
    assert report["damage"] and report["refused"] == [] and report["stopped"] is False


# -- compact --watch as a process ---------------------------------------------------------------


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("busy", [False, True])
def test_watch_ends_on_a_signal(made: MadeLake, sign: signal.Signals, busy: bool) -> None:
    code = "from hslake.cli import main; main()"
    args = ["compact", made.url, "--staging", str(made.staging), "--watch", "--interval", "60"]
    writer = made.writer(8)
    lock = writer.folder / "compact.lock"
    os.utime(lock, (5, 5))
    if busy:
        made.stage(made.plan([200] * 60))
        args += ["--segment-tokens", "200"]
    path = os.pathsep.join([str(REPO), str(REPO / "patch")])
    process = subprocess.Popen(
        [sys.executable, "-c", code, *args],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    before = made.lake.version
    if busy:
        deadline = time.monotonic() + 60
        while made.lake.version == before and time.monotonic() < deadline:
            time.sleep(0.05)
    else:
        deadline = time.monotonic() + 60
        while lock.stat().st_mtime == 5 and time.monotonic() < deadline:
            time.sleep(0.05)  # until it has been here; then it waits for the next minute
    start = time.monotonic()
    process.send_signal(sign)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    assert time.monotonic() - start < 15  # not the sixty seconds of the interval
    assert "committed" in out and "Traceback" not in err
    assert err.startswith(f"compact: watching {made.staging}\n")  # a pipe is no terminal
    assert ("compact: committed 1 samples, 200 tokens, version " in err) == busy
    assert err.splitlines()[-1].startswith("stopped: what was committed is safe"), err
    if busy:
        ((live,),) = made.lake.sql("select count(*) from samples").fetchall()
        assert 2 < live < 62
        again = call("compact", made.url, "--staging", made.staging)
        assert again.exit_code == 0, again.output
        assert made.lake.sql("select count(*) from samples").fetchall() == [(62,)]
    assert list(made.staging.iterdir()) == [writer.folder]
    writer.close()


def test_the_second_signal_ends_at_once_and_leaves_no_lock(made: MadeLake, tmp_path: Path) -> None:
    # The store hangs: what it was asked for never comes back.
    code = """
import threading
from hslake.store import Store
whole = Store.put
def put(store, path, data):
    if path.startswith("segments/"):
        print("hangs", flush=True)
        threading.Event().wait()
    whole(store, path, data)
Store.put = put
from hslake.cli import main
main()
"""
    made.stage(made.plan([200]))
    path = os.pathsep.join([str(REPO), str(REPO / "patch")])
    process = subprocess.Popen(
        [sys.executable, "-c", code, "compact", made.url, "--staging", str(made.staging)],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    # Objects are put side by side: two may say so at once.
    assert process.stdout and process.stdout.readline().startswith("hangs")
    process.send_signal(signal.SIGTERM)
    assert process.stderr and "again ends at once" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM and "stopped at once" in err
    again = call("compact", made.url, "--staging", made.staging)
    assert again.exit_code == 0, again.output
    assert made.lake.sql("select count(*) from samples").fetchall() == [(3,)]


def test_once_stopped_by_a_signal_it_is_130(made: MadeLake) -> None:
    made.stage(made.plan([200] * 60))
    path = os.pathsep.join([str(REPO), str(REPO / "patch")])
    args = ["compact", made.url, "--staging", str(made.staging), "--segment-tokens", "200"]
    process = subprocess.Popen(
        [sys.executable, "-c", "from hslake.cli import main; main()", *args],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    before = made.lake.version
    deadline = time.monotonic() + 60
    while made.lake.version == before and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "stopped: what was committed is safe" in err, err
    assert call("compact", made.url, "--staging", made.staging).exit_code == 0
    assert made.lake.sql("select count(*) from samples").fetchall() == [(62,)]
