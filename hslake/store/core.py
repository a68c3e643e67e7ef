"""Objects of a lake, wherever it is. Paths are relative to the lake and use `/`."""

import contextlib
import os
import re
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fsspec.core import OpenFile

from hslake.errors import (
    CheckFailed,
    Conflict,
    Corrupt,
    HslakeError,
    InvalidInput,
    Missing,
    has_password,
    without_secrets,
)
from hslake.store import local, s3, trouble
from hslake.store.anyfs import FsspecObjects
from hslake.store.written import Piece, Written

_LOCAL = ("file://", "local://")
_S3 = ("s3://", "s3a://")
_PROBE = ".hslake-probe-"
_HALF_A_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.]+):/")  # s3:/bucket would be a folder `s3:`


def check_no_password(url: str) -> None:
    """Raise InvalidInput when `url` holds one: libraries put URLs into their messages."""
    if has_password(url):
        raise InvalidInput(
            f"{without_secrets(url)}: the URL holds a password or key, which would end up in "
            "messages and logs: give it in the environment, for example AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY"
        )


class Store:
    """The objects below one lake URL. Safe from several threads; may be pickled.

    Whatever a call may mend when it is repeated is raised as Unavailable, NoSpace or Conflict.
    Local writes are durable when they return; those to S3 are whole or not there.
    """

    def __init__(self, url: str) -> None:
        for prefix in _LOCAL:
            url = url.removeprefix(prefix)
        check_no_password(url)
        self.is_local = "://" not in url
        if self.is_local and (half := _HALF_A_URL.match(url)):
            raise InvalidInput(
                f"{url}: is this a URL? expected {half[1].lower()}://…, or ./{url} for a folder of "
                "that name"
            )
        self.is_s3 = url.startswith(_S3)
        if self.is_s3:  # one name for one place: tables and DuckDB compare URLs
            url = "s3://" + url.partition("://")[2]
        self.root = str(Path(url).absolute()) if self.is_local else url.rstrip("/")
        self._remote = self._connect()

    def _connect(self) -> Any:
        if self.is_local:
            return None
        return s3.S3Objects(self.root) if self.is_s3 else FsspecObjects(self.root)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "_remote"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._remote = self._connect()  # clients do not travel between processes

    @property
    def fs(self) -> Any:
        """The fsspec filesystem of a store that is not local."""
        return self._remote.filesystem

    def delta_options(self) -> dict[str, str] | None:
        """What deltalake needs to reach the same place; holds keys, so never to be printed."""
        return self._remote.delta_options() if self.is_s3 else None

    def url(self, path: str = "") -> str:
        """Full URL (local: absolute path) of `path`."""
        return f"{self.root}/{path}".rstrip("/")

    def local(self, path: str = "") -> Path:
        """Path of a local lake's object."""
        return Path(self.url(path))

    @contextlib.contextmanager
    def errors(self, path: str) -> Iterator[None]:
        """The machine's and a library's errors as hslake's. Each client has its own kinds."""
        try:
            yield
        except HslakeError:
            raise
        except Exception as error:
            if isinstance(error, FileNotFoundError | NotADirectoryError):
                if not self.is_local and trouble.names_no_bucket(error):
                    raise trouble.no_bucket(self.root) from None
                raise Missing(f"{self.url(path)} is not there") from None
            if self.is_s3:
                raise s3.errors(self.root, path, error) from error
            if not self.is_local:
                raise trouble.remote(self.url(path), error) from error
            refused = trouble.refusal(self.url(path), error)
            if refused is None:
                raise
            raise refused from error

    # Writing

    def put(self, path: str, data: bytes | Sequence[Piece]) -> Written:
        """Write `path`, replacing what is there, atomically. `data` may come in pieces.

        To S3, large objects go in parts, several at a time; 64 MB of them are held beside `data`.
        """
        pieces: Sequence[Piece] = [data] if isinstance(data, bytes) else data
        with self.errors(path):
            if not self.is_local:
                return self._remote.put(path, pieces)
            local.put(self.local(path), pieces)
        return Written(sum(map(len, pieces)))

    def put_new(self, path: str, data: bytes) -> None:
        """Write `path` unless it exists, atomically. Raises Conflict when it exists.

        On S3 an object that this very call wrote, although the answer said otherwise or was lost,
        is a success.
        """
        with self.errors(path):
            try:
                if self.is_local:
                    local.put_new(self.local(path), data)
                else:
                    self._remote.put_new(path, data)
            except FileExistsError:
                raise Conflict(f"{self.url(path)} exists already") from None

    def confirm(self, path: str, written: Written) -> None:
        """Ask the store whether it holds what `put` wrote: the size and, on S3, its checksum.

        Raises Corrupt when not. A store whose tag is no MD5 (encryption with a key of KMS, for
        one) has its object read back instead.
        """
        with self.errors(path):
            found = self._stat(path)
            same = found.size == written.size
            if same and written.tag and found.tag != written.tag:
                same = self._remote.tag_of(path, written) == written.tag
        if not same:
            raise Corrupt(
                f"{self.url(path)}: the store holds {found.size} bytes, tag {found.tag}; "
                f"{written.size} were written, tag {written.tag}; nothing was committed: check the "
                "store and compact again"
            )

    def delete(self, path: str) -> None:
        """Delete one object; nothing happens when it is not there."""
        with contextlib.suppress(Missing), self.errors(path):
            if self.is_local:
                self.local(path).unlink(missing_ok=True)
            else:
                self._remote.delete(path)

    # Reading

    def read(self, path: str) -> bytes:
        """All bytes of `path`. Raises Missing."""
        with self.errors(path):
            return self.local(path).read_bytes() if self.is_local else self._remote.read(path)

    def read_range(
        self, path: str, start: int = 0, end: int | None = None, *, suffix: int | None = None
    ) -> memoryview:
        """Bytes [start, end) of `path`, or its last `suffix` bytes. Raises Missing.

        Fewer bytes come back when the object ends earlier.
        """
        with self.errors(path):
            if self.is_local:
                return local.read_range(self.local(path), start, end, suffix)
            return self._remote.read_range(path, start, end, suffix)

    def _stat(self, path: str) -> Written:
        if self.is_local:
            return Written(self.local(path).stat().st_size)
        return self._remote.stat(path)

    def size(self, path: str) -> int:
        """Size of `path` in bytes. Raises Missing."""
        with self.errors(path):
            return self._stat(path).size

    def exists(self, path: str) -> bool:
        """Whether there is an object (not a folder) at `path`."""
        try:
            with self.errors(path):
                if self.is_local:
                    return local.is_file(self.local(path))
                self._remote.stat(path)
        except Missing:
            return False
        return True

    def folders(self, path: str) -> list[str]:
        """Names of the folders in a local `path`, empty ones too."""
        if self.is_local:
            with contextlib.suppress(Missing), self.errors(path):
                return local.folders(self.local(path))
        return []

    def list(self, path: str = "") -> list[str]:
        """Paths of all objects below `path`, sorted; none when there is nothing."""
        if self.is_local:
            # What is still being written, or never was finished, is no object.
            return sorted(p for p in self._walk(path) if not local.TEMP.fullmatch(p.split("/")[-1]))
        with self.errors(path):
            return sorted(self._remote.sizes(path))

    def sizes(self, path: str = "") -> dict[str, int]:
        """Bytes of every object below `path`, by path: what `list` gives, in as many requests."""
        if not self.is_local:
            with self.errors(path):
                return dict(self._remote.sizes(path))
        found = {}
        for name in self.list(path):
            with contextlib.suppress(Missing), self.errors(name):  # removed meanwhile
                found[name] = self.local(name).stat().st_size
        return found

    def _walk(self, path: str) -> Iterator[str]:
        with self.errors(path):
            for file in local.walk(self.local(path)):
                yield file.relative_to(self.root).as_posix()

    # What nobody finished

    def delete_empty(self, path: str) -> None:
        """Delete the folder `path` and those below it, as far as they are empty."""
        if self.is_local:
            local.delete_empty(self.local(path))

    def leftovers(self, before: float) -> dict[str, int]:
        """What killed writers and probes left in a local lake: path to size, last written at
        `before` (a Unix time) or earlier. Object stores show only whole objects."""
        found = {}
        for path in self._walk("") if self.is_local else ():
            folder, _, name = path.rpartition("/")
            if local.TEMP.fullmatch(name) or (not folder and name.startswith(_PROBE)):
                with contextlib.suppress(Missing), self.errors(path):
                    status = self.local(path).stat()
                    if status.st_mtime <= before:
                        found[path] = status.st_size
        return found

    def uploads(self, before: float) -> Sequence[tuple[str, str]]:
        """(key in the bucket, id) of multipart uploads that a killed writer began in this lake at
        `before` (a Unix time) or earlier and never ended. Their parts are invisible but paid for.
        """
        with self.errors(""):
            return self._remote.uploads(before) if self.is_s3 else []

    def abort_upload(self, key: str, upload_id: str) -> None:
        """End one of `uploads` and free its parts."""
        with self.errors(""):
            self._remote.abort(key, upload_id)

    # Proofs

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
            if self.is_local:
                raise Missing(f"{self.root}: no file can be made there: choose another") from None
            raise trouble.no_bucket(self.root) from None
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


def open_store(url: str | os.PathLike[str]) -> Store:
    """The store of a lake URL: a local path, `file://`, `s3://`, or any fsspec URL."""
    return Store(os.fspath(url))


def open_file(url: str, compression: str | None = None) -> OpenFile:
    """One file for reading, wherever it is, by the same client and settings as a lake there."""
    if url.startswith(_S3):
        store = Store(url)
        with store.errors(""):
            return OpenFile(store.fs, url.partition("://")[2], "rb", compression=compression)
    import fsspec

    return fsspec.open(url, "rb", compression=compression)
