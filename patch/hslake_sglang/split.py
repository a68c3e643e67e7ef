"""Which rows of one forward pass belong to which sample. Pure functions, no torch, no SGLang."""

from collections.abc import Sequence
from dataclasses import dataclass

from hslake.ids import RequestId, parse_request_id


@dataclass(frozen=True)
class Piece:
    """Rows [row, row + count) of a forward are sample positions [position, position + count)."""

    rid: RequestId
    index: int  # place of the request in the batch
    row: int
    count: int
    position: int

    @property
    def overflows(self) -> bool:
        """The prompt is longer than its request id says: the attempt cannot be stored."""
        return self.position + self.count > self.rid.length


def real_rows(extend_seq_lens: Sequence[int]) -> int:
    """Rows of the forward that carry tokens; everything behind them is padding."""
    return sum(int(n) for n in extend_seq_lens)


def split_batch(
    rids: Sequence[object],
    extend_seq_lens: Sequence[int],
    extend_prefix_lens: Sequence[int],
    lake8: str,
) -> list[Piece]:
    """The pieces of this lake's samples in one extend batch, in row order.

    `rids`: one request id per request, in the order in which their rows are concatenated;
    `extend_seq_lens`: rows of each in this forward; `extend_prefix_lens`: tokens of each that were
    processed before. Rows past a prompt's length (decode rows of a mixed chunk), requests that are
    not hslake's or another lake's, and empty requests yield nothing.
    Raises ValueError when the three lists disagree or a number is negative.
    """
    if not len(rids) == len(extend_seq_lens) == len(extend_prefix_lens):
        raise ValueError(
            f"found {len(rids)} request ids, {len(extend_seq_lens)} lengths and "
            f"{len(extend_prefix_lens)} prefixes in one batch, expected as many of each"
        )
    pieces: list[Piece] = []
    row = 0
    for index, raw in enumerate(rids):
        count, prefix = int(extend_seq_lens[index]), int(extend_prefix_lens[index])
        if count < 0 or prefix < 0:
            raise ValueError(f"negative extend length {count} or prefix {prefix} in a batch")
        rid = parse_request_id(raw) if count else None
        if rid is not None and rid.lake8 == lake8 and prefix < rid.length:
            pieces.append(Piece(rid, index, row, count, prefix))
        row += count
    return pieces
