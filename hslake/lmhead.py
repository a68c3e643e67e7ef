"""The LM head of a model folder, read without torch: what the model says of the next token.

It is what tells whether stored `final` rows are the ones that the server itself went on from: the
log-probs of the prompt's own tokens, made from the rows and the head, must be the server's.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hslake.checksum import to_float32
from hslake.errors import Corrupt, InvalidInput, Missing
from hslake.fingerprint import read_config, read_entries, weight_files
from hslake.modelinfo import config_levels, config_value

_HEADS = (
    "lm_head.weight",
    "language_model.lm_head.weight",
    "model.lm_head.weight",
    "model.language_model.lm_head.weight",
    "output.weight",
    "language_model.output.weight",
    "embed_out.weight",
    "transformer.output_layer.weight",
)
_EMBEDDINGS = (
    "model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "embed_tokens.weight",
    "model.tok_embeddings.weight",
    "transformer.wte.weight",
    "wte.weight",
    "transformer.word_embeddings.weight",
)
_PLAIN = ("weight", "bias")
_DTYPES = {"BF16": ("bfloat16", 2), "F16": ("float16", 2), "F32": ("float32", 4)}
# What a model may do to its states or logits around the head, and this module does not.
_UNKNOWN = (
    "output_multiplier_scale",
    "logits_mup_width_multiplier",
    "mup_width_multiplier",
    "dim_model_base",
)
_BLOCK_BYTES = 16 << 20  # of widened head rows at a time


class Unsupported(InvalidInput):
    """A head that cannot be applied here, so nothing can be said: never a verdict."""


@dataclass(frozen=True)
class Tensor:
    """A full-precision tensor in a safetensors file."""

    name: str
    file: Path
    offset: int  # bytes
    dtype: str
    shape: tuple[int, ...]

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) as float32. Raises Corrupt when the file ends before."""
        width = int(np.prod(self.shape[1:], dtype=np.int64))
        itemsize = 4 if self.dtype == "float32" else 2
        with self.file.open("rb") as f:
            f.seek(self.offset + start * width * itemsize)
            bits = np.fromfile(f, f"<u{itemsize}", (stop - start) * width)
        if len(bits) != (stop - start) * width:
            raise Corrupt(f"{self.file}: the tensor {self.name} is cut off: download it again")
        return to_float32(bits, self.dtype).reshape(stop - start, *self.shape[1:])


@dataclass(frozen=True)
class LmHead:
    """The head as the server applies it: logits = softcap(scale * (rows @ weight.T + bias))."""

    weight: Tensor  # [vocab, hidden]
    bias: Tensor | None
    vocab: int  # rows of the weight that are tokens
    scale: float
    softcap: float | None


@dataclass(frozen=True)
class LogProbs:
    """Per row: the log-prob of its target, and the largest absolute logit. float64 [rows]."""

    values: np.ndarray
    peaks: np.ndarray


def find_head(folder: str | Path) -> LmHead:
    """The head of a Hugging Face model folder.

    Raises Missing (no folder, config or weight file), Corrupt (no safetensors file), Unsupported
    when the head is quantised, has an unknown name, or the model does more than scale and cap.
    """
    folder = Path(folder)
    config = read_config(folder / "config.json")
    odd = [n for n in _UNKNOWN if config_value(config, n) not in (None, 1, 1.0)]
    if odd:
        raise Unsupported(f"{folder}: its config has {odd[0]}, which is not understood here")
    found = _Tensors(folder)
    weight = _weight(found, config, folder)
    stem = weight.name.removesuffix("weight")
    more = [n for n in found.names() if n.startswith(stem) and n[len(stem) :] not in _PLAIN]
    if more:
        raise Unsupported(f"{folder}: the LM head is quantised (it has {more[0]})")
    biases = [f"{s}bias" for s in (stem, *_stems()) if f"{s}bias" in found.names()]
    bias = found.read(biases[0]) if biases else None
    if len(weight.shape) != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        raise Unsupported(f"{folder}: {weight.name} has shape {list(weight.shape)}")
    vocab = config_value(config, "vocab_size") or weight.shape[0]
    cap = config_value(config, "final_logit_softcapping")
    return LmHead(weight, bias, min(int(vocab), weight.shape[0]), _scale(config), cap or None)


def _scale(config: dict[str, Any]) -> float:
    divisor = config_value(config, "logits_scaling")
    factors = [config_value(config, n) for n in ("logit_scale", "lm_head_multiplier")]
    scale = 1.0 / float(divisor) if divisor else 1.0
    for factor in factors:
        scale *= 1.0 if factor is None else float(factor)
    return scale


def _weight(found: "_Tensors", config: dict[str, Any], folder: Path) -> Tensor:
    head = next((n for n in _HEADS if n in found.names()), None)
    embedding = next((n for n in _EMBEDDINGS if n in found.names()), None)
    told = {c["tie_word_embeddings"] for c in config_levels(config) if "tie_word_embeddings" in c}
    packed = [n for n in found.names() if n.startswith(tuple(_stems()))]
    if packed and head is None and told != {True}:
        raise Unsupported(f"{folder}: the LM head is quantised (it has {packed[0]})")
    if embedding and (told == {True} or (head is None and told != {False})):
        return found.read(embedding)
    if head is None:
        what = "tied embeddings" if told == {True} else "LM head"
        raise Unsupported(f"{folder}: no {what} was found under a known name")
    return found.read(head)


def _stems() -> Iterator[str]:
    return (name.removesuffix("weight") for name in _HEADS if "lm_head" in name)


class _Tensors:
    """The tensors of a model folder by name; headers are read as they are asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._headers: dict[Path, tuple[dict[str, Any], int]] = {}
        index = folder / "model.safetensors.index.json"
        self._files: dict[str, Path]
        if index.is_file():  # one shard is enough: the others may still be on their way
            self._files = {k: folder / v for k, v in read_config(index)["weight_map"].items()}
            return
        files = weight_files(folder)
        if not files:
            raise Missing(f"{folder} has no safetensors files: give the model's folder")
        self._files = {name: f for f in files for name in self._header(f)[0]}

    def names(self) -> dict[str, Path]:
        return self._files

    def _header(self, file: Path) -> tuple[dict[str, Any], int]:
        if file not in self._headers:
            if not file.is_file():
                raise Missing(f"{file} is not there: finish the download")
            self._headers[file] = read_entries(file)
        return self._headers[file]

    def read(self, name: str) -> Tensor:
        file = self._files[name]
        header, start = self._header(file)
        entry = header.get(name)
        if entry is None:
            raise Corrupt(f"{file} has no {name}, which the index puts there: download it again")
        if entry["dtype"] not in _DTYPES:
            raise Unsupported(f"{file}: {name} is stored as {entry['dtype']}")
        dtype, itemsize = _DTYPES[entry["dtype"]]
        low, high = entry["data_offsets"]
        if high - low != itemsize * int(np.prod(entry["shape"], dtype=np.int64)):
            raise Corrupt(f"{file}: {name} has {high - low} bytes for shape {entry['shape']}")
        return Tensor(name, file, start + low, dtype, tuple(entry["shape"]))


def next_log_probs(
    head: LmHead,
    rows: np.ndarray,
    targets: np.ndarray,
    dtype: str,
    tell: Callable[[float], None] = lambda done: None,
) -> LogProbs:
    """Log-probs of `targets` [n] after the `final` rows float32 [n, hidden].

    `dtype`: the server's, to which it casts the head. Holds about 100 MB whatever the vocabulary;
    `tell` hears the share that is done. Raises Unsupported when rows or targets do not fit.
    """
    if rows.shape != (len(targets), head.weight.shape[1]):
        raise Unsupported(
            f"{head.weight.file}: {head.weight.name} is {list(head.weight.shape)}, the rows have "
            f"hidden size {rows.shape[-1]}: another model's"
        )
    if len(targets) and not 0 <= targets.min() <= targets.max() < head.vocab:
        raise Unsupported(f"token {targets.max()} is outside the head's vocabulary of {head.vocab}")
    # What the server rounds to 24 bits is to be judged with more.
    wide = np.dtype(np.float64 if dtype == "float32" else np.float32)
    left: np.ndarray = rows.astype(wide)
    block = max(1, _BLOCK_BYTES // (wide.itemsize * rows.shape[1]))
    peak, top = np.zeros(len(rows)), np.full(len(rows), -np.inf)
    total, chosen = np.zeros(len(rows)), np.zeros(len(rows))
    for at in range(0, head.vocab, block):
        end = min(head.vocab, at + block)
        weight: np.ndarray = _served(head.weight.rows(at, end), dtype).astype(wide, copy=False)
        logits = (left @ weight.T).astype(np.float64)
        if head.bias is not None:
            logits += _served(head.bias.rows(at, end), dtype)
        logits *= head.scale
        peak = np.maximum(peak, np.abs(logits).max(axis=1))  # before the cap, which shrinks errors
        if head.softcap:
            logits = head.softcap * np.tanh(logits / head.softcap)
        highest = np.maximum(top, logits.max(axis=1))
        total = total * np.exp(top - highest) + np.exp(logits - highest[:, None]).sum(axis=1)
        top = highest
        here = np.flatnonzero((targets >= at) & (targets < end))
        chosen[here] = logits[here, targets[here] - at]
        tell(end / head.vocab)
    return LogProbs(chosen - top - np.log(total), peak)


def tolerance(dtype: str, peaks: np.ndarray) -> np.ndarray:
    """How far a log-prob of a server of this dtype may be off, given the largest logit of its row.

    The server rounds every logit to its dtype: half a unit in the last place at most, of the
    target's logit and of those under the logarithm. float32 also errs by the order of its sums.
    """
    half_unit = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-18}[dtype]
    floor = {"bfloat16": 0.02, "float16": 0.005, "float32": 1e-3}[dtype]
    return 2 * half_unit * peaks + floor


def _served(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values as a server of `dtype` holds them, in float32."""
    if dtype == "float16":
        return values.astype(np.float16).astype(np.float32)
    if dtype != "bfloat16":
        return values
    bits = values.view(np.uint32)
    even = (bits >> np.uint32(16)) & np.uint32(1)  # round half to even
    return ((bits + np.uint32(0x7FFF) + even) & np.uint32(0xFFFF0000)).view(np.float32)
