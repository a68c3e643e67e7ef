"""`hslake status`."""

import json as jsonlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hslake.cli.common import Json, Lake, examples, plain, print_json
from hslake.errors import InvalidInput

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

    from hslake.status import StatusReport, Watcher

INTERVAL_S = 5.0


@examples(
    "hslake status LAKE",
    "hslake status LAKE --server http://localhost:30000 --staging /dev/shm/hslake",
    "hslake status LAKE --server http://localhost:30000 --watch",
    "hslake status LAKE --server http://localhost:30000 --watch 30 --json >> status.jsonl",
)
def status(
    lake: Lake,
    seconds: Annotated[str | None, typer.Argument(hidden=True)] = None,
    server: Annotated[
        list[str] | None,
        typer.Option(
            "--server",
            metavar="URL",
            help="Ask this server too, or the `compact --listen` at this address; repeatable.",
        ),
    ] = None,
    staging: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="Look into this staging folder too; repeatable."),
    ] = None,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch",
            help="Again and again, until Ctrl-C; seconds between looks may follow [default: 5].",
        ),
    ] = False,
    interval: Annotated[float | None, typer.Option(hidden=True)] = None,
    json: Json = False,
) -> None:
    """How far a lake is, when it is done, what is slow, and what somebody should do.

    With --watch a screen that is refreshed in place; where there is no terminal, a block of lines
    each time; with --json one JSON object a line. It outlives servers and stores that do not
    answer: what they told last stays, with its age.
    """
    import hslake.status

    pause = _pause(lake, seconds, interval, watch)
    if watch and seconds is not None and _number(seconds) is None:
        lake = seconds  # `--watch 10 LAKE`
    with hslake.status.Watcher(lake, server or (), staging or ()) as watcher:
        if watch:
            _watch(watcher, pause, json)
            return
        report = watcher.look()
    if json:
        print_json(report)
    else:
        _print(_lines(report))


def _pause(lake: str, seconds: str | None, interval: float | None, watch: bool) -> float:
    """Seconds between looks. Raises InvalidInput."""
    given = [x for x in (seconds, lake if seconds else None) if x is not None]
    number = next((n for x in given if (n := _number(x)) is not None), None)
    if seconds is not None and (number is None or not watch):
        raise InvalidInput(f"found {seconds!r} behind LAKE, expected nothing, or --watch SECONDS")
    pause = number if number is not None else INTERVAL_S if interval is None else interval
    if not 0.1 <= pause <= 86_400:
        raise InvalidInput(f"--watch: found {pause:g} seconds, expected 0.1 to 86400")
    return pause


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _watch(watcher: "Watcher", pause: float, json: bool) -> None:
    """Until Ctrl-C. The first look may fail: a lake that is not there will not come."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    live = None
    try:
        report = watcher.look()
        if sys.stdout.isatty() and not json:
            live = Live(console=console, auto_refresh=False, vertical_overflow="crop")
            live.start()
        while True:
            if json:
                print(jsonlib.dumps(plain(report), ensure_ascii=False), flush=True)
            elif live is not None:
                live.update(_page(_lines(report), console), refresh=True)
            else:
                _print(_lines(report))
                print(flush=True)
            time.sleep(pause)
            report = watcher.look(strict=False)
    except KeyboardInterrupt:  # the way to end it
        return
    finally:
        if live is not None:
            live.stop()


def _page(found: "list[Text]", console: "Console") -> "RenderableType":
    """Tables cut to the terminal's width, other lines wrapped under their names; what does not fit
    below is left out, and said so."""
    from rich.console import Group
    from rich.text import Text

    from hslake.status.screen import INDENT

    page: list[Text] = []
    for text in found:
        if text.no_wrap or len(text) <= console.width:
            text.no_wrap, text.overflow = True, "ellipsis"
            page.append(text)
            continue
        name, rest = text[:INDENT], text[INDENT:]
        for part in rest.wrap(console, max(20, console.width - INDENT)):
            page.append(Text.assemble(name, part))
            name = Text(" " * INDENT)
    room = max(1, console.height - 1)
    if len(page) > room:
        page = [*page[: room - 1], Text(f"… {len(page) - room + 1} lines more", "dim")]
    return Group(*page)


def _lines(report: "StatusReport") -> "list[Text]":
    from hslake.status.screen import lines

    return lines(report)


def _print(found: "list[Text]") -> None:
    """In colour on a terminal; plain and never cut elsewhere."""
    if not sys.stdout.isatty():
        print("\n".join(text.plain for text in found))
        return
    from rich.console import Console

    console = Console()
    for text in found:
        console.print(text, soft_wrap=True, highlight=False)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(status)
