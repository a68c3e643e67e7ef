"""A writer's folder: its birth and its end, and the names in it."""

import contextlib
import shutil
import time
import uuid
from pathlib import Path

from hslake.errors import Conflict
from hslake.staging.locks import Lock, is_locked, rename_folder, try_lock
from hslake.staging.runs import remove_dead_runs

EVENTS = "events"
LOCK = "lock"
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
    """A new writer's folder, named by a fresh UUID, and its held lock.

    Locked under a name that no scan looks at: one that came between the making of the lock file
    and its locking would hold the lock, or take the writer for dead and remove it.
    """
    writer_id = str(uuid.uuid4())
    unborn = root / f".{writer_id}.new"
    unborn.mkdir(parents=True)
    (unborn / COMPACT_LOCK).touch()
    lock = try_lock(unborn / LOCK, create=True)
    if lock is None:
        raise Conflict(f"{unborn / LOCK} is held by another process")
    folder = root / writer_id
    return folder, rename_folder(lock, folder)


def remove_writer(folder: Path) -> None:
    """Delete a dead writer's folder; the caller holds its lock and has taken what it held."""
    # One rename takes it out of everybody's sight; a half-removed folder is never found by a scan.
    gone = folder.with_name(f".{folder.name}.gone")
    folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)  # what stays is for remove_remains


def remove_remains(root: Path) -> None:
    """Remove what kills left out of sight under a staging root: folders half removed, those of
    writers that died before their birth, and those of dead servers' runs."""
    remove_dead_runs(root)
    for path in root.glob(".*"):
        if path.suffix not in (".new", ".gone") or not is_writer_name(path.stem[1:]):
            continue  # somebody else's
        with contextlib.suppress(OSError):  # born meanwhile, or another user's
            old = time.time() - path.stat().st_mtime > _BIRTH_S
            if path.suffix == ".gone" or (old and not is_locked(path / LOCK)):
                shutil.rmtree(path, ignore_errors=True)
