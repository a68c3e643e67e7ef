"""SGLang servers for each mode, all with the same settings, all started at once.

They share the GPUs so that runs of different modes can be interleaved: an idle one only holds its
memory. The `hslake` ones are what `hslake serve` starts.
"""

import contextlib
import json
import os
import shutil
import signal
import sys
from pathlib import Path

from hslake_sglang.process import ServerProcess, _members
from hslake_sglang.settings import spec_env

from benchmarks.hook.settings import HSLAKE, HTTP, NONE, TORCH_SAVE, Settings
from examples.sglang_cpu import cpu_server
from hslake.spec import LakeSpec

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = "hslake_bench_torch_save"
_PORTS_EACH = 1_500  # SGLang takes further ports up to 1,000 above its own


def common_args(s: Settings) -> list[str]:
    """SGLang's arguments, the same in every mode."""
    if s.smoke:
        args = cpu_server.args(s.model, chunk=s.chunk, max_total_tokens=s.kv_tokens)
        return [*args, "--dtype", "bfloat16", "--disable-radix-cache", *s.server_args]
    parallel = []
    if s.tp > 1:
        parallel += ["--tp-size", str(s.tp), "--disable-custom-all-reduce"]
    if s.dp > 1:
        parallel += ["--dp-size", str(s.dp), "--enable-dp-attention"]
    return [
        *("--model-path", str(s.model), "--load-format", "dummy", "--skip-tokenizer-init"),
        *("--dtype", "bfloat16", "--attention-backend", s.attention_backend),
        *("--sampling-backend", "pytorch", "--grammar-backend", "none"),
        *("--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"),
        *("--disable-radix-cache", "--mem-fraction-static", "0.85", "--context-length", "32768"),
        *("--chunked-prefill-size", str(s.chunk), "--max-prefill-tokens", str(s.chunk)),
        *("--max-running-requests", "64", "--disable-shared-experts-fusion"),
        *("--moe-runner-backend", "triton", "--max-total-tokens", str(s.kv_tokens)),
        *("--sleep-on-idle", "--log-level", "info"),
        *parallel,
        *s.server_args,
    ]


def common_env(s: Settings) -> dict[str, str]:
    """What is added to the environment of every server."""
    if s.smoke:
        env = cpu_server.env(os.cpu_count() or 1)
        path = env.pop("PYTHONPATH").split(os.pathsep)
    else:
        # Servers that load side by side see each other's weights come and go on the GPUs.
        env = {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "false"}
        path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    env["PYTHONHASHSEED"] = "0"  # one cause less why two servers differ
    ours = [str(ROOT), str(ROOT / "patch")]
    env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*filter(None, path), *ours]))
    return env


def make_server(
    s: Settings,
    mode: str,
    number: int,
    work: Path,
    *,
    lake: str,
    staging: Path,
    spec: LakeSpec,
    saved: Path,
) -> ServerProcess:
    """Server `number` of `mode`, not started. `lake`, `staging`: of the hslake ones; `saved`: where
    the torch_save one writes to."""
    order = (NONE, TORCH_SAVE, HTTP, HSLAKE)
    place = order.index(mode) + number * len(order)
    port = s.port + _PORTS_EACH * place + os.getpid() % 400
    log, args, env = work / f"server-{mode}-{number}.log", common_args(s), common_env(s)
    if mode == HSLAKE:
        return ServerProcess.for_lake(
            lake,
            staging,
            args,
            log=log,
            python=s.sglang_python,
            env=env,
            part_tokens=s.part_tokens,
            max_parts=staging_parts(s, spec),
            port=port,
        )
    argv = [str(s.sglang_python), "-m", "sglang.launch_server", *args]
    argv += ["--host", "127.0.0.1", "--port", str(port)]
    whole = {k: v for k, v in os.environ.items() if not k.startswith("HSLAKE_")} | env
    if mode == HTTP:
        argv.append("--enable-return-hidden-states")
    if mode == TORCH_SAVE:
        saved.mkdir(parents=True, exist_ok=True)
        whole["PYTHONPATH"] += os.pathsep + str(_plugin_folder(work))
        whole |= {"SGLANG_PLUGINS": PLUGIN, "BENCH_SAVE_TO": str(saved)}
        whole["BENCH_SPEC"] = spec_env(spec)
    return ServerProcess(argv, whole, log, port)


def staging_parts(s: Settings, spec: LakeSpec) -> int:
    """Parts of each writer within the byte quota, which all of them share."""
    return max(2, s.staging_bytes // (s.part_tokens * (spec.bytes_per_token + 4)) // s.dp)


def group_of(server: ServerProcess) -> int:
    """Process group of a started server, which is also its launcher's process id."""
    process = server._process
    assert process is not None
    return process.pid


def processes_of(server: ServerProcess) -> list[Path]:
    """/proc/PID of everything that a started server runs."""
    return list(_members(group_of(server)))


def _plugin_folder(work: Path) -> Path:
    """A folder for PYTHONPATH whose one distribution announces the torch_save plugin to SGLang."""
    folder = work / "plugin"
    info = folder / "hslake_bench-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hslake-bench\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        f"[sglang.srt.plugins]\n{PLUGIN} = benchmarks.hook.torch_save_plugin:register\n"
    )
    return folder


class Leftovers:
    """Remembers what this call started and made, in a file, so that a later call can end and
    remove what a killed one left: its servers run in sessions of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.groups, self.folders = folder, list[int](), list[str]()
        folder.mkdir(parents=True, exist_ok=True)
        for file in folder.glob("leftovers-*.json"):
            if not Path(f"/proc/{file.stem.rpartition('-')[2]}").exists():
                _clear(file)
        self.file = folder / f"leftovers-{os.getpid()}.json"

    def add(self, *, group: int | None = None, folder: Path | None = None) -> None:
        """Remember one more."""
        self.groups += [group] if group else []
        self.folders += [str(folder)] if folder else []
        self.file.write_text(json.dumps({"groups": self.groups, "folders": self.folders}))

    def clear(self) -> None:
        """End and remove everything that was remembered."""
        _clear(self.file)


def _clear(file: Path) -> None:
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return
    for group in found["groups"]:
        if any(b"sglang" in _cmdline(member) for member in _members(group)):
            print(f"ending server {group}", file=sys.stderr)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
    for folder in found["folders"]:
        shutil.rmtree(folder, ignore_errors=True)
    file.unlink(missing_ok=True)


def _cmdline(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""
