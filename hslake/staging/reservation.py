"""A reservation: the rows of one part set aside for one attempt of one sample."""

from dataclasses import dataclass, field

import numpy as np

from hslake.checksum import RowStats
from hslake.errors import InvalidInput
from hslake.ids import RequestId
from hslake.staging.part import Part


@dataclass(frozen=True)
class RowViews:
    """Writable views of staging: `hidden` per stream [n, hidden] bits, `input_ids` int32 [n]."""

    hidden: list[np.ndarray]
    input_ids: np.ndarray


@dataclass(eq=False)
class Reservation:
    """Rows set aside for one attempt; `filled` of `length` are in place, `issued` are there or on
    their way."""

    rid: RequestId
    part: Part
    row_start: int
    incarnation: int
    touched: float
    filled: int = 0
    issued: int = 0
    sums: list[int] = field(default_factory=list)
    stats: list[RowStats] = field(default_factory=list)

    @property
    def length(self) -> int:
        return self.rid.length

    def rows(self, position: int, n: int) -> RowViews:
        """Views of sample rows [position, position + n). Raises InvalidInput outside of it."""
        if position < 0 or n < 0 or position + n > self.length:
            raise InvalidInput(
                f"attempt {self.rid.attempt}: rows {position}..{position + n} of a sample of "
                f"{self.length}"
            )
        rows = slice(self.row_start + position, self.row_start + position + n)
        memory = self.part.memory
        return RowViews([h[rows] for h in memory.hidden], memory.input_ids[rows])
