"""Progress: a bar on a terminal, now and then a line where there is none.

A Progress is used as a context manager: `with Progress(total, "extract") as bar: bar.advance(n)`.
`Progress(total, "extract (tokens)")` shows on standard error: a rich bar on a terminal, elsewhere
(nohup, systemd, Slurm) plain lines, and none for what ends within seconds. Functions that report
progress take the maker (`ProgressMaker`), so a caller can pass one of its own, or `Silent`.
"""

import sys
import threading
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Protocol, Self

import rich.progress
from rich.console import Console, RenderableType
from rich.text import Text

FIRST_LINE_S = 5.0  # what ends sooner says nothing
NEXT_LINE_S = 30.0


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


class _Bar(rich.progress.Progress):
    """A short bar, so that 80 columns hold the counts, with the note in full below it."""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        for task in self.tasks:
            if task.fields["note"]:
                yield Text(task.fields["note"], style="dim")


class _Lines:
    """Prints where the work stands after some seconds, then now and then: also when it is stuck,
    hence a thread of its own."""

    def __init__(self, total: float | None, description: str) -> None:
        name, _, unit = description.partition(" (")
        self._name, self._unit = name, unit.rstrip(")")
        self.total, self.done, self.note = total, 0.0, ""
        self._shown = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._start = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()
        if self.done == self.total:
            self.note = ""  # of what was left a moment ago
        if self._shown:
            self._print(self.done, time.monotonic() - self._start)

    def _run(self) -> None:
        then, done = self._start, 0.0
        while not self._over.wait(NEXT_LINE_S if self._shown else FIRST_LINE_S):
            now = time.monotonic()
            self._print(self.done - done, now - then)  # the rate of late: a stall shows
            then, done = now, self.done

    def _print(self, done: float, seconds: float) -> None:
        self._shown += 1
        text = f"{self._name} {self.done:,.0f}"
        if self.total is not None:
            text += f" of {self.total:,.0f}"
        elif not self.done:
            text = self._name
        text += f" {self._unit}" if self._unit else ""
        if self._unit not in ("", "seconds"):
            text += f", {done / max(seconds, 1e-3):,.0f} {self._unit}/s"
        text += f", {time.monotonic() - self._start:,.0f} s"
        print(text + (f"; {self.note}" if self.note else ""), file=sys.stderr, flush=True)


class Progress:
    """A rich progress bar on a terminal, lines of text elsewhere."""

    def __init__(self, total: float | None, description: str) -> None:
        self.done = 0.0
        self._bar: _Bar | None = None
        self._lines: _Lines | None = None
        if not sys.stderr.isatty():
            self._lines = _Lines(total, description)
            return
        self._bar = _Bar(
            rich.progress.TextColumn("[bold]{task.description}"),
            rich.progress.BarColumn(bar_width=12),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TaskProgressColumn(),
            rich.progress.TimeElapsedColumn(),
            rich.progress.TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task = self._bar.add_task(description, total=total, note="")

    def advance(self, n: float = 1) -> None:
        """`n` more of the total are done."""
        self.done += n
        if self._bar is not None:
            self._bar.advance(self._task, n)
        if self._lines is not None:
            self._lines.done = self.done

    def note(self, text: str) -> None:
        """A short remark beside the bar; replaces the last one."""
        if self._bar is not None:
            self._bar.update(self._task, note=text)
        if self._lines is not None:
            self._lines.note = text

    def resize(self, total: float) -> None:
        """The total has changed."""
        if self._bar is not None:
            self._bar.update(self._task, total=total)
        if self._lines is not None:
            self._lines.total = total

    def __enter__(self) -> Self:
        for shown in (self._bar, self._lines):
            if shown is not None:
                shown.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for shown in (self._bar, self._lines):
            if shown is not None:
                shown.stop()


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


class NoteLines(Silent):
    """Prints each note as a line: for work without an end, where only events are worth telling."""

    def __init__(self, total: float | None = None, description: str = "") -> None:
        super().__init__(total, description)
        self._description = description

    def note(self, text: str) -> None:
        """One line."""
        print(f"{self._description}: {text}", file=sys.stderr, flush=True)
