"""`hslake compact`."""

import contextlib
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from hslake.cli.common import INTERRUPTED, Json, Lake, examples, note, print_json, print_pairs
from hslake.errors import CheckFailed, InvalidInput
from hslake.units import format_bytes, format_count, parse_count

if TYPE_CHECKING:
    from hslake.compactreport import CompactReport

_HUNG_S = 10.0  # after the grace: something hangs that cannot be called off
_STILL = " still arriving; one that was cut short is given up after an hour of silence"


@examples(
    "hslake compact LAKE --staging /dev/shm/hslake",
    "hslake compact LAKE --staging /dev/shm/hslake --watch",
    "hslake compact s3://bucket/lake --staging /dev/shm/hslake --paranoid",
    "hslake compact LAKE --staging /dev/shm/a --staging /dev/shm/b --json",
    "hslake compact LAKE --staging /dev/shm/hslake --watch --listen 0.0.0.0:9650",
)
def compact(
    lake: Lake,
    staging: Annotated[
        list[Path], typer.Option(metavar="DIR", help="Staging directory. Repeatable.")
    ],
    watch: Annotated[
        bool,
        typer.Option("--watch", help="Go on until Ctrl-C or SIGTERM, whatever may mend by itself."),
    ] = False,
    interval: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.0, help="With --watch: pause between looks.")
    ] = 1.0,
    max_age: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0.0,
            help="With --watch: no sample waits longer than this for others to fill its segment.",
        ),
    ] = 60.0,
    segment_tokens: Annotated[
        str | None,
        typer.Option(metavar="N", help="Most tokens of a segment (default: the lake's geometry)."),
    ] = None,
    paranoid: Annotated[
        bool,
        typer.Option(
            "--paranoid", help="Read all that was stored back before it is committed, not a sample."
        ),
    ] = False,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Answer /hslake/status, /hslake/metrics and /health there: for drivers on other "
            "machines, and for Prometheus.",
        ),
    ] = None,
    grace: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0.0,
            help="After Ctrl-C or SIGTERM: time to finish the segments that were begun.",
        ),
    ] = 20.0,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Threads that encode (default: all of up to 4 cores, else half)."),
    ] = None,
    json: Json = False,
) -> None:
    """Move complete samples from staging into the lake and free their staging.

    With --watch, what is complete is gathered until a segment is full, a sample has waited for
    --max-age, or a server is short of staging rows or idle; without it, everything complete is
    taken.

    Every sample is checked against the checksum made at capture before it is committed. A crash
    anywhere leaves nothing half visible: run it again. Parts of another lake or model are refused
    and left alone, damaged ones reported; the others go on, and the exit code is 1.

    Ctrl-C or SIGTERM finishes the segments that were begun, or removes what they left after
    --grace; a second one ends at once. With --watch that is the ordinary end (exit code 0, or 1
    after damage); without it the exit code is 130. Exit code 2 (1 for damage) when the lake itself
    cannot be used.
    """
    limit = None if segment_tokens is None else parse_count(segment_tokens, "--segment-tokens")
    if limit is not None and limit < 1:
        raise InvalidInput(f"--segment-tokens: found {limit}, expected at least 1")
    import hslake.compact

    _open_files()
    from hslake.compact.memory import keep_memory
    from hslake.compactreport import CompactReport
    from hslake.progress import NoteLines, Progress

    keep_memory()
    found = CompactReport()
    # Without a terminal a watching one tells its commits; "0 tokens/s" for days helps nobody.
    lines = watch and not sys.stderr.isatty()
    if lines:
        note(f"compact: watching {', '.join(map(str, staging))}")
    with _stopping(grace) as stop, _listening(listen, lake, staging, found):
        with NoteLines(None, "compact") if lines else Progress(None, "compact (tokens)") as bar:
            report = hslake.compact.compact(
                lake,
                staging,
                watch=watch,
                segment_tokens=limit,
                progress=bar,
                stop=stop,
                interval_s=interval,
                paranoid=paranoid,
                max_age_s=max_age,
                grace_s=grace,
                threads=threads,
                report=found,
            )
    if json:
        print_json(report)
    else:
        rows = [
            ("committed", f"{format_count(report.samples)} samples, "
                          f"{format_count(report.tokens)} tokens in {report.segments} segments"),
            ("raw", format_bytes(report.raw_bytes)),
            ("stored", format_bytes(report.stored_bytes)),
        ]  # fmt: skip
        if not watch:
            rows.append(("waiting", f"{report.waiting} samples{_STILL * (report.waiting > 0)}"))
        rows += [
            ("skipped", f"writer {name}: being compacted by another process, not counted here")
            for name in report.skipped
        ]
        if report.replaced:
            rows.append(("replaced", f"{report.replaced} of a former generation of the plan"))
        if report.duplicates:
            rows.append(("skipped", f"{report.duplicates} duplicates (already in the lake)"))
        rows += [("given up", f"{n} samples: {why}") for why, n in report.abandoned.items()]
        print_pairs(rows, f"{lake} at version {report.version}" if report.version else lake)
    if report.stopped:
        note(
            "stopped: what was committed is safe, the rest is in staging; the same command goes on"
        )
    if not report.passed:
        raise CheckFailed(_problems(report))
    if report.stopped and not watch:
        raise typer.Exit(INTERRUPTED)


@contextlib.contextmanager
def _stopping(grace: float) -> Iterator[Callable[[], bool]]:
    """Whether SIGINT or SIGTERM has come. The process ends at once at the second one, or when it
    hangs for longer than its grace: its locks fall with it, a vacuum removes what it was writing.
    """
    over = threading.Event()
    done = threading.Event()

    def end(code: int, why: str) -> None:
        show = "\033[?25h" if sys.stderr.isatty() else ""  # a progress bar hides the cursor
        note(f"{show}{why}; nothing is half visible, the rest is in staging")
        sys.stderr.flush()
        os._exit(code)

    def watchdog() -> None:
        if not done.wait(grace + _HUNG_S):
            end(INTERRUPTED, f"still not stopped {grace + _HUNG_S:.0f} s later: ended")

    def stop(signum: int, frame: FrameType | None) -> None:
        if over.is_set():
            end(128 + signum, "stopped at once")
        over.set()
        threading.Thread(target=watchdog, daemon=True).start()
        note("finishing what was begun; again ends at once")

    if threading.current_thread() is not threading.main_thread():
        yield over.is_set
        return
    before = [(s, signal.signal(s, stop)) for s in (signal.SIGINT, signal.SIGTERM)]
    try:
        yield over.is_set
    finally:
        done.set()
        for sign, handler in before:
            signal.signal(sign, handler)


@contextlib.contextmanager
def _listening(
    address: str | None, lake: str, staging: list[Path], report: "CompactReport"
) -> Iterator[None]:
    if address is None:
        yield
        return
    from hslake.compact.listen import Listener
    from hslake.lake import open_lake

    with Listener(address, staging, report, open_lake(lake).spec.lake_id) as listener:
        note(f"compact: listening on {listener.address}")
        yield


def _open_files() -> None:
    """Allow as many open files as this user may have: each part that is read takes some."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _problems(report: "CompactReport") -> str:
    lines = []
    if report.troubles:
        lines.append("\n  ".join(["not done, run it again:", *report.troubles]))
    if report.refused:
        lines.append("\n  ".join(["of another lake or model:", *report.refused]))
    if report.damage:
        lines.append(
            f"{len(report.damage)} times damage in staging: " + "; ".join(report.damage)
            + ". What was sound is in the lake, `hslake extract` asks for the rest again; journals "
            "that were cut short are kept in STAGING/damaged, delete them when looked at"
        )  # fmt: skip
    return "\n".join(lines)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(compact)
