"""Work on all cores with a bounded number of results in flight."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")
_REMOTE = 16  # requests that are waited for at a time, at least


def threads_for(local: bool) -> int:
    """One a core: hashing and decoding release the interpreter. More where a store answers late."""
    cores = os.cpu_count() or 1
    return cores if local else max(_REMOTE, cores)


def ordered(
    pool: ThreadPoolExecutor, work: Callable[[A], B], todo: Iterable[A], ahead: int
) -> Iterator[B]:
    """`work` of each of `todo`, in order, at most `ahead` of them begun and not yet taken.

    What one of them raises ends it: nothing more is begun.
    """
    running: deque[Future[B]] = deque()
    try:
        for item in todo:
            running.append(pool.submit(work, item))
            if len(running) >= ahead:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    finally:
        for future in running:
            future.cancel()
