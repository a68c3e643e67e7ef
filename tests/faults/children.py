"""Processes that are killed: hook writers, compactors, vacuums, plans. Started from one that has
imported everything, so that a new one costs milliseconds."""

import functools
import logging
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from hslake import plan as plans
from hslake import versions
from hslake.compact import compact
from hslake.ids import RequestId, new_attempt
from hslake.spec import read_spec
from tests.faults import skew
from tests.faults.hook import Hook, serve
from tests.faults.instruments import instrument
from tests.faults.steps import KillAt, Steps
from tests.faults.world import length_of

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["__main__", "tests.faults.children", "duckdb", "pandas"])


@dataclass(frozen=True)
class Faults:
    """How a child is to die. `kill_at`: see Steps; `trace`: file that gets the steps' names;
    `native`: see instruments; `skew_s`: how far its clock is ahead."""

    roots: tuple[str, ...] = ()
    kill_at: KillAt = None
    trace: str | None = None
    lost_answers: bool = False
    native: tuple[str, int] | None = None
    skew_s: float = 0.0


Child = BaseProcess


def spawn(work: Callable[..., None], faults: Faults, *args: Any) -> Child:
    """Start `work(steps, *args)` in a process of its own."""
    _start_template()
    child = _CONTEXT.Process(target=_main, args=(work, faults, args), daemon=True)  # type: ignore[attr-defined]
    child.start()
    return child


@functools.cache
def _start_template() -> None:
    """The process that all others are forked from. It imports by PYTHONPATH alone (Python 3.11)."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def pipe() -> tuple[Connection, Connection]:
    """Two ends; each is to be closed by the side that does not use it."""
    found: tuple[Connection, Connection] = _CONTEXT.Pipe()
    return found


def _main(work: Callable[..., None], faults: Faults, args: Sequence[Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends everything
    logging.disable()  # that another one is at work, and what a vacuum took: as it should be
    trace = None
    if faults.trace is not None:
        trace = os.open(faults.trace, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    steps = Steps(faults.roots, faults.kill_at, trace)
    if faults.kill_at is not None or trace is not None or faults.native or faults.lost_answers:
        instrument(steps, lost_answers=faults.lost_answers, native=faults.native)
    if faults.skew_s:
        skew.set_clock(faults.skew_s)
    work(steps, *args)
    sys.stdout.flush()
    os._exit(0)


# -- what they do ------------------------------------------------------------------------------


def write(
    steps: Steps, url: str, root: str, requests: Connection, settings: dict[str, Any]
) -> None:
    """A hook writer that captures what comes through `requests` until it is killed; EOF ends it in
    order."""
    hook = Hook(Path(root), read_spec(url), step=steps.step, settings=settings)
    rng = random.Random(hook.writer.writer_id)

    def poll() -> RequestId | None:
        if requests.poll(0.0 if hook.requests else 0.01):
            found: RequestId = requests.recv()
            return found
        return None

    try:
        serve(hook, poll, lambda: rng.random() < 0.01)
    except EOFError:
        hook.finish()


def write_script(
    steps: Steps, url: str, root: str, names: Sequence[str], buffered: bool, parent: Connection
) -> None:
    """One hook writer's life in a fixed order: parts made at once, later and in the background,
    chunks of several samples, a retraction, a drop, a sealed part compacted and recycled, a part
    filled again, the end. `parent` compacts when asked to."""
    now = [1e9]  # a clock that only this script moves
    settings = {
        "part_tokens": 900,
        "max_parts": 3,
        "ahead": buffered,
        "buffered": buffered,
        "clock": lambda: now[0],
        "idle_s": 5.0,
        "silent_s": 60.0,
    }
    spec = read_spec(url)
    hook = Hook(Path(root), spec, step=steps.step, chunk=256, settings=settings)
    if buffered:  # as when there was no room for the third part at first
        hook.writer._parts.all.pop().close()
        hook.upkeep()

    def ask(name: str) -> None:
        hook.submit(RequestId(spec.lake8, new_attempt(), length_of(name), "A1", name))

    def forwards() -> None:
        while hook.requests:
            hook.forward()

    for round_, some in enumerate(names[at : at + 4] for at in range(0, len(names), 4)):
        for name in some:
            ask(name)
        hook.forward()
        hook.retract(round_)
        forwards()
        if round_ == 0:
            ask(names[-1])
            hook.forward()
            hook.abort(0)  # goes silent: it must not hold the part back for ever
            hook.writer.drop(RequestId(spec.lake8, new_attempt(), 5, "A1", names[-1]), "refused")
        now[0] += 61.0
        hook.upkeep()
        parent.send("compact")
        parent.recv()
        now[0] += 6.0
        hook.upkeep()  # a compactor has been here, so idle parts are sealed
        parent.send("compact")
        parent.recv()
        hook.upkeep()  # and recycled
    ask(names[-1])
    hook.forward()
    hook.writer.close()  # in the middle of a sample


def compact_watch(
    steps: Steps, url: str, roots: Sequence[str], segment_tokens: int, interval_s: float
) -> None:
    """A watching compactor, until it is killed."""
    parent = os.getppid()
    compact(
        url,
        [Path(r) for r in roots],
        watch=True,
        segment_tokens=segment_tokens,
        interval_s=interval_s,
        stop=lambda: os.getppid() != parent,
    )


def compact_once(steps: Steps, url: str, roots: Sequence[str], segment_tokens: int) -> None:
    """One pass, live parts too."""
    compact(url, [Path(r) for r in roots], segment_tokens=segment_tokens)


def vacuum_now(steps: Steps, url: str, repeat_s: float | None = None) -> None:
    """A vacuum that takes everything unnamed; again and again with `repeat_s`."""
    while True:
        versions.vacuum(url, retain=timedelta(0))
        if repeat_s is None:
            return
        time.sleep(repeat_s)


def plan(steps: Steps, url: str, file: str) -> None:
    """Plan a file."""
    plans.plan_files(url, [file])


__all__ = [
    "Child",
    "Faults",
    "compact_once",
    "compact_watch",
    "pipe",
    "plan",
    "spawn",
    "vacuum_now",
    "write",
    "write_script",
]
