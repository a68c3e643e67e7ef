"""Framed Arrow record batches: an append-only file in which damage cannot pass for data.

File: 8-byte head `HSLJ` + uint32 version, then frames. Frame: uint32 magic, uint32 sequence number
(from 0), uint32 payload length, uint32 CRC-32C over (sequence, length, payload), payload (an Arrow
IPC record batch message without schema), zero padding to 8 bytes. The file is preallocated with
zeros; the first zero magic ends the data. Little-endian.

A frame is written header first and magic last, so a writer that was killed in the middle leaves
one frame without a magic: it never was. Anything behind that frame is damage.
"""

import mmap
import os
import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import google_crc32c
import pyarrow as pa

from hslake.errors import Corrupt
from hslake.schemas import arrow_schema
from hslake.staging.space import SMALL_RESERVE, allocate, check_room

_HEAD = struct.pack("<4sI", b"HSLJ", 1)
_FRAME = struct.Struct("<IIII")
_MAGIC = 0x464C5348
_GROW = 1 << 20
_BLOCK = 1 << 16  # bytes of one read


def _crc(seq: int, payload: bytes) -> int:
    return google_crc32c.value(struct.pack("<II", seq, len(payload)) + payload)


def _extent(length: int) -> int:
    size = _FRAME.size + length
    return size + -size % 8


class FrameWriter:
    """Appends rows of one table to a new preallocated file; never reopens one."""

    def __init__(self, path: Path, table: str) -> None:
        self._schema = arrow_schema(table)
        pa.array([""])  # imports pandas where there is one: now, not in a forward pass
        self._folder = path.parent
        check_room(self._folder, _GROW, reserve=SMALL_RESERVE)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            allocate(self._fd, _GROW)
            self._map = mmap.mmap(self._fd, _GROW)
        except BaseException:
            os.close(self._fd)
            raise
        self._map[: len(_HEAD)] = _HEAD
        self._at, self._seq = len(_HEAD), 0

    def append(self, *rows: dict[str, Any]) -> None:
        """Write rows as one frame; it is visible to readers only when whole."""
        self._append(pa.RecordBatch.from_pylist(list(rows), schema=self._schema))

    def append_each(self, rows: Sequence[dict[str, Any]], written: Callable[[], object]) -> None:
        """Write rows as a frame each, calling `written` behind every one."""
        # Making Arrow of Python objects is what takes time: once for all.
        whole = pa.RecordBatch.from_pylist(list(rows), schema=self._schema)
        for i in range(len(rows)):
            self._append(whole.slice(i, 1))
            written()

    def _append(self, batch: pa.RecordBatch) -> None:
        payload = batch.serialize().to_pybytes()
        self.room(_extent(len(payload)))
        end = self._at + _extent(len(payload))
        body = self._at + _FRAME.size
        header = _FRAME.pack(_MAGIC, self._seq, len(payload), _crc(self._seq, payload))
        self._map[self._at + 4 : body] = header[4:]
        self._map[body : body + len(payload)] = payload
        # The magic goes last: until it stands, a reader sees a clean end.
        self._map[self._at : self._at + 4] = header[:4]
        self._at, self._seq = end, self._seq + 1

    def room(self, size: int) -> None:
        """Make sure that `size` more bytes of frames can be written. Raises NoSpace."""
        end = self._at + size
        if end > len(self._map):
            longer = len(self._map) + max(_GROW, end - len(self._map))
            check_room(self._folder, longer - len(self._map), reserve=SMALL_RESERVE)
            allocate(self._fd, longer)
            self._map.resize(longer)

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            self._map.close()
            os.close(self._fd)
            self._fd = -1


def read_frames(path: Path, table: str, *, final: bool = True) -> Iterator[dict[str, Any]]:
    """Rows of a frame file, in order, up to the first damage, which raises Corrupt.

    Rows before the damage have been yielded by then and are sound. `final`: nobody writes any more,
    so what lies behind the end is looked at too; while somebody does, that is no sign of damage.
    """
    schema, data = arrow_schema(table), path.read_bytes()
    if data[: len(_HEAD)] != _HEAD:
        raise Corrupt(f"{path}: head {data[:8]!r}, expected {_HEAD!r}")
    at, seq = len(_HEAD), 0
    while at + _FRAME.size <= len(data):
        magic, _, length, _ = _FRAME.unpack_from(data, at)
        if magic == 0:
            # At most one frame was never finished. Rows behind a hole are not lost quietly.
            if final and data[at + _extent(length) :].strip(b"\0"):
                raise Corrupt(f"{path}: bytes follow the end of the frames at byte {at}")
            break
        yield from _rows(path, schema, seq, at, data[at : at + _FRAME.size + length])
        at += _extent(length)
        seq += 1


def _rows(path: Path, schema: pa.Schema, seq: int, at: int, frame: bytes) -> list[dict[str, Any]]:
    """The rows of frame `seq` at byte `at`, of which `frame` is header and payload."""
    magic, found, length, crc = _FRAME.unpack_from(frame)
    payload = frame[_FRAME.size :]
    if magic != _MAGIC or found != seq or len(payload) != length:
        raise Corrupt(f"{path}: frame {seq} at byte {at} has a damaged header")
    if _crc(seq, payload) != crc:
        raise Corrupt(f"{path}: frame {seq} at byte {at} fails its CRC-32C")
    try:
        return pa.ipc.read_record_batch(pa.py_buffer(payload), schema).to_pylist()
    except pa.ArrowException as e:
        raise Corrupt(
            f"{path}: frame {seq} is sound, but no row with the columns {', '.join(schema.names)} "
            f"({e}): was it written by another version of hslake?"
        ) from None


class FrameTail:
    """Follows a frame file that grows: a call reads what is new and what it returns, no more.

    Not thread-safe.
    """

    def __init__(self, path: Path, table: str) -> None:
        self._path, self._schema = path, arrow_schema(table)
        self._starts = array("Q")  # byte offset of every frame seen
        self._end = len(_HEAD)

    def __len__(self) -> int:
        """Frames seen so far."""
        return len(self._starts)

    def read(self, first: int, limit: int) -> list[dict[str, Any]]:
        """Rows of frames [first, first + limit) that are there by now.

        Raises Corrupt for damage in them or in what is new, FileNotFoundError without the file.
        """
        fd = os.open(self._path, os.O_RDONLY)
        try:
            self._advance(fd)
            last = min(len(self._starts), first + limit)
            if first >= last:
                return []
            start = self._starts[first]
            end = self._starts[last] if last < len(self._starts) else self._end
            data = os.pread(fd, end - start, start)
        finally:
            os.close(fd)
        rows: list[dict[str, Any]] = []
        for seq in range(first, last):
            at = self._starts[seq] - start
            length = _FRAME.unpack_from(data, at)[2]
            frame = data[at : at + _FRAME.size + length]
            rows += _rows(self._path, self._schema, seq, at + start, frame)
        return rows

    def _advance(self, fd: int) -> None:
        """Take in the headers of frames that came since the last call."""
        data, base = b"", self._end
        while True:
            at = self._end - base
            if at + _FRAME.size > len(data):
                data, base = os.pread(fd, _BLOCK, self._end), self._end
                if len(data) < _FRAME.size:
                    return  # the file ends here until it is made longer
                continue
            magic, seq, length, _ = _FRAME.unpack_from(data, at)
            if magic == 0:
                return
            if magic != _MAGIC or seq != len(self._starts):
                raise Corrupt(
                    f"{self._path}: frame {len(self._starts)} at byte {self._end} has a damaged "
                    "header"
                )
            self._starts.append(self._end)
            self._end += _extent(length)
