"""Shard indexes, each fetched once: a reader asks for the same few shards again and again."""

import threading
from collections import OrderedDict
from concurrent.futures import Future

import numpy as np

from hslake.segment.layout import Grid
from hslake.segment.shard import NAME_BYTES, parse_index
from hslake.store import Store


class IndexCache:
    """The indexes used last, `limit` bytes of them at most. Safe from several threads.

    A thread that wants an index another is fetching waits for it. What failed is not kept.
    """

    def __init__(self, store: Store, limit: int) -> None:
        self._store, self._limit = store, limit
        self._held: OrderedDict[str, tuple[Future[np.ndarray], int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, grid: Grid, path: str, where: str, name: bytes | None = None) -> np.ndarray:
        """The index [stream, chunk, (offset, bytes)] uint64 of the shard at `path`, which must
        bear `name` (see hslake.segment.shard) if it bears one.

        Raises Missing, or Corrupt naming `where`.
        """
        with self._lock:
            held = self._held.get(path)
            if held is not None:
                self._held.move_to_end(path)
            else:
                mine: Future[np.ndarray] = Future()
                self._held[path] = (mine, grid.index_bytes)
                self._bytes += grid.index_bytes
                while self._bytes > self._limit and len(self._held) > 1:
                    self._bytes -= self._held.popitem(last=False)[1][1]
        if held is not None:
            return held[0].result()
        try:
            tail = self._store.read_range(path, suffix=grid.index_bytes + NAME_BYTES)
            mine.set_result(parse_index(grid, tail, where, name))
        except BaseException as error:
            with self._lock:
                if self._held.get(path, (None,))[0] is mine:
                    self._bytes -= self._held.pop(path)[1]
            mine.set_exception(error)
        return mine.result()
