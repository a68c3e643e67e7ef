"""Framed Arrow record batches: an append-only file in which damage cannot pass for data.

File: 8-byte head `HSLJ` + uint32 version, then frames. Frame: uint32 magic, uint32 sequence number
(from 0), uint32 payload length, uint32 CRC-32C over (sequence, length, payload), payload (an Arrow
IPC record batch message without schema), zero padding to 8 bytes. The file is preallocated with
zeros; the first zero magic ends the data, and everything behind it must be zero. Little-endian.
"""

import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import pyarrow as pa

from hslake.errors import Corrupt
from hslake.schemas import arrow_schema
from hslake.staging.space import allocate

_HEAD = struct.pack("<4sI", b"HSLJ", 1)
_FRAME = struct.Struct("<IIII")
_MAGIC = 0x464C5348
_GROW = 1 << 20


def _crc(seq: int, payload: bytes) -> int:
    return google_crc32c.value(struct.pack("<II", seq, len(payload)) + payload)


class FrameWriter:
    """Appends rows of one table to a new preallocated file; never reopens one."""

    def __init__(self, path: Path, table: str) -> None:
        self._schema = arrow_schema(table)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        allocate(self._fd, _GROW)
        self._map = mmap.mmap(self._fd, _GROW)
        self._map[: len(_HEAD)] = _HEAD
        self._at, self._seq = len(_HEAD), 0

    def append(self, row: dict[str, Any]) -> None:
        """Write one row as one frame; it is visible to readers only when whole."""
        batch = pa.RecordBatch.from_pylist([row], schema=self._schema)
        payload = batch.serialize().to_pybytes()
        end = self._at + _FRAME.size + len(payload)
        end += -end % 8
        if end > len(self._map):
            size = len(self._map) + max(_GROW, end - len(self._map))
            allocate(self._fd, size)
            self._map.resize(size)
        body = self._at + _FRAME.size
        self._map[body : body + len(payload)] = payload
        header = _FRAME.pack(_MAGIC, self._seq, len(payload), _crc(self._seq, payload))
        # The magic goes last: until it stands, a reader sees a clean end.
        self._map[self._at + 4 : body] = header[4:]
        self._map[self._at : self._at + 4] = header[:4]
        self._at, self._seq = end, self._seq + 1

    def close(self) -> None:
        self._map.close()
        os.close(self._fd)


def read_frames(path: Path, table: str) -> Iterator[dict[str, Any]]:
    """Rows of a frame file, in order, up to the first damage, which raises Corrupt.

    Rows before the damage have been yielded by then and are sound.
    """
    schema = arrow_schema(table)
    data = path.read_bytes()
    if data[: len(_HEAD)] != _HEAD:
        raise Corrupt(f"{path}: head {data[:8]!r}, expected {_HEAD!r}")
    at, seq = len(_HEAD), 0
    while at + _FRAME.size <= len(data):
        magic, found_seq, length, crc = _FRAME.unpack_from(data, at)
        if magic == 0:
            # Zeros to the end, or something was wiped: rows behind a hole are not lost quietly.
            if data[at:].strip(b"\0"):
                raise Corrupt(f"{path}: bytes follow the end of the frames at byte {at}")
            break
        payload = data[at + _FRAME.size : at + _FRAME.size + length]
        if magic != _MAGIC or found_seq != seq or len(payload) != length:
            raise Corrupt(f"{path}: frame {seq} at byte {at} has a damaged header")
        if _crc(seq, payload) != crc:
            raise Corrupt(f"{path}: frame {seq} at byte {at} fails its CRC-32C")
        yield from pa.ipc.read_record_batch(pa.py_buffer(payload), schema).to_pylist()
        at += _FRAME.size + length
        at += -at % 8
        seq += 1
