"""Chunks that say more than they hold, with a right crc32c: refused before anything is allocated
or read for them."""

import struct

import numpy as np
import pytest
import zstandard

from hslake.errors import Corrupt
from hslake.segment.codec import crc, decode_chunk, decode_tokens, encode_body, encode_tokens
from tests.segments import make_sample, spec_of

IDS = np.dtype("<i4")


def sealed(body: bytes | bytearray) -> bytes:
    return bytes(body) + crc(bytes(body))


@pytest.mark.parametrize("size", [256, 1 << 20, 1 << 31, 1 << 40, (1 << 64) - 3])
def test_tokens_of_another_size_than_the_chunk(size: int) -> None:
    head = struct.pack("<IBQ", 0xFD2FB528, 0xE0, size)  # zstd: the size of the content, 8 bytes
    with pytest.raises(Corrupt, match="a zstd frame of"):
        decode_tokens(sealed(head + b"\1\0\0"), IDS, 256, "x")


def test_tokens_of_a_frame_that_does_not_tell_its_size() -> None:
    def frame(values: np.ndarray) -> bytes:
        made = zstandard.ZstdCompressor(write_content_size=False)
        return sealed(made.compress(values.tobytes()))

    ids = np.arange(256, dtype=IDS)
    assert np.array_equal(decode_tokens(frame(ids), IDS, 256, "x"), ids)
    assert np.array_equal(decode_tokens(encode_tokens(ids), IDS, 256, "x"), ids)
    with pytest.raises(Corrupt):
        decode_tokens(frame(np.zeros(1 << 22, IDS)), IDS, 256, "x")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "at, values",
    [
        (8, (0, -1, 1 << 30)),  # bytes of a block
        (12, (0, 16, 1 << 30, -1)),  # bytes of the frame
        (4, (0, 1 << 30, -1)),  # bytes decoded
        (0, (0x01040102, 0)),  # version, version of the codec, flags, bytes of an item
    ],
)
def test_blosc_headers_that_lie(dtype: str, at: int, values: tuple[int, ...]) -> None:
    spec = spec_of(dtype, "standard")
    good = encode_body(spec, make_sample(spec, "a", 256, 0).hidden[0])
    for value in values:
        frame = bytearray(good)
        struct.pack_into("<i", frame, at, value)
        with pytest.raises(Corrupt, match="Blosc frame"):
            decode_chunk(spec, sealed(frame), "x")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_blosc_frames_cut_anywhere(dtype: str) -> None:
    """c-blosc is told no length: the header's is what keeps it in the frame."""
    spec = spec_of(dtype, "standard")
    good = encode_body(spec, make_sample(spec, "a", 256, 0).hidden[0])
    for size in (1, 15, 16, 19, 20, 24, len(good) // 2, len(good) - 1):
        with pytest.raises(Corrupt):
            decode_chunk(spec, sealed(good[:size]), "x")
        if size >= 16:  # with a header that fits
            frame = bytearray(good[:size])
            struct.pack_into("<i", frame, 12, size)
            with pytest.raises(Corrupt):
                decode_chunk(spec, sealed(frame), "x")
    for flags in (good[2] | 2, good[2] | 3):  # "the values follow as they are"
        frame = bytearray(good)
        frame[2] = flags
        with pytest.raises(Corrupt):
            decode_chunk(spec, sealed(frame), "x")
