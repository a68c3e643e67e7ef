"""The prompts of every run: random, distinct, from fixed seeds; planned as real samples."""

import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.hook.settings import HSLAKE, HTTP, Settings
from hslake.plan import plan_files

MEAN_TOKENS, LONGEST = 878, 8192  # of the corpus the design speaks of
_SIGMA = 1.0


@dataclass(frozen=True)
class Batch:
    """The prompts of one run or of its warm-up. `source` names it in the lake too."""

    source: str
    prompt: int
    count: int

    def sample_ids(self) -> list[str]:
        """Ids of its samples."""
        return [f"{self.source}-{i:05d}" for i in range(self.count)]

    def prompts(self, vocab: int) -> np.ndarray:
        """Token ids [count, prompt] int32, the same at every call."""
        rng = np.random.default_rng(zlib.crc32(self.source.encode()))
        return rng.integers(16, vocab, (self.count, self.prompt), np.int32)


def run_batches(s: Settings, mode: str, prompt: int, concurrency: int, repeat: int) -> list[Batch]:
    """[warm-up, run] of one run: the same prompts in every mode that sends as many."""
    name = f"p{prompt}c{concurrency}r{repeat}"
    if mode == HTTP:  # seconds for each prompt: one short one has to do
        warm = Batch(name + "w", min(prompt, 64), 1)
    else:
        warm = Batch(name + "w", prompt, max(1, min(s.warmup, s.tokens) // prompt))
    return [
        warm,
        Batch(name, prompt, s.run_tokens(mode, prompt) // prompt),
    ]


def vocabulary(model: Path) -> int:
    """Entries of the model's vocabulary."""
    return int(json.loads((model / "config.json").read_text())["vocab_size"])


def plan_runs(lake: str, s: Settings, folder: Path) -> int:
    """Plan the samples of all runs of mode hslake through Parquet; returns their tokens."""
    vocab = vocabulary(s.model)
    batches = [
        b
        for prompt in s.prompts
        for concurrency in s.concurrency
        for repeat in range(s.repeats)
        for b in run_batches(s, HSLAKE, prompt, concurrency, repeat)
    ]
    rows = ((i, ids, b.source) for b in batches for i, ids in _named(b, vocab))
    return _plan(lake, rows, folder)


def plan_lengths(lake: str, s: Settings, tokens: int, folder: Path) -> int:
    """Plan `tokens` tokens or a few more of samples as long as real ones: log-normal, mean 878, at
    most 8,192 (in a smoke test a sixteenth of that); returns the tokens planned."""
    vocab, rng = vocabulary(s.model), np.random.default_rng(878)
    scale = 16 if s.smoke else 1
    lengths = _lengths(rng, tokens, MEAN_TOKENS // scale, LONGEST // scale)
    rows = (
        (f"e-{i:06d}", rng.integers(16, vocab, n, np.int32), "endurance")
        for i, n in enumerate(lengths)
    )
    return _plan(lake, rows, folder)


def _lengths(rng: np.random.Generator, tokens: int, mean: int, longest: int) -> Sequence[int]:
    count = max(1, tokens // mean)
    shape = rng.lognormal(0.0, _SIGMA, count)
    low, high = 1.0, float(longest)
    for _ in range(60):  # the scale at which the cut ones have the wanted mean
        middle = (low + high) / 2
        cut = np.clip(shape * middle, 1, longest)
        low, high = (middle, high) if cut.mean() < mean else (low, middle)
    lengths = [int(n) for n in np.clip(shape * low, 1, longest)]
    while sum(lengths) < tokens:
        lengths.append(mean)
    return lengths


def _named(batch: Batch, vocab: int) -> Iterator[tuple[str, np.ndarray]]:
    return zip(batch.sample_ids(), batch.prompts(vocab), strict=True)


def _plan(lake: str, rows: Iterator[tuple[str, np.ndarray, str]], folder: Path) -> int:
    ids, tokens, sources = zip(*rows, strict=True)
    offsets = np.concatenate([[0], np.cumsum([len(t) for t in tokens])]).astype(np.int32)
    values = pa.array(np.concatenate(tokens), pa.int32())
    table = pa.table(
        {
            "sample_id": pa.array(ids, pa.string()),
            "input_ids": pa.ListArray.from_arrays(pa.array(offsets), values),
            "source": pa.array(sources, pa.string()),
        }
    )
    file = folder / "plan.parquet"
    pq.write_table(table, file)
    return plan_files(lake, [file]).tokens
