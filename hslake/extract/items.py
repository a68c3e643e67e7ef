"""Lists of samples to ask for, of a million names without a million objects."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_AT_ONCE = 4096
_COLUMNS = ("sample_id", "source", "length", "token_hash", "place")


@dataclass(frozen=True, slots=True)
class Item:
    """One sample to ask for; `length` in tokens. `place`: its number in the worklist that it came
    from, by which `TokenFile` finds its tokens."""

    sample_id: str
    source: str
    length: int
    token_hash: str = ""
    place: int = -1


class Items(Sequence[Item]):
    """A list of Item that never changes, kept as Arrow columns: some 80 bytes a sample."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table.select(_COLUMNS)

    @property
    def tokens(self) -> int:
        """Tokens of all."""
        return int(pc.sum(self._table["length"]).as_py() or 0)

    @property
    def places(self) -> pa.Array:
        """Their numbers, int64."""
        return self._table["place"].combine_chunks()

    @property
    def names(self) -> pa.ChunkedArray:
        """Their sample ids."""
        return self._table["sample_id"]

    def among(self, names: Collection[str]) -> set[str]:
        """Those of `names` that are here."""
        if not names:
            return set()
        asked = pa.array(list(names), pa.string())
        return set(asked.filter(pc.is_in(asked, self.names.combine_chunks())).to_pylist())

    def where(self, mask: np.ndarray) -> "Items":
        """Those at which the bool [len(self)] `mask` is true."""
        return Items(self._table.filter(pa.array(mask)))

    def without(self, names: Collection[str]) -> "Items":
        """All but those of these sample ids."""
        if not names:
            return self
        there = pc.is_in(self.names, pa.array(list(names), pa.string()))
        return Items(self._table.filter(pc.invert(there)))

    def only(self, names: Collection[str]) -> "Items":
        """Those of these sample ids."""
        return Items(self._table.filter(pc.is_in(self.names, pa.array(list(names), pa.string()))))

    def longer(self, tokens: int) -> "Items":
        """Those of more than `tokens` tokens."""
        return Items(self._table.filter(pc.greater(self._table["length"], tokens)))

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __iter__(self) -> Iterator[Item]:
        sources: dict[str, str] = {}  # one object for each
        for batch in self._table.to_batches(max_chunksize=_AT_ONCE):
            columns = [batch.column(i).to_pylist() for i in range(len(_COLUMNS))]
            for name, source, length, digest, place in zip(*columns, strict=True):
                yield Item(name, sources.setdefault(source, source), length, digest, place)

    @overload
    def __getitem__(self, at: int) -> Item: ...
    @overload
    def __getitem__(self, at: slice) -> "Items": ...
    def __getitem__(self, at: int | slice) -> "Item | Items":
        if isinstance(at, int):
            if not -len(self) <= at < len(self):
                raise IndexError(at)
            row = self._table.slice(at % len(self), 1).to_pylist()[0]
            return Item(*(row[c] for c in _COLUMNS))
        start, stop, step = at.indices(len(self))
        if step == 1:
            return Items(self._table.slice(start, max(0, stop - start)))
        return Items(self._table.take(pa.array(range(start, stop, step), pa.int64())))
