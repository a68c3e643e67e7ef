"""The checksum and statistics of hslake.checksum in torch: the same bits, on the device.

uint64 arithmetic mod 2**64 and int64 arithmetic with wrap-around give the same bits, and int64 is
what every torch device has. On CUDA one Triton kernel reads the rows once; without Triton, and on
a CPU, rows are taken in blocks so that temporaries stay small.
"""

from functools import lru_cache

import torch

from hslake.checksum import RowStats, fold, lane_weights

_BLOCK_BYTES = 24 << 20  # of one int64 or float64 temporary; at most two live at once
_CPU_BLOCK_BYTES = 1 << 20  # on a CPU the block should stay in the cache


@lru_cache(maxsize=32)
def _lane_weights(lanes: int, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(lane_weights(lanes).view("int64")).to(device)


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    try:
        import triton
    except ImportError:
        return False
    return hasattr(triton, "jit")


def row_digests(rows: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Digests of `rows` [n, hidden] as an int64 tensor [4, n] on their device, or into `out`: what
    hslake.checksum.fold takes. Does not wait for the device.

    `rows`: bfloat16, float16 or float32, contiguous along the last axis. float32 counts as two
    16-bit lanes, low half first.
    """
    lanes = rows.shape[1] * rows.element_size() // 2
    weights = _lane_weights(lanes, rows.device)
    if out is None:
        out = torch.empty((4, len(rows)), dtype=torch.int64, device=rows.device)
    if rows.is_cuda and _has_triton():
        from hslake.torch_kernel import row_digests as on_device

        on_device(rows, weights, out)
    else:
        _in_blocks(rows, weights, out)
    return out


def _in_blocks(rows: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
    limit = _CPU_BLOCK_BYTES if rows.device.type == "cpu" else _BLOCK_BYTES
    step = max(1, limit // (8 * len(weights)))
    for i in range(0, len(rows), step):
        block = rows[i : i + step]
        lanes = block.view(torch.int16).to(torch.int64)
        sums, squares, peaks, bad = out[:, i : i + step]
        torch.sum(lanes.bitwise_and_(0xFFFF).mul_(weights), dim=1, out=sums)
        del lanes
        values = block.to(torch.float64)
        wrong = ~values.isfinite()
        torch.sum(wrong, dim=1, out=bad)
        values.masked_fill_(wrong, 0.0)
        peaks.copy_(torch.linalg.vector_norm(values, float("inf"), dim=1).view(torch.int64))
        squares.copy_(values.square_().sum(dim=1).view(torch.int64))


def digest(rows: torch.Tensor, position: int = 0) -> tuple[int, RowStats]:
    """Partial checksum (0 <= sum < 2**64, the bits of hslake.checksum.rows_checksum) and
    statistics of `rows` [n, hidden]; `position`: place of the first row in its sample."""
    if not len(rows):
        return 0, RowStats()
    digests = row_digests(rows).cpu().numpy()[None]
    return fold(digests, [(0, len(rows), position)], rows.shape[1])[0][0]
