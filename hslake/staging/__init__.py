"""Staging: the RAM-backed directory a writer fills and a compactor empties."""

from hslake.staging.part import PartInfo, Reserved
from hslake.staging.reader import WriterDir, read_part, scan
from hslake.staging.reservation import Reservation, RowViews
from hslake.staging.status import StatusReader, read_status
from hslake.staging.writer import StagingWriter

__all__ = [
    "PartInfo",
    "Reservation",
    "Reserved",
    "RowViews",
    "StagingWriter",
    "StatusReader",
    "WriterDir",
    "read_part",
    "read_status",
    "scan",
]
