"""The memory of a part: its chunk files, allocated and mapped once, handed on at recycling.

On CUDA it is page-locked as well, which costs half a second a gigabyte: never in a forward pass.
"""

import mmap
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hslake.spec import LakeSpec
from hslake.staging.space import allocate, alone, check_room

_BESIDE = 2 << 20  # bytes of a part's journal and metadata

# (address, bytes) of a map -> the function that undoes it. Raises NoSpace.
PageLock = Callable[[int, int], Callable[[], None]]


def bits_dtype(itemsize: int) -> np.dtype:
    """Unsigned dtype of the stored bit patterns: uint16 or uint32, little-endian."""
    return np.dtype(f"<u{itemsize}")


def part_bytes(spec: LakeSpec, capacity: int) -> int:
    """Bytes of staging one part of `capacity` rows takes."""
    return capacity * (spec.bytes_per_token + 4) + _BESIDE


def rows_in(spec: LakeSpec, size: int) -> int:
    """Rows of the largest part that takes at most `size` bytes of staging."""
    return max(0, size - _BESIDE) // (spec.bytes_per_token + 4)


def chunk_files(part: Path, streams: int) -> tuple[list[Path], Path]:
    """The chunks of a part's folder: hidden states, one file a stream, and token ids."""
    hidden = [part / f"hidden_states/c/{i}/0/0" for i in range(streams)]
    return hidden, part / "input_ids/c/0"


class PartMemory:
    """The maps of one part's chunks: `hidden` one array [capacity, hidden] of bits a stream,
    `input_ids` int32 [capacity].

    Raises NoSpace when the filesystem, the memory cgroup or the page lock has no room for it.
    """

    def __init__(
        self, path: Path, spec: LakeSpec, capacity: int, page_lock: PageLock | None = None
    ) -> None:
        self._maps: list[mmap.mmap] = []
        self._unlocks: list[Callable[[], None]] = []
        self.hidden: list[np.ndarray] = []
        size = capacity * spec.hidden_size * spec.itemsize
        files, ids = chunk_files(path, len(spec.streams))
        # One process at a time: each would take for its own what both see to be free.
        with alone(path.parent.parent):
            check_room(path.parent, part_bytes(spec, capacity))
            for file in files:
                _allocate(file, size)
            _allocate(ids, capacity * 4)
        try:
            for file in files:
                bits = np.frombuffer(self._map(file, page_lock), bits_dtype(spec.itemsize))
                self.hidden.append(bits.reshape(capacity, spec.hidden_size))
            self.input_ids = np.frombuffer(self._map(ids, page_lock), "<i4")
        except BaseException:
            self.close()
            raise

    def _map(self, path: Path, page_lock: PageLock | None) -> mmap.mmap:
        with path.open("r+b") as f:
            made = mmap.mmap(f.fileno(), 0)
        self._maps.append(made)
        if page_lock is not None:
            address = np.frombuffer(made, np.uint8).ctypes.data
            self._unlocks.append(page_lock(address, len(made)))
        return made

    def close(self) -> None:
        """Unlock and drop the maps, so that unlinked pages are really freed. Idempotent."""
        while self._unlocks:
            self._unlocks.pop()()
        self.hidden, self.input_ids = [], np.empty(0, "<i4")
        for m in self._maps:
            try:
                m.close()
            except BufferError:  # a caller still holds a view; its death frees the pages
                continue
        self._maps = []


def _allocate(path: Path, size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        allocate(fd, size)
    finally:
        os.close(fd)
