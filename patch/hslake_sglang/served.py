"""The model that a server is given, against the lake's: what its files say before it is loaded."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hslake.errors import HslakeError
from hslake.fingerprint import read_config
from hslake.spec import LakeSpec
from hslake_sglang.refusals import DECLARED, DECLARES, NO_WEIGHTS

_QUANTISED = ("quantization_config", "compression_config")
# Files beside config.json that declare a quantisation, and the methods that read them: those that
# they may mean where they name none.
_FILES = {
    "hf_quant_config.json": ("modelopt",),
    "quantize_config.json": ("gptq", "awq"),
    "quant_config.json": ("awq",),
    "quantization_config.json": ("auto-round",),
    "quant_model_description.json": ("modelslim",),
}
# SGLang's own other names of a method: the same weights, for another kernel.
_ALIASES = {
    "gptq": ("gptq_marlin", "marlin", "moe_wna16"),
    "awq": ("awq_marlin", "moe_wna16"),
    "compressed-tensors": ("compressed_tensors",),
    "compressed_tensors": ("compressed-tensors",),
}
_MODELOPT = "modelopt"
_ALGORITHMS = {"FP8": "modelopt_fp8", "MXFP8": "mxfp8"}
_MIXED = ("modelopt_mixed", "w4afp8")

# In SGLang's order: the first that a config has counts.
_LENGTHS = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length")
_TEXT = ("thinker_config", "llm_config", "language_config", "text_config")


def facts(spec: LakeSpec, model: Path | None) -> frozenset[str]:
    """What makes some settings harmless for this lake and the model in folder `model`."""
    found = set()
    if spec.model.fingerprint.get("weights") is None:
        found.add(NO_WEIGHTS)
    declared = declared_quantisation(model)
    if declared is None or declared:
        found.add(DECLARED)
    return frozenset({*found, *(DECLARES + name for name in declared or ())})


def declared_quantisation(model: Path | None) -> frozenset[str] | None:
    """The values of --quantization that say what the files in folder `model` declare; empty when
    they declare none, None when there is no readable folder."""
    try:
        config = read_config(model / "config.json") if model else None
    except HslakeError:
        return None
    if config is None or model is None:
        return None
    names: set[str] = set()
    for level in (config, *(v for v in config.values() if isinstance(v, dict))):
        for key in _QUANTISED:
            if level.get(key):
                names.update(_methods(level[key], ""))
    for name, methods in _FILES.items():
        if (model / name).is_file():
            try:
                content: Any = read_config(model / name)
            except HslakeError:
                content = {}
            for method in methods:
                names.update(_methods(content, method))
    return frozenset(names)


def _methods(content: Any, otherwise: str) -> Iterator[str]:
    """All names of the quantisation that `content` declares; `otherwise` when it names none."""
    declared = content if isinstance(content, dict) else {}
    inner = declared.get("quantization")
    algorithm = str((inner if isinstance(inner, dict) else declared).get("quant_algo") or "")
    method = str(declared.get("quant_method") or otherwise).lower()
    if not method:
        method = _MODELOPT if algorithm else "(unnamed)"
    yield method
    yield from _ALIASES.get(method, ())
    if method.startswith(_MODELOPT):
        yield from _of_modelopt(algorithm.upper())


def _of_modelopt(algorithm: str) -> Iterator[str]:
    yield _MODELOPT
    if algorithm == "MIXED_PRECISION":
        yield from _MIXED
    elif "FP4" in algorithm:
        yield "modelopt_fp4"
    elif algorithm in _ALGORITHMS:
        yield _ALGORITHMS[algorithm]


def context_length(model: Path | None) -> int | None:
    """The context in tokens that SGLang derives from the config of the model in folder `model`;
    None when that cannot be said surely."""
    try:
        config = read_config(model / "config.json") if model else None
    except HslakeError:
        return None
    names = (config or {}).get("architectures")
    first = str(names[0]) if isinstance(names, list) and names else ""
    if config is None or re.fullmatch(r"Llava\w*ForCausalLM", first):
        return None
    text = config
    for key in _TEXT:
        if isinstance(config.get(key), dict):
            text = config[key]
            break
    if isinstance(text.get("text_config"), dict):  # of a thinker
        text = text["text_config"]
    if not all(_plain_scaling(text.get(key)) for key in ("rope_scaling", "rope_parameters")):
        return None
    for key in (*_LENGTHS, "max_position_embeddings"):
        length = text.get(key)
        if length is not None:
            return length if type(length) is int and length > 0 else None
    return None


def _plain_scaling(scaling: Any) -> bool:
    """Whether SGLang surely multiplies the length by nothing for this rotary scaling."""
    if not scaling:
        return True
    if not isinstance(scaling, dict):
        return False
    if "original_max_position_embeddings" in scaling or scaling.get("rope_type") == "llama3":
        return True
    # Scalings by kind of layer lie one deeper; transformers may bring them into another form.
    return "factor" not in scaling and not any(isinstance(v, dict) for v in scaling.values())
