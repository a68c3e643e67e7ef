"""The folders in which the processes of one server tell each other: `<staging>/.hook/<run>/`.

Beside them lies a lock that the server's first process holds while it lives, so that others may
remove what dead servers left.
"""

import contextlib
import json
import time
from pathlib import Path

from hslake.staging.births import LOCK, make_locked, remove_at_once
from hslake.staging.locks import Lock, is_locked, try_lock

RUNS = ".hook"
_BIRTH_S = 60.0  # no birth takes so long


def begin_run(root: Path, run: str) -> Lock:
    """Make the folder of server run `run`; it is this process's to `end_run`. Raises OSError."""
    return make_locked(root / RUNS / run)


def end_run(lock: Lock) -> None:
    """Remove the folder of a run that ends in order. Never raises."""
    with contextlib.suppress(OSError):  # what stays is removed as an old one
        remove_at_once(Path(lock.path).parent)
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
    if born and (folder / LOCK).exists():
        lock = try_lock(folder / LOCK)
        if lock is not None:
            end_run(lock)
    elif time.time() - folder.stat().st_mtime > _BIRTH_S:
        locks = [folder / LOCK, *(root / writer / LOCK for writer in _writers(folder))]
        if not any(is_locked(lock) for lock in locks):
            remove_at_once(folder)


def _writers(folder: Path) -> list[str]:
    """The writers that a run's folder names."""
    found = []
    for path in folder.glob("*.json"):
        with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError):
            found.append(str(json.loads(path.read_text("utf-8")).get("writer")))
    return found
