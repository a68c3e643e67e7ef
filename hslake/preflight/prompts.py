"""What preflight asks servers to capture: beginnings of planned samples, under probe ids."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hslake.extract.worklist import Item, Worklist, read_ids
from hslake.lake import Lake

PROBE_TOKENS = 10
ALONE_TOKENS = 256  # of the prompt that is sent alone and among others
_OTHERS = (17, 96, 33, 160, 5, 200, 64)  # tokens of the others
_READ = 256  # planned samples whose tokens are read


@dataclass(frozen=True)
class Prompts:
    """Token ids: of the short probe, of the one sent alone and among `others`, and of whole
    planned samples for the burst, which begin with the longest that there is."""

    probe: list[int]
    alone: list[int]
    others: list[list[int]]
    planned: list[list[int]]

    def within(self, limit: int) -> "Prompts":
        """The same, with prompts cut to `limit` tokens; planned samples above it are left out."""
        return Prompts(
            self.probe[:limit],
            self.alone[:limit],
            [ids[:limit] for ids in self.others],
            [ids for ids in self.planned if len(ids) <= limit],
        )


def make_prompts(lake: Lake, listing: Worklist) -> Prompts:
    """Prompts from the plan's samples that are not captured yet, made-up ones where it has none."""
    planned = _planned(lake, listing.missing)
    vocab = lake.spec.model.vocab_size or 100
    # Repeated ids still get different states by their position, except at boundary 0.
    filler = [i % vocab for i in range(5, 5 + ALONE_TOKENS)]
    first = planned[1 if len(planned) > 1 else 0] if planned else []
    rng = np.random.default_rng(7)
    pool = [ids for ids in planned if len(ids) > 1] or [filler]
    whole = [ids for ids in pool if len(ids) >= ALONE_TOKENS]
    alone = whole[-1] if whole else max(pool, key=len)
    others = [_cut(pool, n, int(rng.integers(len(pool)))) for n in _OTHERS]
    return Prompts(
        (first + filler)[:PROBE_TOKENS],
        alone[:ALONE_TOKENS],
        others,
        planned,
    )


def _cut(pool: Sequence[list[int]], tokens: int, start: int) -> list[int]:
    """The first `tokens` of one sample of the pool, from the end of others where it is short."""
    found: list[int] = []
    for i in range(len(pool)):
        found += pool[(start + i) % len(pool)]
        if len(found) >= tokens:
            break
    return found[:tokens]


def _planned(lake: Lake, missing: Sequence[Item]) -> list[list[int]]:
    """Tokens of the longest missing sample and of the first ones in the order of extraction."""
    if not missing:
        return []
    longest = max(missing, key=lambda item: item.length)
    items = [longest, *(i for i in missing[:_READ] if i != longest)]
    ids = read_ids(lake, items)
    return [ids[item.sample_id].tolist() for item in items]
