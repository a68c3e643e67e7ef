"""Samples that are too long: rejected, cut, or split into pieces with ids of their own."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from hslake.errors import InvalidInput
from hslake.ids import MAX_ID_BYTES

_DIGEST = 16  # hex digits that stand for the rest of an id that would be too long


class OverLong(StrEnum):
    """What becomes of a sample of more tokens than `--max-length`."""

    REJECT = "reject"
    TRUNCATE = "truncate"
    SPLIT = "split"


@dataclass(frozen=True)
class Limits:
    """`max_length` in tokens (None: any); `min_supervised`: fewest supervised tokens of a sample
    (None: one of a piece, any of a whole sample)."""

    max_length: int | None = None
    over_long: OverLong = OverLong.REJECT
    min_supervised: int | None = None

    def __post_init__(self) -> None:
        if self.max_length is not None and self.max_length < 1:
            raise InvalidInput(f"--max-length: found {self.max_length}, expected at least 1")
        if self.max_length is None and self.over_long is not OverLong.REJECT:
            raise InvalidInput(f"--over-long {self.over_long}: of what length? give --max-length")
        if self.min_supervised is not None and self.min_supervised < 0:
            raise InvalidInput(f"--min-supervised: found {self.min_supervised}, expected 0 or more")

    def is_long(self, length: int) -> bool:
        """Whether a sample of `length` tokens is over-long."""
        return self.max_length is not None and length > self.max_length

    def pieces(self, length: int) -> Iterator[tuple[int, int]]:
        """Tokens [start, end) of what an over-long sample becomes; none when it is rejected."""
        size = self.max_length or length
        if self.over_long is OverLong.TRUNCATE:
            yield 0, size
        elif self.over_long is OverLong.SPLIT:
            for start in range(0, length, size):
                yield start, min(start + size, length)

    def is_poor(self, supervised: int, *, piece: bool) -> bool:
        """Whether there is too little to learn from a sample, or a piece of one."""
        least = self.min_supervised
        if least is None:
            least = 1 if piece else 0
        return supervised < least


def piece_id(sample_id: str, start: int, end: int) -> str:
    """Id of the tokens [start, end) of a sample: the same for the same piece, at most 200 bytes."""
    suffix = f"@{start}-{end}"
    if len(sample_id.encode()) + len(suffix) <= MAX_ID_BYTES:
        return sample_id + suffix
    digest = hashlib.sha256(sample_id.encode()).hexdigest()[:_DIGEST]
    room = MAX_ID_BYTES - len(suffix) - len(digest) - 1
    head = sample_id.encode()[:room].decode("utf-8", "ignore").rstrip()
    return f"{head}~{digest}{suffix}"
