"""The codec `hslake.bf16plane`: entropy-code the exponents of bfloat16 values, keep the rest raw.

Each 16-bit value is rotated left by one, so its high byte is exactly the exponent and its low byte
mantissa and sign. Only the exponents (2.7 of 8 bits) compress; looking for matches there costs
both ratio and speed. Encoded form, little-endian:

    magic "HSP1" | values u32 | exponent bytes u32 | low bytes u32 | exponents | low plane

`exponents` is one zstd frame of the `values` high bytes; the low plane is raw with its trailing
zero bytes cut, so the zero padding behind a sample costs nothing.
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

NAME = "hslake.bf16plane"
_MAGIC = b"HSP1"
_HEADER = struct.Struct("<4sIII")
# A hash table of 64 entries and the longest minimum match: next to no match is found, so a block
# is Huffman-coded literals. The window must hold a whole 128 KiB block.
_PARAMETERS = zstandard.ZstdCompressionParameters(
    window_log=17,
    chain_log=6,
    hash_log=6,
    search_log=1,
    min_match=7,
    target_length=0,
    strategy=zstandard.STRATEGY_FAST,
    write_content_size=True,
)
_local = threading.local()  # zstandard's contexts are not thread-safe


def _compressor() -> zstandard.ZstdCompressor:
    if not hasattr(_local, "compressor"):
        _local.compressor = zstandard.ZstdCompressor(compression_params=_PARAMETERS)
    return _local.compressor


def _decompressor() -> zstandard.ZstdDecompressor:
    if not hasattr(_local, "decompressor"):
        _local.decompressor = zstandard.ZstdDecompressor()
    return _local.decompressor


def encode(data: Any) -> bytes:
    """Encode little-endian 16-bit values (any contiguous buffer of an even number of bytes)."""
    flat = np.frombuffer(data, np.uint8)
    if flat.size % 2:
        raise ValueError(f"{NAME} encodes 16-bit values, found {flat.size} bytes")
    values = flat.view("<u2")
    rotated = (values << np.uint16(1)) | (values >> np.uint16(15))
    exponents = (rotated >> np.uint16(8)).astype(np.uint8)
    low = rotated.astype(np.uint8)
    frame = _compressor().compress(exponents.data)
    raw = low.tobytes().rstrip(b"\0")
    return b"".join([_HEADER.pack(_MAGIC, values.size, len(frame), len(raw)), frame, raw])


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
        high = np.frombuffer(_decompressor().decompress(frame), np.uint8)
    except zstandard.ZstdError as e:
        raise ValueError(f"the exponent frame does not decode ({e})") from None
    if high.size != count:
        raise ValueError(f"{high.size} exponents, expected {count}")
    values = np.empty(count, "<u2") if out is None else out
    planes = values.view(np.uint8)
    planes[1::2] = high
    planes[0 : 2 * low_bytes : 2] = np.frombuffer(view[_HEADER.size + frame_bytes :], np.uint8)
    planes[2 * low_bytes :: 2] = 0
    sign = values << np.uint16(15)
    np.right_shift(values, np.uint16(1), out=values)
    np.bitwise_or(values, sign, out=values)
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
