"""A writer's folder: its birth and its end, and the names in it."""

import shutil
import uuid
from pathlib import Path

from hslake.errors import Conflict
from hslake.staging.locks import Lock, rename_folder, try_lock

EVENTS = "events"
LOCK = "lock"
COMPACT_LOCK = "compact.lock"  # held by the one compactor that works on this writer
STATUS = "status.json"


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
    shutil.rmtree(gone)
