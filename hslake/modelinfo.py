"""What a lake takes from a model's folder at creation: its dimensions and its final norm."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hslake.errors import InvalidInput
from hslake.fingerprint import model_fingerprint, read_config, read_entries, weight_files
from hslake.spec import DTYPES, ModelInfo
from hslake.zarrmeta import array_metadata

_NORM_NAMES = (
    "model.norm.weight",
    "model.final_layernorm.weight",
    "language_model.norm.weight",
    "transformer.ln_f.weight",
    "transformer.norm_f.weight",
    "decoder.final_layer_norm.weight",
    "final_layer_norm.weight",
)
_EPS_NAMES = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


@dataclass(frozen=True)
class FinalNorm:
    """Final norm: little-endian weight bytes [hidden] of a dtype, eps, and the tensor's name."""

    dtype: str
    weight: bytes
    eps: float | None
    tensor: str

    def matches(self, hidden_size: int) -> bool:
        """Whether the weight has one value per hidden channel."""
        return len(self.weight) == hidden_size * DTYPES[self.dtype]

    def objects(self, prefix: str) -> dict[str, bytes]:
        """A Zarr v3 array [hidden] with attributes `eps` and `tensor`: objects by path."""
        length = len(self.weight) // DTYPES[self.dtype]
        attributes = {"eps": self.eps, "tensor": self.tensor}
        document = array_metadata([length], [length], self.dtype, ["hidden"], attributes=attributes)
        text = json.dumps(document, indent=1) + "\n"
        return {f"{prefix}/c/0": self.weight, f"{prefix}/zarr.json": text.encode()}


def config_path(model_config: str | Path) -> Path:
    """The config.json that a path to it or to its folder means."""
    path = Path(model_config)
    return path / "config.json" if path.is_dir() else path


def config_levels(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Where the language model's values are: multimodal configs keep them one level down."""
    yield config
    for key in ("text_config", "llm_config", "language_config"):
        if isinstance(config.get(key), dict):
            yield config[key]


def config_value(config: dict[str, Any], *names: str) -> Any:
    """The first of `names` that the config gives, wherever it keeps the language model's values."""
    return next((c[n] for c in config_levels(config) for n in names if c.get(n) is not None), None)


def read_model(path: Path, name: str | None) -> tuple[ModelInfo, str | None]:
    """(ModelInfo, dtype the config names) from a config.json. Raises Missing or InvalidInput."""
    config = read_config(path)
    layers = config_value(config, "num_hidden_layers", "n_layer", "num_layers")
    hidden = config_value(config, "hidden_size", "n_embd", "d_model")
    if type(layers) is not int or type(hidden) is not int:
        raise InvalidInput(
            f"{path}: found num_hidden_layers {layers!r} and hidden_size {hidden!r}, expected "
            "numbers: is this a language model's config? else give --num-layers and --hidden-size"
        )
    names = config.get("architectures") or [""]
    info = ModelInfo(
        name or config.get("_name_or_path") or path.absolute().parent.name,
        str(names[0]),
        layers,
        hidden,
        config_value(config, "vocab_size"),
        model_fingerprint(path),
    )
    dtype = config_value(config, "dtype", "torch_dtype")
    return info, str(dtype).removeprefix("torch.") if dtype else None


def final_norm(path: Path) -> FinalNorm | None:
    """The final norm from the safetensors files beside a config.json, None when it is not there."""
    config = read_config(path)
    eps = config_value(config, *_EPS_NAMES)
    for file in weight_files(path.parent):
        header, start = read_entries(file)
        for name, entry in header.items():
            if name.endswith(_NORM_NAMES) and ".layers." not in name and "vision" not in name:
                if entry["dtype"] not in _DTYPES or len(entry["shape"]) != 1:
                    continue
                low, high = entry["data_offsets"]
                with file.open("rb") as f:
                    f.seek(start + low)
                    data = f.read(high - low)
                dtype = _DTYPES[entry["dtype"]]
                if len(data) != entry["shape"][0] * DTYPES[dtype]:
                    raise InvalidInput(f"{file}: the tensor {name} is cut off: download it again")
                return FinalNorm(dtype, data, eps, name)
    return None
