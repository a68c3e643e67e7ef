"""The folders in which the processes of one server tell each other: `<staging>/.hook/<run>/`.

Beside them lies a lock that the server's first process holds while it lives, so that others may
remove what dead servers left.
"""

import contextlib
import json
import shutil
import time
from pathlib import Path

from hslake.staging.locks import Lock, is_locked, rename_folder, try_lock

RUNS = ".hook"
_LOCK = "lock"
_BIRTH_S = 60.0  # no birth takes so long


def begin_run(root: Path, run: str) -> Lock:
    """Make the folder of server run `run`; it is this process's to `end_run`. Raises OSError."""
    unborn = root / RUNS / f".{run}.new"  # locked before anybody sees it
    unborn.mkdir(parents=True)
    lock = try_lock(unborn / _LOCK, create=True)
    if lock is None:
        raise BlockingIOError(f"{unborn / _LOCK} is held by another process")
    return rename_folder(lock, root / RUNS / run)


def end_run(lock: Lock) -> None:
    """Remove the folder of a run that ends in order. Never raises."""
    _remove(Path(lock.path).parent)
    with contextlib.suppress(OSError):
        lock.release()


def remove_dead_runs(root: Path) -> None:
    """Remove the folders of servers that have died, also those of before there was a lock, whose
    writers are gone. Never raises, and never touches those of a living server."""
    with contextlib.suppress(OSError):
        for folder in (root / RUNS).iterdir():
            with contextlib.suppress(OSError):  # another one removes it too
                _remove_if_dead(root, folder)


def _remove_if_dead(root: Path, folder: Path) -> None:
    born = not folder.name.endswith(".new")
    if born and (folder / _LOCK).exists():
        lock = try_lock(folder / _LOCK)
        if lock is not None:
            end_run(lock)
    elif time.time() - folder.stat().st_mtime > _BIRTH_S:
        locks = [folder / _LOCK, *(root / writer / "lock" for writer in _writers(folder))]
        if not any(is_locked(lock) for lock in locks):
            _remove(folder)


def _writers(folder: Path) -> list[str]:
    """The writers that a run's folder names."""
    found = []
    for path in folder.glob("*.json"):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            found.append(str(json.loads(path.read_text("utf-8")).get("writer")))
    return found


def _remove(folder: Path) -> None:
    # One rename takes it out of everybody's sight; what a kill leaves is removed as an old one.
    gone = folder.with_name(f".{folder.name.strip('.')}.gone")
    with contextlib.suppress(OSError):
        folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)
