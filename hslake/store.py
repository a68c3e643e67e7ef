"""Objects of a lake, on a local folder or an object store: a thin layer over fsspec.

Paths are relative to the lake and use `/`. Local writes are durable when they return.
"""

import contextlib
import errno
import os
import re
import stat
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
from fsspec.core import url_to_fs

from hslake.errors import (
    CheckFailed,
    Conflict,
    HslakeError,
    InvalidInput,
    Missing,
    NoSpace,
    Unavailable,
    has_password,
    reason,
    without_secrets,
)

_LOCAL = ("file://", "local://")
_TAKEN = (errno.EEXIST, errno.EINVAL)  # s3fs reports a lost conditional put of Ceph as EINVAL


# As _temp names them, and as deltalake names what it has not finished in a log.
_TEMP = re.compile(r"\..+\.[0-9a-f]{32}\.tmp|(\d{20}\..+|_last_checkpoint)#\d+")
_PROBE = ".hslake-probe-"
_FULL = (errno.ENOSPC, errno.EDQUOT)


def refusal(where: str, error: Exception) -> HslakeError | None:
    """What the machine's refusal is to a caller of hslake; None when `error` is none.

    Never Missing or Corrupt: what merely cannot be read now must not be taken for damage.
    """
    named = re.search(r"\(os error (\d+)\)", str(error))  # deltalake's, which carry no errno
    code = error.errno if isinstance(error, OSError) else None
    code = code or (int(named[1]) if named else None)
    if code in (None, errno.ENOENT, errno.ENOTDIR):
        return None
    what = f"{where}: {os.strerror(code)}"
    if code in _FULL:
        return NoSpace(f"{what}: make room there and run it again")
    return Unavailable(
        f"{what}: this user must be able to read and write there: look at owner, permissions, "
        "mount and limits, then run it again"
    )


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


def _make_dirs(folder: Path) -> None:
    """`mkdir -p`, durable: every new name is synced in its parent."""
    if folder.is_dir():
        return
    _make_dirs(folder.parent)
    try:
        folder.mkdir(exist_ok=True)
    except FileExistsError:
        raise InvalidInput(f"{folder} is a file, expected a folder: choose another place") from None
    sync_dir(folder.parent)


def check_no_password(url: str) -> None:
    """Raise InvalidInput when `url` holds one: libraries put URLs into their messages."""
    if has_password(url):
        raise InvalidInput(
            f"{without_secrets(url)}: the URL holds a password or key, which would end up in "
            "messages and logs: give it in the environment, for example AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY"
        )


class NoBucket(Missing):
    """Not only the object, but all that could hold it is missing."""


class Store:
    """The objects below one lake URL. Safe from several threads; may be pickled."""

    def __init__(self, url: str) -> None:
        for prefix in _LOCAL:
            if url.startswith(prefix):
                url = url[len(prefix) :]
        check_no_password(url)
        self.is_local = "://" not in url
        self.root = str(Path(url).absolute()) if self.is_local else url.rstrip("/")
        self._fs: Any = None
        self._base = self.root

    @property
    def fs(self) -> fsspec.AbstractFileSystem:
        """The fsspec filesystem, made on first use."""
        if self._fs is None:
            try:
                self._fs, self._base = url_to_fs(self.root)
            except (ValueError, ImportError) as e:
                raise InvalidInput(
                    f"{self.root}: {e}; expected a folder or a URL such as "
                    "s3://bucket/lake (pip install 'hslake[s3]')"
                ) from None
        return self._fs

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_fs": None}  # clients do not travel between processes

    def url(self, path: str = "") -> str:
        """Full URL (local: absolute path) of `path`."""
        return f"{self.root}/{path}".rstrip("/")

    def local(self, path: str = "") -> Path:
        """Path of a local lake's object."""
        return Path(self.url(path))

    def _key(self, path: str) -> str:
        self.fs  # noqa: B018 - sets _base
        return f"{self._base}/{path}".rstrip("/")

    def _missing(self, path: str) -> Missing:
        return Missing(f"{self.url(path)} is not there")

    @contextlib.contextmanager
    def errors(self, path: str) -> Iterator[None]:
        """The machine's and a library's errors as hslake's. Each filesystem has its own kinds."""
        try:
            yield
        except (FileNotFoundError, NotADirectoryError) as error:
            if not self.is_local and "bucket does not exist" in str(error):
                raise NoBucket(f"{self.root}: its bucket does not exist: make it first") from None
            raise self._missing(path) from None
        except HslakeError:
            raise
        except Exception as error:
            if self.is_local:
                refused = refusal(self.url(path), error)
                if refused is None:
                    raise
                raise refused from error
            raise Unavailable(
                f"{self.url(path)}: the store cannot be reached or refuses ({reason(error)}): "
                "check the bucket, the credentials and AWS_ENDPOINT_URL, then try again"
            ) from error

    def put(self, path: str, data: bytes | Sequence[bytes]) -> None:
        """Write `path`, replacing what is there, atomically. `data` may come in pieces."""
        if not self.is_local:
            whole = data if isinstance(data, bytes) else b"".join(data)
            with self.errors(path):
                self.fs.pipe_file(self._key(path), whole)
            return
        with self.errors(path):
            target, temp = self._temp(path, data)
            try:
                temp.replace(target)
            except BaseException:
                temp.unlink(missing_ok=True)
                raise
            sync_dir(target.parent)

    def put_new(self, path: str, data: bytes) -> None:
        """Write `path` unless it exists, atomically. Raises Conflict when it exists."""
        if not self.is_local:
            with self.errors(path):
                try:
                    self.fs.pipe_file(self._key(path), data, mode="create")
                except OSError as e:
                    taken = isinstance(e, FileExistsError) or e.errno in _TAKEN
                    if taken and self.exists(path):
                        raise Conflict(f"{self.url(path)} exists already") from None
                    raise
            return
        with self.errors(path):
            target, temp = self._temp(path, data)
            try:
                os.link(temp, target)
            except FileExistsError:
                raise Conflict(f"{target} exists already") from None
            finally:
                temp.unlink(missing_ok=True)
            sync_dir(target.parent)

    def _temp(self, path: str, data: bytes | Sequence[bytes]) -> tuple[Path, Path]:
        target = self.local(path)
        _make_dirs(target.parent)
        temp = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
        try:
            with temp.open("xb") as f:
                f.writelines([data] if isinstance(data, bytes) else data)
                f.flush()
                os.fsync(f.fileno())
        except BaseException:
            temp.unlink(missing_ok=True)
            raise
        return target, temp

    def read(self, path: str) -> bytes:
        """All bytes of `path`. Raises Missing."""
        with self.errors(path):
            if self.is_local:
                return self.local(path).read_bytes()
            return self.fs.cat_file(self._key(path))

    def read_range(
        self, path: str, start: int = 0, end: int | None = None, *, suffix: int | None = None
    ) -> memoryview:
        """Bytes [start, end) of `path`, or its last `suffix` bytes. Raises Missing.

        Fewer bytes come back when the object ends earlier.
        """
        with self.errors(path):
            if self.is_local:
                return _read_local(self.local(path), start, end, suffix)
            if suffix is not None:
                # fsspec resolves negative starts itself, for every filesystem.
                return memoryview(self.fs.cat_file(self._key(path), start=-suffix))
            return memoryview(self.fs.cat_file(self._key(path), start=start, end=end))

    def size(self, path: str) -> int:
        """Size of `path` in bytes. Raises Missing."""
        with self.errors(path):
            if self.is_local:
                return self.local(path).stat().st_size
            self.fs.invalidate_cache(self.fs._parent(self._key(path)))
            return int(self.fs.info(self._key(path))["size"])

    def exists(self, path: str) -> bool:
        """Whether there is an object (not a folder) at `path`."""
        try:
            if self.is_local:
                with self.errors(path):
                    return stat.S_ISREG(self.local(path).stat().st_mode)
            self.size(path)
        except Missing:
            return False
        with self.errors(path):
            return self.fs.isfile(self._key(path))

    def folders(self, path: str) -> list[str]:
        """Names of the folders in a local `path`, empty ones too."""
        if not self.is_local:
            return []
        with contextlib.suppress(Missing), self.errors(path):
            return sorted(e.name for e in os.scandir(self.local(path)) if e.is_dir())
        return []

    def list(self, path: str = "") -> list[str]:
        """Paths of all objects below `path`, sorted; none when there is nothing."""
        if self.is_local:
            # What is still being written, or never was finished, is no object.
            return sorted(p for p in self._walk(path) if not _TEMP.fullmatch(p.split("/")[-1]))
        with self.errors(path):
            self.fs.invalidate_cache()
            base_key = self._key("")
            return sorted(k[len(base_key) + 1 :] for k in self.fs.find(self._key(path)))

    def _walk(self, path: str) -> Iterator[str]:
        """All files below a local `path`. A folder that cannot be read is no empty folder."""

        def fail(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError | NotADirectoryError):
                raise error

        with self.errors(path):
            for folder, _, names in os.walk(self.local(path), onerror=fail):
                for name in names:
                    yield (Path(folder) / name).relative_to(self.root).as_posix()

    def leftovers(self, before: float) -> dict[str, int]:
        """What killed writers and probes left in a local lake: path to size, last written at
        `before` (a Unix time) or earlier. Object stores show only whole objects."""
        found = {}
        for path in self._walk("") if self.is_local else ():
            folder, _, name = path.rpartition("/")
            if _TEMP.fullmatch(name) or (not folder and name.startswith(_PROBE)):
                with contextlib.suppress(Missing), self.errors(path):
                    status = self.local(path).stat()
                    if status.st_mtime <= before:
                        found[path] = status.st_size
        return found

    def delete_empty(self, path: str) -> None:
        """Delete the folder `path` and those below it, as far as they are empty."""
        if not self.is_local:
            return
        for folder, _, _ in os.walk(self.local(path), topdown=False):
            with contextlib.suppress(OSError):  # not empty, or not ours to delete
                Path(folder).rmdir()

    def delete(self, path: str) -> None:
        """Delete one object; nothing happens when it is not there."""
        if self.is_local:
            with self.errors(path):
                self.local(path).unlink(missing_ok=True)
            return
        with contextlib.suppress(Missing), self.errors(path):
            self.fs.rm_file(self._key(path))

    def time_put(self, data: bytes) -> float:
        """Seconds that it takes to put one object, which is deleted again."""
        path = f"{_PROBE}{uuid.uuid4().hex}"
        try:
            start = time.perf_counter()
            self.put(path, data)
            return time.perf_counter() - start
        finally:
            self.delete(path)

    def check_put_new(self) -> None:
        """Put one key twice.

        Raises CheckFailed when the store lets the second through, Missing when it has no bucket.
        """
        path = f"{_PROBE}{uuid.uuid4().hex}"
        try:
            self.put_new(path, b"1")
        except Missing:
            raise Missing(f"{self.root}: its bucket does not exist: make it first") from None
        try:
            self.put_new(path, b"2")
        except Conflict:
            return
        finally:
            self.delete(path)
        raise CheckFailed(
            f"{self.root}: the store overwrote an object that a conditional put should have kept; "
            "expected If-None-Match support: two writers would lose each other's commits here, "
            "use another store"
        )


def _read_local(path: Path, start: int, end: int | None, suffix: int | None) -> memoryview:
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


def open_store(url: str | os.PathLike[str]) -> Store:
    """The store of a lake URL: a local path, `file://`, or any fsspec URL such as `s3://`."""
    return Store(os.fspath(url))
