"""Writing one segment: encode, decode again and compare, store, confirm, inventory last.

The next samples are encoded while the last shard is hashed and written, so that all cores and the
disk work at once. A crash anywhere leaves objects without an inventory, which nothing refers to.
"""

import contextlib
import os
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from hslake import checksum
from hslake.errors import Corrupt, InvalidInput
from hslake.segment import inventory
from hslake.segment.codec import decode_chunk, encode_chunk, encode_tokens
from hslake.segment.layout import (
    INVENTORY,
    TOKEN_DTYPES,
    hidden_grid,
    metadata_documents,
    new_segment_id,
    padded,
    segment_prefix,
    token_grid,
)
from hslake.segment.readback import Stored, confirm, put_sampled
from hslake.segment.shard import ShardWriter, name_of
from hslake.spec import LakeSpec
from hslake.store import Store

__all__ = [
    "SegmentInfo",
    "SegmentSample",
    "StatesDiffer",
    "new_segment_id",
    "remove_segment",
    "write_segment",
]

_STORING = 2  # shards that are being hashed and written, or wait for it
_NICE = 10  # of the threads that encode and store
_scratch = threading.local()  # where a thread decodes to: fresh memory costs page faults


class StatesDiffer(Corrupt):
    """What was encoded does not have the checksum that was taken at capture."""


@dataclass(frozen=True)
class SegmentSample:
    """One sample to store.

    `hidden` has one array [length, hidden] per stream of the spec, in its order: the bit patterns
    (uint16, or uint32 for float32). `checksum` is the one taken at capture, one int64 a stream.
    """

    sample_id: str
    hidden: Sequence[np.ndarray]
    input_ids: np.ndarray | Sequence[int]
    loss_mask: np.ndarray | Sequence[int]
    checksum: Sequence[int]


@dataclass(frozen=True)
class SegmentInfo:
    """A written segment.

    `placements` are (sample_id, token_start); `tokens` counts the padding between samples too;
    `raw_bytes` are the samples' states before the codec, `stored_bytes` all objects.
    """

    segment_id: str
    placements: list[tuple[str, int]]
    tokens: int
    raw_bytes: int
    stored_bytes: int
    inventory_digest: str


class _Objects:
    """Stores the objects of one segment in the background and remembers them for the inventory."""

    def __init__(self, store: Store, segment_id: str, pool: ThreadPoolExecutor) -> None:
        self.store, self.prefix, self._pool = store, segment_prefix(segment_id), pool
        self._segment_id = segment_id
        self.written: list[inventory.Object] = []
        self._stored: dict[str, Stored] = {}
        self._storing: deque[tuple[Future[inventory.Object], Future[Stored]]] = deque()

    def put(self, key: str, pieces: Sequence[bytes]) -> None:
        """Begin to store an object; waits while too many are under way. Raises what storing an
        earlier one raised."""
        while len(self._storing) >= _STORING:
            self._wait()
        put = self._pool.submit(put_sampled, self.store, self.prefix + key, pieces)
        self._storing.append((self._pool.submit(inventory.describe, key, pieces), put))

    def put_shard(self, key: str, shard: ShardWriter) -> None:
        """Begin to store a whole shard under its name."""
        self.put(key, shard.finish(name_of(self._segment_id, key)))

    def confirm_all(self, paranoid: bool) -> None:
        """Wait until everything is stored, then make sure of every object."""
        while self._storing:
            self._wait()
        checks = [self._pool.submit(self._confirm, o, paranoid) for o in self.written]
        for check in checks:
            check.result()

    def _wait(self) -> None:
        described, put = self._storing.popleft()
        stored, entry = put.result(), described.result()
        self._stored[entry.key] = stored
        self.written.append(entry)

    def _confirm(self, entry: inventory.Object, paranoid: bool) -> None:
        confirm(self.store, self.prefix + entry.key, entry, self._stored[entry.key], paranoid)

    def put_inventory(self, text: bytes) -> None:
        """Store the inventory, last of all, and make sure of every byte of it."""
        path, entry = self.prefix + INVENTORY, inventory.describe(INVENTORY, [text])
        confirm(self.store, path, entry, put_sampled(self.store, path, [text]), paranoid=True)

    def remove(self) -> None:
        """Take away what was stored of a segment that is given up, as far as that works."""
        with contextlib.suppress(Exception):
            while self._storing:
                self._wait()
        for o in self.written:
            with contextlib.suppress(Exception):
                self.store.delete(self.prefix + o.key)
        with contextlib.suppress(Exception):
            self.store.delete_empty(self.prefix)


def remove_segment(store: Store, segment_id: str) -> None:
    """Take away the objects of a segment that no commit can name (any more)."""
    with ThreadPoolExecutor(2 * _STORING) as pool:
        list(pool.map(store.delete, store.list(f"segments/{segment_id}")))
    store.delete_empty(f"segments/{segment_id}")


def _check(spec: LakeSpec, sample: SegmentSample) -> int:
    """The sample's length; raises InvalidInput when its parts do not fit the spec."""
    length = len(sample.input_ids)
    shapes = [h.shape for h in sample.hidden]
    name = f"sample {sample.sample_id}"
    if not length:
        raise InvalidInput(f"{name} has no tokens; expected at least one: leave it out")
    if shapes != [(length, spec.hidden_size)] * len(spec.streams) or any(
        h.dtype.itemsize != spec.itemsize for h in sample.hidden
    ):
        raise InvalidInput(
            f"{name}: states {[(h.dtype.name, h.shape) for h in sample.hidden]}, expected "
            f"{len(spec.streams)} arrays of {spec.dtype} bits {(length, spec.hidden_size)}"
        )
    if len(sample.loss_mask) != length or len(sample.checksum) != len(spec.streams):
        raise InvalidInput(
            f"{name}: {len(sample.loss_mask)} mask values and {len(sample.checksum)} checksums, "
            f"expected {length} and {len(spec.streams)}"
        )
    return length


def _encode(spec: LakeSpec, rows: np.ndarray, position: int, where: str) -> tuple[bytes, int]:
    """Encode rows [n <= chunk, hidden]; also the partial checksum of what decodes from it."""
    size, n = spec.geometry.chunk_tokens, len(rows)
    if n < size:
        whole = np.zeros((size, spec.hidden_size), rows.dtype)
        whole[:n] = rows
        rows = whole
    data = encode_chunk(spec, rows)
    out = getattr(_scratch, "out", None)
    if out is None or out.shape != rows.shape or out.dtype.itemsize != rows.dtype.itemsize:
        out = None
    _scratch.out = out = decode_chunk(spec, data, where, out)
    return data, checksum.rows_checksum(out[:n], position)


_Jobs = list[list[Future[tuple[bytes, int]]]]  # [stream][chunk]: encoded bytes, partial checksum


def _start(spec: LakeSpec, sample: SegmentSample, length: int, pool: ThreadPoolExecutor) -> _Jobs:
    size = spec.geometry.chunk_tokens
    return [
        [
            pool.submit(
                _encode,
                spec,
                rows[at : at + size],
                at,
                f"sample {sample.sample_id}, stream {stream}, row {at}, just encoded",
            )
            for at in range(0, length, size)
        ]
        for stream, rows in zip(spec.streams, sample.hidden, strict=True)
    ]


def _collect(spec: LakeSpec, sample: SegmentSample, jobs: _Jobs) -> list[list[bytes]]:
    """Encoded chunks [stream][chunk]; raises StatesDiffer when a checksum does not come back."""
    encoded = []
    for stream, expected, futures in zip(spec.streams, sample.checksum, jobs, strict=True):
        results = [f.result() for f in futures]
        found = checksum.to_int64(sum(part for _, part in results))
        if found != int(expected):
            raise StatesDiffer(
                f"sample {sample.sample_id}, stream {stream}: checksum {found} after encoding, "
                f"{expected} at capture: its rows changed in between; capture it again"
            )
        encoded.append([data for data, _ in results])
    return encoded


def _encoded(
    spec: LakeSpec, samples: Iterable[SegmentSample], pool: ThreadPoolExecutor
) -> Iterator[tuple[SegmentSample, int, list[list[bytes]]]]:
    """(sample, length, encoded chunks) in order. As many of the next samples as fill a shard are
    encoded meanwhile, and at least one."""
    ahead: deque[tuple[SegmentSample, int, _Jobs]] = deque()
    tokens = 0
    for sample in samples:
        length = _check(spec, sample)
        ahead.append((sample, length, _start(spec, sample, length, pool)))
        tokens += length
        while len(ahead) > 1 and tokens > spec.geometry.shard_tokens:
            first, count, jobs = ahead.popleft()
            tokens -= count
            yield first, count, _collect(spec, first, jobs)
    for first, count, jobs in ahead:
        yield first, count, _collect(spec, first, jobs)


def default_threads() -> int:
    """Threads that encode: all cores of a small machine, half of a large one, where a server beside
    needs the other half of each physical core."""
    cores = os.cpu_count() or 1
    return cores if cores <= 4 else min(16, max(4, cores // 2))


def _step_back() -> None:
    """Let this thread give way to others, above all to the server that fills staging."""
    if sys.platform == "linux":  # where a thread has a priority of its own
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def _token_chunks(values: np.ndarray | Sequence[int], dtype: np.dtype, size: int) -> list[bytes]:
    """Encoded chunks of one sample's ids or mask, zero-padded."""
    given = np.asarray(values)
    whole = np.zeros(padded(len(given), size), dtype)
    whole[: len(given)] = given
    if not np.array_equal(whole[: len(given)], given):
        raise InvalidInput(f"token values outside {dtype.name}: {given.min()} to {given.max()}")
    return [encode_tokens(whole[at : at + size]) for at in range(0, len(whole), size)]


def write_segment(
    store: Store,
    spec: LakeSpec,
    segment_id: str,
    samples: Iterable[SegmentSample],
    *,
    threads: int | None = None,
    paranoid: bool = False,
) -> SegmentInfo:
    """Write a whole segment; it becomes visible only by the manifest commit that follows.

    Holds in memory, encoded: the shard that is being filled, two that are being stored, and the
    samples that are encoded ahead, which are one shard and one sample together; a shard of the
    design's model takes about 320 MB. Samples are read when their turn comes. With `paranoid`,
    every object is read back whole and compared by its digest, instead of a sample of its bytes.

    Raises InvalidInput for samples that do not fit the spec (or none at all), StatesDiffer when
    states do not have the checksum of their capture (nothing is left of the segment then), Corrupt
    when the store does not hold what was sent.
    """
    count = threads or default_threads()
    # Two pools: hashing and writing must not queue behind chunks that are to be encoded.
    encoders = ThreadPoolExecutor(count, initializer=_step_back)
    storers = ThreadPoolExecutor(2 * _STORING, initializer=_step_back)
    objects = _Objects(store, segment_id, storers)
    try:
        return _write(spec, segment_id, _encoded(spec, samples, encoders), objects, paranoid)
    except StatesDiffer:
        objects.remove()
        raise
    finally:
        encoders.shutdown(cancel_futures=True)
        storers.shutdown(cancel_futures=True)


def _write(
    spec: LakeSpec,
    segment_id: str,
    samples: Iterable[tuple[SegmentSample, int, list[list[bytes]]]],
    objects: _Objects,
    paranoid: bool,
) -> SegmentInfo:
    grid, size = hidden_grid(spec), spec.geometry.chunk_tokens
    placements: list[tuple[str, int]] = []
    tokens = raw_bytes = shard_number = 0
    shard: ShardWriter | None = None
    token_chunks: dict[str, list[bytes]] = {name: [] for name in TOKEN_DTYPES}
    for sample, length, encoded in samples:
        first, count = tokens // size, len(encoded[0])
        done = 0
        while done < count:  # the part of the sample that lies in one shard at a time
            number, at = divmod(first + done, grid.chunks)
            if shard is not None and number != shard_number:
                objects.put_shard(grid.key(shard_number), shard)
                shard = None
            shard, shard_number = shard or ShardWriter(grid), number
            part = min(count - done, grid.chunks - at)
            for stream, chunks in enumerate(encoded):
                for i in range(part):
                    shard.add(stream, at + i, chunks[done + i])
            done += part
        for name, dtype in TOKEN_DTYPES.items():
            values = sample.input_ids if name == "input_ids" else sample.loss_mask
            token_chunks[name] += _token_chunks(values, dtype, size)
        placements.append((sample.sample_id, tokens))
        tokens += count * size
        raw_bytes += length * spec.bytes_per_token
    if shard is None:
        raise InvalidInput("a segment needs at least one sample, found none")
    objects.put_shard(grid.key(shard_number), shard)
    for name, chunks in token_chunks.items():
        g = token_grid(spec, name)
        for number in range(-(-len(chunks) // g.chunks)):
            writer = ShardWriter(g)
            part_of = chunks[number * g.chunks : (number + 1) * g.chunks]
            for i, data in enumerate(part_of):
                writer.add(0, i, data)
            objects.put_shard(g.key(number), writer)
    for key, data in metadata_documents(spec, segment_id, tokens).items():
        objects.put(key, [data])
    objects.confirm_all(paranoid)
    text = inventory.build(segment_id, objects.written)
    objects.put_inventory(text)
    stored = sum(o.size for o in objects.written) + len(text)
    return SegmentInfo(segment_id, placements, tokens, raw_bytes, stored, inventory.digest(text))
