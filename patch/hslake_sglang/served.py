"""The model that a server is given, against the lake's: what its files say before it is loaded."""

from pathlib import Path

from hslake.errors import HslakeError
from hslake.fingerprint import read_config
from hslake.spec import LakeSpec
from hslake_sglang.refusals import DECLARED, NO_WEIGHTS

_QUANTISED = ("quantization_config", "compression_config")


def facts(spec: LakeSpec, model: str | None) -> frozenset[str]:
    """What makes some settings harmless for this lake and the model in folder `model`."""
    found = set()
    if spec.model.fingerprint.get("weights") is None:
        found.add(NO_WEIGHTS)
    if declares_quantisation(model) is not False:
        found.add(DECLARED)
    return frozenset(found)


def declares_quantisation(model: str | None) -> bool | None:
    """Whether a model folder says that its weights are quantised; None for no readable folder."""
    folder = Path(model or "")
    try:
        config = read_config(folder / "config.json")
    except HslakeError:
        return None
    levels = [config, *(v for v in config.values() if isinstance(v, dict))]
    said = any(level.get(key) for level in levels for key in _QUANTISED)
    return said or (folder / "hf_quant_config.json").is_file()
