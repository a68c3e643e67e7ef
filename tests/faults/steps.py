"""Counts what a process does to the world, and kills it between two of its steps.

A step is announced *before* it happens: killed at step k, exactly the first k - 1 are done. Files
are watched with Python's audit hook; what it does not see (mapped memory, fallocate, fsync, Delta's
own writes) by wrappers that `tests.faults.instruments` puts around it. Nothing in hslake knows.
"""

import contextlib
import os
import re
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_NAMES = (
    (re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"), "ID"),
    (re.compile(r"[0-9a-f]{32}(-[0-9a-f]{32})*"), "X"),
    (re.compile(r"\d+"), "N"),
)


KillAt = int | tuple[str, int] | None


class Steps:
    """Steps of this process that touch something below `roots`.

    `kill_at`: die at that step (from 1), or at the n-th of a name (which differs less from run to
    run where threads are), or at none. `trace`: an open file descriptor that the
    name of every step is written to, as it comes.
    """

    def __init__(self, roots: tuple[str, ...], kill_at: KillAt, trace: int | None) -> None:
        self._roots, self._kill_at, self._trace = roots, kill_at, trace
        self.count = 0
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._local = threading.local()

    def begin(self) -> None:
        """From now on."""
        sys.addaudithook(self._audit)

    def step(self, what: str) -> None:
        """One step, about to happen."""
        with self._lock:
            name = f"{self.phase}: {what}"
            self.count += 1
            self._counts[name] += 1
            if self._trace is not None:
                os.write(self._trace, f"{name}\n".encode())
            if self._kill_at in (self.count, (name, self._counts[name])):
                os.kill(os.getpid(), signal.SIGKILL)
                signal.pause()

    @property
    def phase(self) -> str:
        """What this thread is at, by the innermost `during`."""
        return getattr(self._local, "phase", "")

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Name the steps of this thread."""
        before, self._local.phase = self.phase, phase
        try:
            yield
        finally:
            self._local.phase = before

    def wrap(self, owner: Any, name: str, phase: str) -> None:
        """Have the steps inside the function `owner.name` be of `phase`."""
        real: Callable[..., Any] = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with self.during(phase):
                return real(*args, **kwargs)

        setattr(owner, name, wrapped)

    def name_of(self, path: object, folder: int = -1) -> str | None:
        """A short name of the path without what differs from run to run; None: not watched."""
        text = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else None
        if text is None:
            return None
        if folder >= 0 and not text.startswith("/"):
            with contextlib.suppress(OSError):
                text = f"{Path(f'/proc/self/fd/{folder}').readlink()}/{text}"
        for root in self._roots:
            if text.startswith(root + "/"):
                for pattern, short in _NAMES:
                    text = pattern.sub(short, text.removeprefix(root + "/"))
                return text
        return None

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        look = _EVENTS.get(event)
        if look is None or getattr(self._local, "inside", False):
            return
        self._local.inside = True
        try:
            named = look(self, args)
            if named is not None:
                self.step(f"{event.removeprefix('os.').removeprefix('fcntl.')} {named}")
        finally:
            self._local.inside = False

    def _opened(self, args: tuple[Any, ...]) -> str | None:
        return self.name_of(args[0]) if args[2] is not None and args[2] & _WRITING else None

    def _locked(self, args: tuple[Any, ...]) -> str | None:
        with contextlib.suppress(OSError):
            return self.name_of(Path(f"/proc/self/fd/{args[0]}").readlink())
        return None

    def _renamed(self, args: tuple[Any, ...]) -> str | None:
        return self.name_of(args[1], args[3])


_EVENTS: dict[str, Callable[[Steps, tuple[Any, ...]], str | None]] = {
    "open": Steps._opened,
    "os.rename": Steps._renamed,
    "os.link": Steps._renamed,
    "os.remove": lambda steps, args: steps.name_of(args[0], args[1]),
    "os.rmdir": lambda steps, args: steps.name_of(args[0], args[1]),
    "os.mkdir": lambda steps, args: steps.name_of(args[0], args[2]),
    "os.utime": lambda steps, args: steps.name_of(args[0], args[3]),
    "os.truncate": lambda steps, args: steps.name_of(args[0]),
    "fcntl.lockf": Steps._locked,
}
