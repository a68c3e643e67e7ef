"""`hslake log`, `hslake pin`, `hslake vacuum`."""

import re
from datetime import timedelta
from typing import Annotated

import typer

from hslake.cli.common import DryRun, Json, Lake, examples, note, print_json, print_table
from hslake.errors import InvalidInput
from hslake.units import format_bytes

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
_LONGEST = 36_500 * 86_400  # a century: before the year 1 there is no date to compare with


def parse_duration(text: str, what: str) -> timedelta:
    """ "30d", "12h", "90m", "0s". Raises InvalidInput."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([smhdw])\s*", text.lower())
    if not match:
        raise InvalidInput(f"{what}: found {text!r}, expected a duration such as 30d or 12h")
    seconds = float(match[1]) * _UNITS[match[2]]
    if seconds > _LONGEST:
        raise InvalidInput(f"{what}: found {text!r}, expected at most {_LONGEST // 86_400}d")
    return timedelta(seconds=seconds)


@examples("hslake log LAKE", "hslake log LAKE --limit 0 --json")
def log(
    lake: Lake,
    limit: Annotated[int, typer.Option(min=0, help="Newest versions to show; 0 = all.")] = 50,
    json: Json = False,
) -> None:
    """History: one line for each version that changed samples."""
    import hslake.versions

    rows = hslake.versions.log(lake, warn=lambda problem: note(f"warning: {problem}"))
    shown = rows[:limit] if limit else rows
    if json:
        print_json(shown)
        return
    if shown:
        cells = [[", ".join(v) if k == "pins" else v for k, v in row.items()] for row in shown]
        print_table(list(shown[0]), cells)
    else:
        print("no version has samples yet")
    if len(shown) < len(rows):
        note(f"… {len(rows) - len(shown)} older versions; --limit 0 shows all")


@examples("hslake pin LAKE run-1", "hslake pin LAKE run-2 --version 12", "hslake pin LAKE --list")
def pin(
    lake: Lake,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Letters, digits, . _ -")] = "",
    version: Annotated[
        int | None, typer.Option(min=0, help="Manifest version (default: the newest).")
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="List the pins.")] = False,
    json: Json = False,
) -> None:
    """Name a version, so that it is kept. A name never moves."""
    import hslake
    import hslake.pins

    if show:
        pins = hslake.pins.pins(hslake.open(lake))
        if json:
            print_json(pins)
        else:
            rows = [[p.name, p.version, p.pinned_at] for p in pins]
            print_table(["name", "version", "pinned_at"], rows)
        return
    if not name:
        raise InvalidInput("expected a NAME for the version: hslake pin LAKE NAME (or --list)")
    made = hslake.pins.pin(lake, name, version)
    if json:
        print_json(made)
    else:
        print(f"{made.name} names version {made.version} of {lake}")


@examples("hslake vacuum LAKE --dry-run", "hslake vacuum LAKE", "hslake vacuum LAKE --retain 7d")
def vacuum(
    lake: Lake,
    retain: Annotated[
        str, typer.Option(metavar="AGE", help="Keep what is younger, e.g. 12h, 30d.")
    ] = "30d",
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Remove segments that no version names, and unfinished files.

    They are left when a compactor dies before its commit.
    """
    age = parse_duration(retain, "--retain")
    import hslake.versions

    report = hslake.versions.vacuum(lake, age, dry_run)
    if json:
        print_json(report)
        return
    verb = "removed" if report.removed else ("would remove" if dry_run else "found")
    count = len(report.segments)
    print(f"{verb} {count} orphaned segments; {format_bytes(report.bytes)} in all")
    for segment in report.segments:
        print(f"  {segment}")
    if report.uploads:
        print(f"{verb} {len(report.uploads)} uploads that killed writers never ended")
    if report.leftovers:
        print(f"{verb} {len(report.leftovers)} files that killed writers never finished")
    for path in report.leftovers:
        print(f"  {path}")


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (log, pin, vacuum):
        app.command()(command)
