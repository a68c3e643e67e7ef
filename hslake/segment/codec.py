"""Encoding of single inner chunks, without zarr-python, bit-equal to what the metadata declares.

Every chunk ends in the crc32c of its encoded bytes, which every decode verifies.
"""

import threading
from typing import Any

import google_crc32c
import numpy as np
import zstandard
from numcodecs.blosc import SHUFFLE, Blosc

from hslake.errors import Corrupt, InvalidInput
from hslake.segment import bf16plane, bloscframe
from hslake.spec import LakeSpec
from hslake.zarrmeta import RAW_CODECS

CRC_BYTES = 4
# A byte plane must fill at least one zstd block, or the ratio falls from 0.69 to 0.78.
BLOSC_BLOCK = 1 << 20
_BLOSC = Blosc(cname="zstd", clevel=1, shuffle=SHUFFLE, blocksize=BLOSC_BLOCK)
_BLOSC_HEADER = 16
_ZSTD_LEVEL = 3
_UNSAID = -1  # zstandard's size of a frame that does not tell it
# Arrays as stored: bfloat16 as its bits.
_STORAGE = {"bfloat16": "<u2", "float16": "<f2", "float32": "<f4"}
_local = threading.local()  # zstandard's contexts are not thread-safe

(_BYTES,) = RAW_CODECS
_CRC = {"name": "crc32c"}
INDEX_CODECS: list[dict[str, Any]] = [_BYTES, _CRC]
TOKEN_CODECS: list[dict[str, Any]] = [
    _BYTES,
    {"name": "zstd", "configuration": {"level": _ZSTD_LEVEL, "checksum": False}},
    _CRC,
]


def storage_dtype(spec: LakeSpec) -> np.dtype:
    """NumPy dtype of stored hidden states: uint16 bits for bfloat16, else the native float."""
    return np.dtype(_STORAGE[spec.dtype])


def codec_metadata(spec: LakeSpec) -> list[dict[str, Any]]:
    """The Zarr v3 codecs of an inner chunk of `hidden_states`."""
    if spec.codec == "none":
        return [_BYTES, _CRC]
    if spec.codec == "bf16plane":
        return [_BYTES, {"name": bf16plane.NAME, "configuration": {}}, _CRC]
    if spec.codec != "standard":
        raise InvalidInput(f"codec {spec.codec!r} is unknown to this hslake: upgrade it")
    blosc = {
        "typesize": spec.itemsize,
        "cname": "zstd",
        "clevel": 1,
        "shuffle": "shuffle",
        "blocksize": BLOSC_BLOCK,
    }
    return [_BYTES, {"name": "blosc", "configuration": blosc}, _CRC]


def crc(data: bytes | memoryview | np.ndarray) -> bytes:
    """Little-endian crc32c of `data`."""
    found = np.frombuffer(data, np.uint8) if isinstance(data, memoryview) else data
    return int(google_crc32c.value(found)).to_bytes(CRC_BYTES, "little")  # type: ignore[arg-type]


def strip_crc(data: bytes | memoryview, where: str) -> memoryview:
    """`data` without its crc32c; raises Corrupt naming `where` when that does not match."""
    body = memoryview(data)[:-CRC_BYTES]
    if not len(body) or crc(body) != data[-CRC_BYTES:]:
        raise Corrupt(
            f"{where}: its {len(data)} bytes do not match their crc32c: the data is damaged; "
            "`hslake verify --quarantine` hides the sample, `hslake extract` captures it again"
        )
    return body


def _damaged(where: str, found: str, expected: str) -> Corrupt:
    return Corrupt(
        f"{where}: {found}, expected {expected}; `hslake verify --quarantine` hides the sample, "
        "`hslake extract` captures it again"
    )


def encode_chunk(spec: LakeSpec, rows: np.ndarray) -> bytes:
    """Encode one whole inner chunk [chunk_tokens, hidden] of values or their bits, with its crc32c.

    Raises InvalidInput for another shape or item size.
    """
    body = encode_body(spec, rows)
    return b"".join((body, crc(body)))


def encode_body(spec: LakeSpec, rows: np.ndarray) -> bytes | memoryview:
    """`encode_chunk` without the crc32c. With the codec `none` it is `rows`' own memory."""
    shape = (spec.geometry.chunk_tokens, spec.hidden_size)
    if rows.shape != shape or rows.dtype.itemsize != spec.itemsize:
        raise InvalidInput(
            f"a chunk of {rows.dtype} {rows.shape}, expected {spec.itemsize}-byte values {shape}"
        )
    bits = np.ascontiguousarray(rows).view(f"<u{spec.itemsize}").reshape(-1)
    if spec.codec == "standard":
        if spec.itemsize == bloscframe.TYPESIZE and bits.nbytes >= bloscframe.LEAST:
            frame = bloscframe.encode(bits, BLOSC_BLOCK)
            if len(frame) <= bits.nbytes + _BLOSC_HEADER:
                return frame
        return bytes(_BLOSC.encode(bits))  # which keeps what does not get shorter as it is
    if spec.codec == "bf16plane":
        return bf16plane.encode(bits)
    return bits.view(np.uint8).data


def decode_chunk(
    spec: LakeSpec, data: bytes | memoryview, where: str, out: np.ndarray | None = None
) -> np.ndarray:
    """Verify and decode one inner chunk to [chunk_tokens, hidden] of `storage_dtype(spec)`.

    `out`, when given, is a C-contiguous array of that shape and item size to decode into.
    Raises Corrupt naming `where` on damage.
    """
    return decode_body(spec, strip_crc(data, where), where, out)


def decode_body(
    spec: LakeSpec, body: bytes | memoryview, where: str, out: np.ndarray | None = None
) -> np.ndarray:
    """`decode_chunk` of what has no crc32c (any more)."""
    count = spec.geometry.chunk_tokens * spec.hidden_size
    if out is None:
        out = np.empty((spec.geometry.chunk_tokens, spec.hidden_size), storage_dtype(spec))
    bits = out.view(f"<u{spec.itemsize}").reshape(-1)
    expected = f"{count * spec.itemsize} bytes of {spec.dtype} in codec {spec.codec}"
    try:
        if spec.codec == "standard":
            bloscframe.check(body, bits.nbytes, spec.itemsize)
            _BLOSC.decode(body, out=bits)
        elif spec.codec == "bf16plane":
            bf16plane.decode(body, out=bits)
        else:
            if len(body) != bits.nbytes:
                raise _damaged(where, f"{len(body)} bytes", expected)
            bits[:] = np.frombuffer(body, bits.dtype)
    except (ValueError, RuntimeError) as e:
        raise _damaged(where, f"it does not decode ({e})", expected) from None
    return out


def encode_tokens(values: np.ndarray) -> bytes:
    """Encode one inner chunk of a token array (int32 or uint8)."""
    if not hasattr(_local, "compressor"):
        _local.compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL)
    body = _local.compressor.compress(values.astype(values.dtype.newbyteorder("<")).tobytes())
    return body + crc(body)


def decode_tokens(data: bytes | memoryview, dtype: np.dtype, count: int, where: str) -> np.ndarray:
    """Verify and decode one inner chunk of `count` tokens; raises Corrupt naming `where`."""
    body = strip_crc(data, where)
    size, expected = count * dtype.itemsize, f"{count} values of {dtype}"
    try:
        # Looked at first: zstandard allocates what the frame says it holds.
        found = zstandard.frame_content_size(body)
        if found not in (size, _UNSAID):
            raise _damaged(where, f"a zstd frame of {found} bytes", expected)
        raw = zstandard.ZstdDecompressor().decompress(body, max_output_size=size)
    except zstandard.ZstdError as e:
        raise _damaged(where, f"it does not decode ({e})", expected) from None
    if len(raw) != size:
        raise _damaged(where, f"{len(raw)} bytes", expected)
    return np.frombuffer(raw, dtype)
