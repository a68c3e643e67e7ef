"""One sample on its way into a segment."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from hslake.errors import InvalidInput
from hslake.spec import LakeSpec


class LazyRows(Protocol):
    """Rows [length, hidden] of bit patterns that are read when their turn comes."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(length, hidden)."""

    @property
    def dtype(self) -> np.dtype:
        """Type of the bit patterns."""

    def read_into(self, at: int, out: np.ndarray) -> None:
        """Fill C-contiguous `out` [n, hidden] with the rows from `at`; several threads call it."""


@dataclass(frozen=True)
class SegmentSample:
    """One sample to store.

    `hidden` has [length, hidden] per stream of the spec, in its order: arrays of the bit patterns
    (uint16, or uint32 for float32), or LazyRows. `checksum` is the one taken at capture, one int64
    a stream.
    """

    sample_id: str
    hidden: Sequence[Any]
    input_ids: np.ndarray | Sequence[int]
    loss_mask: np.ndarray | Sequence[int]
    checksum: Sequence[int]

    @property
    def length(self) -> int:
        """Tokens."""
        return len(self.input_ids)

    def check(self, spec: LakeSpec) -> None:
        """Raise InvalidInput when its parts do not fit the spec."""
        length = self.length
        shapes = [tuple(h.shape) for h in self.hidden]
        name = f"sample {self.sample_id}"
        if not length:
            raise InvalidInput(f"{name} has no tokens; expected at least one: leave it out")
        if shapes != [(length, spec.hidden_size)] * len(spec.streams) or any(
            h.dtype.itemsize != spec.itemsize for h in self.hidden
        ):
            raise InvalidInput(
                f"{name}: states {[(h.dtype.name, tuple(h.shape)) for h in self.hidden]}, expected "
                f"{len(spec.streams)} arrays of {spec.dtype} bits {(length, spec.hidden_size)}"
            )
        if len(self.loss_mask) != length or len(self.checksum) != len(spec.streams):
            raise InvalidInput(
                f"{name}: {len(self.loss_mask)} mask values and {len(self.checksum)} checksums, "
                f"expected {length} and {len(spec.streams)}"
            )
