"""The CUDA kernel of the checksum, run by Triton's interpreter: the same digests as on the CPU.

On a GPU it is compiled from the same source; benchmarks/hook_h200.py verifies every row there.
"""

import os

import numpy as np
import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"  # read where the kernel is defined

from hslake import checksum, torch_checksum, torch_kernel

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def on_device(rows: torch.Tensor) -> np.ndarray:
    lanes = rows.shape[1] * rows.element_size() // 2
    weights = torch.from_numpy(checksum.lane_weights(lanes).view("int64"))
    out = torch.full((4, len(rows)), -1, dtype=torch.int64)
    torch_kernel.row_digests(rows, weights, out)
    return out.numpy()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "hidden"), [(1, 1), (3, 8), (5, 576), (2, 1024), (4, 2500)])
def test_the_kernel_gives_the_cpus_digests(dtype: torch.dtype, rows: int, hidden: int) -> None:
    random = torch.Generator().manual_seed(rows * hidden)
    wide = (torch.randn(rows, 3 * hidden, generator=random, dtype=torch.float64) * 50).to(dtype)
    wide[0, hidden], wide[rows - 1, hidden] = float("nan"), -0.0
    wide[rows // 2, 2 * hidden - 1] = float("-inf")
    part = wide[:, hidden : 2 * hidden]  # a stream inside packed states
    found, expected = on_device(part), torch_checksum.row_digests(part).numpy()
    assert (found[[0, 2, 3]] == expected[[0, 2, 3]]).all()
    assert found[1].view(np.float64) == pytest.approx(expected[1].view(np.float64), rel=1e-12)
    bits = part.contiguous().view(torch.int32 if dtype == torch.float32 else torch.int16).numpy()
    [[(total, stats)]] = checksum.fold(found[None], [(0, rows, 7)], hidden)
    assert total == checksum.rows_checksum(bits.view(f"u{bits.itemsize}"), 7)
    assert stats.nonfinite == expected[3].sum() and stats.count == rows * hidden


def test_random_bits_of_every_kind() -> None:
    bits = np.random.default_rng(4).integers(0, 65536, (64, 96)).astype(np.uint16)
    for dtype in DTYPES:
        rows = torch.from_numpy(bits.view(np.int16)).view(dtype)
        assert (on_device(rows)[0] == torch_checksum.row_digests(rows).numpy()[0]).all()


def test_no_rows() -> None:
    assert on_device(torch.empty(0, 8)).shape == (4, 0)
