"""What `hslake serve` adds to SGLang's arguments and what it refuses, with the reason and the fix.

Two views of one rule: `prepare` reads the argument list before SGLang starts, `check_running` reads
the server's effective settings inside the worker, which also sees `--config` files and defaults.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hslake.errors import InvalidInput
from hslake_sglang import versions

DEFAULT_CHUNK = 8192
_OFF: tuple[Any, ...] = (None, False, 0, 1, "", "null", "none", (), [])


@dataclass(frozen=True)
class Refusal:
    """One SGLang setting that breaks capture."""

    attribute: str
    options: tuple[str, ...]
    reason: str
    breaks: Callable[[Any], bool]
    takes_value: bool = True


def _more_than_one(value: Any) -> bool:
    try:
        return int(value) > 1
    except (TypeError, ValueError):
        return False


def _set(value: Any) -> bool:
    return not any(value is off or value == off for off in _OFF)


def _is(text: str) -> Callable[[Any], bool]:
    return lambda value: str(value).lower() == text


def _true(value: Any) -> bool:
    return value is True


def _switch(attribute: str, reason: str, *more: str) -> Refusal:
    return Refusal(attribute, (_option(attribute), *more), reason, _true, takes_value=False)


def _option(attribute: str) -> str:
    return "--" + attribute.replace("_", "-")


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "pp_size",
        ("--pp-size", "--pipeline-parallel-size"),
        "with pipeline parallelism a stage sees only its own layers; use --tp-size or --dp-size",
        _more_than_one,
    ),
    Refusal(
        "attn_cp_size",
        ("--attn-cp-size", "--attention-context-parallel-size"),
        "context-parallel prefill leaves each rank with a part of the rows; remove it",
        _more_than_one,
    ),
    Refusal(
        "dcp_size",
        ("--dcp-size", "--decode-context-parallel-size"),
        "context parallelism is not known to leave whole rows to capture; remove it",
        _more_than_one,
    ),
    Refusal(
        "speculative_algorithm",
        ("--speculative-algorithm",),
        "speculative decoding owns the auxiliary capture and adds verify rows; remove it",
        _set,
    ),
    Refusal(
        "dllm_algorithm",
        ("--dllm-algorithm",),
        "diffusion decoding rewrites positions, so a row is not one prompt token; remove it",
        _set,
    ),
    Refusal(
        "disaggregation_mode",
        ("--disaggregation-mode",),
        "a decode-side PD server never computes the prompt's states; capture on the prefill side",
        _is("decode"),
    ),
    Refusal(
        "tokenizer_worker_num",
        ("--tokenizer-worker-num",),
        "several HTTP workers would not all carry /hslake/status; use 1",
        _more_than_one,
    ),
    Refusal(
        "lora_paths",
        ("--lora-paths",),
        "an adapter changes the states without changing the model's fingerprint; remove it",
        _set,
    ),
    _switch("enable_lora", "an adapter changes the states under the same fingerprint; remove it"),
    _switch("enable_two_batch_overlap", "two-batch overlap does not run the capture; remove it"),
    _switch("enable_layernorm_sp", "layernorm-SP shards the states over ranks; remove it"),
    _switch("enable_megamoe_for_layernorm_sp", "layernorm-SP shards the states; remove it"),
    _switch("enable_prefill_cp", "context-parallel prefill shards the rows; remove it"),
    _switch(
        "enable_return_hidden_states",
        "the hook's capture changes what it returns (boundaries instead of final); remove it",
    ),
    _switch("enable_return_aux_hidden_states", "it sets the same capture; remove it"),
    _switch("enable_pdmux", "split prefill does not run the capture; remove it"),
    _switch("enable_dynamic_chunking", "the lake records one chunk size a server; remove it"),
    _switch("is_embedding", "an embedding server never calls the logits processor; remove it"),
    _switch("encoder_only", "an encoder server has no language model; remove it"),
    _switch("smg_grpc_mode", "/hslake/status needs SGLang's HTTP server; remove it"),
    _switch("grpc_mode", "/hslake/status needs SGLang's HTTP server; remove it"),
    _switch("use_ray", "Ray's HTTP server does not carry /hslake/status; remove it"),
    _switch(
        "enable_hierarchical_cache",
        "prefixes restored from a cache are not computed, so not captured; remove it",
        "--enable-hicache",
    ),
)


def option_value(args: Sequence[str], names: Sequence[str]) -> str | None:
    """The last value given for any of `names` (`--x v` or `--x=v`); "" for a bare switch."""
    found: str | None = None
    for i, arg in enumerate(args):
        name, equals, value = arg.partition("=")
        if name not in names:
            continue
        if equals:
            found = value
        else:
            following = args[i + 1] if i + 1 < len(args) else ""
            found = "" if following.startswith("--") else following
    return found


def prepare(args: Sequence[str], *, version: str, dtype: str) -> list[str]:
    """SGLang's arguments with what capture needs for SGLang `version` and a lake of `dtype`.

    Raises InvalidInput on an unsupported version and on arguments that break capture; all problems
    are listed in one message.
    """
    wrong = [p for p in [versions.problem(version)] if p]
    if wrong:
        raise InvalidInput(wrong[0])
    if option_value(args, ["--model-path", "--model"]) is None and not _has(args, "--config"):
        wrong.append("--model-path is missing: name the model's folder after `--`")
    for rule in REFUSALS:
        value = option_value(args, rule.options)
        if value is not None and (not rule.takes_value or rule.breaks(value)):
            wrong.append(f"{rule.options[0]}: {rule.reason}")
    wrong += _refused_graphs(args)
    more, trouble = _dtype(args, dtype)
    wrong += trouble
    chunk, trouble = _chunk(args)
    wrong += trouble
    if wrong:
        raise InvalidInput("SGLang's arguments break capture:\n  " + "\n  ".join(wrong))
    more += chunk
    if not _has(args, "--disable-radix-cache"):
        more.append("--disable-radix-cache")
    graphs = versions.no_prefill_graph_flags(version)
    if not _has(args, graphs[0]) and not _has(args, "--disable-prefill-cuda-graph"):
        more += graphs
    return [*args, *more]


def _has(args: Sequence[str], name: str) -> bool:
    return option_value(args, [name]) is not None


def _refused_graphs(args: Sequence[str]) -> list[str]:
    reason = "a prefill CUDA graph hides the batch's request ids from the hook"
    wrong = []
    backend = option_value(args, ["--cuda-graph-backend-prefill"])
    if backend not in (None, "disabled"):
        wrong.append(f"--cuda-graph-backend-prefill {backend}: {reason}; use `disabled`")
    config = option_value(args, ["--cuda-graph-config"])
    if config:
        try:
            prefill = json.loads(config).get("prefill", {})
        except (ValueError, AttributeError):
            return [*wrong, f"--cuda-graph-config: {config!r} is not a JSON object"]
        if isinstance(prefill, dict) and prefill.get("backend", "disabled") != "disabled":
            wrong.append(f"--cuda-graph-config prefill: {reason}; set its backend to `disabled`")
    return wrong


def _dtype(args: Sequence[str], lake: str) -> tuple[list[str], list[str]]:
    names = {"half": "float16", "float": "float32"}
    given = option_value(args, ["--dtype"])
    if given in (None, "auto"):
        return ["--dtype", lake], []
    assert given is not None
    if names.get(given, given) != lake:
        return [], [f"--dtype {given}: the lake stores {lake}, never cast; use --dtype {lake}"]
    return [], []


def _chunk(args: Sequence[str]) -> tuple[list[str], list[str]]:
    given = option_value(args, ["--chunked-prefill-size"])
    if given is None:
        return ["--chunked-prefill-size", str(DEFAULT_CHUNK)], []
    try:
        fine = int(given) > 0
    except ValueError:
        fine = False
    if fine:
        return [], []
    return [], [f"--chunked-prefill-size {given}: expected a fixed positive number, such as 8192"]


def check_running(settings: Any, version: str) -> list[str]:
    """Problems of a running server's effective settings (any object with SGLang's attribute names).

    Catches what a `--config` file or a bare `sglang serve` brings past `prepare`.
    """
    wrong = [p for p in [versions.problem(version)] if p]
    wrong += [
        f"{rule.options[0]}: {rule.reason}"
        for rule in REFUSALS
        if rule.breaks(getattr(settings, rule.attribute, None))
    ]
    if getattr(settings, "disable_radix_cache", True) is False:
        wrong.append("--disable-radix-cache is missing: cached rows are not computed, so not seen")
    return wrong
