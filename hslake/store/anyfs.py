"""A lake anywhere else that fsspec reaches: memory://, gs://, az:// and others."""

from collections.abc import Sequence
from typing import Any

import fsspec
from fsspec.core import url_to_fs

from hslake.errors import InvalidInput
from hslake.store.written import Piece, Written


class FsspecObjects:
    """The objects below one fsspec URL."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._found: tuple[fsspec.AbstractFileSystem, str] | None = None

    @property
    def filesystem(self) -> fsspec.AbstractFileSystem:
        """The fsspec filesystem, made on first use."""
        return self._open()[0]

    def _open(self) -> tuple[fsspec.AbstractFileSystem, str]:
        if self._found is None:
            try:
                self._found = url_to_fs(self.root)
            except (ValueError, ImportError) as e:
                raise InvalidInput(
                    f"{self.root}: {e}; expected a folder or a URL such as s3://bucket/lake"
                ) from None
        return self._found

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_found": None}  # clients do not travel between processes

    def _key(self, path: str) -> str:
        return f"{self._open()[1]}/{path}".rstrip("/")

    def put(self, path: str, pieces: Sequence[Piece]) -> Written:
        """Write an object whole."""
        data = b"".join(pieces)
        self.filesystem.pipe_file(self._key(path), data)
        return Written(len(data))

    def put_new(self, path: str, data: bytes) -> None:
        """Write an object unless there is one. Raises FileExistsError when there is."""
        self.filesystem.pipe_file(self._key(path), data, mode="create")

    def delete(self, path: str) -> None:
        """Delete an object. Raises FileNotFoundError when it is not there."""
        self.filesystem.rm_file(self._key(path))

    def read(self, path: str) -> bytes:
        """A whole object."""
        return self.filesystem.cat_file(self._key(path))

    def read_range(self, path: str, start: int, end: int | None, suffix: int | None) -> memoryview:
        """Bytes [start, end) of an object, or its last `suffix`."""
        if suffix is not None:  # fsspec resolves negative starts itself, for every filesystem
            return memoryview(self.filesystem.cat_file(self._key(path), start=-suffix))
        return memoryview(self.filesystem.cat_file(self._key(path), start=start, end=end))

    def stat(self, path: str) -> Written:
        """Size of an object. Raises FileNotFoundError for a folder."""
        fs, key = self.filesystem, self._key(path)
        fs.invalidate_cache(fs._parent(key))
        found = fs.info(key)
        if found["type"] != "file":
            raise FileNotFoundError(path)
        return Written(int(found["size"]))

    def sizes(self, path: str) -> dict[str, int]:
        """Bytes of the objects below `path`, by path."""
        self.filesystem.invalidate_cache()
        cut = len(self._key("")) + 1
        found = self.filesystem.find(self._key(path), detail=True)
        return {key[cut:]: int(info["size"]) for key, info in found.items()}
