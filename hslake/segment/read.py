"""Reading samples: the shard's index, then one range where the wanted chunks lie together.

Needs only the spec and the sample's place from the manifest. Whatever is missing or damaged
raises Corrupt; zeros never stand in for lost data.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from hslake.errors import Corrupt, InvalidInput, Missing
from hslake.segment.codec import decode_chunk, decode_tokens, storage_dtype
from hslake.segment.layout import (
    TOKEN_DTYPES,
    Grid,
    hidden_grid,
    segment_prefix,
    token_grid,
)
from hslake.segment.shard import ABSENT, parse_index
from hslake.spec import LakeSpec
from hslake.store import Store
from hslake.streams import stream_names

# Reading over a gap this small beats another request.
_GAP_BYTES = 1 << 20
_Chunk = tuple[int, int]  # stream, chunk of the whole token axis


def _fetch(
    store: Store, grid: Grid, segment_id: str, wanted: Sequence[_Chunk]
) -> Iterator[tuple[_Chunk, memoryview, str]]:
    """The encoded bytes of every wanted chunk with a name for errors, range by range."""
    by_shard: dict[int, list[_Chunk]] = {}
    for stream, chunk in wanted:
        by_shard.setdefault(chunk // grid.chunks, []).append((stream, chunk))
    for shard, chunks in by_shard.items():
        path = segment_prefix(segment_id) + grid.key(shard)
        where = f"segment {segment_id}, object {grid.key(shard)}"
        try:
            tail = store.read_range(path, suffix=grid.index_bytes)
        except Missing:
            raise Corrupt(
                f"{where}: it is missing, and with it {_chunk_name(grid, chunks[0])}; expected at "
                f"{store.url(path)}: `hslake verify --quarantine` hides its samples"
            ) from None
        try:
            index = parse_index(grid, tail, where)
        except Corrupt as e:
            raise Corrupt(f"{e} (reading {_chunk_name(grid, chunks[0])})") from None
        places = []
        for stream, chunk in chunks:
            offset, size = index[stream, chunk % grid.chunks]
            if offset == ABSENT:
                raise Corrupt(
                    f"{where}: {_chunk_name(grid, (stream, chunk))} is absent from the index; the "
                    "manifest says it holds a sample: `hslake verify --quarantine` hides it"
                )
            places.append((int(offset), int(size), (stream, chunk)))
        places.sort()
        for run in _runs(places):
            start, end = run[0][0], max(offset + size for offset, size, _ in run)
            data = memoryview(store.read_range(path, start, end))
            for offset, size, key in run:
                part = data[offset - start : offset - start + size]
                name = f"{where}, {_chunk_name(grid, key)}"
                if len(part) != size:
                    raise Corrupt(
                        f"{name}: {len(part)} bytes, expected {size}: the object was cut short; "
                        "`hslake verify --quarantine` hides the sample"
                    )
                yield key, part, name


def _chunk_name(grid: Grid, key: _Chunk) -> str:
    stream, chunk = key
    at = chunk * grid.chunk
    tokens = f"chunk {chunk} (tokens {at} to {at + grid.chunk})"
    return f"stream number {stream}, {tokens}" if grid.streams else tokens


def _runs(places: list[tuple[int, int, _Chunk]]) -> Iterator[list[tuple[int, int, _Chunk]]]:
    """Split places sorted by offset where the gap is worth a request of its own."""
    run: list[tuple[int, int, _Chunk]] = []
    for place in places:
        if run and place[0] - (run[-1][0] + run[-1][1]) > _GAP_BYTES:
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


def read_rows(
    store: Store,
    spec: LakeSpec,
    segment_id: str,
    token_start: int,
    length: int,
    streams: Sequence[str | int] | None = None,
    rows: slice | None = None,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Hidden states of a sample, [stream, n, hidden] in the order of `streams` (default: all).

    uint16 bit patterns for bfloat16, else float16 or float32. `rows` is a slice of the sample's
    rows with step 1. `out`, of that shape and item size with a contiguous last axis, is filled
    and returned. Raises InvalidInput for an unknown stream or a wrong `out`, Corrupt naming
    segment, object and chunk.
    """
    numbers = _stream_numbers(spec, streams)
    start, stop = _window(spec, token_start, length, rows)
    shape = (len(numbers), stop - start, spec.hidden_size)
    if out is None:
        out = np.empty(shape, storage_dtype(spec))
    elif out.shape != shape or out.dtype.itemsize != spec.itemsize:
        raise InvalidInput(
            f"out is {out.dtype} {out.shape}, expected {spec.itemsize}-byte values {shape}"
        )
    if stop == start or not numbers:
        return out
    size = spec.geometry.chunk_tokens
    base = token_start // size
    target = out.view(storage_dtype(spec))
    slots: dict[int, list[int]] = {}
    for slot, number in enumerate(numbers):
        slots.setdefault(number, []).append(slot)
    chunks = range(start // size, -(-stop // size))
    wanted = [(number, base + c) for number in slots for c in chunks]
    scratch: np.ndarray | None = None
    for (number, chunk), data, where in _fetch(store, hidden_grid(spec), segment_id, wanted):
        at = (chunk - base) * size
        low, high = max(start, at), min(stop, at + size)
        for slot in slots[number]:
            place = target[slot, low - start : high - start]
            if high - low == size and place.flags.c_contiguous:
                decode_chunk(spec, data, where, place)
            else:
                scratch = decode_chunk(spec, data, where, scratch)
                place[:] = scratch[low - at : high - at]
    return out


def read_tokens(
    store: Store,
    spec: LakeSpec,
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
    start, stop = _window(spec, token_start, length, rows)
    if segment_tokens is not None and token_start + length > segment_tokens:
        raise InvalidInput(
            f"segment {segment_id}: a sample of {length} tokens at {token_start} does not fit its "
            f"{segment_tokens} tokens; take all three from the manifest"
        )
    size = spec.geometry.chunk_tokens
    base = token_start // size
    result = []
    for name, dtype in TOKEN_DTYPES.items():
        values = np.empty(stop - start, dtype)
        chunks = range(start // size, -(-stop // size)) if stop > start else range(0)
        wanted = [(0, base + c) for c in chunks]
        for (_, chunk), data, where in _fetch(store, token_grid(spec, name), segment_id, wanted):
            at = (chunk - base) * size
            low, high = max(start, at), min(stop, at + size)
            decoded = decode_tokens(data, dtype, size, where)
            values[low - start : high - start] = decoded[low - at : high - at]
        result.append(values)
    return result[0], result[1]


def read_sample(
    store: Store,
    spec: LakeSpec,
    segment_id: str,
    token_start: int,
    length: int,
    streams: Sequence[str | int] | None = None,
    rows: slice | None = None,
    out: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(hidden states, input_ids, loss_mask) of a sample: `read_rows` and `read_tokens` together."""
    hidden = read_rows(store, spec, segment_id, token_start, length, streams, rows, out)
    ids, mask = read_tokens(store, spec, segment_id, token_start, length, rows=rows)
    return hidden, ids, mask
