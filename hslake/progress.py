"""Progress bars on a terminal only.

A Progress is used as a context manager: `with Progress(total, "extract") as bar: bar.advance(n)`.
`Progress(total, description)` shows a rich bar on standard error when that is a terminal and is
silent otherwise. Functions that report progress take the maker (`ProgressMaker`), so a caller can
pass one of its own, or `Silent`.
"""

import sys
from types import TracebackType
from typing import Protocol, Self

import rich.progress
from rich.console import Console


class Bar(Protocol):
    """What a function that makes progress may call."""

    def advance(self, n: float = 1) -> None:
        """`n` more of the total are done."""

    def note(self, text: str) -> None:
        """A short remark beside the bar; replaces the last one."""

    def resize(self, total: float) -> None:
        """The total has changed."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class ProgressMaker(Protocol):
    """Makes a Bar for `total` units of work; None when the total is not known."""

    def __call__(self, total: float | None, description: str) -> Bar: ...


class Progress:
    """A rich progress bar on a terminal, nothing elsewhere."""

    def __init__(self, total: float | None, description: str) -> None:
        self.done = 0.0
        self._bar: rich.progress.Progress | None = None
        if sys.stderr.isatty():
            self._bar = rich.progress.Progress(
                rich.progress.TextColumn("[bold]{task.description}"),
                rich.progress.BarColumn(),
                rich.progress.MofNCompleteColumn(),
                rich.progress.TaskProgressColumn(),
                rich.progress.TimeElapsedColumn(),
                rich.progress.TimeRemainingColumn(),
                rich.progress.TextColumn("[dim]{task.fields[note]}"),
                console=Console(stderr=True),
            )
            self._task = self._bar.add_task(description, total=total, note="")

    def advance(self, n: float = 1) -> None:
        """`n` more of the total are done."""
        self.done += n
        if self._bar is not None:
            self._bar.advance(self._task, n)

    def note(self, text: str) -> None:
        """A short remark beside the bar; replaces the last one."""
        if self._bar is not None:
            self._bar.update(self._task, note=text)

    def resize(self, total: float) -> None:
        """The total has changed."""
        if self._bar is not None:
            self._bar.update(self._task, total=total)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


class Silent:
    """A Progress that never shows anything."""

    def __init__(self, total: float | None = None, description: str = "") -> None:
        self.done = 0.0

    def advance(self, n: float = 1) -> None:
        """Count, and show nothing."""
        self.done += n

    def note(self, text: str) -> None:
        """Show nothing."""

    def resize(self, total: float) -> None:
        """Show nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None
