"""Small model folders: a config and an LM head in safetensors files, and what that head says."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

_CODES = {"<f4": "F32", "<f2": "F16", "<u2": "BF16", "|i1": "I8"}


def to_bits(values: np.ndarray) -> np.ndarray:
    """float32 values whose lower 16 bits are zero, as bfloat16 bits."""
    return (values.astype("<f4").view("<u4") >> 16).astype("<u2")


def bf16(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Random float32 values that bfloat16 holds exactly."""
    bits = rng.normal(size=shape).astype("<f4").view("<u4") & 0xFFFF0000
    return bits.view("<f4")


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """uint16 arrays are written as bfloat16."""
    header, at = {}, 0
    for name, array in tensors.items():
        header[name] = {
            "dtype": _CODES[array.dtype.str],
            "shape": list(array.shape),
            "data_offsets": [at, at + array.nbytes],
        }
        at += array.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(
        struct.pack("<Q", len(text)) + text + b"".join(a.tobytes() for a in tensors.values())
    )


def write_model(folder: Path, tensors: dict[str, np.ndarray], **config: Any) -> Path:
    """A model folder with one safetensors file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def log_probs(logits: np.ndarray, targets: Any) -> np.ndarray:
    """log softmax of float64 [n, vocab] at `targets`, the plain way."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    norm = np.log(np.exp(shifted).sum(axis=1))
    return shifted[np.arange(len(logits)), np.asarray(targets)] - norm
