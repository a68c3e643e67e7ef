"""Shards of the Zarr codec `sharding_indexed`: chunks in the order they are added, then the index.

zarr-python writes inner chunks in Morton order, which scatters a sample; here the writer decides,
and lays a sample's chunks one behind the other. Readers see a standard shard either way.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from hslake.errors import Corrupt, InvalidInput
from hslake.segment.codec import crc, strip_crc
from hslake.segment.layout import Grid
from hslake.store import Piece

_MARK = b"HSLKNAME"
NAME_BYTES = len(_MARK) + 16
ABSENT = np.uint64(0xFFFFFFFFFFFFFFFF)


def name_of(segment_id: str, key: str) -> bytes:
    """What stands before a shard's index and says which object it is.

    No index entry points there, so other readers pass over it. A shard that was put in the place
    of another, whole and sound, is told by it: chunks and index know nothing of where they belong.
    """
    return _MARK + hashlib.sha256(f"{segment_id}/{key}".encode()).digest()[:16]


class ShardWriter:
    """Collects the encoded chunks of one shard in memory."""

    def __init__(self, grid: Grid) -> None:
        self._index = np.full((*grid.index_shape, 2), ABSENT, "<u8")
        self._parts: list[Piece] = []
        self._size = 0

    def add(self, stream: int, chunk: int, pieces: Sequence[Piece]) -> None:
        """Append the encoded chunk number `chunk` (within the shard) of `stream`, in pieces.

        Raises InvalidInput when it has already been added.
        """
        if self._index[stream, chunk, 0] != ABSENT:
            raise InvalidInput(f"chunk {chunk} of stream {stream} was added to the shard twice")
        size = sum(map(len, pieces))
        self._index[stream, chunk] = (self._size, size)
        self._parts += pieces
        self._size += size

    def finish(self, name: bytes = b"") -> list[Piece]:
        """The shard's bytes, in pieces: joining them would copy hundreds of megabytes. The writer
        is empty afterwards and must not be used again. `name`: see `name_of`."""
        index = self._index.tobytes()
        parts, self._parts = self._parts, []
        return [*parts, *([name] if name else []), index, crc(index)]


def parse_index(
    grid: Grid, data: bytes | memoryview, where: str, name: bytes | None = None
) -> np.ndarray:
    """The index [stream, chunk, (offset, bytes)] uint64 from the last bytes of a shard.

    `name`: what must stand before it, if anything of the kind does (older shards have none).
    Raises Corrupt naming `where` when it is short, does not match its crc32c or is another's.
    """
    before, data = data[: -grid.index_bytes], data[-grid.index_bytes :]
    if len(data) != grid.index_bytes:
        raise Corrupt(
            f"{where}: {len(data)} bytes where the index takes {grid.index_bytes}: the object was "
            "cut short; `hslake verify --quarantine` hides its samples"
        )
    body = strip_crc(data, f"{where}: shard index")
    found = bytes(before[-NAME_BYTES:])
    if name is not None and found.startswith(_MARK) and found != name:
        raise Corrupt(
            f"{where}: another object, sound, is in its place: restore the right one from a copy; "
            "`hslake verify --quarantine` hides its samples"
        )
    return np.frombuffer(body, "<u8").reshape(*grid.index_shape, 2)
