"""Reading samples: the shard's index once, then one range where the wanted chunks lie together.

Needs only the spec and the sample's place from the manifest. Whatever is missing or damaged
raises Corrupt; zeros never stand in for lost data.
"""

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np

from hslake.errors import Corrupt, InvalidInput, Missing
from hslake.segment.codec import decode_chunk, decode_tokens, storage_dtype
from hslake.segment.indexes import IndexCache
from hslake.segment.layout import (
    TOKEN_DTYPES,
    Grid,
    hidden_grid,
    segment_prefix,
    token_grid,
)
from hslake.segment.shard import ABSENT, name_of
from hslake.spec import LakeSpec
from hslake.store import Store
from hslake.streams import stream_names

# Reading over a gap this small beats another request.
_GAP_BYTES = 1 << 20
# What is held encoded at a time, however long the sample.
_RUN_BYTES = 64 << 20
_Chunk = tuple[int, int]  # stream, chunk of the whole token axis


class SegmentReader:
    """Reads samples of a lake's segments; safe from several threads.

    Remembers the indexes of the shards it has read (at most `index_bytes` of them; segments never
    change). The buffers it fills are the caller's.
    """

    def __init__(self, store: Store, spec: LakeSpec, index_bytes: int = 64 << 20) -> None:
        self._store, self._spec = store, spec
        self._indexes = IndexCache(store, index_bytes)

    def sample(
        self,
        segment_id: str,
        token_start: int,
        length: int,
        streams: Sequence[str | int] | None = None,
        rows: slice | None = None,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(hidden states, input_ids, loss_mask): `rows` and `tokens` together."""
        hidden = self.rows(segment_id, token_start, length, streams, rows)
        return hidden, *self.tokens(segment_id, token_start, length, rows=rows)

    def rows(
        self,
        segment_id: str,
        token_start: int,
        length: int,
        streams: Sequence[str | int] | None = None,
        rows: slice | None = None,
    ) -> np.ndarray:
        """Hidden states of a sample, [stream, n, hidden] in the order of `streams` (default: all).

        uint16 bit patterns for bfloat16, else float16 or float32. `rows` is a slice of the sample's
        rows with step 1. Raises as `rows_into`.
        """
        start, stop = _window(self._spec, token_start, length, rows)
        count = len(_stream_numbers(self._spec, streams))
        shape = (count, stop - start, self._spec.hidden_size)
        out = np.empty(shape, storage_dtype(self._spec))
        self.rows_into(list(out), segment_id, token_start, length, streams, rows)
        return out

    def rows_into(
        self,
        out: Sequence[np.ndarray],
        segment_id: str,
        token_start: int,
        length: int,
        streams: Sequence[str | int] | None = None,
        rows: slice | None = None,
    ) -> None:
        """Decode a sample's hidden states into `out`: one array [n, hidden] a stream, of the lake's
        item size and with a contiguous last axis.

        Raises InvalidInput for an unknown stream or a wrong `out`, Corrupt naming segment, object
        and chunk.
        """
        spec = self._spec
        numbers = _stream_numbers(spec, streams)
        start, stop = _window(spec, token_start, length, rows)
        shape = (stop - start, spec.hidden_size)
        if [o.shape for o in out] != [shape] * len(numbers) or any(
            o.dtype.itemsize != spec.itemsize for o in out
        ):
            raise InvalidInput(
                f"out is {[(o.dtype.name, o.shape) for o in out]}, expected {len(numbers)} arrays "
                f"of {spec.itemsize}-byte values {shape}"
            )
        if stop == start:
            return
        targets: dict[int, list[np.ndarray]] = {}
        for number, place in zip(numbers, out, strict=True):
            targets.setdefault(number, []).append(place.view(storage_dtype(spec)))
        size = spec.geometry.chunk_tokens
        base = token_start // size
        chunks = range(start // size, -(-stop // size))
        wanted = [(number, base + c) for number in targets for c in chunks]
        scratch: np.ndarray | None = None
        grid = hidden_grid(spec)
        for (number, chunk), data, where in self._fetch(grid, segment_id, wanted):
            at = (chunk - base) * size
            low, high = max(start, at), min(stop, at + size)
            with self._named(grid, segment_id, (number, chunk)):
                for target in targets[number]:
                    place = target[low - start : high - start]
                    if high - low == size and place.flags.c_contiguous:
                        decode_chunk(spec, data, where, place)
                    else:
                        scratch = decode_chunk(spec, data, where, scratch)
                        place[:] = scratch[low - at : high - at]

    def chunks(
        self, segment_id: str, token_start: int, length: int, run_bytes: int = _RUN_BYTES
    ) -> Iterator[tuple[int, int, np.ndarray, np.ndarray]]:
        """A sample chunk by chunk: (stream number, position in the sample, rows [n, hidden], the
        padding behind them [m, hidden]), shard by shard and stream by stream.

        Bit patterns (uint16 or uint32), valid until the next chunk is asked for. Holds one chunk
        and `run_bytes` of encoded ones, however long the sample. Raises as `rows_into`.
        """
        spec, grid = self._spec, hidden_grid(self._spec)
        _, stop = _window(spec, token_start, length, None)
        size = spec.geometry.chunk_tokens
        base = token_start // size
        wanted = [(s, base + c) for s in range(len(spec.streams)) for c in range(-(-stop // size))]
        scratch: np.ndarray | None = None
        for (number, chunk), data, where in self._fetch(grid, segment_id, wanted, run_bytes):
            with self._named(grid, segment_id, (number, chunk)):
                scratch = decode_chunk(spec, data, where, scratch)
            at = (chunk - base) * size
            bits = scratch.view(f"<u{spec.itemsize}")
            yield number, at, bits[: stop - at], bits[stop - at :]

    def tokens(
        self,
        segment_id: str,
        token_start: int,
        length: int,
        segment_tokens: int | None = None,
        rows: slice | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """input_ids (int32) and loss_mask (uint8) of a sample, each [n].

        `segment_tokens`, from the manifest, is checked when given: a sample cannot reach past it.
        Raises InvalidInput, or Corrupt naming segment, object and chunk.
        """
        start, stop = _window(self._spec, token_start, length, rows)
        if segment_tokens is not None and token_start + length > segment_tokens:
            raise InvalidInput(
                f"segment {segment_id}: a sample of {length} tokens at {token_start} does not fit "
                f"its {segment_tokens} tokens; take all three from the manifest"
            )
        size = self._spec.geometry.chunk_tokens
        base = token_start // size
        chunks = range(start // size, -(-stop // size)) if stop > start else range(0)
        wanted = [(0, base + c) for c in chunks]
        result = []
        for name, dtype in TOKEN_DTYPES.items():
            values = np.empty(stop - start, dtype)
            grid = token_grid(self._spec, name)
            for (_, chunk), data, where in self._fetch(grid, segment_id, wanted):
                at = (chunk - base) * size
                low, high = max(start, at), min(stop, at + size)
                with self._named(grid, segment_id, (0, chunk)):
                    decoded = decode_tokens(data, dtype, size, where)
                values[low - start : high - start] = decoded[low - at : high - at]
            result.append(values)
        return result[0], result[1]

    def _fetch(
        self,
        grid: Grid,
        segment_id: str,
        wanted: Sequence[_Chunk],
        run_bytes: int = _RUN_BYTES,
    ) -> Iterator[tuple[_Chunk, memoryview, str]]:
        """The encoded bytes of every wanted chunk with a name for errors, range by range."""
        by_shard: dict[int, list[_Chunk]] = {}
        for stream, chunk in wanted:
            by_shard.setdefault(chunk // grid.chunks, []).append((stream, chunk))
        for shard, chunks in by_shard.items():
            path = segment_prefix(segment_id) + grid.key(shard)
            where = f"segment {segment_id}, object {grid.key(shard)}"
            try:
                with self._named(grid, segment_id, chunks[0], stream=False):
                    name = name_of(segment_id, grid.key(shard))
                    index = self._indexes.get(grid, path, where, name)
                for run in _runs(self._places(grid, segment_id, index, chunks, where), run_bytes):
                    start, end = run[0][0], max(offset + size for offset, size, _ in run)
                    data = self._store.read_range(path, start, end)
                    for offset, size, key in run:
                        part = data[offset - start : offset - start + size]
                        at = f"{where}, {self._chunk_name(grid, key)}"
                        if len(part) != size:
                            with self._named(grid, segment_id, key):
                                raise Corrupt(
                                    f"{at}: {len(part)} bytes, expected {size}: the object was "
                                    "cut short; `hslake verify --quarantine` hides the sample"
                                )
                        yield key, part, at
            except Missing:
                with self._named(grid, segment_id, chunks[0], stream=False):
                    raise Corrupt(
                        f"{where}: it is missing, and with it {self._chunk_name(grid, chunks[0])}; "
                        f"expected at {self._store.url(path)}: `hslake verify --quarantine` hides "
                        "its samples"
                    ) from None

    def _places(
        self,
        grid: Grid,
        segment_id: str,
        index: np.ndarray,
        chunks: Sequence[_Chunk],
        where: str,
    ) -> list[tuple[int, int, _Chunk]]:
        """(offset, bytes, chunk) of each chunk by offset; raises Corrupt for one that is absent."""
        places = []
        for stream, chunk in chunks:
            offset, size = index[stream, chunk % grid.chunks]
            if offset == ABSENT:
                with self._named(grid, segment_id, (stream, chunk)):
                    raise Corrupt(
                        f"{where}: {self._chunk_name(grid, (stream, chunk))} is absent from the "
                        "index; the manifest says it holds a sample: `hslake verify --quarantine` "
                        "hides it"
                    )
            places.append((int(offset), int(size), (stream, chunk)))
        return sorted(places)

    def _chunk_name(self, grid: Grid, key: _Chunk) -> str:
        stream, chunk = key
        at = chunk * grid.chunk
        tokens = f"chunk {chunk} (tokens {at} to {at + grid.chunk})"
        return f"stream {self._spec.streams[stream]}, {tokens}" if grid.streams else tokens

    @contextlib.contextmanager
    def _named(
        self, grid: Grid, segment_id: str, key: _Chunk, stream: bool = True
    ) -> Iterator[None]:
        """Put the place into a Corrupt that comes from within, for whoever counts damage."""
        try:
            yield
        except Corrupt as error:
            error.segment_id, error.object = segment_id, grid.key(key[1] // grid.chunks)
            error.stream = self._spec.streams[key[0]] if stream and grid.streams else ""
            raise


def _runs(
    places: list[tuple[int, int, _Chunk]], run_bytes: int
) -> Iterator[list[tuple[int, int, _Chunk]]]:
    """Split places sorted by offset into ranges: one request each."""
    run: list[tuple[int, int, _Chunk]] = []
    for place in places:
        offset, size, _ = place
        if run and (
            offset - (run[-1][0] + run[-1][1]) > _GAP_BYTES or offset + size - run[0][0] > run_bytes
        ):
            yield run
            run = []
        run.append(place)
    if run:
        yield run


def _window(spec: LakeSpec, token_start: int, length: int, rows: slice | None) -> tuple[int, int]:
    """First and last + 1 of the wanted rows; raises InvalidInput for what cannot be read."""
    size = spec.geometry.chunk_tokens
    if token_start < 0 or token_start % size or length < 1:
        raise InvalidInput(
            f"a sample of {length} tokens at {token_start}: expected at least one token and a "
            f"start that is a multiple of {size}; take both from the manifest"
        )
    if not isinstance(rows, slice | None):
        raise InvalidInput(f"rows: found {rows!r}, expected a slice such as slice(0, 128)")
    start, stop, step = (rows or slice(None)).indices(length)
    if step != 1:
        raise InvalidInput(f"rows {rows}: expected a step of 1; thin out what comes back")
    return start, max(start, stop)


def _stream_numbers(spec: LakeSpec, streams: Sequence[str | int] | None) -> list[int]:
    if streams is None:
        return list(range(len(spec.streams)))
    names = stream_names(streams)
    unknown = [s for s in names if s not in spec.streams]
    if unknown:
        raise InvalidInput(
            f"stream {', '.join(unknown)} is not in the lake; it has {', '.join(spec.streams)}"
        )
    return [spec.streams.index(s) for s in names]
