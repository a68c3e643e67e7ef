"""The checksum and statistics of hslake.checksum in torch: the same bits, on the device.

uint64 arithmetic mod 2**64 and int64 arithmetic with wrap-around give the same bits, and int64 is
what every torch device has. Rows are taken in blocks so that temporaries stay small.
The `*_tensor` functions return device tensors without waiting for the device.
"""

from functools import lru_cache

import torch

from hslake.checksum import MASK64, RowStats, lane_weights

_BLOCK_BYTES = 32 << 20  # of one int64 or float64 temporary; at most two live at once
_CPU_BLOCK_BYTES = 1 << 20  # on a CPU the block should stay in the cache


def _int64(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift(x: torch.Tensor, by: int) -> torch.Tensor:
    """Logical right shift of int64 (torch's own keeps the sign)."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def mix(x: torch.Tensor) -> torch.Tensor:
    """splitmix64's output function of int64 `x` (wraps mod 2**64)."""
    x = x + _int64(0x9E3779B97F4A7C15)
    x = (x ^ _shift(x, 30)) * _int64(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _int64(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


@lru_cache(maxsize=32)
def _lane_weights(lanes: int, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(lane_weights(lanes).view("int64")).to(device)


def _blocks(rows: torch.Tensor, width: int) -> range:
    limit = _CPU_BLOCK_BYTES if rows.device.type == "cpu" else _BLOCK_BYTES
    return range(0, len(rows), max(1, limit // (8 * width)))


def rows_checksum_tensor(rows: torch.Tensor, position: int = 0) -> torch.Tensor:
    """Partial checksum of `rows` [n, hidden] as a 0-d int64 tensor on their device.

    `rows`: bfloat16, float16 or float32, contiguous along the last axis; `position`: place of the
    first row in its sample. float32 counts as two 16-bit lanes, low half first.
    """
    lanes = rows.view(torch.int16)
    weights = _lane_weights(lanes.shape[1], rows.device)
    sums = torch.empty(len(lanes), dtype=torch.int64, device=rows.device)
    steps = _blocks(lanes, lanes.shape[1])
    for i in steps:
        block = lanes[i : i + steps.step].to(torch.int64)
        block.bitwise_and_(0xFFFF).mul_(weights)
        torch.sum(block, dim=1, out=sums[i : i + steps.step])
    places = torch.arange(len(lanes), dtype=torch.int64, device=rows.device)
    return (sums * (mix(places + ((1 << 40) + position)) | 1)).sum()


def rows_checksum(rows: torch.Tensor, position: int = 0) -> int:
    """Partial checksum (0 <= sum < 2**64), bit-equal to hslake.checksum.rows_checksum."""
    return int(rows_checksum_tensor(rows, position).item()) & MASK64


def row_stats_tensor(rows: torch.Tensor) -> torch.Tensor:
    """float64 [3] on the device: sum of squares and absolute maximum of the finite values of
    `rows` [n, hidden], and the number of non-finite ones."""
    total, peak, bad = torch.zeros(3, dtype=torch.float64, device=rows.device).unbind()
    steps = _blocks(rows, rows.shape[1])
    for i in steps:
        block = rows[i : i + steps.step].to(torch.float64)
        wrong = ~block.isfinite()
        block.masked_fill_(wrong, 0.0)
        bad = bad + wrong.sum()
        peak = torch.maximum(peak, torch.linalg.vector_norm(block, float("inf")))
        total = total + block.square_().sum()
    return torch.stack([total, peak, bad])


def row_stats(rows: torch.Tensor) -> RowStats:
    """Statistics of `rows` [n, hidden], as hslake.checksum.row_stats gives (the sum of squares
    may differ in its last bits: it is added up in another order)."""
    total, peak, bad = row_stats_tensor(rows).tolist()
    return RowStats(total, peak, int(bad), rows.numel())
