"""`hslake preflight`."""

from pathlib import Path
from typing import Annotated

import typer

from hslake.cli.common import Json, Lake, examples, print_json
from hslake.errors import CheckFailed


@examples(
    "hslake preflight LAKE --server http://localhost:30000 --staging /dev/shm/hslake",
    "hslake preflight LAKE --server http://a:30000 --server http://b:30000",
    "hslake preflight LAKE --server http://localhost:30000 --json",
)
def preflight(
    lake: Lake,
    server: Annotated[
        list[str],
        typer.Option("--server", metavar="URL", help="A server's address; repeat for several."),
    ],
    staging: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR",
            help="The server's staging folder, when it is on this machine: the captured states "
            "themselves are looked at. Repeatable.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Go or no-go before a long run.

    Checks lake, plan, target and staging, and lets every server capture a probe of ten tokens,
    which never reaches the lake. Exits 1 on no-go; every warning and failure says what to do.
    """
    import hslake.preflight
    from hslake.progress import Progress

    report = hslake.preflight.preflight(lake, server, staging=staging or (), progress=Progress)
    if json:
        print_json(report)
    else:
        width = max(len(c.name) for c in report.checks)
        for check in report.checks:
            print(f"{check.ok.upper():<4}  {check.name:<{width}}  {check.found}")
            if check.todo:
                print(f"      {'':<{width}}  -> {check.todo}")
    bad, doubts = len(report.failures), len(report.warnings)
    if not report.passed:
        names = ", ".join(c.name for c in report.failures)
        raise CheckFailed(f"no-go: {bad} of {len(report.checks)} checks failed ({names})")
    if not json:
        print(f"go: {len(report.checks) - doubts} checks passed, {doubts} warnings")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(preflight)
