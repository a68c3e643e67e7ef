"""The plan of one epoch: which samples form which micro-batch, in which order.

The plan is global. It depends on the selected samples, the seed, the epoch and the batch settings,
never on ranks, workers or threads: those only take slices of it. So a run resumes exactly, also
with another number of ranks.

    order     samples by md5(seed, epoch, sample_id)          (queries/epoch.sql, in DuckDB)
    windows   runs of that order, each sorted by length to cut padding (padded layout only)
    batches   cut greedily under `tokens_per_batch`, then shuffled over the whole epoch
    steps     global step t takes the next `world_size` batches, rank r the r-th of them
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import duckdb
import numpy as np
import pyarrow as pa

from hslake import schemas
from hslake.checksum import mix
from hslake.errors import InvalidInput

LAYOUTS = ("padded", "packed")
MIN_WINDOW, MAX_WINDOW = 4, 32  # batches per window: little padding, yet other mates every epoch
_ALGORITHM = b"hslake epoch plan 1"  # part of every digest: change it when the plan would change
_MAX_SEED = (1 << 63) - 1


@dataclass(frozen=True)
class EpochPlan:
    """Micro-batches of one epoch, for all ranks together.

    `samples`: int64 sample indices, batch after batch; `starts`: int64 [batches + 1] offsets into
    it; `digest`: hex SHA-256 of all that defines the plan; `oversized`: samples alone in a batch
    larger than `tokens_per_batch`.
    """

    samples: np.ndarray
    starts: np.ndarray
    digest: str
    oversized: int

    def __len__(self) -> int:
        return len(self.starts) - 1

    def batch(self, i: int) -> np.ndarray:
        """Sample indices of micro-batch `i`."""
        return self.samples[self.starts[i] : self.starts[i + 1]]


def epoch_order(refs: pa.Table, seed: int, epoch: int) -> np.ndarray:
    """Row numbers (int64) of `refs` in the order of the epoch.

    `refs` needs the columns sample_id, source and length; it stands for the view `samples` in
    queries/epoch.sql.
    """
    for name, value in (("seed", seed), ("epoch", epoch)):
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_SEED:
            raise InvalidInput(f"{name}: found {value!r}, expected an integer from 0 to 2**63 - 1")
    sql = (schemas.data_dir("queries") / "epoch.sql").read_text("utf-8")
    rows = refs.select(["sample_id", "source", "length"])
    rows = rows.append_column("row", pa.array(np.arange(len(refs), dtype=np.int64)))
    with duckdb.connect(config={"threads": 1}) as db:
        db.register("samples", rows)
        # A relation of our own around the named query, so that the file stays the only source.
        db.execute(
            f"select s.row from ({sql}) e join samples s using (sample_id) order by e.position",
            {"seed": seed, "epoch": epoch},
        )
        return db.fetchnumpy()["row"].astype(np.int64)


def padded_length(tokens: int, multiple: int) -> int:
    """`tokens` rounded up to a multiple of `multiple`."""
    return -(-tokens // multiple) * multiple


def sort_windows(order: np.ndarray, lengths: np.ndarray, window_tokens: int) -> np.ndarray:
    """`order` with every window of about `window_tokens` tokens sorted by length, longest first.

    Equal lengths keep their shuffled order.
    """
    sizes = lengths[order].astype(np.int64)
    window = (np.cumsum(sizes) - sizes) // window_tokens
    return order[np.lexsort((-sizes, window))]


def window_size(total_tokens: int, tokens_per_batch: int) -> int:
    """Tokens per window: an eighth of the epoch within MIN_WINDOW to MAX_WINDOW batches.

    A window over the whole of a small lake would put the same samples together in every epoch.
    """
    return min(max(total_tokens // 8, MIN_WINDOW * tokens_per_batch), MAX_WINDOW * tokens_per_batch)


def cut_batches(
    order: np.ndarray, lengths: np.ndarray, tokens_per_batch: int, layout: str, multiple: int = 1
) -> np.ndarray:
    """Offsets [batches + 1] that cut `order` into micro-batches of at most `tokens_per_batch`.

    Cost of a batch: padded n * (longest, rounded up to `multiple`), packed the sum, rounded up.
    A sample longer than that gets a batch of its own.
    """
    starts: list[int] = []
    count = total = longest = 0
    for i, tokens in enumerate(lengths[order].tolist()):
        longest, total, count = max(longest, tokens), total + tokens, count + 1
        cost = count * padded_length(longest, multiple) if layout == "padded" else total
        if not starts or cost > tokens_per_batch:
            starts.append(i)
            longest, total, count = tokens, tokens, 1
    return np.array([*starts, len(order)], dtype=np.int64)


def shuffle_batches(
    order: np.ndarray, starts: np.ndarray, seed: int, epoch: int
) -> tuple[np.ndarray, np.ndarray]:
    """The same batches in a shuffled sequence: (order, starts) again.

    Keys come from splitmix64 of (seed, epoch, batch number), not from a library's generator,
    whose stream may change between versions.
    """
    count = len(starts) - 1
    base = mix(mix(np.array([seed], np.uint64)) ^ np.uint64(epoch))
    keys = mix(base + np.arange(count, dtype=np.uint64))
    sequence = np.argsort(keys, kind="stable")
    pieces = [order[starts[i] : starts[i + 1]] for i in sequence]
    sizes = np.diff(starts)[sequence]
    shuffled = np.concatenate(pieces) if pieces else order[:0]
    return shuffled, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise InvalidInput unless `value` is one of `choices`."""
    if value not in choices:
        raise InvalidInput(f"{name}: found {value!r}, expected one of {', '.join(choices)}")


def check_least(name: str, value: int, least: int) -> None:
    """Raise InvalidInput unless `value` is a whole number of at least `least`."""
    if type(value) is not int or value < least:
        raise InvalidInput(f"{name}: found {value!r}, expected at least {least}")


def check_batch_settings(tokens_per_batch: int, layout: str, multiple: int) -> None:
    """Raise InvalidInput unless the settings make sense together."""
    check_choice("layout", layout, LAYOUTS)
    if not all(type(n) is int and n >= 1 for n in (tokens_per_batch, multiple)):
        raise InvalidInput(
            f"found tokens_per_batch={tokens_per_batch!r} and pad_multiple={multiple!r}, "
            "expected whole numbers of at least 1"
        )
    if tokens_per_batch % multiple:
        raise InvalidInput(
            f"tokens_per_batch={tokens_per_batch} is not a multiple of pad_multiple={multiple}: "
            "a full batch could not be padded without passing the limit; round it up"
        )


def epoch_plan(
    refs: pa.Table,
    *,
    seed: int,
    epoch: int,
    tokens_per_batch: int,
    layout: str,
    multiple: int = 1,
    oversize: str = "raise",
) -> EpochPlan:
    """Plan one epoch over `refs` (columns sample_id, source, length).

    `oversize`: a sample that alone takes more than `tokens_per_batch` is refused here, before
    anything is read ("raise": InvalidInput naming it), or gets a batch of its own ("own_batch").
    """
    check_batch_settings(tokens_per_batch, layout, multiple)
    lengths = refs["length"].to_numpy().astype(np.int64)
    too_long = np.flatnonzero(lengths > tokens_per_batch)
    if len(too_long) and oversize == "raise":
        worst = int(too_long[np.argmax(lengths[too_long])])
        raise InvalidInput(
            f"{len(too_long)} samples are longer than tokens_per_batch={tokens_per_batch}; the "
            f"longest is {refs['sample_id'][worst].as_py()!r} with {lengths[worst]} tokens. Raise "
            f'tokens_per_batch, select with where="length <= {tokens_per_batch}", or allow '
            'batches above the limit with oversize="own_batch"'
        )
    order = epoch_order(refs, seed, epoch)
    if layout == "padded":
        order = sort_windows(order, lengths, window_size(int(lengths.sum()), tokens_per_batch))
    if not len(order):
        starts = np.zeros(1, np.int64)
    else:
        starts = cut_batches(order, lengths, tokens_per_batch, layout, multiple)
        order, starts = shuffle_batches(order, starts, seed, epoch)
    digest = _digest(refs, order, starts, lengths, (layout, multiple, tokens_per_batch))
    return EpochPlan(order, starts, digest, len(too_long))


def _digest(
    refs: pa.Table,
    order: np.ndarray,
    starts: np.ndarray,
    lengths: np.ndarray,
    settings: tuple[str, int, int],
) -> str:
    """SHA-256 of what a training run sees: every id and length in sequence, and the cuts."""
    digest = hashlib.sha256(_ALGORITHM)
    digest.update(repr(settings).encode())
    digest.update("\n".join(refs["sample_id"].take(pa.array(order)).to_pylist()).encode())
    digest.update(lengths[order].astype("<i8").tobytes())
    digest.update(starts.astype("<i8").tobytes())
    return digest.hexdigest()


def steps(batches: int, consumed: int, world_size: int) -> int:
    """Global steps left: the last one may be short, and then some ranks get a padding batch."""
    return -(-max(batches - consumed, 0) // world_size)


def rank_batches(
    batches: int, consumed: int, rank: int, world_size: int
) -> Iterator[tuple[int | None, int]]:
    """What `rank` does from micro-batch `consumed` on: (micro-batch or None, consumed after it).

    Every rank gets the same number of steps and the same `consumed` after each. None stands for
    a padding batch: the tail of an epoch is never dropped.
    """
    for step in range(steps(batches, consumed, world_size)):
        mine = consumed + step * world_size + rank
        after = min(consumed + (step + 1) * world_size, batches)
        yield (mine if mine < batches else None), after
