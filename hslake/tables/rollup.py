"""Roll-ups: copies of many small files of a table in one, so that reading stays fast.

A commit adds one small file, and ten thousand files take a minute to open. A roll-up holds the rows
of a block of 32, 1,024, … versions. It is named by what it was made of (the digest of its parts'
names), never changes, and may be missing: it is then read from its parts. Delta's log does not know
it, and no version depends on it.
"""

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from hslake.tables.tablename import version_of

FOLDER = "_rollup"
FACTOR = 32
_SPANS = (FACTOR**3, FACTOR**2, FACTOR)


@dataclass(frozen=True)
class Block:
    """Versions `first` to `last` of a table and the names of the files that they added."""

    first: int
    last: int
    parts: tuple[str, ...]

    @property
    def name(self) -> str:
        """The roll-up's path below the table."""
        digest = hashlib.sha256("\n".join(self.parts).encode()).hexdigest()[:32]
        return f"{FOLDER}/{self.first:020d}-{self.last:020d}-{digest}.parquet"


def blocks(parts: Sequence[str], version: int, span: int) -> Iterator[Block]:
    """The whole blocks of `span` versions up to `version` that more than one part lies in."""
    at: dict[int, list[str]] = {}
    for part in parts:
        number = version_of(part)
        if number is not None and number > 0:
            at.setdefault((number - 1) // span, []).append(part)
    for k, members in sorted(at.items()):
        if (k + 1) * span <= version and len(members) > 1:
            yield Block(k * span + 1, (k + 1) * span, tuple(sorted(members)))


def cover(parts: Sequence[str], version: int, have: Collection[str]) -> list[str | Block]:
    """What to read for the rows of all `parts`, each exactly once and by version: the largest
    roll-ups among `have` (paths below the table), and the parts that none of them holds."""
    left = dict.fromkeys(parts)
    found: list[str | Block] = []
    if have:
        for span in _SPANS:
            for block in blocks(list(left), version, span):
                if block.name in have:
                    found.append(block)
                    for part in block.parts:
                        del left[part]
    return sorted([*found, *left], key=_first)


def _first(item: str | Block) -> tuple[int, str]:
    if isinstance(item, Block):
        return item.first, item.name
    return version_of(item) or 0, item


def wanted(parts: Sequence[str], version: int, have: Collection[str]) -> list[Block]:
    """The roll-ups that are not there yet, small ones first."""
    return [
        block
        for span in reversed(_SPANS)
        for block in blocks(parts, version, span)
        if block.name not in have
    ]
