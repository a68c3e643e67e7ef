"""What identifies a model: its config, and its weights without reading all of them."""

import hashlib
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hslake.errors import Corrupt, InvalidInput, Missing

# Written by whoever saved the files last; they say nothing about the model.
_IGNORED = ("transformers_version", "_name_or_path", "dtype", "torch_dtype")
_SAMPLES = 16
_SAMPLE_BYTES = 1 << 16
_MAX_HEADER = 1 << 28


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    """The config without the ignored keys, also not in sub-configs such as text_config."""
    return {
        k: _plain(v) if isinstance(v, dict) and k.endswith("_config") and k[:5] != "quant" else v
        for k, v in config.items()
        if k not in _IGNORED
    }


def read_config(path: Path) -> dict[str, Any]:
    """Parse a model's config.json. Raises Missing or InvalidInput."""
    try:
        config = json.loads(path.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise Missing(f"{path} is not there; expected a model's config.json") from None
    except (OSError, ValueError, RecursionError) as e:
        raise InvalidInput(f"{path} cannot be read as JSON: {e}") from None
    if not isinstance(config, dict):
        raise InvalidInput(f"{path}: expected a JSON object")
    return config


def weight_files(folder: Path) -> list[Path]:
    """The model's safetensors files, sorted: those the index names, or all. Raises Missing."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        found = sorted({folder / n for n in read_config(index).get("weight_map", {}).values()})
        gone = [p.name for p in found if not p.is_file()]
        if gone:
            raise Missing(
                f"{folder}: {len(gone)} of {len(found)} weight files are missing, "
                f"the first is {gone[0]}: finish the download"
            )
    else:
        found = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
    adapters = sorted(folder.glob("adapter*.safetensors"))
    return found + [p for p in adapters if p not in found]


def read_header(path: Path) -> tuple[bytes, int]:
    """(JSON header, offset of the data) of a safetensors file. Raises Corrupt."""
    with path.open("rb") as f:
        start = f.read(8)
        size = struct.unpack("<Q", start)[0] if len(start) == 8 else _MAX_HEADER + 1
        header = f.read(size) if size <= _MAX_HEADER else b""
    if len(header) != size:
        raise Corrupt(f"{path} is no safetensors file, or is cut off: download it again")
    return header, 8 + size


def read_entries(path: Path) -> tuple[dict[str, Any], int]:
    """(entry by name, offset of the data) of a safetensors file. Raises Corrupt."""
    raw, start = read_header(path)
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"{path}: its header is not JSON ({error}): download it again") from None
    if not isinstance(found, dict):
        raise Corrupt(f"{path}: its header is no JSON object: download it again")
    return found, start


def model_fingerprint(model_dir: str | Path) -> dict[str, str | None]:
    """SHA-256 (hex) of the config and of the weights of a Hugging Face model folder.

    Weights: safetensors headers, file sizes and 16 samples of 64 KiB of each file; None when there
    are no safetensors files. `model_dir` may also be the config.json in it.
    """
    folder = Path(model_dir)
    path = folder if folder.is_file() else folder / "config.json"
    folder = path.parent
    parts: list[Any] = [_plain(read_config(path))]
    extras = [n for n in ("hf_quant_config.json", "adapter_config.json") if (folder / n).is_file()]
    parts += [[n, read_config(folder / n)] for n in extras]
    text = json.dumps(parts if len(parts) > 1 else parts[0], sort_keys=True, separators=(",", ":"))
    config = hashlib.sha256(text.encode()).hexdigest()
    files = weight_files(folder)
    if not files:
        return {"config": config, "weights": None}
    digest = hashlib.sha256()
    for file in files:
        _sample(file, digest)
    return {"config": config, "weights": digest.hexdigest()}


def _sample(file: Path, digest: Any) -> None:
    header, start = read_header(file)
    size = file.stat().st_size
    digest.update(struct.pack("<QQ", size, len(header)) + header)
    with file.open("rb") as f:
        for i in range(_SAMPLES):
            last = max(start, size - _SAMPLE_BYTES)
            f.seek(start + (last - start) * i // (_SAMPLES - 1))
            digest.update(f.read(_SAMPLE_BYTES))


def check_fingerprint(
    spec_fp: Mapping[str, str | None], other_fp: Mapping[str, str | None], what: str
) -> None:
    """Raise InvalidInput when `what` is not the lake's model; unknown parts are not compared."""
    for part in ("config", "weights"):
        have, found = spec_fp.get(part), other_fp.get(part)
        if have and found and have != found:
            raise InvalidInput(
                f"{what} is not the model of this lake: its {part} has fingerprint {found[:12]}…, "
                f"expected {have[:12]}…: use the model that the lake was made for, or make a new "
                "lake"
            )


def check_model(
    spec_fp: Mapping[str, str | None], model_fp: Mapping[str, str | None], what: str
) -> None:
    """Raise InvalidInput when `what`, a model that is to be run, is not the lake's or cannot be
    told from another one."""
    check_fingerprint(spec_fp, model_fp, what)
    if spec_fp.get("weights") and not model_fp.get("weights"):
        raise InvalidInput(
            f"{what} has no safetensors files, and the lake was made for a model with: its weights "
            "cannot be told from others; use the folder that the lake was made for"
        )
