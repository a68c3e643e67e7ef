"""serve's checks before any weight loads, and servers as child processes."""

import mmap
import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
from hslake_sglang import process, serve, settings
from hslake_sglang.process import ServerProcess, free_port

from hslake.errors import CheckFailed, InvalidInput, Missing
from tests.patch.toy import make_spec

SPEC = make_spec(("2", "final"), "bfloat16")


@pytest.fixture
def lake(tmp_path: Path) -> str:
    folder = tmp_path / "lake"
    folder.mkdir()
    (folder / "hslake.json").write_text(SPEC.to_json())
    return str(folder)


@pytest.fixture
def staging(tmp_path: Path) -> Path:
    folder = tmp_path / "staging"
    folder.mkdir()
    return folder


def prepare(lake: str, staging: Path, monkeypatch: pytest.MonkeyPatch, **more) -> serve.Command:
    monkeypatch.setattr(serve, "_sglang_version", lambda python, env: "0.5.23")
    return serve.prepare(lake, staging, ["--model-path", "some/model"], **more)


def test_command_and_environment(lake: str, staging: Path, monkeypatch) -> None:
    monkeypatch.setenv(settings.RUN, "of another server")
    made = prepare(
        lake, staging, monkeypatch, part_tokens=64, max_parts=2, env={"SGLANG_PLUGINS": "x"}
    )
    assert made.argv[:3] == [sys.executable, "-m", "sglang.launch_server"]
    assert "--disable-radix-cache" in made.argv
    assert made.env[settings.STAGING] == str(staging) and made.env[settings.LAKE] == lake
    assert made.env["SGLANG_PLUGINS"] == "x,hslake" and settings.RUN not in made.env
    found = settings.load(made.env)
    assert (found.spec, found.part_tokens, found.max_parts) == (SPEC, 64, 2)


def test_missing_things_are_named(lake: str, tmp_path: Path, staging: Path, monkeypatch) -> None:
    with pytest.raises(Missing, match="staging"):
        prepare(lake, tmp_path / "no-staging", monkeypatch)
    with pytest.raises(Missing):
        prepare(str(tmp_path / "no-lake"), staging, monkeypatch)


def test_an_interpreter_without_sglang(lake: str, staging: Path) -> None:
    with pytest.raises(Missing, match="no SGLang"):
        serve.prepare(lake, staging, ["--model-path", "m"])
    with pytest.raises(Missing, match="nowhere/python"):
        serve.prepare(lake, staging, ["--model-path", "m"], python="nowhere/python")


def test_another_model_is_refused_before_it_loads(
    lake: str, staging: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"hidden_size": 1}')
    spec = make_spec(("2", "final"), "bfloat16", fingerprint={"config": "00" * 32, "weights": None})
    (Path(lake) / "hslake.json").write_text(spec.to_json())
    monkeypatch.setattr(serve, "_sglang_version", lambda python, env: "0.5.23")
    with pytest.raises(InvalidInput, match="model"):
        serve.prepare(lake, staging, ["--model-path", str(model)])


def test_a_busy_port_and_a_missing_folder_are_found_before_anything_loads(
    lake: str, staging: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "_sglang_version", lambda python, env: "0.5.23")
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = str(busy.getsockname()[1])
        with pytest.raises(InvalidInput, match=f"--port {port} cannot be listened on"):
            serve.prepare(lake, staging, ["--model-path", "m", "--port", port])
    with pytest.raises(Missing, match="no such folder"):
        serve.prepare(lake, staging, ["--model-path", str(tmp_path / "nomodel")])


SERVER = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_server_process_starts_answers_and_stops_with_its_children(tmp_path: Path) -> None:
    port = free_port()
    log = tmp_path / "log"
    argv = [sys.executable, "-c", SERVER, str(port)]
    with ServerProcess(argv, {}, log, port) as server:
        assert server.alive()
        child = int(log.read_text().split()[1])
        assert Path(f"/proc/{child}").exists()
    assert not server.alive()
    deadline = time.monotonic() + 5
    while _runs(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(child)
    server.stop()  # a second time does no harm


@pytest.mark.parametrize("dies_first", [False, True])
def test_shared_memory_that_its_processes_mapped_is_removed_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_first: bool
) -> None:
    monkeypatch.setattr(process, "_LOADS", str(tmp_path / "sglang_loads_"))
    mine, others = tmp_path / "sglang_loads_mine.shm", tmp_path / "sglang_loads_other.shm"
    for path in (mine, others):
        path.write_bytes(bytes(4096))
    child = f"import mmap, time; f = open({str(mine)!r}, 'r+b'); m = mmap.mmap(f.fileno(), 0); "
    server = SERVER.replace("import time; ", child)
    port = free_port()
    argv = [sys.executable, "-c", server, str(port)]
    with others.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        running = ServerProcess(argv, {}, tmp_path / "log", port).start()
        try:
            deadline = time.monotonic() + 30
            while not process.mapped_files(running._process.pid, str(tmp_path)):  # type: ignore[union-attr]
                assert time.monotonic() < deadline
                time.sleep(0.05)
            running.wait_ready(30)
            if dies_first:
                os.killpg(running._process.pid, signal.SIGKILL)  # type: ignore[union-attr]
                running._process.wait(10)  # type: ignore[union-attr]
        finally:
            running.stop(grace=1)
    assert not mine.exists() and others.exists()


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_server_that_dies_or_hangs_is_told_with_its_log(tmp_path: Path) -> None:
    dies = [sys.executable, "-c", "print('no such weights'); raise SystemExit(3)"]
    with pytest.raises(CheckFailed, match=r"(?s)code 3.*no such weights"):
        ServerProcess(dies, {}, tmp_path / "log1", free_port()).__enter__()
    hangs = [sys.executable, "-uc", "print('still loading'); import time; time.sleep(60)"]
    server = ServerProcess(hangs, {}, tmp_path / "log2", free_port()).start()
    try:
        with pytest.raises(CheckFailed, match="still loading"):
            server.wait_ready(timeout=1.5)
    finally:
        server.stop()
    assert not server.alive()
