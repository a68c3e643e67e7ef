"""`hslake audit`."""

from pathlib import Path
from typing import Annotated

import typer

from hslake.cli.common import Json, Lake, examples, print_json, print_pairs
from hslake.errors import CheckFailed
from hslake.units import format_bytes, parse_bytes


@examples(
    "hslake audit LAKE",
    "hslake audit LAKE --fail-over 3.5TB",
    "hslake audit LAKE --report audit.html",
    "hslake audit LAKE --json",
)
def audit(
    lake: Lake,
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE.html", help="Write an HTML report with a plot."),
    ] = None,
    fail_over: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Exit 1 when the forecast exceeds it, e.g. 3.5TB."),
    ] = None,
    json: Json = False,
) -> None:
    """Stored bytes, forecast for the whole plan, and the estimate.

    Exit 1 when the forecast exceeds --fail-over.
    """
    limit = None if fail_over is None else parse_bytes(fail_over, "--fail-over")
    import hslake.audit

    result = hslake.audit.audit(lake, report, limit)
    if json:
        print_json(result)
    else:
        print_pairs(hslake.audit.lines(result), f"{result.lake} at version {result.version}")
        if result.report:
            print(f"  report written to {result.report}")
    if not result.passed:
        raise CheckFailed(
            f"the forecast {format_bytes(result.forecast_stored_bytes)} exceeds the limit "
            f"{format_bytes(limit or 0)}: plan fewer tokens or streams, choose another codec, or "
            "raise --fail-over"
        )


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(audit)
