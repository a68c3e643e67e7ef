"""`hslake log`, `hslake pin`, `hslake vacuum`."""

import re
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hslake.cli.common import DryRun, Json, Lake, examples, note, plain, print_json, print_table
from hslake.errors import InvalidInput
from hslake.units import format_bytes

if TYPE_CHECKING:
    import hslake.lake

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
    """History: what each version changed, when, and who made it.

    added, hidden, deleted: samples; segments, condemned_segments: segments added and removed;
    tokens and bytes are those of what was added.
    """
    import hslake.versions

    shown = hslake.versions.log(lake, limit, warn=lambda problem: note(f"warning: {problem}"))
    if json:
        print_json(shown)
        return
    if not shown:
        print("no version has samples yet")
        return
    print_table(list(_COLUMNS.values()), [[_cell(row, k) for k in _COLUMNS] for row in shown])
    if limit and len(shown) == limit and shown[-1]["commit_version"] > 1:
        note("… older versions: --limit 0 shows all")


_COLUMNS = {
    "commit_version": "version",
    "committed_at": "committed_at",
    "action": "action",
    "by": "by",
    "added": "added",
    "hidden": "hidden",
    "deleted": "deleted",
    "condemned_segments": "condemned",
    "tokens": "tokens",
    "stored_bytes": "stored",
    "pins": "pins",
}


def _cell(row: dict[str, Any], key: str) -> Any:
    value = row[key]
    if key == "pins":
        return ", ".join(value)
    return format_bytes(value) if key == "stored_bytes" else value


@examples(
    "hslake pin LAKE run-1",
    "hslake pin LAKE run-2 --version 12",
    "hslake pin LAKE --list",
    "hslake pin LAKE run-1 --remove",
    'hslake query LAKE "select count(*) from samples" --version run-1',
)
def pin(
    lake: Lake,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Letters, digits, . _ -")] = "",
    version: Annotated[
        int | None, typer.Option(min=0, help="Manifest version (default: the newest).")
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="List the pins.")] = False,
    remove: Annotated[
        bool, typer.Option("--remove", help="Remove the pin: its version ages like others.")
    ] = False,
    json: Json = False,
) -> None:
    """Name a version, so that vacuum keeps it whole, whatever its age.

    A name never moves: once given, also when it was removed since, it names that version or none.
    """
    import hslake
    import hslake.pins

    if show:
        _list_pins(hslake.open(lake), json)
        return
    if not name:
        raise InvalidInput("expected a NAME for the version: hslake pin LAKE NAME (or --list)")
    if remove:
        if version is not None:
            raise InvalidInput("--remove takes the pin's NAME alone, not --version")
        gone = hslake.pins.unpin(lake, name)
        if json:
            print_json({"removed": name, "pin": gone})
        else:
            what = f"version {gone.version}" if gone else "a pin that did not read"
            print(f"removed {name} ({what}) of {lake}")
        return
    made = hslake.pins.pin(lake, name, version)
    if json:
        print_json(made)
    else:
        print(f"{made.name} names version {made.version} of {lake}")


def _list_pins(lake: "hslake.lake.Lake", json: bool) -> None:
    import hslake.pins

    pins = hslake.pins.pins(lake)
    gone = hslake.pins.broken(lake.manifest_table(), pins)
    lacking = Counter(name for names in gone.values() for name in names)
    if json:
        print_json([{**plain(p), "removed_segments": lacking[p.name]} for p in pins])
        return
    rows = [[p.name, p.version, p.pinned_at, lacking[p.name] or ""] for p in pins]
    print_table(["name", "version", "pinned_at", "removed segments"], rows)


@examples("hslake vacuum LAKE --dry-run", "hslake vacuum LAKE", "hslake vacuum LAKE --retain 7d")
def vacuum(
    lake: Lake,
    retain: Annotated[
        str,
        typer.Option(
            metavar="AGE", help="Keep versions whole that were replaced since, e.g. 12h, 30d."
        ),
    ] = "30d",
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Give space back: remove segments that no retained version needs, and unfinished files.

    Retained is what is pinned, the newest, or was replaced less than --retain ago. Segments go that
    a compactor left when it died before its commit, and those of which all samples were hidden
    (verify --quarantine, delete). Rows are never removed: every version can be queried.
    """
    age = parse_duration(retain, "--retain")
    import hslake.versions
    from hslake.progress import Progress

    with Progress(None, "vacuum (segments)") as bar:
        report = hslake.versions.vacuum(lake, age, dry_run, bar)
    if json:
        print_json(report)
        return
    verb = "would remove" if dry_run else "removed"
    count, hidden = len(report.segments), len(report.hidden)
    print(
        f"{verb} {count} segments, {format_bytes(report.bytes)} in all: {count - hidden} orphaned, "
        f"{hidden} whose samples are all hidden"
    )
    for segment in report.segments:
        print(f"  {segment}")
    if report.uploads:
        print(f"{verb} {len(report.uploads)} uploads that killed writers never ended")
    if report.leftovers:
        print(f"{verb} {len(report.leftovers)} files that killed writers never finished")
    for path in report.leftovers:
        print(f"  {path}")
    for segment, why in sorted(report.kept.items()):
        print(f"kept {segment}: {why}")


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (log, pin, vacuum):
        app.command()(command)
