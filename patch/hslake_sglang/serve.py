"""`hslake serve`: SGLang with the capture, checked before any weight is loaded."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hslake.errors import InvalidInput, Missing
from hslake.spec import LakeSpec, check_fingerprint, model_fingerprint, read_spec
from hslake.staging.check import check_roots
from hslake_sglang import flags, settings

_SGLANG_PORT = 30_000  # its default
_ASK = (
    "import importlib.metadata as m, json\n"
    "def v():\n"
    "    try: return m.version('sglang')\n"
    "    except m.PackageNotFoundError: return ''\n"
    "hooks = [e.name for e in m.entry_points(group='sglang.srt.plugins')]\n"
    "print(json.dumps({'version': v(), 'hook': 'hslake' in hooks}))\n"
)


@dataclass(frozen=True)
class Command:
    """A server ready to start: the full argument vector and its whole environment."""

    argv: list[str]
    env: dict[str, str]
    spec: LakeSpec


def prepare(
    lake_url: str,
    staging: str | Path,
    sglang_args: Sequence[str],
    *,
    part_tokens: int | None = None,
    max_parts: int | None = None,
    python: str | Path | None = None,
    env: Mapping[str, str] | None = None,
) -> Command:
    """Check everything that can be checked without loading the model, and build the command.

    `part_tokens` and `max_parts` cap each writer's staging (defaults: settings.staging_size).
    `python` is the interpreter that has SGLang (default: this one), `env` what is added to this
    process's environment, for example PYTHONPATH. Raises InvalidInput, Missing or NoSpace.
    """
    spec = read_spec(lake_url)
    folder = settings.check_staging(staging)
    check_roots([folder], spec)
    interpreter = str(python or sys.executable)
    full = {**os.environ, **(env or {})}
    version = _sglang_version(interpreter, full)
    args = flags.prepare(sglang_args, version=version, dtype=spec.dtype)
    _check_model(spec, args)
    _check_port(args)
    for name, value in ((settings.PART_TOKENS, part_tokens), (settings.MAX_PARTS, max_parts)):
        if value is not None:
            full[name] = str(value)
    writers = max(int(flags.option_value(args, n) or 1) for n in _DP_OPTIONS.values())
    settings.staging_size(
        folder,
        spec,
        _number(full, settings.PART_TOKENS),
        _number(full, settings.MAX_PARTS),
        writers=writers,
    )
    full[settings.STAGING] = str(folder.resolve())
    full[settings.LAKE] = lake_url
    full[settings.SPEC] = settings.spec_env(spec)
    full.pop(settings.RUN, None)
    allowed = full.get("SGLANG_PLUGINS", "")
    if allowed and "hslake" not in allowed.split(","):
        full["SGLANG_PLUGINS"] = allowed + ",hslake"
    return Command([interpreter, "-m", "sglang.launch_server", *args], full, spec)


def serve(
    lake_url: str,
    staging: str | Path,
    sglang_args: Sequence[str],
    *,
    part_tokens: int | None = None,
    max_parts: int | None = None,
    python: str | Path | None = None,
    env: Mapping[str, str] | None = None,
) -> None:
    """Replace this process by SGLang's server with the hook (see `prepare` for the arguments)."""
    command = prepare(
        lake_url,
        staging,
        sglang_args,
        part_tokens=part_tokens,
        max_parts=max_parts,
        python=python,
        env=env,
    )
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command.argv[0], command.argv, command.env)


def _number(env: Mapping[str, str], name: str) -> int | None:
    text = env.get(name, "")
    if text and not text.isdigit():
        raise InvalidInput(f"{name}={text!r}: expected a positive whole number")
    return int(text) if text else None


_DP_OPTIONS = {
    "dp_size": ("--dp-size", "--data-parallel-size"),
    "attn_dp_size": ("--attn-dp-size", "--attention-data-parallel-size"),
}


def _sglang_version(python: str, env: Mapping[str, str]) -> str:
    try:
        out = subprocess.run(
            [python, "-c", _ASK], env=dict(env), capture_output=True, text=True, timeout=120
        )
    except OSError as error:
        raise Missing(f"cannot run the interpreter {python!r}: {error}") from error
    try:
        found = json.loads(out.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        raise InvalidInput(
            f"{python} could not say which SGLang it has: {out.stderr.strip()[-500:]}"
        ) from None
    if not found["version"]:
        raise Missing(
            f"no SGLang in {python}: install one there, or name another interpreter with --python"
        )
    if not found["hook"]:
        raise Missing(
            f"hslake is not installed in {python}, so SGLang {found['version']} would start "
            f"without the hook: run `{python} -m pip install hslake`"
        )
    return str(found["version"])


def _check_port(args: Sequence[str]) -> None:
    """SGLang finds a busy port only after the weights are loaded."""
    host = flags.option_value(args, ["--host"]) or "127.0.0.1"
    port = flags.option_value(args, ["--port"]) or str(_SGLANG_PORT)
    if not port.isdigit():
        return  # SGLang says what it thinks of it
    try:
        with socket.create_server((host, int(port))):
            pass
    except (OSError, OverflowError) as error:
        raise InvalidInput(
            f"--host {host} --port {port} cannot be listened on ({error}): name another --port"
        ) from None


def _check_model(spec: LakeSpec, args: Sequence[str]) -> None:
    """Compare fingerprints early when the model is a local folder; the worker always does."""
    model = flags.option_value(args, ["--model-path", "--model"])
    if model and model.startswith(("/", ".")) and not Path(model).exists():
        raise Missing(f"--model-path {model}: there is no such folder")
    if model and Path(model).is_dir():
        check_fingerprint(spec.model.fingerprint, model_fingerprint(model), f"the model {model}")
