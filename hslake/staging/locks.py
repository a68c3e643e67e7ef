"""POSIX record locks: released by the kernel when the holder dies, never inherited by a fork.

A PID file lies after a reboot and `flock` outlives its holder in forked children. Record locks
belong to the process: it cannot see its own, and loses one when it closes *any* descriptor of that
file. So the paths this process holds are remembered here, and their files are opened here only.
"""

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

_held: dict[str, int] = {}  # real path -> pid: process state, exactly like the locks themselves


@dataclass(frozen=True)
class Lock:
    """A held lock; `release` it once."""

    path: str
    fd: int

    def release(self) -> None:
        _held.pop(self.path, None)
        os.close(self.fd)


def _mine(path: Path) -> bool:
    return _held.get(os.path.realpath(path)) == os.getpid()


def try_lock(path: Path, *, shared: bool = False, create: bool = False) -> Lock | None:
    """The lock of `path`, or None when somebody (this process included) holds it.

    None also when the file goes away meanwhile: its folder was recycled or removed. `create` is for
    the owner of a new folder only; anybody else would lock a file nobody knows. Raises
    PermissionError.
    """
    if _mine(path):
        return None
    try:
        # To share it, reading is enough: the file may be another user's.
        mode = os.O_RDONLY if shared else os.O_RDWR
        fd = os.open(path, mode | (os.O_CREAT if create else 0), 0o644)
    except FileNotFoundError:
        return None
    try:
        fcntl.lockf(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    try:
        current = os.path.samestat(os.fstat(fd), os.stat(path))  # noqa: PTH116
    except FileNotFoundError:
        current = False
    if not current:
        os.close(fd)
        return None
    real = os.path.realpath(path)
    _held[real] = os.getpid()
    return Lock(real, fd)


def rename_folder(lock: Lock, to: Path) -> Lock:
    """Rename the folder of a held lock's file to `to`; the lock under its new path."""
    old = Path(lock.path)
    real = os.path.realpath(to / old.name)
    _held[real] = os.getpid()  # before: another thread that looked there would lose us the lock
    try:
        old.parent.rename(to)
    except BaseException:
        del _held[real]
        raise
    del _held[lock.path]
    return Lock(real, lock.fd)


def is_locked(path: Path) -> bool:
    """Whether a live process (this one included) holds the lock of `path` exclusively.

    Asks for a shared lock, for which reading is enough: the file may be another user's. Raises
    PermissionError when not even that is allowed.
    """
    if _mine(path):
        return True
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False
