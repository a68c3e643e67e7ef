"""What a store is to hold after a write."""

from dataclasses import dataclass

Piece = bytes | memoryview  # of an object that is to be written; memoryviews are of bytes


@dataclass(frozen=True)
class Written:
    """Size in bytes, and the store's own checksum (an S3 ETag) where it has one."""

    size: int
    tag: str | None = None
