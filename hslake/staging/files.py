"""Small files that readers see whole or not at all."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
