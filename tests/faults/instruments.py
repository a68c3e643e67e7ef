"""Wrappers, in a process that is to be killed, around what Python's audit hook does not see."""

import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hslake import plan, verify, versions
from hslake.compact import line, sources
from hslake.segment import chunks
from hslake.staging import frames, part, parts, writer
from hslake.store import Store, Written
from hslake.tables import catalog
from tests.faults import hook
from tests.faults.steps import Steps
from tests.faults.syscalls import die_at


def instrument(
    steps: Steps, *, lost_answers: bool = False, native: tuple[str, int] | None = None
) -> None:
    """Announce to `steps` what the audit hook does not see, and begin.

    `lost_answers`: every append succeeds and then raises, as when the connection breaks before the
    answer. `native`: (kind of system call, n): die at the first such
    call inside the n-th append.
    """
    _phases(steps)
    _descriptors(steps)
    _journals(steps)
    _uploads(steps)
    _appends(steps, lost_answers, native)
    steps.begin()


def _phases(steps: Steps) -> None:
    for owner, name, phase in (
        (writer.StagingWriter, "__init__", "birth"),
        (writer.StagingWriter, "make_part", "make"),
        (writer.StagingWriter, "begin", "reserve"),
        (writer.StagingWriter, "wrote", "write"),
        (writer.StagingWriter, "flush", "write"),
        (writer.StagingWriter, "close", "close"),
        (writer.StagingWriter, "_write_status", "status"),
        (parts.Parts, "make", "make"),
        (part.Part, "seal", "seal"),
        (parts.Parts, "recycle", "recycle"),
        (sources, "take", "take"),
        (sources.Sources, "_look_into", "take"),
        (sources.Sources, "hold", "take"),
        (sources, "remove_remains", "remove"),
        (sources, "remove_writer", "remove"),
        (sources.Sources, "free", "free"),
        (line, "fill", "upload"),
        (line, "finish", "upload"),
        (versions, "vacuum", "vacuum"),
        (verify, "hide", "hide"),
        (hook.Hook, "forward", "write"),
        (plan, "plan_files", "plan"),
    ):
        steps.wrap(owner, name, phase)
    real = catalog.commit

    def commit(store: Store, name: str, build: Any, txn_id: str) -> int:
        # A vacuum's or a plan's commit is a step of theirs.
        with steps.during(f"{steps.phase} commit".strip()):
            return real(store, name, build, txn_id)

    catalog.commit = commit  # type: ignore[assignment]


def _descriptors(steps: Steps) -> None:
    """Before and after what is done to a descriptor."""

    def name(fd: int) -> str | None:
        return steps.name_of(Path(f"/proc/self/fd/{fd}").readlink())

    def both(real: Callable[..., Any], what: str) -> Callable[..., Any]:
        def wrapped(fd: int, *args: Any) -> Any:
            named = name(fd)
            if named is not None:
                steps.step(f"{what} {named}")
            return real(fd, *args)

        return wrapped

    os.fsync = both(os.fsync, "fsync")
    os.posix_fallocate = both(os.posix_fallocate, "fallocate")


def _journals(steps: Steps) -> None:
    """Frames are written in pieces, and no piece at once."""

    class Map(mmap.mmap):
        def __setitem__(self, at: Any, value: Any) -> None:
            start, stop, _ = at.indices(len(self))
            middle = (start + stop) // 2
            steps.step(f"frame bytes {_piece(stop - start)}, none")
            if stop - start == 4:  # aligned: one store of the processor
                super().__setitem__(at, value)
                return
            super().__setitem__(slice(start, middle), value[: middle - start])
            steps.step(f"frame bytes {_piece(stop - start)}, half")
            super().__setitem__(slice(middle, stop), value[middle - start :])

    frames.mmap = SimpleNamespace(mmap=Map)  # type: ignore[assignment]


def _piece(size: int) -> str:
    return {4: "magic", 8: "head", 12: "header"}.get(size, "payload")


class _Pieces(Sequence[bytes]):
    """Pieces of an object that announce themselves."""

    def __init__(self, steps: Steps, what: str, pieces: Sequence[bytes]) -> None:
        self._steps, self._what, self._pieces = steps, what, pieces

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, at: Any) -> Any:
        return self._pieces[at]

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._pieces:
            self._steps.step(f"piece of {self._what}")
            yield piece


def _uploads(steps: Steps) -> None:
    put, delete, encode = Store.put, Store.delete, chunks.encode_body

    def noted_put(self: Store, path: str, data: Any) -> Written:
        whole = (
            [data[: len(data) // 2], data[len(data) // 2 :]] if isinstance(data, bytes) else data
        )
        what = steps.name_of(f"{self.root}/{path}") or path
        in_pool = "upload" if path.startswith("segments/") else ""
        with steps.during(steps.phase or in_pool):
            written = put(self, path, _Pieces(steps, what, whole))
            steps.step(f"stored {what}")
            return written

    def noted_encode(*args: Any) -> bytes:
        with steps.during("encode"):
            steps.step("chunk")
            return encode(*args)

    def noted_delete(self: Store, path: str) -> None:
        # Of a segment that is condemned, or given up: in a pool's thread, which has no phase.
        with steps.during(steps.phase or ("vacuum" if path.startswith("segments/") else "")):
            delete(self, path)

    Store.delete = noted_delete  # type: ignore[method-assign]
    Store.put = noted_put  # type: ignore[method-assign]
    chunks.encode_body = noted_encode


def _appends(steps: Steps, lost_answers: bool, native: tuple[str, int] | None) -> None:
    real, count = catalog._append, 0

    def append(state: catalog.TableState, *args: Any) -> None:
        nonlocal count
        count += 1
        steps.step(f"before the entry of {state.name}")
        if native is not None and native[1] == count and not die_at(native[0]):
            os._exit(UNUSABLE)
        real(state, *args)
        steps.step(f"after the entry of {state.name}")
        if lost_answers:
            raise OSError("the connection broke before the answer came")

    catalog._append = append


UNUSABLE = 77  # exit status: there is no seccomp here
