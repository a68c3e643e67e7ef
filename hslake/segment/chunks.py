"""Samples to encoded chunks, on many threads, in order, a bounded way ahead.

The work is cut into units: the part of a sample that lies in one shard. Units come out in the order
of the samples; as much as fills half a shard is encoded ahead of the one that is asked for.
"""

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from hslake import checksum
from hslake.errors import Corrupt
from hslake.segment.codec import crc, decode_body, encode_body
from hslake.segment.layout import hidden_grid
from hslake.segment.samples import SegmentSample
from hslake.segment.shard import Piece
from hslake.spec import LakeSpec

_local = threading.local()  # memory of a thread, used again: fresh pages cost page faults


class StatesDiffer(Corrupt):
    """What was encoded does not have the checksum that was taken at capture."""


@dataclass(frozen=True)
class Unit:
    """Rows [at, at + rows) of a sample: those that lie in one shard, from its chunk number `chunk`
    on. `last`: the sample ends here."""

    sample: SegmentSample
    at: int
    rows: int
    shard: int
    chunk: int
    last: bool


@dataclass(frozen=True)
class Chunk:
    """An encoded chunk in pieces, crc32c last, and the partial checksum of what decodes from it."""

    pieces: tuple[Piece, ...]
    partial: int


_Jobs = list[list[Future[Chunk]]]  # [stream][chunk]


def units(
    spec: LakeSpec, samples: Iterable[SegmentSample], pool: ThreadPoolExecutor
) -> Iterator[tuple[Unit, list[list[Chunk]]]]:
    """(unit, its encoded chunks [stream][chunk]) in order.

    Raises InvalidInput for a sample that does not fit the spec, and what reading one raises; what
    was begun is called off then.
    """
    ahead: deque[tuple[Unit, _Jobs]] = deque()
    rows = 0
    try:
        for unit in _cut(spec, samples):
            ahead.append((unit, _start(spec, unit, pool)))
            rows += unit.rows
            while len(ahead) > 1 and rows > spec.geometry.shard_tokens // 2:
                first, jobs = ahead.popleft()
                rows -= first.rows
                yield first, _results(jobs)
        while ahead:
            first, jobs = ahead.popleft()
            yield first, _results(jobs)
    finally:
        for _, jobs in ahead:
            for future in (f for stream in jobs for f in stream):
                future.cancel()


def _cut(spec: LakeSpec, samples: Iterable[SegmentSample]) -> Iterator[Unit]:
    grid, size = hidden_grid(spec), spec.geometry.chunk_tokens
    chunk = 0  # in the segment
    for sample in samples:
        sample.check(spec)
        length, at = sample.length, 0
        while at < length:
            shard, place = divmod(chunk, grid.chunks)
            rows = min(length - at, (grid.chunks - place) * size)
            yield Unit(sample, at, rows, shard, place, at + rows == length)
            at += rows
            chunk += -(-rows // size)


def _start(spec: LakeSpec, unit: Unit, pool: ThreadPoolExecutor) -> _Jobs:
    size, end = spec.geometry.chunk_tokens, unit.at + unit.rows
    return [
        [
            pool.submit(
                _encode,
                spec,
                source,
                at,
                min(size, end - at),
                f"sample {unit.sample.sample_id}, stream {stream}, row {at}, just encoded",
            )
            for at in range(unit.at, end, size)
        ]
        for stream, source in zip(spec.streams, unit.sample.hidden, strict=True)
    ]


def _results(jobs: _Jobs) -> list[list[Chunk]]:
    try:
        return [[f.result() for f in stream] for stream in jobs]
    except BaseException:
        for future in (f for stream in jobs for f in stream):
            future.cancel()
        raise


def _encode(spec: LakeSpec, source: Any, at: int, n: int, where: str) -> Chunk:
    """Encode rows [at, at + n) of a stream, n <= chunk; then decode and take the checksum of that.

    The crc32c is taken last: of bytes that have been decoded to what the checksum speaks for.
    """
    rows = _rows(spec, source, at, n)
    body = encode_body(spec, rows)
    if spec.codec == "none":
        out = np.frombuffer(body, rows.dtype).reshape(rows.shape)
    else:
        out = decode_body(spec, body, where, _memory("out", spec, rows.dtype))
    return Chunk((body, crc(body)), checksum.rows_checksum(out[:n], at))


def _rows(spec: LakeSpec, source: Any, at: int, n: int) -> np.ndarray:
    """A whole chunk of rows, zero-padded."""
    size = spec.geometry.chunk_tokens
    keep = spec.codec == "none"  # what is stored as it is must have memory of its own
    lazy = not isinstance(source, np.ndarray)
    if n == size and not keep and not lazy:
        return source[at : at + n]
    shape = (size, spec.hidden_size)
    whole = np.empty(shape, source.dtype) if keep else _memory("rows", spec, source.dtype)
    if lazy:
        source.read_into(at, whole[:n])
    else:
        whole[:n] = source[at : at + n]
    whole[n:] = 0
    return whole


def _memory(name: str, spec: LakeSpec, dtype: np.dtype) -> np.ndarray:
    """A chunk [chunk_tokens, hidden] of this thread's own."""
    shape = (spec.geometry.chunk_tokens, spec.hidden_size)
    found: np.ndarray | None = getattr(_local, name, None)
    if found is None or found.shape != shape or found.dtype != dtype:
        found = np.empty(shape, dtype)
        setattr(_local, name, found)
    return found
