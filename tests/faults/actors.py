"""Threads that run hslake's own code and wait before every step until they are told to go on, so
that a test decides in which order two of them meet a store and a table."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from hslake import picks
from hslake.segment import layout
from hslake.store import Store
from hslake.tables import catalog, deltalog, tablefile
from hslake.verify import quarantine
from hslake.versions import vacuuming

_PATIENCE_S = 120.0  # for one step
_local = threading.local()


class Ended(BaseException):
    """Raised in the thread of an actor that is to do nothing any more."""


class Actor:
    """`work` on a thread of its own. `skew_s`: how far its clock is ahead.

    `at`: the step it waits before, None once it has ended with `result` or `error`. `fault`: what
    befalls its next append to a table, "lost" (done, but it raises) or "refused" (not done).
    """

    def __init__(self, work: Callable[[], Any], skew_s: float = 0.0) -> None:
        self.skew_s = skew_s
        self.at: str | None = "start"
        self.result: Any = None
        self.error: BaseException | None = None
        self.fault: str | None = None
        self.crashed = False
        self._work = work
        self._go, self._waits = threading.Semaphore(0), threading.Semaphore(0)
        self._ending = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._wait()

    def step(self) -> None:
        """Do one step, up to the next one or the end."""
        assert self.at is not None and not self.crashed
        self._go.release()
        self._wait()

    def crash(self) -> None:
        """It never does anything again: its thread stays where it is until `bury`."""
        self.crashed = True

    def bury(self) -> None:
        """End its thread. What that cleans up, a crash would not: only after everything else."""
        if self.at is not None:
            self._ending = True
            self._go.release()
        self._thread.join(_PATIENCE_S)

    def _wait(self) -> None:
        if not self._waits.acquire(timeout=_PATIENCE_S):
            raise TimeoutError(f"the actor neither stops nor ends behind its step {self.at!r}")

    def _run(self) -> None:
        _local.actor = self
        try:
            self.pause("begin")
            self.result = self._work()
        except BaseException as error:
            self.error = error
        self.at = None
        self._waits.release()

    def pause(self, what: str) -> None:
        """Called on its thread: wait before the step `what`."""
        if self._ending:
            raise Ended
        self.at = what
        self._waits.release()
        self._go.acquire()
        if self._ending:
            raise Ended


def _actor() -> Actor | None:
    return getattr(_local, "actor", None)


def _stopping(real: Callable[..., Any], what: str) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        actor = _actor()
        if actor is not None:
            actor.pause(what)
        return real(*args, **kwargs)

    return wrapped


@contextmanager
def instruments() -> Iterator[None]:
    """Have actors stop at what they do to a store or a table, and see their own clocks."""
    append, nanoseconds = catalog._append, layout.time.time_ns

    def faulty_append(*args: Any) -> None:
        actor = _actor()
        if actor is None:
            return append(*args)
        actor.pause("append")
        fault, actor.fault = actor.fault, None
        if fault == "refused":
            raise OSError("the store refuses for a moment")
        append(*args)
        actor.pause("appended")
        if fault == "lost":
            raise OSError("the connection broke before the answer came")

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.now(tz) + timedelta(seconds=_skew())

    def time_ns() -> int:
        return nanoseconds() + int(_skew() * 1e9)

    with ExitStack() as stack:
        for name in ("put", "confirm", "delete", "size", "list", "delete_empty", "leftovers"):
            real = getattr(Store, name)
            stack.enter_context(patch.object(Store, name, _stopping(real, name)))
        for module, name in ((catalog, "open_table"), (deltalog, "sync_base"), (deltalog, "sync")):
            real = getattr(module, name)
            stack.enter_context(patch.object(module, name, _stopping(real, name)))
        stack.enter_context(patch.object(catalog, "_append", faulty_append))
        for module in (tablefile, picks, quarantine, vacuuming):
            stack.enter_context(patch.object(module, "datetime", Clock))
        stack.enter_context(patch.object(layout, "time", SimpleNamespace(time_ns=time_ns)))
        # Waiting for luck is what the test itself decides about.
        no_wait = SimpleNamespace(sleep=lambda s: None, time_ns=time_ns)
        stack.enter_context(patch.object(catalog, "time", no_wait))
        yield


def _skew() -> float:
    actor = _actor()
    return 0.0 if actor is None else actor.skew_s
