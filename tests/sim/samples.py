"""Samples for simulated runs: lengths as in a real corpus, random tokens, files to plan."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

SOURCES = ("A1", "B3", "B4", "B5", "B6", "B7", "B8")
VOCAB = 163_840
_SIGMA = 0.9
_BATCH = 2000


def lengths_of(count: int, *, mean: float, longest: int, seed: int) -> np.ndarray:
    """`count` log-normal lengths, 1 to `longest`, of mean `mean` (within a token a sample)."""
    spread = np.exp(np.random.default_rng(seed).normal(0.0, _SIGMA, count))

    def at(scale: float) -> np.ndarray:
        return np.clip(np.rint(spread * scale), 1, longest).astype(np.int64)

    low, high = 0.0, 8.0 * mean
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if at(middle).mean() < mean else (low, middle)
    return at(high)


def write_plan(
    folder: Path, lengths: np.ndarray, *, seed: int, first: int = 0, prefix: str = ""
) -> list[Path]:
    """Parquet files, one a source, of samples numbered from `first`; ids are `prefix` + source +
    number. A third of each sample, at its end, is supervised."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    paths = []
    for k, source in enumerate(SOURCES):
        numbers = np.arange(k, len(lengths), len(SOURCES))
        if not len(numbers):
            continue
        paths.append(folder / f"{source}-{first}.parquet")
        with pq.ParquetWriter(paths[-1], _SCHEMA) as writer:
            for batch in _batches(numbers, lengths, rng, f"{prefix}{source}", source, first):
                writer.write_batch(batch)
    return paths


_SCHEMA = pa.schema(
    [
        ("sample_id", pa.string()),
        ("source", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.uint8())),
    ]
)


def _batches(
    numbers: np.ndarray,
    lengths: np.ndarray,
    rng: np.random.Generator,
    name: str,
    source: str,
    first: int,
) -> Iterator[pa.RecordBatch]:
    for at in range(0, len(numbers), _BATCH):
        some = numbers[at : at + _BATCH]
        n = lengths[some]
        ends = np.concatenate([[0], np.cumsum(n)]).astype(np.int32)
        ids = rng.integers(0, VOCAB, ends[-1], dtype=np.int32)
        position = np.arange(ends[-1]) - np.repeat(ends[:-1], n)
        mask = (position >= np.repeat(n - -(-n // 3), n)).astype(np.uint8)
        yield pa.record_batch(
            [
                pa.array([f"{name}-{first + i:06d}" for i in some.tolist()]),
                pa.array([source] * len(some)),
                pa.ListArray.from_arrays(pa.array(ends), pa.array(ids)),
                pa.ListArray.from_arrays(pa.array(ends), pa.array(mask)),
            ],
            schema=_SCHEMA,
        )
