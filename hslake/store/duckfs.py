"""An fsspec filesystem as DuckDB needs it: one open file may be read by several threads.

DuckDB reads a large Parquet file with several threads through one handle, each with a seek and a
read of its own. Files of fsspec have one position for all: two threads in the wrong order read each
other's bytes, or none.
"""

import threading
from typing import Any

import fsspec


class ForThreads(fsspec.AbstractFileSystem):
    """`inner`, whose files have a position for each thread. Only what DuckDB asks for."""

    cachable = False

    def __init__(self, inner: fsspec.AbstractFileSystem) -> None:
        super().__init__()
        self.inner, self.protocol = inner, inner.protocol

    def _strip_protocol(self, path: Any) -> Any:  # type: ignore[override]
        return self.inner._strip_protocol(path)

    def unstrip_protocol(self, name: str) -> str:
        """As the inner one's."""
        return str(self.inner.unstrip_protocol(name))

    def open(self, path: str, mode: str = "rb", **more: Any) -> Any:
        """A file to read. Raises what the inner filesystem does."""
        return _File(self.inner.open(path, mode, **more))

    def info(self, path: str, **more: Any) -> Any:
        """As the inner one's."""
        return self.inner.info(path, **more)

    def ls(self, path: str, detail: bool = True, **more: Any) -> Any:
        """As the inner one's."""
        return self.inner.ls(path, detail=detail, **more)

    def modified(self, path: str) -> Any:
        """As the inner one's."""
        return self.inner.modified(path)


class _File:
    def __init__(self, file: Any) -> None:
        self._file, self._lock, self._at = file, threading.Lock(), threading.local()

    def seek(self, to: int, whence: int = 0) -> int:
        if whence == 0:
            self._at.place = to
        else:
            with self._lock:
                if whence == 1:
                    to, whence = to + self.tell(), 0
                self._at.place = self._file.seek(to, whence)
        return self.tell()

    def tell(self) -> int:
        return getattr(self._at, "place", 0)

    def read(self, size: int = -1) -> Any:
        with self._lock:
            self._file.seek(self.tell())
            data = self._file.read(size)
        self._at.place = self.tell() + len(data)
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
