"""hslake.torch_checksum's row digests as one Triton kernel: a single pass over the rows.

One program a row. Integer sums wrap mod 2**64, so the order in which they are added up does not
matter and the bits are those of the CPU.
"""

import torch
import triton
import triton.language as tl

_BLOCK = 1024


# Whatever changes from one forward to the next must not make Triton compile another variant: that
# would stop the server for seconds.
@triton.jit(do_not_specialize=["stride", "count"])
def _digest(  # type: ignore[no-untyped-def]
    rows,  # the bit patterns, int16 or int32
    weights,  # int64, one a 16-bit lane
    out,  # int64 [4, count]
    stride,  # elements from row to row
    count,
    width: tl.constexpr,
    kind: tl.constexpr,  # 0 bfloat16, 1 float16, 2 float32
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    base = rows + row * stride
    total = tl.zeros([block], tl.int64)
    squares = tl.zeros([block], tl.float64)
    peak = tl.zeros([block], tl.float32)
    bad = tl.zeros([block], tl.int64)
    for at in range(0, width, block):
        column = at + tl.arange(0, block)
        inside = column < width
        bits = tl.load(base + column, mask=inside, other=0)
        if kind == 2:
            low = (bits & 0xFFFF).to(tl.int64)
            high = ((bits >> 16) & 0xFFFF).to(tl.int64)
            total += low * tl.load(weights + 2 * column, mask=inside, other=0)
            total += high * tl.load(weights + 2 * column + 1, mask=inside, other=0)
            value = bits.to(tl.float32, bitcast=True)
        else:
            lanes = bits.to(tl.int64) & 0xFFFF
            total += lanes * tl.load(weights + column, mask=inside, other=0)
            if kind == 1:
                value = bits.to(tl.float16, bitcast=True).to(tl.float32)
            else:
                value = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        size = tl.abs(value)
        finite = size < float("inf")  # not so for NaN either
        size = tl.where(finite, size, 0.0)
        bad += tl.where(finite, 0, 1)
        peak = tl.maximum(peak, size)
        wide = size.to(tl.float64)
        squares += wide * wide
    place = out + row
    tl.store(place, tl.sum(total, 0))
    place += count
    tl.store(place, tl.sum(squares, 0).to(tl.int64, bitcast=True))
    place += count
    tl.store(place, tl.max(peak, 0).to(tl.float64).to(tl.int64, bitcast=True))
    place += count
    tl.store(place, tl.sum(bad, 0))


_KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


def row_digests(rows: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
    """Digest `rows` [n, width] into `out` int64 [4, n] (see hslake.checksum.fold).

    `weights`: int64 lane weights on the same device. Launched on the current stream.
    """
    bits = rows.view(torch.int32 if rows.element_size() == 4 else torch.int16)
    count, width = bits.shape
    if count:
        _digest[(count,)](
            bits, weights, out, bits.stride(0), count, width, _KINDS[rows.dtype], _BLOCK
        )
