"""`hslake compact`."""

import contextlib
import resource
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from hslake.cli.common import Json, Lake, examples, note, print_json, print_pairs
from hslake.errors import CheckFailed, InvalidInput
from hslake.units import format_bytes, format_count, parse_count

if TYPE_CHECKING:
    from hslake.compactreport import CompactReport

_STILL = " still arriving; one that was cut short is given up after an hour of silence"


@examples(
    "hslake compact LAKE --staging /dev/shm/hslake",
    "hslake compact LAKE --staging /dev/shm/hslake --watch",
    "hslake compact s3://bucket/lake --staging /dev/shm/hslake --paranoid",
    "hslake compact LAKE --staging /dev/shm/a --staging /dev/shm/b --json",
)
def compact(
    lake: Lake,
    staging: Annotated[
        list[Path], typer.Option(metavar="DIR", help="Staging directory. Repeatable.")
    ],
    watch: Annotated[
        bool,
        typer.Option("--watch", help="Go on until Ctrl-C or SIGTERM, then finish the segment."),
    ] = False,
    interval: Annotated[
        float, typer.Option(metavar="SECONDS", help="With --watch: pause between passes.")
    ] = 1.0,
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
    json: Json = False,
) -> None:
    """Move complete samples from staging into the lake and free their staging.

    With --watch, a live server's parts are taken once they are full or idle for some seconds, so
    that segments are not tiny; without it, everything complete.

    Every sample is checked against the checksum made at capture before it is committed. A crash
    anywhere leaves nothing half visible: run it again. Parts of another lake or model are refused
    and left alone, damaged ones reported; the others go on, and the exit code is 1.
    """
    limit = None if segment_tokens is None else parse_count(segment_tokens, "--segment-tokens")
    if limit is not None and limit < 1:
        raise InvalidInput(f"--segment-tokens: found {limit}, expected at least 1")
    stopping = False

    def stop(signum: int, frame: FrameType | None) -> None:
        nonlocal stopping
        if stopping:  # the second Ctrl-C does not wait
            raise KeyboardInterrupt
        stopping = True
        note("finishing this segment; press Ctrl-C again to stop at once")

    signals = (signal.SIGINT, signal.SIGTERM) if watch else ()
    before = [(s, signal.signal(s, stop)) for s in signals]
    import hslake.compact

    _open_files()
    from hslake.progress import NoteLines, Progress

    try:
        # Without a terminal a watching one tells its commits; "0 tokens/s" for days helps nobody.
        lines = watch and not sys.stderr.isatty()
        if lines:
            note(f"compact: watching {', '.join(map(str, staging))}")
        with NoteLines(None, "compact") if lines else Progress(None, "compact (tokens)") as bar:
            report = hslake.compact.compact(
                lake,
                staging,
                watch=watch,
                segment_tokens=limit,
                progress=bar,
                stop=lambda: stopping,
                interval_s=interval,
                paranoid=paranoid,
            )
    finally:
        for sign, handler in before:
            signal.signal(sign, handler)
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


def _open_files() -> None:
    """Allow as many open files as this user may have: each part that is read takes some."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _problems(report: "CompactReport") -> str:
    lines = []
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
