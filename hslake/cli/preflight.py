"""`hslake preflight`."""

import shutil
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hslake.cli.common import Json, Lake, examples, print_json
from hslake.errors import CheckFailed, InvalidInput, Missing

if TYPE_CHECKING:
    from hslake.preflight import PreflightReport

_NARROW = 60  # columns that the text gets at least


@examples(
    "hslake preflight LAKE --server http://localhost:30000 --staging /dev/shm/hslake --model MODEL",
    "hslake preflight LAKE --server http://a:30000 --server http://b:30000 --burst 60",
    "hslake preflight LAKE --server http://localhost:30000 --burst 0 --json",
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
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="The model's folder: `final` is compared with the server's log-probs through the "
            "LM head in it.",
        ),
    ] = None,
    burst: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="Length of a timed burst, which gives rates, ETA and bottleneck; 0: none.",
        ),
    ] = 20.0,
    concurrency: Annotated[
        int, typer.Option(help="Requests at once to each server, as extract will be given.")
    ] = 32,
    max_tokens: Annotated[
        int, typer.Option(help="Tokens on their way to each server, as extract will be given.")
    ] = 131_072,
    json: Json = False,
) -> None:
    """Go or no-go before a long run.

    Checks lake, plan, target and staging, lets every server capture a few probes, and measures in a
    short burst how long the plan will take and what holds it back. Probes never reach the lake. For
    all checks run it on the server's machine with --staging and --model, best with `hslake compact
    --watch` running. Exits 1 on no-go; every warning and failure says what to do.
    """
    import hslake.preflight
    from hslake.extract.drive import Limits
    from hslake.progress import Progress

    if not 0 <= burst < float("inf"):
        raise InvalidInput(f"--burst: found {burst}, expected seconds, or 0 for none")
    for what, value in (("concurrency", concurrency), ("max-tokens", max_tokens)):
        if value is not None and value < 1:
            raise InvalidInput(f"--{what}: found {value}, expected at least 1")
    if model is not None and not model.is_dir():
        raise Missing(f"--model {model}: there is no such folder")
    report = hslake.preflight.preflight(
        lake,
        server,
        staging=staging or (),
        model=model,
        burst_s=burst,
        limits=Limits(requests=concurrency, tokens=max_tokens),
        progress=Progress,
    )
    if json:
        print_json(report)
    else:
        _print(report)
    bad, doubts = len(report.failures), len(report.warnings)
    if not report.passed:
        names = ", ".join(dict.fromkeys(c.name for c in report.failures))
        raise CheckFailed(f"no-go: {bad} of {len(report.checks)} checks failed ({names})")
    if not json:
        passed = len(report.checks) - doubts
        warnings = f"{doubts} warning{'s' * (doubts != 1)}"
        print(f"go: {passed} checks passed, {warnings}")


def _print(report: "PreflightReport") -> None:
    """One check a line; on a terminal, long ones are broken under their column."""
    width = max(len(c.name) for c in report.checks)
    for check in report.checks:
        several = len(report.servers) > 1 and check.where not in check.found
        found = f"{check.where}: {check.found}" if several else check.found
        _print_text(f"{check.result.upper():<4}  {check.name:<{width}}  ", found)
        if check.todo:
            _print_text(f"      {'':<{width}}  -> ", check.todo)


def _print_text(start: str, text: str) -> None:
    columns = shutil.get_terminal_size().columns
    if not sys.stdout.isatty() or columns < len(start) + _NARROW:
        print(start + text)
        return
    lines = textwrap.wrap(text, columns - len(start), break_long_words=False) or [""]
    print(start + lines[0])
    for line in lines[1:]:
        print(" " * len(start) + line)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(preflight)
