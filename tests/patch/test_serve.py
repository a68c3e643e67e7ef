"""serve's checks before any weight loads, and servers as child processes."""

import json
import mmap
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hslake_sglang import flags, interpreter, process, serve, settings
from hslake_sglang.process import ServerProcess, free_port

import hslake
from hslake.errors import CheckFailed, InvalidInput, Missing, NoSpace
from hslake.plan import plan_files
from hslake.staging import space
from hslake.staging.memory import part_bytes
from tests.patch import fakesglang
from tests.patch.toy import HIDDEN, LAYERS, make_spec

SPEC = make_spec(("2", "final"), "bfloat16")


@pytest.fixture
def lake(tmp_path: Path) -> str:
    folder = tmp_path / "lake"
    folder.mkdir()
    (folder / "hslake.json").write_text(SPEC.to_json())
    return str(folder)


def prepare(
    lake: str, staging: Path, sglang: Path, *args: str, env: dict[str, str] | None = None, **more
) -> serve.Command:
    given = args or ("--model-path", "some/model")
    path = os.pathsep.join([str(sglang.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    return serve.prepare(lake, staging, given, env={"PYTHONPATH": path, **(env or {})}, **more)


def model(folder: Path, architecture: str = "LlamaForCausalLM", **config: Any) -> Path:
    folder.mkdir()
    facts = {
        "architectures": [architecture],
        "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN,
        "torch_dtype": "bfloat16",
        **config,
    }
    (folder / "config.json").write_text(json.dumps(facts))
    return folder


def test_command_and_environment(
    lake: str, staging: Path, sglang: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(settings.RUN, "of another server")
    monkeypatch.setenv(settings.GPU_MEMORY_TAKEN, "1")
    env = {"SGLANG_PLUGINS": "x"}
    made = prepare(lake, staging, sglang, part_tokens=64, max_parts=2, env=env)
    assert made.argv[:3] == [sys.executable, "-m", "sglang.launch_server"]
    assert "--disable-radix-cache" in made.argv
    assert made.argv[-2:] == ["--cuda-graph-backend-prefill", "disabled"]
    assert made.env[settings.STAGING] == str(staging) and made.env[settings.LAKE] == lake
    assert made.env["SGLANG_PLUGINS"] == "x,hslake"
    assert not {settings.RUN, settings.GPU_MEMORY_TAKEN} & made.env.keys()
    found = settings.load(made.env)
    assert (found.spec, found.part_tokens, found.max_parts) == (SPEC, 64, 2)
    assert "2 parts of 64 tokens" in " ".join(made.notes)
    # The defaults are settled here too, not by each worker in its turn.
    made = prepare(lake, staging, sglang)
    assert settings.load(made.env).part_tokens == 32_768


def test_missing_things_are_named(lake: str, tmp_path: Path, staging: Path, sglang: Path) -> None:
    with pytest.raises(Missing, match="staging"):
        prepare(lake, tmp_path / "no-staging", sglang)
    with pytest.raises(Missing):
        prepare(str(tmp_path / "no-lake"), staging, sglang)
    with pytest.raises(Missing, match="no such folder"):
        prepare(lake, staging, sglang, "--model-path", str(tmp_path / "nomodel"))


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ({"part_tokens": 0}, "--part-tokens 0"),
        ({"max_parts": 0}, "--max-parts 0"),
        ({"args": ("--port", "99999")}, "--port 99999: expected a number from 1 to 65535"),
        ({"args": ("--port", "http")}, "--port http"),
        ({"args": ("--port", "9" * 5000)}, "--port 9"),
    ],
)
def test_numbers_that_are_none_are_named_by_their_option(
    lake: str, staging: Path, sglang: Path, option: dict[str, Any], told: str
) -> None:
    more = option.pop("args", ())
    with pytest.raises(InvalidInput, match=told):
        prepare(lake, staging, sglang, "--model-path", "m", *more, **option)


@pytest.mark.parametrize("at", ["lake", "lake/below", "."])
def test_staging_in_the_lake_and_the_lake_in_staging(
    lake: str, sglang: Path, tmp_path: Path, at: str
) -> None:
    folder = tmp_path / at
    folder.mkdir(exist_ok=True)
    before = sorted(folder.iterdir())
    with pytest.raises(InvalidInput, match="in each other"):
        prepare(lake, folder, sglang)
    link = tmp_path / "link"
    link.symlink_to(folder)
    with pytest.raises(InvalidInput, match="in each other"):
        prepare("file://" + lake, link, sglang)
    link.unlink()
    assert sorted(folder.iterdir()) == before
    (tmp_path / "lake2").mkdir()
    prepare(lake, tmp_path / "lake2", sglang)  # only its name begins alike


def test_what_does_not_fit_staging_is_refused_or_told(
    lake: str, staging: Path, sglang: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = part_bytes(SPEC, 500_000)
    monkeypatch.setattr(space, "free_bytes", lambda folder: (2 * one + space.RESERVE, "the fs"))
    with pytest.raises(NoSpace, match="4 parts of 500,000"):
        prepare(lake, staging, sglang, part_tokens=500_000, max_parts=4)
    made = prepare(lake, staging, sglang, part_tokens=500_000)
    assert settings.load(made.env).max_parts == 2
    assert any("2 parts of a writer instead of 4" in note for note in made.notes)
    size = f"{one / 2**30:.2f} GiB a part, {2 * one / 2**30:.2f} GiB in all"
    assert any(size in note for note in made.notes)


def test_a_disk_is_no_place_for_staging(
    lake: str, staging: Path, sglang: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space, "filesystem", lambda folder: "ext4")
    notes = " ".join(prepare(lake, staging, sglang).notes)
    assert "WARNING" in notes and "on ext4, not in RAM" in notes
    monkeypatch.setattr(space, "filesystem", lambda folder: "tmpfs")
    assert "WARNING" not in " ".join(prepare(lake, staging, sglang).notes)


def test_parts_hold_the_longest_sample_that_is_missing(
    staging: Path, sglang: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = hslake.create(str(tmp_path / "planned"), hidden_size=HIDDEN, num_layers=LAYERS,
                         streams=SPEC.streams)  # fmt: skip
    rows = [{"sample_id": str(n), "input_ids": [1] * n} for n in (40, 300, 40_000)]
    (tmp_path / "plan.jsonl").write_text("\n".join(map(json.dumps, rows)))
    plan_files(made.url, [tmp_path / "plan.jsonl"], source="A1")
    with pytest.raises(InvalidInput, match=r"--part-tokens 39,999.* 40,000 tokens"):
        prepare(made.url, staging, sglang, part_tokens=39_999)
    prepare(made.url, staging, sglang, part_tokens=40_000)
    assert settings.load(prepare(made.url, staging, sglang).env).part_tokens == 40_000
    monkeypatch.setattr(space, "free_bytes", lambda f: (space.RESERVE + (1 << 20), "the fs"))
    with pytest.raises(NoSpace, match="smaller --context-length"):
        prepare(made.url, staging, sglang)
    monkeypatch.undo()
    context = ("--model-path", "m", "--context-length", "1000")  # it will take no longer one
    left_out = "1 planned samples .* will not be captured.* 1,000 tokens"
    assert re.search(left_out, prepare(made.url, staging, sglang, *context).notes[1])
    prepare(made.url, staging, sglang, *context, part_tokens=300)
    with pytest.raises(InvalidInput, match="300 tokens"):
        prepare(made.url, staging, sglang, *context, part_tokens=299)
    # What SGLang takes from the model's config, without the option.
    short = model(tmp_path / "short", max_position_embeddings=300)
    args = ("--model-path", str(short))
    told = prepare(made.url, staging, sglang, *args, part_tokens=40)
    assert re.search("2 planned samples .* 300 tokens", told.notes[0])
    scaled = {"max_position_embeddings": 300, "rope_scaling": {"rope_type": "yarn", "factor": 4}}
    unsure = model(tmp_path / "unsure", **scaled)
    with pytest.raises(InvalidInput, match=r" 40,000 tokens.*--context-length"):
        prepare(made.url, staging, sglang, "--model-path", str(unsure), part_tokens=39_999)


def test_an_interpreter_without_sglang(lake: str, staging: Path) -> None:
    with pytest.raises(Missing, match="no SGLang"):
        serve.prepare(lake, staging, ["--model-path", "m"])
    with pytest.raises(Missing, match=r"nowhere/python.*--python"):
        serve.prepare(lake, staging, ["--model-path", "m"], python="nowhere/python")
    with pytest.raises(InvalidInput, match="is it a Python"):
        serve.prepare(lake, staging, ["--model-path", "m"], python="/bin/true")


def test_an_interpreter_that_does_not_answer(
    lake: str, staging: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interpreter, "_PATIENCE_S", 0.2)
    mute = tmp_path / "python"
    mute.write_text("#!/bin/sh\nexec sleep 5\n")
    mute.chmod(0o755)
    with pytest.raises(InvalidInput, match="did not say"):
        serve.prepare(lake, staging, ["--model-path", "m"], python=mute)


def test_an_unsupported_version(lake: str, staging: Path, tmp_path: Path) -> None:
    old = fakesglang.make(tmp_path / "old", "0.5.10")
    with pytest.raises(InvalidInput, match=r"0\.5\.10 is not supported.*0\.5\.11"):
        prepare(lake, staging, old)


def test_only_options_that_the_version_knows_are_added(
    lake: str, staging: Path, sglang: Path
) -> None:
    made = sglang / "srt/server_args.py"
    made.write_text(made.read_text().replace("cuda_graph_backend_prefill", "something_else"))
    assert prepare(lake, staging, sglang).argv[-1] == "--disable-piecewise-cuda-graph"


def test_a_config_file_is_read_before_anything_loads(
    lake: str, staging: Path, sglang: Path, tmp_path: Path
) -> None:
    pytest.importorskip("yaml")  # comes with SGLang, which reads the file itself
    config = tmp_path / "server.yaml"
    config.write_text("model-path: some/model\nchunked_prefill_size: 512\n")
    made = prepare(lake, staging, sglang, "--config", str(config))
    assert "--chunked-prefill-size" not in made.argv  # it stands in the file
    assert "--disable-radix-cache" in made.argv
    config.write_text("model-path: some/model\npipeline-parallel-size: 2\nenable-lora: true\n")
    with pytest.raises(InvalidInput, match=r"(?s)--pp-size.*--enable-lora"):
        prepare(lake, staging, sglang, "--config", str(config))
    config.write_text("{")  # SGLang will say what is wrong with it
    prepare(lake, staging, sglang, "--config", str(config))


def test_another_model_is_refused_before_it_loads(
    lake: str, staging: Path, sglang: Path, tmp_path: Path
) -> None:
    folder = model(tmp_path / "model")
    spec = make_spec(("2", "final"), "bfloat16", fingerprint={"config": "00" * 32, "weights": None})
    (Path(lake) / "hslake.json").write_text(spec.to_json())
    with pytest.raises(InvalidInput, match="fingerprint"):
        prepare(lake, staging, sglang, "--model-path", str(folder))


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"num_hidden_layers": LAYERS + 1}, f"layers {LAYERS + 1}.*made for {LAYERS}"),
        ({"hidden_size": 7168}, f"hidden size 7168.*made for {HIDDEN}"),
        ({"architecture": "PlainForCausalLM"}, r"0\.5\.23 cannot capture from .*PlainForCausalLM"),
        ({"architecture": "NewForCausalLM"}, r"0\.5\.23 has no model for .*NewForCausalLM"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_before_it_loads(
    lake: str, staging: Path, sglang: Path, tmp_path: Path, config: dict[str, Any], told: str
) -> None:
    folder = model(tmp_path / "model", **config)
    with pytest.raises(InvalidInput, match=told):
        prepare(lake, staging, sglang, "--model-path", str(folder))


def test_what_cannot_be_told_about_a_model_does_not_stop_the_server(
    lake: str, staging: Path, sglang: Path, tmp_path: Path
) -> None:
    good = model(tmp_path / "good", torch_dtype="float32")
    made = prepare(lake, staging, sglang, "--model-path", str(good))
    assert "config names float32; served and stored as bfloat16" in " ".join(made.notes)
    odd = model(tmp_path / "odd", architectures=None, num_hidden_layers="many")
    prepare(lake, staging, sglang, "--model-path", str(odd))
    new = model(tmp_path / "new", "NewForCausalLM")
    env = {"SGLANG_EXTERNAL_MODEL_PACKAGE": "somewhere"}
    prepare(lake, staging, sglang, "--model-path", str(new), env=env)


def test_a_server_of_another_model_than_its_folders_is_refused(
    lake: str, staging: Path, sglang: Path, tmp_path: Path
) -> None:
    plain = ("--model-path", str(model(tmp_path / "plain")))
    dummy, fp8 = ("--load-format", "dummy"), ("--quantization", "fp8")
    prepare(lake, staging, sglang, *plain, *dummy)  # this lake's fingerprint has no weights
    with pytest.raises(InvalidInput, match=r"--quantization: .*another model"):
        prepare(lake, staging, sglang, *plain, *fp8)
    quantised = model(
        tmp_path / "quantised", text_config={"quantization_config": {"quant_method": "fp8"}}
    )
    prepare(lake, staging, sglang, "--model-path", str(quantised), *fp8)
    prepare(lake, staging, sglang, "--model-path", "on/a/hub", *fp8)  # the worker looks at it
    spec = make_spec(("2", "final"), "bfloat16", fingerprint={"config": None, "weights": "00" * 32})
    (Path(lake) / "hslake.json").write_text(spec.to_json())
    with pytest.raises(InvalidInput, match=r"--load-format: .*weights are not those"):
        prepare(lake, staging, sglang, *plain, *dummy)
    with pytest.raises(InvalidInput, match="no safetensors files"):
        prepare(lake, staging, sglang, *plain)


def test_a_model_through_transformers_is_refused(
    lake: str, staging: Path, sglang: Path, tmp_path: Path
) -> None:
    args = ("--model-path", str(model(tmp_path / "model")), "--model-impl", "transformers")
    with pytest.raises(InvalidInput, match="TransformersForCausalLM"):
        prepare(lake, staging, sglang, *args)


def test_gpu_memory_is_taken_off_what_sglang_may_use(
    lake: str, staging: Path, sglang: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an nvidia-smi that says what a GPU machine's says."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "nvidia-smi").write_text("#!/bin/sh\necho '0, GPU-a, 1024'\necho '1, GPU-b, 4096'\n")
    (tools / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    args = ("--model-path", "m", "--mem-fraction-static", "0.9")
    made = prepare(lake, staging, sglang, *args)
    assert flags.option_value(made.argv, ["--mem-fraction-static"]) == "0.8368"
    assert made.env[settings.GPU_MEMORY_TAKEN] == "1"
    assert "lowered from 0.9 to 0.8368" in made.notes[-1]
    made = prepare(lake, staging, sglang, *args, env={"CUDA_VISIBLE_DEVICES": "1"})
    assert flags.option_value(made.argv, ["--mem-fraction-static"]) == "0.8842"
    unset = prepare(lake, staging, sglang, "--model-path", "m")
    assert "--mem-fraction-static" not in unset.argv
    assert "0.06 GiB" in " ".join(unset.notes)
    assert settings.GPU_MEMORY_TAKEN not in unset.env
    for none in ({"CUDA_VISIBLE_DEVICES": ""}, {}):
        device = () if none else ("--device", "cpu")
        made = prepare(lake, staging, sglang, *args, *device, env=none)
        assert "GPU" not in " ".join(made.notes)
        assert flags.option_value(made.argv, ["--mem-fraction-static"]) == "0.9"


def test_a_busy_port_is_found_before_anything_loads(lake: str, staging: Path, sglang: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = str(busy.getsockname()[1])
        with pytest.raises(InvalidInput, match=f"--port {port} cannot be listened on"):
            prepare(lake, staging, sglang, "--model-path", "m", "--port", port)


@pytest.mark.parametrize("host", ["::", "::1", "0.0.0.0", "localhost", "[::1]"])
def test_hosts_of_both_families(lake: str, staging: Path, sglang: Path, host: str) -> None:
    if ":" in host and not _has_ipv6():
        pytest.skip("this machine has no IPv6")
    args = ("--model-path", "m", "--host", host, "--port", str(free_port()))
    if host.startswith("["):  # for a URL: SGLang's server cannot listen on it either
        with pytest.raises(InvalidInput, match="cannot be listened on"):
            prepare(lake, staging, sglang, *args)
    else:
        prepare(lake, staging, sglang, *args)


def test_a_busy_port_of_ipv6(lake: str, staging: Path, sglang: Path) -> None:
    if not _has_ipv6():
        pytest.skip("this machine has no IPv6")
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as busy:
        args = ("--model-path", "m", "--host", "::1", "--port", str(busy.getsockname()[1]))
        with pytest.raises(InvalidInput, match="cannot be listened on"):
            prepare(lake, staging, sglang, *args)


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


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
