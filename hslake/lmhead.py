"""The LM head of a model folder, read without torch: what the model says of the next token.

It is what tells whether stored `final` rows are the ones that the server itself went on from: the
log-probs of the prompt's own tokens, made from the rows and the head, must be the server's.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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
_TILE_BYTES = 32 << 20  # of logits at a time, for each thread


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
    """Log-probs of the targets, in their shape, and the largest absolute logit of each row [n].
    float64."""

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
    threads: int | None = None,
) -> LogProbs:
    """Log-probs of `targets` [n] or [n, k] after the `final` rows float32 [n, hidden].

    `dtype`: the server's, to which it casts the head. The head is read once, block by block, on
    `threads` (default: one a core). Holds `rows` (twice for float32), and some 100 MB and 100 MB a
    thread, whatever the vocabulary; `tell` hears the share that is done. Raises Unsupported when
    rows or targets do not fit.
    """
    if rows.ndim != 2 or rows.shape != (len(targets), head.weight.shape[1]):
        raise Unsupported(
            f"{head.weight.file}: {head.weight.name} is {list(head.weight.shape)}, the rows have "
            f"hidden size {rows.shape[-1]}: another model's"
        )
    if targets.size and not 0 <= targets.min() <= targets.max() < head.vocab:
        raise Unsupported(f"token {targets.max()} is outside the head's vocabulary of {head.vocab}")
    # What the server rounds to 24 bits is to be judged with more.
    wide = np.dtype(np.float64 if dtype == "float32" else np.float32)
    sums = _Sums(rows.astype(wide, copy=False), targets.reshape(len(targets), -1))
    block = max(1, _BLOCK_BYTES // (wide.itemsize * rows.shape[1]))
    tile = max(1, _TILE_BYTES // (wide.itemsize * min(block, head.vocab)))
    tiles = [slice(at, at + tile) for at in range(0, len(rows), tile)]
    places = [(at, min(head.vocab, at + block)) for at in range(0, head.vocab, block)]
    with ThreadPoolExecutor(threads or os.cpu_count()) as pool:
        # One block is read while the one before it is at work.
        coming = pool.submit(_block, head, *places[0], dtype, wide)
        for n, (at, end) in enumerate(places):
            weight, bias = coming.result()
            if n + 1 < len(places):
                coming = pool.submit(_block, head, *places[n + 1], dtype, wide)

            def add(
                some: slice, w: np.ndarray = weight, b: np.ndarray | None = bias, at: int = at
            ) -> None:
                sums.add(head, some, w, b, at)

            for _ in pool.map(add, tiles):
                pass
            tell(end / head.vocab)
    found = sums.chosen - (sums.top + np.log(sums.total))[:, None]
    return LogProbs(found.reshape(targets.shape), sums.peak)


def _block(
    head: LmHead, at: int, end: int, dtype: str, wide: np.dtype
) -> tuple[np.ndarray, np.ndarray | None]:
    """Rows [at, end) of weight and bias as a server of `dtype` holds them."""
    found = [_served(t, at, end, dtype) for t in (head.weight, head.bias) if t is not None]
    return found[0].astype(wide, copy=False), found[1] if len(found) > 1 else None


class _Sums:
    """The softmax of many rows, taken in block by block of the vocabulary."""

    def __init__(self, rows: np.ndarray, targets: np.ndarray) -> None:
        n = len(rows)
        self.rows, self.targets = rows, targets  # [n, hidden], [n, k]
        self.peak, self.top = np.zeros(n), np.full(n, -np.inf)
        self.total, self.chosen = np.zeros(n), np.zeros(targets.shape)

    def add(
        self, head: LmHead, some: slice, weight: np.ndarray, bias: np.ndarray | None, at: int
    ) -> None:
        """The logits of the rows `some` for the tokens from `at` on. Slices do not overlap, so
        threads may add them side by side."""
        logits = self.rows[some] @ weight.T
        if bias is not None:
            logits += bias
        if head.scale != 1.0:
            logits *= head.scale
        # Before the cap, which shrinks errors.
        largest = np.maximum(logits.max(axis=1), -logits.min(axis=1))
        self.peak[some] = np.maximum(self.peak[some], largest)
        if head.softcap:
            logits = head.softcap * np.tanh(logits / head.softcap)
        here = (self.targets[some] >= at) & (self.targets[some] < at + len(weight))
        which, place = np.nonzero(here)
        self.chosen[some][which, place] = logits[which, self.targets[some][which, place] - at]
        top = self.top[some]
        highest = np.maximum(top, logits.max(axis=1))
        logits -= highest[:, None].astype(logits.dtype)
        np.exp(logits, out=logits)
        more = logits.sum(axis=1, dtype=np.float64)
        self.total[some] = self.total[some] * np.exp(top - highest) + more
        self.top[some] = highest


def tolerance(dtype: str, peaks: np.ndarray) -> np.ndarray:
    """How far a log-prob of a server of this dtype may be off, given the largest logit of its row.

    The server rounds every logit to its dtype: half a unit in the last place at most, of the
    target's logit and of those under the logarithm. float32 also errs by the order of its sums.
    """
    half_unit = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-18}[dtype]
    floor = {"bfloat16": 0.02, "float16": 0.005, "float32": 1e-3}[dtype]
    return 2 * half_unit * peaks + floor


def _served(tensor: Tensor, start: int, stop: int, dtype: str) -> np.ndarray:
    """Rows [start, stop) of a tensor as a server of `dtype` holds them, in float32."""
    values = tensor.rows(start, stop)
    if dtype == tensor.dtype:
        return values
    if dtype == "float16":
        return values.astype(np.float16).astype(np.float32)
    if dtype != "bfloat16":
        return values
    bits = values.view(np.uint32)
    even = (bits >> np.uint32(16)) & np.uint32(1)  # round half to even
    return ((bits + np.uint32(0x7FFF) + even) & np.uint32(0xFFFF0000)).view(np.float32)
