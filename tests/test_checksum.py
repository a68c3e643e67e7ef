"""The checksum: published vectors, three implementations, and the damage it must catch."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hslake import checksum, schemas, torch_checksum

M = (1 << 64) - 1
VECTORS = json.loads((schemas.data_dir("schemas") / "checksum_vectors.json").read_text("utf-8"))
FEW = settings(max_examples=30, deadline=None)
RNG = np.random.default_rng(0)


def slow_mix(x):
    x = (x + 0x9E3779B97F4A7C15) & M
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & M
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & M
    return x ^ (x >> 31)


def slow_checksum(lanes, position):
    """The definition in DESIGN section 4, in Python's own integers."""
    total = 0
    for p, row in enumerate(lanes, start=position):
        inner = sum((slow_mix(c) | 1) * v for c, v in enumerate(row))
        total += (slow_mix((1 << 40) + p) | 1) * inner
    return total & M


def rows_of(vector):
    """Bit patterns [rows, hidden] of a published vector."""
    kind = np.uint32 if vector["dtype"] == "float32" else np.uint16
    if "rows" in vector:
        return np.array(vector["rows"], dtype=kind)
    n = vector["hidden"] * vector["count"]
    made = (np.arange(n, dtype=np.uint64) * 40503 + 12345) % 65536
    return made.astype(kind).reshape(vector["count"], vector["hidden"])


def as_torch(bits, dtype):
    signed = bits.view(np.int16 if bits.dtype.itemsize == 2 else np.int32)
    return torch.from_numpy(signed).view(getattr(torch, dtype))


@pytest.mark.parametrize("vector", VECTORS["vectors"], ids=lambda v: v["name"])
def test_published_vectors(vector):
    rows, position = rows_of(vector), vector["position"]
    lanes = rows.view("<u2").tolist()
    assert f"{slow_checksum(lanes, position):016x}" == vector["sum"]
    assert f"{checksum.rows_checksum(rows, position):016x}" == vector["sum"]
    tensor = as_torch(rows, vector["dtype"])
    assert f"{torch_checksum.digest(tensor, position)[0]:016x}" == vector["sum"]
    assert str(checksum.to_int64(int(vector["sum"], 16))) == vector["stored"]


@FEW
@given(st.integers(1, 70), st.integers(1, 40), st.integers(0, 1 << 20), st.integers(0, 2**32 - 1))
def test_implementations_agree(rows, hidden, position, seed):
    bits = np.random.default_rng(seed).integers(0, 65536, (rows, hidden)).astype(np.uint16)
    found = checksum.rows_checksum(bits, position)
    assert found == slow_checksum(bits.tolist(), position)
    for dtype in ("bfloat16", "float16"):
        assert found == torch_checksum.digest(as_torch(bits, dtype), position)[0]


@FEW
@given(st.integers(2, 90), st.data())
def test_partial_sums_add_up(rows, data):
    bits = RNG.integers(0, 65536, (rows, 33)).astype(np.uint16)
    cut = data.draw(st.integers(1, rows - 1))
    tensor = as_torch(bits, "bfloat16")
    parts = torch_checksum.digest(tensor[:cut], 0)[0]
    parts += torch_checksum.digest(tensor[cut:], cut)[0]
    assert checksum.to_int64(parts) == checksum.sample_checksum(bits)


def test_blocks_do_not_matter(monkeypatch):
    tensor = torch.randn(300, 64)
    whole = torch_checksum.digest(tensor, 5)
    monkeypatch.setattr(torch_checksum, "_CPU_BLOCK_BYTES", 8 * 128 * 7)
    again = torch_checksum.digest(tensor, 5)
    assert whole[0] == again[0] == checksum.rows_checksum(tensor.numpy(), 5)
    assert whole[1].absmax == again[1].absmax
    assert whole[1].sum_squares == pytest.approx(again[1].sum_squares, rel=1e-12)


def test_rows_with_a_stride():
    """A stream's columns in a wider tensor, as the server hands them over."""
    wide = torch.randn(20, 96)
    part = wide[:, 32:64]
    assert torch_checksum.digest(part)[0] == checksum.rows_checksum(part.numpy().copy())


def damage(bits, how):
    bits = bits.copy()
    if how == "swap rows":
        bits[[3, 9]] = bits[[9, 3]]
    elif how == "swap columns":
        bits[:, [1, 5]] = bits[:, [5, 1]]
    elif how == "shift rows":
        bits = np.roll(bits, 1, axis=0)
    elif how == "zero row":
        bits[7] = 0
    elif how == "two sign flips":
        bits[2, 3] ^= 0x8000
        bits[8, 3] ^= 0x8000
    elif how == "all signs of two rows":
        bits[[2, 8]] ^= 0x8000
    return bits


@pytest.mark.parametrize(
    "how",
    [
        "swap rows",
        "swap columns",
        "shift rows",
        "zero row",
        "two sign flips",
        "all signs of two rows",
    ],
)
def test_damage_is_caught(how):
    for seed in range(50):
        bits = np.random.default_rng(seed).integers(0, 65536, (32, 16)).astype(np.uint16)
        tensor = as_torch(damage(bits, how), "bfloat16")
        assert torch_checksum.digest(tensor)[0] != checksum.rows_checksum(bits), how


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_statistics_agree(dtype):
    tensor = (torch.randn(200, 48, dtype=torch.float64) * 30).to(getattr(torch, dtype))
    tensor[3, 4], tensor[150, 0], tensor[9, 9] = float("nan"), float("inf"), -float("inf")
    bits = tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32).numpy()
    values = checksum.to_float32(bits.view(f"u{tensor.element_size()}"), dtype)
    wanted, found = checksum.row_stats(values), torch_checksum.digest(tensor)[1]
    assert (found.nonfinite, found.count, found.absmax) == (3, 9600, wanted.absmax)
    assert found.rms() == pytest.approx(wanted.rms(), rel=1e-12)


def test_statistics_of_large_values_do_not_overflow():
    tensor = torch.full((4, 8), 3e38)
    assert torch_checksum.digest(tensor)[1].rms() == pytest.approx(3e38, rel=1e-6)


def test_no_rows():
    assert torch_checksum.digest(torch.empty(0, 8)) == (0, checksum.RowStats(0.0, 0.0, 0, 0))
