"""Folders that are locked from their first moment on and go in one step: no scan ever meets half
of one."""

import shutil
from pathlib import Path

from hslake.staging.locks import Lock, rename_folder, try_lock

LOCK = "lock"


def make_locked(folder: Path, *files: str) -> Lock:
    """Make `folder` with empty `files` and a lock that this process holds. Raises OSError.

    Locked under a name that no scan looks at: one that came between the making of the lock file
    and its locking would hold the lock, or take the owner for dead and remove the folder.
    """
    unborn = folder.with_name(f".{folder.name}.new")
    unborn.mkdir(parents=True)
    for name in files:
        (unborn / name).touch()
    lock = try_lock(unborn / LOCK, create=True)
    if lock is None:
        raise BlockingIOError(f"{unborn / LOCK} is held by another process")
    return rename_folder(lock, folder)


def remove_at_once(folder: Path) -> None:
    """Take `folder` out of everybody's sight by one rename, then delete it: what a kill leaves
    then is for whoever clears remains. Raises OSError when it cannot be renamed."""
    gone = folder.with_name(f".{folder.name.strip('.')}.gone")
    folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)
