"""Reading the rows of a complete sample with plain reads.

Not through maps: what a map has touched counts as this process's memory for as long as it lives,
and a file that fails or is cut short under a map ends the process (SIGBUS).
"""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hslake.errors import Corrupt, InvalidInput, Unavailable
from hslake.spec import DTYPES
from hslake.staging.memory import bits_dtype, chunk_files
from hslake.staging.part import PartInfo, Reserved


class PartUnavailable(Unavailable):
    """The machine cannot read a part's file now; nothing need be wrong with it."""

    def __init__(self, part: Path, message: str) -> None:
        super().__init__(message)
        self.part = part


@dataclass(frozen=True)
class StagedRows:
    """Rows [first, first + shape[0]) of one chunk file of a part, read when asked for.

    `shape` is [rows, values] (or [rows]), `dtype` the type of the bit patterns.
    """

    part: Path
    file: Path
    first: int
    shape: tuple[int, ...]
    dtype: np.dtype

    def read_into(self, at: int, out: np.ndarray) -> None:
        """Fill C-contiguous `out` with the rows from `at`. Raises Corrupt for a file that is
        missing or short, PartUnavailable when the machine cannot read it now."""
        row = self.dtype.itemsize * (self.shape[1] if len(self.shape) > 1 else 1)
        view = out.reshape(-1).view(np.uint8).data
        offset, done = (self.first + at) * row, 0
        try:
            fd = os.open(self.file, os.O_RDONLY)
            try:
                while done < len(view):
                    got = os.preadv(fd, [view[done:]], offset + done)
                    if not got:
                        raise Corrupt(
                            f"{self.file} ends at byte {offset + done}, expected "
                            f"{offset + len(view)} at least: it was cut short"
                        )
                    done += got
            finally:
                os.close(fd)
        except FileNotFoundError as error:
            raise Corrupt(f"{self.file}: {error}") from None
        except OSError as error:  # no descriptor, no right, EIO: perhaps in a moment
            raise PartUnavailable(
                self.part, f"{self.file} cannot be read now: {error}; its samples stay in staging"
            ) from error

    def check(self) -> None:
        """Raise Corrupt unless the file reaches the last of the rows, PartUnavailable when the
        machine cannot tell now."""
        row = self.dtype.itemsize * (self.shape[1] if len(self.shape) > 1 else 1)
        end = (self.first + self.shape[0]) * row
        try:
            size = self.file.stat().st_size
        except FileNotFoundError as error:
            raise Corrupt(f"{self.file}: {error}") from None
        except OSError as error:
            raise PartUnavailable(
                self.part, f"{self.file} cannot be read now: {error}; its samples stay in staging"
            ) from error
        if size < end:
            raise Corrupt(f"{self.file} has {size} bytes, expected {end} at least: cut short")

    def read(self) -> np.ndarray:
        """All of the rows. Raises as `read_into`."""
        out = np.empty(self.shape, self.dtype)
        self.read_into(0, out)
        return out


def staged_rows(part: PartInfo, sample: Reserved) -> tuple[list[StagedRows], StagedRows]:
    """A complete sample's hidden states, one StagedRows [length, hidden] a stream, and input_ids
    int32 [length]. Reads nothing. Raises InvalidInput when they lie outside the part."""
    end = sample.row_start + sample.length
    if sample.row_start < 0 or end > part.capacity:
        raise InvalidInput(f"{part.path}: rows {sample.row_start}..{end} of {part.capacity}")
    a = part.attributes
    files, ids = chunk_files(part.path, len(a["streams"]))
    bits, shape = bits_dtype(DTYPES[a["dtype"]]), (sample.length, a["hidden_size"])
    first = sample.row_start
    return (
        [StagedRows(part.path, f, first, shape, bits) for f in files],
        StagedRows(part.path, ids, first, (sample.length,), np.dtype("<i4")),
    )
