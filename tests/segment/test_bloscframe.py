"""Blosc frames of our own: what c-blosc makes of them, and what they cost."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numcodecs.blosc import Blosc, _cbuffer_sizes  # type: ignore[attr-defined]

from hslake.segment import bloscframe

BLOCK = 1 << 12


def states(size: int, seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal(size, dtype=np.float32)
    return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def decoded(frame: bytes) -> np.ndarray:
    return np.frombuffer(Blosc().decode(frame), np.uint16)


@pytest.mark.parametrize("size", [512, 513, 2047, 2048, 2049, 5000, 6 * 2048, 6 * 2048 + 1])
@pytest.mark.parametrize("kind", ["states", "zeros", "zero tail", "noise", "constant"])
def test_blosc_reads_it(size: int, kind: str) -> None:
    bits = states(size)
    if kind == "zeros":
        bits[:] = 0
    elif kind == "zero tail":
        bits[size // 3 :] = 0
    elif kind == "noise":
        bits = np.random.default_rng(1).integers(0, 1 << 16, size).astype(np.uint16)
    elif kind == "constant":
        bits[:] = 0x8000
    frame = bloscframe.encode(bits, BLOCK)
    assert np.array_equal(decoded(frame), bits)
    assert _cbuffer_sizes(frame) == (2 * size, len(frame), min(BLOCK, 2 * size))


@given(st.integers(512, 9000), st.integers(0, 9000), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_any_size_and_tail(size: int, zeros: int, seed: int) -> None:
    bits = states(size, seed)
    bits[max(0, size - zeros) :] = 0
    assert np.array_equal(decoded(bloscframe.encode(bits, BLOCK)), bits)


def test_smaller_than_c_blosc_makes_it() -> None:
    bits = states(1 << 20)
    ours = bloscframe.encode(bits, 1 << 20)
    theirs = Blosc(cname="zstd", clevel=1, shuffle=Blosc.SHUFFLE, blocksize=1 << 20).encode(bits)
    assert len(ours) < len(theirs)
    bits[1 << 18 :] = 0
    assert len(bloscframe.encode(bits, 1 << 20)) < 0.27 * len(ours)  # padding costs nothing
