"""`hslake tune`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hslake.cli.common import Json, Lake, examples, note, print_json, print_table
from hslake.errors import CheckFailed, InvalidInput
from hslake.units import format_bytes, parse_count

if TYPE_CHECKING:
    from hslake.tune import TuneReport


@examples(
    "hslake tune LAKE --server http://localhost:30000 --staging /dev/shm/hslake",
    "hslake tune LAKE --server http://a:30000 --server http://b:30000 --seconds 20",
    "hslake tune LAKE --staging /dev/shm/hslake --chunk 4096,8192,16384 -- --model-path MODEL",
)
def tune(
    lake: Lake,
    sglang_args: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- ARGS...]", help="Start servers for it with these arguments of SGLang."
        ),
    ] = None,
    server: Annotated[
        list[str] | None,
        typer.Option("--server", metavar="URL", help="A running server; repeat for several."),
    ] = None,
    staging: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR",
            help="The servers' staging folder, when it is on this machine; needed with -- ARGS.",
        ),
    ] = None,
    chunk: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,…",
            help="Chunk sizes to compare, with -- ARGS: a server is started with each in turn.",
        ),
    ] = None,
    python: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="As for `hslake serve`, with -- ARGS."),
    ] = None,
    seconds: Annotated[float, typer.Option(help="Of one burst, once it has settled.")] = 8.0,
    repeats: Annotated[int, typer.Option(help="Bursts at every concurrency that comes near.")] = 3,
    first: Annotated[int, typer.Option(help="Concurrency to begin with.")] = 4,
    most: Annotated[int, typer.Option(help="Concurrency to try at most.")] = 1024,
    probes: Annotated[
        bool,
        typer.Option(
            "--probes", help="Capture none of the plan's samples; also done when few are left."
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Measure concurrency and chunk size, and print the flags to use.

    Captures planned samples for real in short bursts: concurrency is doubled until it gains
    nothing, then the candidates are measured again in turns, and the least within noise of the best
    is taken. Servers of other chunk sizes are compared; with -- ARGS they are started for it, one
    after the other. Run `hslake compact --watch` beside it, as in the run itself: staging that
    fills limits a burst, and is told. Ctrl-C loses nothing that was captured. Exits 1 when nothing
    could be measured.
    """
    import hslake.tune
    from hslake.progress import Progress

    if chunk is not None and not sglang_args:
        raise InvalidInput(
            "--chunk starts servers: give the arguments to start them with behind --"
        )
    chunks = [parse_count(part, "--chunk") for part in (chunk or "").split(",") if part]
    options = hslake.tune.TuneOptions(
        seconds,
        repeats,
        first,
        most,
        tuple(dict.fromkeys(chunks)),
        tuple(sglang_args or ()),
        python,
        probes,
    )
    report = hslake.tune.tune(lake, server or (), options, staging=staging or (), progress=Progress)
    if json:
        print_json(report)
    else:
        _print(report)
    if report.best is None:
        raise CheckFailed(
            "nothing could be measured: " + "; ".join(report.warnings or ["no burst"])
        )


def _print(report: "TuneReport") -> None:
    for group in report.groups:
        size = f"chunk size {group.chunk:,}" if group.chunk else "chunk size not known"
        memory = ""
        if group.memory_bytes is not None:
            memory = f", of each GPU the capture takes {format_bytes(group.memory_bytes)}"
        print(f"{', '.join(group.servers)}: {size}{memory}")
        rows = []
        for level in group.levels:
            spread = None if level.spread is None else f"± {level.spread / level.rate:.1%}"
            chosen = "<- enough" if group.best is not None and level == group.best else ""
            room = f"{level.starved:.0%}" if level.starved >= 0.005 else ""
            rows.append(
                [
                    level.requests,
                    round(level.rate, 1),
                    spread,
                    level.bursts,
                    round(level.on_the_way, 1),
                    level.most_tokens,
                    room,
                    chosen,
                ]
            )
        columns = ["at once", "tokens/s", "spread", "bursts", "on the way", "tokens", "no room", ""]
        print_table(columns, rows)
        print()
    kind = "probes, which the compactor gives up" if report.probes else "planned samples"
    count = f"{report.samples:,} " if not report.probes else ""
    print(f"measured with {count}{kind}")
    for text in report.warnings:
        note(f"warning: {text}")
    for command in report.commands:
        print(command)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(tune)
