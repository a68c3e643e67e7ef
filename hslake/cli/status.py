"""`hslake status`."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hslake.cli.common import Json, Lake, examples, print_json, print_pairs, print_table
from hslake.units import format_bytes, format_count

if TYPE_CHECKING:
    from hslake.status import Coverage, StatusReport


@examples(
    "hslake status LAKE",
    "hslake status LAKE --server http://localhost:30000 --staging /dev/shm/hslake",
    "hslake status LAKE --server http://localhost:30000 --watch",
    "hslake status LAKE --json",
)
def status(
    lake: Lake,
    server: Annotated[
        list[str] | None,
        typer.Option("--server", metavar="URL", help="Ask this server too; repeatable."),
    ] = None,
    staging: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="Look into this staging folder too; repeatable."),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Again and again, until Ctrl-C.")] = False,
    interval: Annotated[float, typer.Option(min=0.5, help="Seconds between looks.")] = 5.0,
    json: Json = False,
) -> None:
    """Coverage, tokens left, rate and ETA, staging fill, servers, storage against the estimate."""
    import hslake.status

    while True:
        report = hslake.status.status(lake, servers=server or (), staging=staging or ())
        if watch and not json and sys.stdout.isatty():
            print("\033[H\033[2J", end="")
        if json:
            print_json(report)
        else:
            _print(report, staging)
        if not watch:
            return
        sys.stdout.flush()
        try:
            time.sleep(interval)
        except KeyboardInterrupt:  # the way to end it
            return


def _print(report: "StatusReport", staging: list[Path] | None) -> None:
    print(f"{report.lake} at version {report.version}, {report.at:%Y-%m-%d %H:%M:%S} UTC")
    if report.coverage:
        columns = ["source", "split", "planned", "committed", "waiting", "missing", "percent"]
        rows = [
            [c.source, c.split, c.planned, c.committed, c.waiting, c.missing, _percent(c)]
            for c in report.coverage
        ]
        sums = [report.planned, report.committed, report.waiting or 0, report.missing]
        share = 100 * report.committed_tokens / max(1, report.planned_tokens)
        print_table(columns, [*rows, ["(total)", "", *sums, round(share, 2)]])
        if report.waiting is None:
            print("(waiting counts as missing here: name --server or --staging to tell it apart)")
        elif report.missing and not staging:
            print("(what servers that have ended left in staging counts as missing: see --staging)")
    else:
        print(f"nothing is planned: hslake plan {report.lake} FILE --source NAME")
    print_pairs(_pairs(report))
    if report.writers:
        columns = ["writer", "seen at", "state", "filled", "captured", "dropped"]
        print_table(
            columns,
            [
                [
                    w.writer[:8],
                    w.seen_at,
                    w.error or ("armed" if w.alive and w.armed else "ended"),
                    f"{100 * (1 - w.free_rows / max(1, w.capacity_rows)):.0f} %" if w.alive else "",
                    w.samples_captured,
                    w.dropped,
                ]
                for w in report.writers
            ],
        )


def _percent(c: "Coverage") -> float:
    return round(100 * c.committed_tokens / max(1, c.planned_tokens), 2)


def _pairs(r: "StatusReport") -> list[tuple[str, str]]:
    rows = [
        (
            "tokens",
            f"{format_count(r.committed_tokens)} of {format_count(r.planned_tokens)} committed, "
            f"{format_count(r.tokens_left)} left",
        )
    ]
    if r.tokens_per_second and r.tokens_left:
        about = "nothing is going on now"
        if r.eta_seconds is not None:
            about = f"about {_span(r.eta_seconds)} left"
        rows.append(("rate", f"{r.tokens_per_second:,.0f} tokens/s committed, {about}"))
    stored = f"{format_bytes(r.stored_bytes)} stored of {format_bytes(r.raw_bytes)} raw"
    if r.expected_bytes:
        stored += f"; {r.stored_bytes / r.expected_bytes:.1%} of what the estimate foresees so far"
    rows.append(("storage", stored))
    whole = f"{format_bytes(r.forecast_bytes)} for the whole plan"
    if r.estimate_bytes:
        whole += f", the estimate is {format_bytes(r.estimate_bytes)}"
    rows.append(("forecast", whole))
    rows += [("server", f"{s.url}: {s.state}") for s in r.servers]
    return rows


def _span(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes < 1:
        return "a minute"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(status)
