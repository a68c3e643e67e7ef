"""What the compactor would sustain on this machine, from real rows: encode, check, hash, put."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from hslake.checksum import rows_checksum
from hslake.errors import Corrupt
from hslake.preflight.probe import Rows
from hslake.segment import inventory
from hslake.segment.codec import decode_chunk, encode_chunk
from hslake.segment.write import default_threads
from hslake.spec import LakeSpec
from hslake.store import Store

ROWS_BYTES = 96 << 20  # of captured states that are looked at
_OBJECT_BYTES = 64 << 20  # at most, of the object that is put


@dataclass(frozen=True)
class Compaction:
    """Measured on `tokens` captured tokens. Seconds a token: `code` (encode, decode, checksum,
    hash, on `threads`), `put` (stored bytes to the lake)."""

    tokens: int
    ratio: float  # stored / raw bytes
    threads: int
    code: float
    put: float
    put_rate: float  # bytes a second

    @property
    def rate(self) -> float:
        """Tokens a second: the compactor does both at once."""
        return 1.0 / max(self.code, self.put)


def measure(spec: LakeSpec, rows: Sequence[Rows], store: Store) -> Compaction:
    """Do to captured rows what the compactor does, and store one object, deleted again.

    Raises Corrupt when a chunk does not come back as it was, and what the store raises.
    """
    threads = default_threads()
    chunks = list(_chunks(spec, rows))
    tokens = sum(len(r.input_ids) for r in rows)
    raw = tokens * spec.bytes_per_token
    sums = [rows_checksum(part, at) for part, at in chunks]
    with ThreadPoolExecutor(threads) as pool:
        start = time.perf_counter()
        done = list(pool.map(lambda job: _code(spec, *job), chunks))
        code = time.perf_counter() - start
    if [found for _, found in done] != sums:
        raise Corrupt("a chunk decodes to other rows than were encoded: do not compact here")
    encoded = [data for data, _ in done]
    stored = sum(map(len, encoded))
    data = b"".join(encoded)[:_OBJECT_BYTES]
    seconds = store.time_put(data)
    rate = len(data) / max(seconds, 1e-9)
    ratio = stored / raw
    put = spec.bytes_per_token * ratio / rate
    return Compaction(tokens, ratio, threads, code / tokens, put, rate)


def _chunks(spec: LakeSpec, rows: Sequence[Rows]) -> Iterator[tuple[np.ndarray, int]]:
    """(rows [n <= chunk, hidden], position in the sample) of all streams of all samples."""
    size = spec.geometry.chunk_tokens
    for sample in rows:
        for stream in sample.hidden:
            for at in range(0, len(stream), size):
                yield np.ascontiguousarray(stream[at : at + size]), at


def _code(spec: LakeSpec, part: np.ndarray, at: int) -> tuple[bytes, int]:
    whole = part
    if len(part) < spec.geometry.chunk_tokens:  # every sample starts on a chunk
        whole = np.zeros((spec.geometry.chunk_tokens, spec.hidden_size), part.dtype)
        whole[: len(part)] = part
    data = encode_chunk(spec, whole)
    inventory.describe("burst", [data])
    return data, rows_checksum(decode_chunk(spec, data, "burst")[: len(part)], at)
