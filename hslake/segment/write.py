"""Writing segments: encode, decode again and compare, store, confirm, inventory last.

`fill` encodes a segment and hands its objects to the threads that store them, `Filled.finish` waits
for these and confirms. Between the two the next segment may be filled, so that all cores and the
disk work at once. A crash anywhere leaves objects without an inventory, which nothing refers to.
"""

import contextlib
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from hslake import checksum
from hslake.errors import InvalidInput
from hslake.segment import inventory
from hslake.segment.chunks import Chunk, StatesDiffer, Unit, units
from hslake.segment.codec import encode_tokens
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
from hslake.segment.samples import SegmentSample
from hslake.segment.shard import ShardWriter, name_of
from hslake.spec import LakeSpec
from hslake.store import Piece, Store

__all__ = [
    "Filled",
    "SegmentInfo",
    "SegmentSample",
    "StatesDiffer",
    "Workers",
    "fill",
    "new_segment_id",
    "remove_segment",
    "workers",
    "write_segment",
]

_STORING = 2  # shards that are being hashed and written, or wait for it, of all segments
_NICE = 10  # of the threads that encode and store
_LOOK_S = 0.2  # between two looks whether a wait is to be given up


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


@dataclass(frozen=True)
class Workers:
    """The threads that encode and store, and the places for what is being stored: the segments of
    a process share them, so that several at once take no more memory than one."""

    encoders: ThreadPoolExecutor
    storers: ThreadPoolExecutor
    places: threading.BoundedSemaphore


@contextlib.contextmanager
def workers(threads: int | None = None) -> Iterator[Workers]:
    """Threads for segments; what they have begun is waited for at the end."""
    # Two pools: hashing and writing must not queue behind chunks that are to be encoded.
    found = Workers(
        ThreadPoolExecutor(threads or default_threads(), "encode", _step_back),
        ThreadPoolExecutor(2 * _STORING, "store", _step_back),
        threading.BoundedSemaphore(_STORING),
    )
    try:
        yield found
    finally:
        found.encoders.shutdown(cancel_futures=True)
        found.storers.shutdown(cancel_futures=True)


class _Objects:
    """Stores the objects of one segment in the background and remembers them for the inventory."""

    def __init__(self, store: Store, segment_id: str, threads: Workers) -> None:
        self.store, self.prefix, self._threads = store, segment_prefix(segment_id), threads
        self._segment_id = segment_id
        self.written: list[inventory.Object] = []
        self._stored: dict[str, Stored] = {}
        self._begun: list[str] = []
        self._storing: deque[Future[tuple[inventory.Object, Stored]]] = deque()

    def put_shard(self, key: str, shard: ShardWriter, go_on: Callable[[], None]) -> None:
        """As `put`, a whole shard under its name."""
        self.put(key, shard.finish(name_of(self._segment_id, key)), go_on)

    def put(self, key: str, pieces: Sequence[Piece], go_on: Callable[[], None]) -> None:
        """Begin to store an object; waits while too many are under way, and calls `go_on` then,
        which may raise. Raises what storing an earlier one raised."""
        while self._storing and self._storing[0].done():
            self._take()
        while not self._threads.places.acquire(timeout=_LOOK_S):
            go_on()
        storers = self._threads.storers
        try:
            described = storers.submit(inventory.describe, key, pieces)
            self._storing.append(storers.submit(self._put, key, pieces, described))
        except BaseException:
            self._threads.places.release()
            raise
        self._begun.append(key)

    def _put(
        self, key: str, pieces: Sequence[Piece], described: Future[inventory.Object]
    ) -> tuple[inventory.Object, Stored]:
        try:
            stored = put_sampled(self.store, self.prefix + key, pieces)
            return described.result(), stored
        finally:
            self._threads.places.release()

    def confirm_all(self, paranoid: bool) -> None:
        """Wait until everything is stored, then make sure of every object."""
        while self._storing:
            self._take()
        storers = self._threads.storers
        for check in [storers.submit(self._confirm, o, paranoid) for o in self.written]:
            check.result()

    def _take(self) -> None:
        entry, stored = self._storing.popleft().result()
        self.written.append(entry)
        self._stored[entry.key] = stored

    def _confirm(self, entry: inventory.Object, paranoid: bool) -> None:
        confirm(self.store, self.prefix + entry.key, entry, self._stored[entry.key], paranoid)

    def put_inventory(self, text: bytes) -> None:
        """Store the inventory, last of all, and make sure of every byte of it."""
        self._begun.append(INVENTORY)
        path, entry = self.prefix + INVENTORY, inventory.describe(INVENTORY, [text])
        confirm(self.store, path, entry, put_sampled(self.store, path, [text]), paranoid=True)

    def remove(self) -> None:
        """Take away what was stored of a segment that is given up, as far as that works."""
        for future in self._storing:
            with contextlib.suppress(Exception):
                future.result()
        self._storing.clear()
        # The inventory first: without it nobody takes the rest for a segment.
        for key in reversed(self._begun):
            with contextlib.suppress(Exception):
                self.store.delete(self.prefix + key)
        with contextlib.suppress(Exception):
            self.store.delete_empty(self.prefix)


def remove_segment(store: Store, segment_id: str) -> None:
    """Take away the objects of a segment that no commit can name (any more)."""
    with ThreadPoolExecutor(2 * _STORING) as pool:
        list(pool.map(store.delete, store.list(f"segments/{segment_id}")))
    store.delete_empty(f"segments/{segment_id}")


@dataclass
class Filled:
    """A segment all of whose objects are stored or being stored, but for its inventory."""

    segment_id: str
    placements: list[tuple[str, int]]
    tokens: int
    raw_bytes: int
    _objects: _Objects = field(repr=False)

    def finish(self, paranoid: bool = False) -> SegmentInfo:
        """Wait, confirm every object, write the inventory. With `paranoid`, every object is read
        back whole and compared by its digest, instead of a sample of its bytes.

        Raises Corrupt when the store does not hold what was sent, and what the store raises; the
        caller then abandons the segment.
        """
        objects = self._objects
        objects.confirm_all(paranoid)
        text = inventory.build(self.segment_id, objects.written)
        objects.put_inventory(text)
        stored = sum(o.size for o in objects.written) + len(text)
        return SegmentInfo(
            self.segment_id,
            self.placements,
            self.tokens,
            self.raw_bytes,
            stored,
            inventory.digest(text),
        )

    def abandon(self) -> None:
        """Remove what was stored, as far as that works; a vacuum takes the rest."""
        self._objects.remove()


def default_threads() -> int:
    """Threads that encode: all cores of a small machine, half of a large one, where a server beside
    needs the other half of each physical core."""
    cores = usable_cores()
    return cores if cores <= 4 else min(16, max(4, cores // 2))


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0)) or 1
    return os.cpu_count() or 1


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

    Raises as `fill` and `Filled.finish`; nothing is left of the segment then, as far as the store
    lets us.
    """
    with workers(threads) as found:
        filled = fill(store, spec, segment_id, samples, found)
        try:
            return filled.finish(paranoid)
        except BaseException:
            filled.abandon()
            raise


def fill(
    store: Store,
    spec: LakeSpec,
    segment_id: str,
    samples: Iterable[SegmentSample],
    threads: Workers,
    go_on: Callable[[], None] = lambda: None,
) -> Filled:
    """Encode a segment and begin to store it.

    Holds in memory, encoded: the shard that is being filled, what is encoded ahead (half a shard
    and a unit, which is at most a shard), and the shards that are being stored, of which there are
    two whatever else is under way. A shard of the design's model takes about 320 MB (470 MB with
    the codec `none`). Rows are read when their turn comes, into memory that each thread has once.

    `go_on` is called often and may raise, to give the segment up.

    Raises InvalidInput for samples that do not fit the spec (or none at all), StatesDiffer when
    states do not have the checksum of their capture, what reading the samples raises, and what the
    store raises. Nothing is left of the segment then, as far as the store lets us.
    """
    objects = _Objects(store, segment_id, threads)
    try:
        return _fill(spec, segment_id, samples, objects, threads, go_on)
    except BaseException:
        objects.remove()
        raise


def _fill(
    spec: LakeSpec,
    segment_id: str,
    samples: Iterable[SegmentSample],
    objects: _Objects,
    threads: Workers,
    go_on: Callable[[], None],
) -> Filled:
    grid, size = hidden_grid(spec), spec.geometry.chunk_tokens
    shard: ShardWriter | None = None
    number = tokens = raw_bytes = 0
    placements: list[tuple[str, int]] = []
    token_chunks: dict[str, list[bytes]] = {name: [] for name in TOKEN_DTYPES}
    sums = [0] * len(spec.streams)
    for unit, encoded in units(spec, samples, threads.encoders):
        go_on()
        if shard is not None and unit.shard != number:
            objects.put_shard(grid.key(number), shard, go_on)
            shard = None
        shard, number = shard or ShardWriter(grid), unit.shard
        sums = _add(shard, unit, encoded, [0] * len(sums) if unit.at == 0 else sums)
        if not unit.last:
            continue
        sample = unit.sample
        _compare(spec, sample, sums)
        for name, dtype in TOKEN_DTYPES.items():
            values = sample.input_ids if name == "input_ids" else sample.loss_mask
            token_chunks[name] += _token_chunks(values, dtype, size)
        placements.append((sample.sample_id, tokens))
        tokens += padded(sample.length, size)
        raw_bytes += sample.length * spec.bytes_per_token
    if shard is None:
        raise InvalidInput("a segment needs at least one sample, found none")
    objects.put_shard(grid.key(number), shard, go_on)
    for name, chunks in token_chunks.items():
        g = token_grid(spec, name)
        for at in range(-(-len(chunks) // g.chunks)):
            writer = ShardWriter(g)
            for i, data in enumerate(chunks[at * g.chunks : (at + 1) * g.chunks]):
                writer.add(0, i, (data,))
            objects.put_shard(g.key(at), writer, go_on)
    for key, data in metadata_documents(spec, segment_id, tokens).items():
        objects.put(key, [data], go_on)
    return Filled(segment_id, placements, tokens, raw_bytes, objects)


def _add(shard: ShardWriter, unit: Unit, encoded: list[list[Chunk]], sums: list[int]) -> list[int]:
    """Put a unit's chunks into the shard; the sample's partial checksums with theirs."""
    for stream, chunks in enumerate(encoded):
        for i, chunk in enumerate(chunks):
            shard.add(stream, unit.chunk + i, chunk.pieces)
    return [a + sum(c.partial for c in chunks) for a, chunks in zip(sums, encoded, strict=True)]


def _compare(spec: LakeSpec, sample: SegmentSample, sums: Sequence[int]) -> None:
    for stream, expected, total in zip(spec.streams, sample.checksum, sums, strict=True):
        found = checksum.to_int64(total)
        if found != int(expected):
            raise StatesDiffer(
                f"sample {sample.sample_id}, stream {stream}: checksum {found} after encoding, "
                f"{expected} at capture: its rows changed in between; capture it again"
            )
