"""Small files that readers see whole or not at all."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hslake.errors import NoSpace

_PAGE = 4096


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, which becomes `path` at the end; after an error nothing of it is left."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        yield temporary
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def is_full(error: NoSpace | OSError) -> bool:
    """Whether it means that there is no room, and not that something is broken."""
    return isinstance(error, NoSpace) or error.errno in (errno.ENOSPC, errno.EDQUOT)


def replace_text(path: Path, text: str) -> None:
    """Write a small file anew; blanks at its end leave it room to grow.

    On a full filesystem in place, which needs no page: a reader may then see half of it, once.
    Raises OSError.
    """
    data = text.encode()
    room = -(-(len(data) + _PAGE // 2) // _PAGE) * _PAGE
    try:
        with replacing(path) as temporary:
            temporary.write_bytes(data.ljust(room))
    except OSError as error:
        if not is_full(error) or not path.exists() or len(data) > path.stat().st_size:
            raise
        with path.open("r+b") as f:
            f.write(data.ljust(path.stat().st_size))
