"""SGLang's settings that break capture: how each is called, why, and what to do instead.

Also those that make the server compute another model than the folder it was given, whose
fingerprint is the lake's. Choices of kernels, and of how exactly they compute, are not among them:
they move the rounding of one and the same model.
"""

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

# Facts that make some settings harmless (hslake_sglang.served.facts).
NO_WEIGHTS = "the lake was made for a config without weights"
DECLARED = "the model's own files say that it is quantised, or nobody knows"
# Before a value of --quantization which says no more than what the model's files declare. Facts
# with it are all that is accepted of a model that is known to be quantised.
DECLARES = "the model's own files declare --quantization "

_OFF: tuple[Any, ...] = (None, False, 0, 1, "", "null", "none", (), [])


@dataclass(frozen=True)
class Refusal:
    """One setting. `attribute` is its name in SGLang's ServerArgs, `options` its spellings on the
    command line over all versions, `breaks` decides from a value: of a running server, or a
    string ("" for an option without value). `below`: only older versions break. `unless`: a fact
    about lake or model under which it does not.
    """

    attribute: str
    options: tuple[str, ...]
    reason: str
    breaks: Callable[[Any], bool]
    below: tuple[int, int, int] | None = None
    unless: str | None = None


def _more_than_one(value: Any) -> bool:
    try:
        return int(value) > 1
    except (TypeError, ValueError):
        return False


def _set(value: Any) -> bool:
    return not any(value is off or value == off for off in _OFF)


def _text(value: Any) -> str:
    """A value as it is written on the command line; it may be an enumeration's."""
    return str(getattr(value, "value", value)).lower()


def _is(*texts: str) -> Callable[[Any], bool]:
    """Whether a value is one of `texts`."""
    return lambda value: _text(value) in texts


def _on(value: Any) -> bool:
    return value is True or (isinstance(value, str) and value.lower() not in ("false", "0", "no"))


def _other_than(*texts: str) -> Callable[[Any], bool]:
    """Whether a value is given and is none of `texts`."""
    return lambda value: _set(value) and _text(value) not in texts


def _some_json(value: Any) -> bool:
    try:
        return bool(json.loads(str(value))) if _set(value) else False
    except ValueError:
        return False  # SGLang says what it thinks of it


def _option(attribute: str) -> str:
    return "--" + attribute.replace("_", "-")


def _switch(attribute: str, reason: str, *more: str, **rest: Any) -> Refusal:
    return Refusal(attribute, (_option(attribute), *more), reason, _on, **rest)


def _number(attribute: str, reason: str, *more: str) -> Refusal:
    return Refusal(attribute, (_option(attribute), *more), reason, _more_than_one)


def _value(attribute: str, reason: str, *more: str) -> Refusal:
    return Refusal(attribute, (_option(attribute), *more), reason, _set)


def _but(attribute: str, harmless: tuple[str, ...], reason: str, **rest: Any) -> Refusal:
    """Refused with any value that is not among `harmless`."""
    return Refusal(attribute, (_option(attribute),), reason, _other_than(*harmless), **rest)


_PREFILL_CP = "context-parallel prefill shards the rows over ranks; remove it"
_ADAPTER = "an adapter changes the states under the same model fingerprint; remove it"
_RETURN = (
    "the hook's capture changes what it returns (boundaries instead of final), and it copies every "
    "state through HTTP; remove it"
)
_GRAPH = "a prefill CUDA graph hides the batch's request ids from the hook; remove it"
_FRONT = "/hslake/status and /hslake/metrics need SGLang's own HTTP server; remove it"

_NOT_ITS = "the weights are not those of the model's folder, whose fingerprint is the lake's; "
_QUANTISED = (
    "the server would compute another model than the folder's, whose fingerprint is the lake's; "
    "remove it, or save the quantised model in a folder and make a lake for that"
)
_ANEW = "it quantises the model anew, so the server would compute another one; leave it out"
_UNLIKE = (
    "it is not what the model's own files declare, so the server could compute another model than "
    "the folder's; leave it out: SGLang reads what they declare"
)
# Methods that requantise a checkpoint, whatever it declares.
_ONLINE = ("quark_mxfp4", "nvfp4_online", "minimax_m3_nvfp4")
_CONFIG = (
    "the server would compute another model than config.json describes, whose fingerprint is the "
    "lake's; write it into the config.json of a folder of its own and make a lake for that"
)
# They read the safetensors files of the folder as they are.
_ITS_FILES = (
    *("auto", "safetensors", "instanttensor", "fastsafetensors", "runai_streamer"),
    *("sharded_state", "layered", "mistral"),
)

_OTHER_MODEL: tuple[Refusal, ...] = (
    _but(
        "load_format",
        _ITS_FILES,
        _NOT_ITS + "use auto (dummy is for a lake that was made from a config.json alone)",
        unless=NO_WEIGHTS,
    ),
    _but("weight_cache_mode", ("off",), _NOT_ITS + "use off"),
    _switch("checkpoint_engine_wait_weights_before_ready", _NOT_ITS + "remove it"),
    _switch("enable_memory_saver", "weights may leave the GPU and not come back; remove it"),
    _value("kt_weight_path", _NOT_ITS + "remove it"),
    _value("modelopt_checkpoint_restore_path", _NOT_ITS + "remove it"),
    Refusal(
        "quantization", ("--quantization",), _QUANTISED, _other_than("unquant"), unless=DECLARED
    ),
    Refusal("quantization", ("--quantization",), _ANEW, _is(*_ONLINE)),
    _value("modelopt_quant", _QUANTISED),
    _switch("quantize_and_serve", _QUANTISED),
    _value("torchao_config", _QUANTISED),
    _value("rl_quant_profile", _QUANTISED),
    Refusal("json_model_override_args", ("--json-model-override-args",), _CONFIG, _some_json),
    _value("decrypted_config_file", _CONFIG),
    _but("model_config_parser", ("auto", "hf", "mistral"), _CONFIG),
    _value("forward_hooks", "they may change the states on their way; remove it"),
    _switch("debug_tensor_dump_inject", "it replaces the states on their way; remove it"),
)

REFUSALS: tuple[Refusal, ...] = (
    _number(
        "pp_size",
        "with pipeline parallelism a stage sees only its own layers; use --tp-size or --dp-size",
        "--pipeline-parallel-size",
    ),
    _number(
        "attn_cp_size",
        "context-parallel prefill leaves each rank with a part of the rows; remove it",
        "--attention-context-parallel-size",
    ),
    _number(
        "dcp_size",
        "context parallelism is not known to leave whole rows to capture; remove it",
        "--decode-context-parallel-size",
    ),
    _switch("enable_prefill_cp", _PREFILL_CP),
    # The same up to 0.5.13, and as deprecated spellings up to 0.5.21.
    _switch("enable_prefill_context_parallel", _PREFILL_CP),
    _switch("enable_nsa_prefill_context_parallel", _PREFILL_CP),
    _switch("enable_dsa_prefill_context_parallel", _PREFILL_CP),
    _value(
        "speculative_algorithm",
        "speculative decoding owns the auxiliary capture and adds verify rows; remove it",
    ),
    _value("decoupled_spec_role", "it is one half of speculative decoding; remove it"),
    _value(
        "dllm_algorithm",
        "diffusion decoding rewrites positions, so a row is not one prompt token; remove it",
    ),
    Refusal(
        "disaggregation_mode",
        ("--disaggregation-mode",),
        "a decode-side PD server never computes the prompt's states; capture on the prefill side",
        _is("decode"),
    ),
    _number(
        "tokenizer_worker_num",
        "several HTTP workers would not all carry /hslake/status; use 1",
    ),
    _value("lora_paths", _ADAPTER),
    _value("uno_lora_path", _ADAPTER),
    _switch("enable_lora", _ADAPTER),
    _switch("enable_two_batch_overlap", "two-batch overlap does not run the capture; remove it"),
    _switch("enable_layernorm_sp", "layernorm-SP shards the states over ranks; remove it"),
    _switch("enable_megamoe_for_layernorm_sp", "layernorm-SP shards the states; remove it"),
    _switch("enable_return_hidden_states", _RETURN),
    _value("return_hidden_states_mode", _RETURN),
    _switch("enable_return_aux_hidden_states", "it sets the same capture; remove it"),
    _switch("enforce_piecewise_cuda_graph", _GRAPH),
    _switch("enable_pdmux", "split prefill does not run the capture; remove it"),
    _switch("enable_dynamic_chunking", "the lake records one chunk size a server; remove it"),
    _switch("is_embedding", "an embedding server never calls the logits processor; remove it"),
    _switch("encoder_only", "an encoder server has no language model; remove it"),
    _switch("smg_grpc_mode", _FRONT),
    _switch("grpc_mode", _FRONT),
    _switch("use_ray", _FRONT),
    # Served by processes of its own until then, in the same process since.
    _switch("enable_http2", _FRONT, below=(0, 5, 14)),
    _switch(
        "enable_hierarchical_cache",
        "prefixes restored from a cache are not computed, so not captured; remove it",
        "--enable-hicache",
    ),
    Refusal(
        "ep_dispatch_algorithm",
        ("--ep-dispatch-algorithm",),
        "tokens go to experts at random, not to those that the router chose; use static or dynamic",
        _is("fake"),
    ),
    *_OTHER_MODEL,
)


def refusals(version: tuple[int, int, int], facts: Collection[str] = ()) -> list[Refusal]:
    """Those that hold for this SGLang version, given `facts` (NO_WEIGHTS, DECLARED, and DECLARES
    before each value that is accepted)."""
    rules = [
        rule
        for rule in REFUSALS
        if (rule.below is None or version < rule.below) and rule.unless not in facts
    ]
    same = [fact.removeprefix(DECLARES) for fact in facts if fact.startswith(DECLARES)]
    if same:
        unlike = _other_than("unquant", *same)
        reason = f"{_UNLIKE} ({', '.join(sorted(same))})"
        rules.append(Refusal("quantization", ("--quantization",), reason, unlike))
    return rules
