"""Batch layouts: allocate the buffers of a batch, and hand out each sample's place in them.

The loader decodes straight into those places; `collate_batch` copies ready samples into them, as a
`collate_fn` of torch.utils.data.DataLoader. Nothing is shifted, and masks are as they were planned:
position t of every tensor belongs to token t. See `zero_last_loss`.

padded (the names SpecForge's trainer takes; B samples, T = longest):
    input_ids, attention_mask, loss_mask [B, T] int64
    hidden_state [B, T, n * H]   the n boundaries side by side, in ascending order, lake dtype
    target       [B, T, H]       the stream `final`, lake dtype
    lengths [B] int64, sample_ids list[str], is_padding bool
packed (as speculators takes; samples one after the other in one row):
    input_ids, loss_mask, document_ids, position_ids [1, total] int64 (document -1 = padding)
    hidden_state [1, total, n * H], target [1, total, H], lengths, sample_ids, is_padding

A batch without samples (`is_padding`) has a few zero tokens and an all-zero loss mask; `lengths`
and `sample_ids` are empty. A rank with no sample left runs it to stay in step with the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hslake.torch.order import check_batch_settings, padded_length

PADDING_TOKENS = 8  # rows of a batch without samples: enough for losses that shift a few times
TORCH_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
_BITS = {2: (torch.int16, np.int16, np.uint16), 4: (torch.int32, np.int32, np.uint32)}

Batch = dict[str, Any]
Slot = tuple[int, slice]  # a sample's rows in the [rows, tokens, ...] tensors of a batch


@dataclass(frozen=True)
class Shape:
    """What the buffers of a batch depend on besides the samples' lengths.

    `state_width` = boundaries * hidden and `target_width` = hidden; 0 leaves the tensor out.
    """

    layout: str
    state_width: int
    target_width: int
    dtype: torch.dtype
    multiple: int = 1
    pin_memory: bool = False

    @property
    def wide(self) -> dict[str, int]:
        """Names and widths of the tensors that hold states."""
        both = {"hidden_state": self.state_width, "target": self.target_width}
        return {name: width for name, width in both.items() if width}


def bits(tensor: torch.Tensor) -> np.ndarray:
    """The bit patterns of a 2- or 4-byte tensor as an unsigned NumPy view (no copy)."""
    as_torch, _, as_uint = _BITS[tensor.element_size()]
    return tensor.view(as_torch).numpy().view(as_uint)


def from_bits(array: np.ndarray, dtype: str) -> torch.Tensor:
    """A tensor of the lake's dtype over an array of 2- or 4-byte bit patterns (no copy)."""
    _, as_int, _ = _BITS[array.dtype.itemsize]
    return torch.from_numpy(array.view(as_int)).view(TORCH_DTYPES[dtype])


def huge(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor in memory from NumPy, which asks the kernel for huge pages.

    First writes to new memory from torch.empty pay for page faults: 1.2 against 6.4 GB/s.
    """
    return torch.from_numpy(np.empty(size, _BITS[dtype.itemsize][1])).view(dtype)


def grid(shape: Shape, lengths: Sequence[int]) -> tuple[int, int]:
    """Leading dimensions [rows, tokens] of a batch's tensors."""
    if not lengths:
        return 1, padded_length(PADDING_TOKENS, shape.multiple)
    if shape.layout == "padded":
        return len(lengths), padded_length(max(lengths), shape.multiple)
    return 1, padded_length(sum(lengths), shape.multiple)


def batch_bytes(shape: Shape, lengths: Sequence[int]) -> int:
    """Bytes that `allocate` takes for such a batch."""
    rows, tokens = grid(shape, lengths)
    integers = 3 if shape.layout == "padded" else 4
    return rows * tokens * (sum(shape.wide.values()) * shape.dtype.itemsize + integers * 8)


def slots(shape: Shape, lengths: Sequence[int]) -> list[Slot]:
    """Where each sample's rows lie: index a tensor of the batch with it."""
    if shape.layout == "padded":
        return [(i, slice(0, length)) for i, length in enumerate(lengths)]
    ends = np.cumsum(lengths, dtype=np.int64).tolist()
    return [(0, slice(end - length, end)) for end, length in zip(ends, lengths, strict=True)]


def allocate(shape: Shape, sample_ids: Sequence[str], lengths: Sequence[int]) -> Batch:
    """A batch for these samples: everything that follows from the lengths is set.

    `input_ids`, `loss_mask`, `hidden_state` and `target` are left to be filled at `slots`; their
    padding is zero already.
    """
    rows, tokens = grid(shape, lengths)

    def tensor(dtype: torch.dtype, *width: int) -> torch.Tensor:
        return torch.empty((rows, tokens, *width), dtype=dtype, pin_memory=shape.pin_memory)

    batch: Batch = {"input_ids": tensor(torch.int64).zero_()}
    if shape.layout == "padded":
        # A batch without samples attends to itself: attention over nothing would make NaN of it.
        batch["attention_mask"] = tensor(torch.int64).fill_(0 if lengths else 1)
    batch["loss_mask"] = tensor(torch.int64).zero_()
    if shape.layout == "packed":
        batch["document_ids"] = tensor(torch.int64).fill_(-1)
        batch["position_ids"] = tensor(torch.int64).zero_()
    for name, width in shape.wide.items():
        if shape.pin_memory:
            batch[name] = tensor(shape.dtype, width)
        else:
            batch[name] = huge((rows, tokens, width), shape.dtype)
    batch["lengths"] = torch.tensor(list(lengths), dtype=torch.int64)
    batch["sample_ids"] = list(sample_ids)
    batch["is_padding"] = not lengths

    taken = slots(shape, lengths)
    for document, slot in enumerate(taken):
        if shape.layout == "padded":
            batch["attention_mask"][slot] = 1
        else:
            batch["document_ids"][slot] = document
            batch["position_ids"][slot] = torch.arange(lengths[document])
    # Zero only the padding: the rest is written once, by the decoder. Through NumPy, because
    # torch's threads take several times longer to touch new pages.
    unused = taken if shape.layout == "padded" else taken[-1:]
    for name in shape.wide:
        raw = bits(batch[name])
        for row, rows_taken in unused or [(0, slice(0, 0))]:
            raw[row, rows_taken.stop :] = 0
    return batch


def items(batch: Batch, shape: Shape) -> list[dict[str, Any]]:
    """The samples of a batch as dataset items: views, no copy."""
    names = ("input_ids", "loss_mask", *shape.wide)
    return [
        {"sample_id": sample_id, **{name: batch[name][slot] for name in names}}
        for sample_id, slot in zip(
            batch["sample_ids"], slots(shape, batch["lengths"].tolist()), strict=True
        )
    ]


def assemble(samples: Sequence[dict[str, Any]], shape: Shape) -> Batch:
    """A batch of copies of these items."""
    lengths = [len(sample["input_ids"]) for sample in samples]
    batch = allocate(shape, [sample["sample_id"] for sample in samples], lengths)
    for sample, slot in zip(samples, slots(shape, lengths), strict=True):
        for name in ("input_ids", "loss_mask", *shape.wide):
            batch[name][slot] = sample[name]
    return batch


def collate_batch(
    samples: Sequence[dict[str, Any]], layout: str = "padded", multiple: int = 1
) -> Batch:
    """A batch of items of a HiddenStateDataset, the same as the loader builds.

    For torch's DataLoader: `collate_fn=functools.partial(collate_batch, layout="packed")`.
    """
    check_batch_settings(multiple, layout, multiple)
    wide = {name: samples[0][name] for name in ("hidden_state", "target") if name in samples[0]}
    shape = Shape(
        layout=layout,
        state_width=wide["hidden_state"].shape[-1] if "hidden_state" in wide else 0,
        target_width=wide["target"].shape[-1] if "target" in wide else 0,
        dtype=next(iter(wide.values())).dtype,
        multiple=multiple,
    )
    return assemble(samples, shape)


def zero_last_loss(batch: Batch) -> Batch:
    """Clear the loss mask at each sample's last token, in place, and return the batch.

    A trainer that predicts the next token has no target there. SpecForge does the same when it
    reads its own files; do it when feeding its trainer directly.
    """
    lengths = batch["lengths"]
    if "document_ids" in batch:
        batch["loss_mask"][0, torch.cumsum(lengths, 0) - 1] = 0
    else:
        batch["loss_mask"][torch.arange(len(lengths)), lengths - 1] = 0
    return batch
