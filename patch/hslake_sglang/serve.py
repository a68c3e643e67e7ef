"""`hslake serve`: SGLang with the capture, checked before any weight is loaded."""

import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hslake.errors import HslakeError, InvalidInput, Missing
from hslake.fingerprint import check_model, read_config
from hslake.modelinfo import read_model
from hslake.spec import LakeSpec, ModelInfo, model_fingerprint, read_spec
from hslake.staging.check import check_apart, check_roots
from hslake_sglang import flags, hub, memory, room, settings, source
from hslake_sglang.interpreter import Found, ask
from hslake_sglang.served import context_length, facts

_SGLANG_PORT = 30_000  # its default
_GIB = 2**30


@dataclass(frozen=True)
class Command:
    """A server ready to start: the full argument vector, its whole environment, and what the
    person who starts it should know."""

    argv: list[str]
    env: dict[str, str]
    spec: LakeSpec
    notes: tuple[str, ...] = ()


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
    for name, value in (("--part-tokens", part_tokens), ("--max-parts", max_parts)):
        if value is not None and value < 1:
            raise InvalidInput(f"{name} {value}: expected a positive whole number")
    spec = read_spec(lake_url)
    folder = settings.check_staging(staging)
    check_apart(lake_url, folder)
    check_roots([folder], spec)
    interpreter = str(python or sys.executable)
    full = {**os.environ, **(env or {})}
    found = _sglang(interpreter, full, flags.option_value(sglang_args, ["--config"]))
    known = source.options(found.root) if found.root else {}
    given = flags.spelled_out([*flags.config_args(found.config or {}), *sglang_args], known)
    model = _model(given, full)
    revision = flags.option_value(given, ["--revision"])
    local = hub.ask_folder(interpreter, full, model, revision) if model else None
    if model and local and hub.is_id(model) and not _is_whole(spec, local):
        local = None  # the download may bring other files
    args = flags.prepare(
        sglang_args,
        version=found.version,
        dtype=spec.dtype,
        known=known,
        config=found.config,
        facts=facts(spec, local),
    )
    every = [*flags.config_args(found.config or {}), *args]
    foreign = found.others or bool(full.get("SGLANG_EXTERNAL_MODEL_PACKAGE"))
    notes = _check_named(spec, every, found, model, local, foreign=foreign) if model else []
    _check_port(every)
    if part_tokens is None:
        part_tokens = settings.count(full, settings.PART_TOKENS)
    if max_parts is None:
        max_parts = settings.count(full, settings.MAX_PARTS)
    tokens, parts, told = room.plan_staging(
        lake_url, folder, spec, every, part_tokens, max_parts, context_length(local)
    )
    notes += told
    # Settled here: a worker would count what others have taken meanwhile.
    full[settings.PART_TOKENS], full[settings.MAX_PARTS] = str(tokens), str(parts)
    args, more = _leave_memory(spec, args, every, full)
    full[settings.STAGING] = str(folder.resolve())
    full[settings.LAKE] = lake_url
    full[settings.SPEC] = settings.spec_env(spec)
    full.pop(settings.RUN, None)
    allowed = full.get("SGLANG_PLUGINS", "")
    if allowed and "hslake" not in allowed.split(","):
        full["SGLANG_PLUGINS"] = allowed + ",hslake"
    argv = [interpreter, "-m", "sglang.launch_server", *args]
    return Command(argv, full, spec, (*notes, *more))


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
    for note in command.notes:
        print(f"hslake: {note}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command.argv[0], command.argv, command.env)


def _sglang(python: str, env: Mapping[str, str], config: str | None) -> Found:
    found = ask(python, env, config)
    if not found.version:
        raise Missing(
            f"no SGLang in {python}: install one there, or name another interpreter with --python"
        )
    if not found.hook:
        raise Missing(
            f"hslake is not installed in {python}, so SGLang {found.version} would start "
            f"without the hook: run `{python} -m pip install hslake`"
        )
    return found


def _leave_memory(
    spec: LakeSpec, args: list[str], every: Sequence[str], env: dict[str, str]
) -> tuple[list[str], list[str]]:
    """(arguments with less memory for SGLang, what to tell about it); marks `env` when done."""
    env.pop(settings.GPU_MEMORY_TAKEN, None)
    device = flags.option_value(every, ["--device"])
    total = memory.smallest_gpu(env) if device in (None, "cuda") else None
    if total is None:
        return args, []
    chunk = flags.chunk_tokens(every)
    need = memory.capture_bytes(spec, chunk)
    told = [
        f"GPU memory: the capture takes {need / _GIB:.2f} GiB on each GPU that writes "
        f"(forwards of {chunk:,} tokens)"
    ]
    given = flags.option_value(every, [flags.MEMORY])
    if given is None:
        return args, [*told, "GPU memory: held back from SGLang's own choice when the model loads"]
    try:
        fraction = float(given)
    except ValueError:
        return args, told  # SGLang says what it thinks of it
    less = memory.lowered(fraction, need, total)
    env[settings.GPU_MEMORY_TAKEN] = "1"
    told.append(f"GPU memory: {flags.MEMORY} lowered from {given} to {less}")
    return [*args, flags.MEMORY, str(less)], told


def _check_port(args: Sequence[str]) -> None:
    """SGLang finds a busy port only after the weights are loaded."""
    host = flags.option_value(args, ["--host"]) or "127.0.0.1"
    port = flags.option_value(args, ["--port"]) or str(_SGLANG_PORT)
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 65_536:
        raise InvalidInput(f"--port {port}: expected a number from 1 to 65535")
    try:
        # The first address, as SGLang's HTTP server takes it; `::` is one of IPv6.
        found = socket.getaddrinfo(
            host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        with socket.create_server(found[0][4], family=found[0][0]):
            pass
    except OSError as error:
        raise InvalidInput(
            f"--host {host} --port {port} cannot be listened on ({error}): name another --port"
        ) from None


def _model(args: Sequence[str], env: Mapping[str, str]) -> str | None:
    """The model's folder or id. Raises Missing without the folder, InvalidInput for an id that
    leads to no folder."""
    model = flags.option_value(args, flags.MODEL)
    if model and model.startswith(("/", ".")) and not Path(model).exists():
        raise Missing(f"--model-path {model}: there is no such folder")
    problem = model and hub.problem(model, flags.option_value(args, ["--download-dir"]), env)
    if problem:
        raise InvalidInput(problem)
    return model


def _check_named(
    spec: LakeSpec,
    args: Sequence[str],
    found: Found,
    model: str,
    local: Path | None,
    *,
    foreign: bool,
) -> list[str]:
    """What the files of `model` in folder `local` say; the worker always looks at the model.

    Returns what to tell about it. Raises InvalidInput or Missing.
    """
    if not hub.is_id(model):
        return _check_model(spec, args, found, Path(model), foreign=foreign)
    if local is None:
        return [
            f"model: {model} is not, or not wholly, in the local Hugging Face cache: the worker "
            "checks that it is the lake's after the download"
        ]
    try:
        return _check_model(spec, args, found, local, foreign=foreign)
    except InvalidInput as error:
        raise InvalidInput(
            f"{model} in the local Hugging Face cache: {error} (another state of it: --revision)"
        ) from None


def _is_whole(spec: LakeSpec, snapshot: Path) -> bool:
    return hub.is_whole(snapshot, weights=spec.model.fingerprint.get("weights") is not None)


def _check_model(
    spec: LakeSpec, args: Sequence[str], found: Found, model: Path, *, foreign: bool
) -> list[str]:
    if not (model / "config.json").is_file():
        return []  # a format that has its own description
    path = model / "config.json"
    named = [str(name) for name in read_config(path).get("architectures") or []]
    if flags.option_value(args, ["--model-impl"]) == "transformers":
        named = [source.FALLBACK]
    if found.root:
        problem = source.capture_problem(found.root, named, found.version, foreign=foreign)
        if problem:
            raise InvalidInput(f"{model}: {problem}")
    try:
        info, dtype = read_model(path, None)
    except HslakeError:  # a config that only SGLang understands
        check_model(spec.model.fingerprint, model_fingerprint(model), f"the model {model}")
        return []
    _check_size(spec, path, info)
    check_model(spec.model.fingerprint, info.fingerprint, f"the model {model}")
    if dtype in (None, spec.dtype):
        return []
    return [f"dtype: the model's config names {dtype}; served and stored as {spec.dtype}"]


def _check_size(spec: LakeSpec, path: Path, info: ModelInfo) -> None:
    for what, mine, its in (
        ("layers", spec.num_layers, info.num_layers),
        ("hidden size", spec.hidden_size, info.hidden_size),
    ):
        if mine != its:
            raise InvalidInput(
                f"{path}: the model has {what} {its}, the lake was made for {mine}: serve the "
                "lake's model, or make another lake for this one"
            )
