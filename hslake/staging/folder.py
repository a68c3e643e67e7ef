"""A writer's folder: its birth and its end, and the names in it."""

import contextlib
import shutil
import time
import uuid
from pathlib import Path

from hslake.staging.births import LOCK, make_locked, remove_at_once
from hslake.staging.locks import Lock, is_locked
from hslake.staging.runs import remove_dead_runs

EVENTS = "events"
COMPACT_LOCK = "compact.lock"  # held by the one compactor that works on this writer
STATUS = "status.json"
_BIRTH_S = 60.0  # no birth takes so long


def is_writer_name(name: str) -> bool:
    """Whether a writer's folder may be called so: a UUID in its usual form."""
    try:
        return str(uuid.UUID(name)) == name
    except ValueError:
        return False


def make_writer(root: Path) -> tuple[Path, Lock]:
    """A new writer's folder, named by a fresh UUID, and its held lock. Raises OSError."""
    folder = root / str(uuid.uuid4())
    return folder, make_locked(folder, COMPACT_LOCK)


def remove_writer(folder: Path) -> None:
    """Delete a dead writer's folder; the caller holds its lock and has taken what it held."""
    remove_at_once(folder)  # what a kill leaves of it is for remove_remains


def remove_remains(root: Path) -> None:
    """Remove what kills left out of sight under a staging root: folders half removed, those of
    writers that died before their birth, and those of dead servers' runs."""
    remove_dead_runs(root)
    for path in remains(root):
        shutil.rmtree(path, ignore_errors=True)


def remains(root: Path) -> list[Path]:
    """Folders of writers that are half removed, or died before their birth."""
    found = []
    for path in sorted(root.glob(".*")):
        if path.suffix not in (".new", ".gone") or not is_writer_name(path.stem[1:]):
            continue  # somebody else's
        with contextlib.suppress(OSError):  # born meanwhile, or another user's
            old = time.time() - path.stat().st_mtime > _BIRTH_S
            if path.suffix == ".gone" or (old and not is_locked(path / LOCK)):
                found.append(path)
    return found
