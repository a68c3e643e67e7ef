"""A lake in a folder: whole files, durable when a call returns.

The order is the guarantee: content, `fsync` of the file, the name, `fsync` of the folder. Names are
made by rename or link inside one folder, so never across filesystems.
"""

import contextlib
import os
import re
import stat
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from hslake.errors import InvalidInput
from hslake.store.written import Piece

# As _temp names them, and as deltalake names what it has not finished in a log.
TEMP = re.compile(r"\..+\.[0-9a-f]{32}\.tmp|(\d{20}\..+|_last_checkpoint)#\d+")


def sync_dir(folder: Path) -> None:
    """Make the names in `folder` durable."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_file(path: Path) -> None:
    """Make the content of `path` durable."""
    sync_dir(path)  # fsync needs any descriptor of it


def make_dirs(folder: Path) -> None:
    """`mkdir -p`, durable: every new name is synced in its parent."""
    if folder.is_dir():
        return
    make_dirs(folder.parent)
    try:
        folder.mkdir(exist_ok=True)
    except FileExistsError:
        raise InvalidInput(f"{folder} is a file, expected a folder: choose another place") from None
    sync_dir(folder.parent)


def put(target: Path, pieces: Sequence[Piece]) -> None:
    """Write `target`, replacing what is there, atomically and durably."""
    temp = _temp(target, pieces)
    try:
        temp.replace(target)
    except BaseException:
        temp.unlink(missing_ok=True)
        raise
    sync_dir(target.parent)


def put_new(target: Path, data: bytes) -> None:
    """Write `target`, atomically and durably. Raises FileExistsError when it is there."""
    temp = _temp(target, [data])
    try:
        os.link(temp, target)
    finally:
        temp.unlink(missing_ok=True)
    sync_dir(target.parent)


def _temp(target: Path, pieces: Sequence[Piece]) -> Path:
    make_dirs(target.parent)
    temp = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temp.open("xb") as f:
            f.writelines(pieces)
            f.flush()
            os.fsync(f.fileno())
    except BaseException:
        temp.unlink(missing_ok=True)
        raise
    return temp


def read_range(path: Path, start: int, end: int | None, suffix: int | None) -> memoryview:
    """Bytes [start, end) of a file, or its last `suffix`."""
    fd = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        if suffix is not None:
            start, end = max(0, size - suffix), size
        stop = size if end is None else min(end, size)
        # NumPy asks the kernel for huge pages: new memory costs page faults otherwise.
        data = np.empty(max(0, stop - start), np.uint8)
        done = 0
        while done < data.size:
            got = os.preadv(fd, [data[done:].data], start + done)
            if not got:
                break
            done += got
        return data[:done].data
    finally:
        os.close(fd)


def is_file(path: Path) -> bool:
    """Whether a file is there. Raises FileNotFoundError when nothing is."""
    return stat.S_ISREG(path.stat().st_mode)


def walk(folder: Path) -> Iterator[Path]:
    """All files below `folder`. One that cannot be read is no empty folder: it raises."""

    def fail(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise error

    for where, _, names in os.walk(folder, onerror=fail):
        for name in names:
            yield Path(where) / name


def folders(folder: Path) -> list[str]:
    """Names of the folders in `folder`, empty ones too."""
    return sorted(e.name for e in os.scandir(folder) if e.is_dir())


def delete_empty(folder: Path) -> None:
    """Delete `folder` and those below it, as far as they are empty."""
    for where, _, _ in os.walk(folder, topdown=False):
        with contextlib.suppress(OSError):  # not empty, or not ours to delete
            Path(where).rmdir()
