"""hslake: a data lake for the hidden states of large language models.

`hslake.create` makes a lake, `hslake.open` opens one. Importing this package loads neither DuckDB,
Delta nor torch: the hook in the server imports it too.
"""

from importlib.metadata import PackageNotFoundError, version
from os import PathLike
from typing import TYPE_CHECKING, Any

from hslake.errors import (
    CheckFailed,
    Conflict,
    Corrupt,
    HslakeError,
    InvalidInput,
    Missing,
    NoSpace,
    Unavailable,
)

if TYPE_CHECKING:
    from hslake.lake import Lake

try:
    __version__ = version("hslake")
except PackageNotFoundError:  # run from a checkout that is not installed
    __version__ = "0.1.0"

__all__ = [
    "CheckFailed",
    "Conflict",
    "Corrupt",
    "HslakeError",
    "InvalidInput",
    "Missing",
    "NoSpace",
    "Unavailable",
    "__version__",
    "create",
    "open",
]


def create(url: str | PathLike[str], **settings: Any) -> "Lake":
    """Make a lake; `hslake.lake.create` says which settings there are."""
    from hslake.lake import create as create_lake

    return create_lake(url, **settings)


def open(url: str | PathLike[str], version: int | str | None = None) -> "Lake":
    """Open the lake at `url`, at a manifest version or a pin's name (default: the newest).

    Raises Missing when there is no lake, no such version or no such pin.
    """
    from hslake.lake import open_lake

    return open_lake(url, version)
