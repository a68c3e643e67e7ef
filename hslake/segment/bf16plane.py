"""The codec `hslake.bf16plane`: entropy-code the exponents of bfloat16 values, keep the rest raw.

Each 16-bit value is split into its 8 exponent bits and a byte of sign (high bit) and mantissa. Only
the exponents (2.7 of 8 bits) compress; looking for matches there costs both ratio and speed.
Encoded form, little-endian:

    magic "HSP2" | values u32 | exponent bytes u32 | low bytes u32 | exponents | low plane

`exponents` is one zstd frame of the `values` exponents; the low plane (sign and mantissa) is raw
with zero bytes at its end cut, so the zero padding behind a sample costs nothing.
"""

import asyncio
import struct
import threading
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import zstandard
from zarr.abc.codec import BytesBytesCodec
from zarr.core.array_spec import ArraySpec
from zarr.core.buffer import Buffer

from hslake.segment.literals import compressor

NAME = "hslake.bf16plane"
_MAGIC = b"HSP2"
_HEADER = struct.Struct("<4sIII")
# Values split and joined at a time: what NumPy passes over several times must stay in the cache
# (four times faster than whole chunks), while a call into NumPy must be worth its overhead.
_BLOCK = 1 << 17
_PAGE = 4096
_SIGN, _MANTISSA = np.uint16(0x80), np.uint16(0x7F)
_SIGN_AND_MANTISSA = np.uint16(0x807F)
_SEVEN, _EIGHT = np.uint16(7), np.uint16(8)
_local = threading.local()  # zstandard's contexts are not thread-safe


def _decompressor() -> zstandard.ZstdDecompressor:
    if not hasattr(_local, "decompressor"):
        _local.decompressor = zstandard.ZstdDecompressor()
    return _local.decompressor


def encode(data: Any) -> bytes:
    """Encode little-endian 16-bit values (any contiguous buffer of an even number of bytes)."""
    flat = np.frombuffer(data, np.uint8)
    if flat.size % 2:
        raise ValueError(f"{NAME} encodes 16-bit values, found {flat.size} bytes")
    exponents, low = _planes(flat.size // 2)
    _split(flat.view("<u2"), exponents, low)
    frame = compressor().compress(exponents.data)
    raw = low[: _used(low)].data
    return b"".join([_HEADER.pack(_MAGIC, low.size, len(frame), len(raw)), frame, raw])


def _planes(size: int) -> np.ndarray:
    """Two uint8 planes [2, size] of this thread's own, to be used again: with fresh pages for each
    chunk, half of the time of encoding would go into page faults."""
    if not hasattr(_local, "planes") or _local.planes.shape[1] < size:
        _local.planes = np.empty((2, size), np.uint8)
    return _local.planes[:, :size]


def _used(plane: np.ndarray) -> int:
    """Length of `plane` without the zeros at its end, in steps of a page."""
    end = plane.size
    while end and not plane[max(0, end - _PAGE) : end].any():
        end = max(0, end - _PAGE)
    return end


def _split(values: np.ndarray, exponents: np.ndarray, low: np.ndarray) -> None:
    """Fill the planes of flat uint16 `values`: exponents, and sign and mantissa, uint8 each."""
    work, mantissa = np.empty((2, min(_BLOCK, values.size)), np.uint16)
    for at in range(0, values.size, _BLOCK):
        v = values[at : at + _BLOCK]
        w, m = work[: v.size], mantissa[: v.size]
        np.right_shift(v, _SEVEN, out=w)
        exponents[at : at + _BLOCK] = w  # the conversion to a byte drops the sign
        np.right_shift(v, _EIGHT, out=w)
        np.bitwise_and(w, _SIGN, out=w)
        np.bitwise_and(v, _MANTISSA, out=m)
        np.bitwise_or(w, m, out=w)
        low[at : at + _BLOCK] = w


def _join(exponents: np.ndarray, low: np.ndarray, values: np.ndarray) -> None:
    """Put the planes back into flat uint16 `values`; `low` may be shorter, zeros follow it."""
    work = np.empty(min(_BLOCK, values.size), np.int16)
    for at in range(0, values.size, _BLOCK):
        v = values[at : at + _BLOCK]
        v[...] = exponents[at : at + _BLOCK]
        np.left_shift(v, _SEVEN, out=v)
        part = low[at : at + _BLOCK]
        work[: part.size] = part.view(np.int8)  # extends the sign to bit 15, where it belongs
        w = work[: part.size].view(np.uint16)
        np.bitwise_and(w, _SIGN_AND_MANTISSA, out=w)
        np.bitwise_or(v[: part.size], w, out=v[: part.size])


def decode(data: Any, out: np.ndarray | None = None) -> np.ndarray:
    """Decode to a flat little-endian uint16 array, or into `out` (flat uint16 of that size).

    Raises ValueError when the data is not what `encode` writes or does not fit `out`.
    """
    view = memoryview(data).cast("B")
    if len(view) < _HEADER.size:
        raise ValueError(f"{len(view)} bytes, shorter than the {NAME} header")
    magic, count, frame_bytes, low_bytes = _HEADER.unpack_from(view)
    if magic != _MAGIC or len(view) != _HEADER.size + frame_bytes + low_bytes or low_bytes > count:
        raise ValueError(f"the {NAME} header does not fit its {len(view)} bytes")
    if out is not None and out.size != count:
        raise ValueError(f"{count} values, expected {out.size}")
    frame = view[_HEADER.size : _HEADER.size + frame_bytes]
    try:
        if zstandard.frame_content_size(frame) != count:
            raise ValueError(f"the exponent frame does not hold {count} values")
        exponents = np.frombuffer(_decompressor().decompress(frame), np.uint8)
    except zstandard.ZstdError as e:
        raise ValueError(f"the exponent frame does not decode ({e})") from None
    if exponents.size != count:
        raise ValueError(f"{exponents.size} exponents, expected {count}")
    values = np.empty(count, "<u2") if out is None else out
    _join(exponents, np.frombuffer(view[_HEADER.size + frame_bytes :], np.uint8), values)
    return values


@dataclass(frozen=True)
class Bf16PlaneCodec(BytesBytesCodec):
    """The codec for zarr-python, a bytes-to-bytes codec behind `bytes` (little-endian)."""

    is_fixed_size = False

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Accepts the name alone or with an empty configuration; raises ValueError otherwise."""
        if data.get("name") != NAME or data.get("configuration"):
            raise ValueError(f"found {data!r}, expected {NAME!r} with no configuration")
        return cls()

    def to_dict(self) -> dict[str, Any]:
        """The codec's metadata."""
        return {"name": NAME, "configuration": {}}

    async def _encode_single(self, chunk: Buffer, spec: ArraySpec) -> Buffer | None:
        encoded = await asyncio.to_thread(encode, chunk.to_bytes())
        return spec.prototype.buffer.from_bytes(encoded)

    async def _decode_single(self, chunk: Buffer, spec: ArraySpec) -> Buffer:
        decoded = await asyncio.to_thread(decode, chunk.to_bytes())
        return spec.prototype.buffer.from_array_like(decoded.view("B"))

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: ArraySpec) -> int:
        """Not known ahead of encoding."""
        raise NotImplementedError(f"{NAME} has no fixed encoded size")
