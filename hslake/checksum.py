"""The checksum and the statistics of a sample's rows, in NumPy.

The checksum is fixed for the life of the format. With mix = splitmix64, A[c] = mix(c) | 1,
B[p] = mix(2**40 + p) | 1 and u16[p, c] the 16-bit lanes of row p (a float32 is two lanes, low half
first), it is  sum_p B[p] * (sum_c A[c] * u16[p, c])  mod 2**64, stored as int64. `p` is the
position in the sample, so partial sums over any split of the rows simply add up.
splitmix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

MASK64 = (1 << 64) - 1
_BLOCK_ROWS = 64  # keeps the widened block inside the L2 cache
_scratch = threading.local()


def mix(x: np.ndarray) -> np.ndarray:
    """splitmix64's output function of uint64 `x` (wraps mod 2**64)."""
    x = x.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@lru_cache(maxsize=8)
def lane_weights(lanes: int) -> np.ndarray:
    """A[0..lanes), uint64."""
    return mix(np.arange(lanes, dtype=np.uint64)) | np.uint64(1)


def row_weights(position: int, rows: int) -> np.ndarray:
    """B[position..position + rows), uint64."""
    start = np.uint64((1 << 40) + position)
    return mix(np.arange(rows, dtype=np.uint64) + start) | np.uint64(1)


@lru_cache(maxsize=2)
def _first_weights(rows: int) -> np.ndarray:
    return row_weights(0, rows)


def as_lanes(rows: np.ndarray) -> np.ndarray:
    """View C-contiguous rows [n, hidden] of a 2- or 4-byte type as uint16 lanes [n, lanes]."""
    return rows.view("<u2") if rows.dtype.itemsize != 2 else rows.view(np.uint16)


def rows_checksum(rows: np.ndarray, position: int = 0) -> int:
    """Partial checksum (0 <= sum < 2**64) of rows [n, hidden] at sample positions from `position`.

    `rows` is any 2- or 4-byte dtype, C-contiguous along the last axis.
    """
    lanes = as_lanes(rows)
    a = lane_weights(lanes.shape[1])
    sums = np.empty(len(lanes), np.uint64)
    wide = _wide(lanes.shape[1])
    for i in range(0, len(lanes), _BLOCK_ROWS):
        part = lanes[i : i + _BLOCK_ROWS]
        block = wide[: len(part)]
        block[...] = part
        np.einsum("ij,j->i", block, a, out=sums[i : i + len(part)])
    return int((sums * row_weights(position, len(lanes))).sum(dtype=np.uint64))


def _wide(lanes: int) -> np.ndarray:
    """A block of this thread's own, to be used again: fresh pages each time can take longer than
    the sums."""
    found: np.ndarray | None = getattr(_scratch, "wide", None)
    if found is None or found.shape[1] != lanes:
        found = _scratch.wide = np.empty((_BLOCK_ROWS, lanes), np.uint64)
    return found


def to_int64(total: int) -> int:
    """The stored form of a checksum: the sum mod 2**64 as a signed 64-bit integer."""
    total &= MASK64
    return total - (1 << 64) if total >= 1 << 63 else total


def sample_checksum(rows: np.ndarray) -> int:
    """Stored checksum (int64) of one whole stream of a sample, rows [length, hidden]."""
    return to_int64(rows_checksum(rows, 0))


@dataclass(frozen=True)
class RowStats:
    """Mergeable statistics of one stream's rows; non-finite values count only in `nonfinite`."""

    sum_squares: float = 0.0
    absmax: float = 0.0
    nonfinite: int = 0
    count: int = 0

    def merge(self, other: "RowStats") -> "RowStats":
        """Statistics of both sets of rows together."""
        return RowStats(
            self.sum_squares + other.sum_squares,
            max(self.absmax, other.absmax),
            self.nonfinite + other.nonfinite,
            self.count + other.count,
        )

    def rms(self) -> float:
        """Root of the mean square over the finite values; 0 when there is none."""
        finite = self.count - self.nonfinite
        return float((self.sum_squares / finite) ** 0.5) if finite else 0.0


def to_float32(bits: np.ndarray, dtype: str) -> np.ndarray:
    """Values of stored bit patterns: uint16 (bfloat16, float16) or uint32 (float32), as float32."""
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype == "float16":
        return bits.view(np.float16).astype(np.float32)
    return bits.view(np.float32)


def row_stats(values: np.ndarray) -> RowStats:
    """Statistics of float32 `values` [rows, hidden]; squares are summed in float64."""
    total, peak, bad = 0.0, 0.0, 0
    for i in range(0, len(values), _BLOCK_ROWS):
        block = values[i : i + _BLOCK_ROWS]
        finite = np.isfinite(block)
        wrong = block.size - int(finite.sum())
        if wrong:
            block, bad = block[finite], bad + wrong
        if block.size:
            flat = block.astype(np.float64).ravel()
            total += float(flat @ flat)
            peak = max(peak, float(np.abs(block).max()))
    return RowStats(total, peak, bad, values.size)


_EXPONENTS = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000}  # all ones: no number
_DOT = 8192  # for longer ones BLAS starts threads of its own, beside those of the caller
_STAT_ROWS = 8  # widened to float64, they stay inside the L2 cache


def bits_stats(bits: np.ndarray, dtype: str) -> RowStats:
    """`row_stats` of stored bit patterns [rows, hidden] (uint16, uint32 for float32), several times
    faster when all values are finite: the largest is found among the patterns."""
    if not bits.size:
        return RowStats()
    sign = bits.dtype.type((1 << (8 * bits.dtype.itemsize - 1)) - 1)
    peak = max(
        int((bits[i : i + _BLOCK_ROWS] & sign).max()) for i in range(0, len(bits), _BLOCK_ROWS)
    )
    if peak >= _EXPONENTS[dtype]:
        return row_stats(to_float32(bits, dtype))
    shape = (_STAT_ROWS, bits.shape[1])
    wide = getattr(_scratch, "stats", None)
    if wide is None or wide[0].shape != shape:
        wide = _scratch.stats = (np.empty(shape, np.uint32), np.empty(shape, np.float64))
    total = 0.0
    for i in range(0, len(bits), _STAT_ROWS):
        block = bits[i : i + _STAT_ROWS]
        values = wide[1][: len(block)]
        if dtype == "bfloat16":
            high = wide[0][: len(block)]
            np.left_shift(block, 16, out=high, dtype=np.uint32, casting="unsafe")
            values[...] = high.view(np.float32)
        else:
            values[...] = block.view(np.float16 if dtype == "float16" else np.float32)
        flat = values.reshape(-1)
        for j in range(0, flat.size, _DOT):
            part = flat[j : j + _DOT]
            total += float(part @ part)
    largest = to_float32(np.array([peak], bits.dtype), dtype)[0]
    return RowStats(total, float(largest), 0, bits.size)


def fold(
    digests: np.ndarray, pieces: Sequence[tuple[int, int, int]], width: int
) -> list[list[tuple[int, RowStats]]]:
    """Partial checksums and statistics of pieces of rows of `width` values, [piece][stream].

    `digests`: int64 [stream, 4, row], of each row the sum of its weighted lanes (mod 2**64), then,
    as the bit patterns of float64, sum of squares and absolute maximum of its finite values, and
    the count of the others. `pieces`: (row, count > 0, position in the sample), rows ascending and
    apart. A fixed number of NumPy calls, however many pieces there are.
    """
    if not pieces:
        return []
    longest = max(position + count for _, count, position in pieces)
    table = _first_weights(1 << (longest - 1).bit_length())
    weights = np.concatenate([table[at : at + n] for _, n, at in pieces])
    first, end = pieces[0][0], pieces[-1][0] + pieces[-1][1]
    if end - first == len(weights):
        mine = digests[:, :, first:end]
    else:  # others' rows lie between
        rows = np.concatenate([np.arange(row, row + n) for row, n, _ in pieces])
        mine = digests[:, :, rows]
    starts = np.cumsum([0, *(n for _, n, _ in pieces)])[:-1]
    sums = np.add.reduceat(mine[:, 0].view(np.uint64) * weights, starts, axis=1)
    squares = np.add.reduceat(mine[:, 1].view(np.float64), starts, axis=1)
    peaks = np.maximum.reduceat(mine[:, 2].view(np.float64), starts, axis=1)
    bad = np.add.reduceat(mine[:, 3], starts, axis=1)
    columns = (a.T.tolist() for a in (sums, squares, peaks, bad))
    return [
        [
            (total, RowStats(square, peak, wrong, n * width))
            for total, square, peak, wrong in zip(*of_piece, strict=True)
        ]
        for (_, n, _), *of_piece in zip(pieces, *columns, strict=True)
    ]
