"""`hslake delete`, `hslake repair`."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from hslake.cli.common import DryRun, Json, Lake, examples, note, plain, print_json, print_pairs
from hslake.errors import CheckFailed, InvalidInput
from hslake.units import format_bytes, format_count

if TYPE_CHECKING:
    from hslake.versions import DeleteReport

_SHOWN = 20
_REMAINS = (
    "not touched: staging (a compactor gives these samples up), other lakes, the files that were "
    "planned from, copies and exports; the samples' token ids in older files of the plan, and "
    "their rows without states in the manifest's history"
)


@examples(
    "hslake delete LAKE --where \"source = 'B7'\" --dry-run",
    "hslake delete LAKE --where \"sample_id in ('A1-000017', 'A1-000018')\" --reason 'request 42'",
    'hslake delete LAKE --where "list_contains(input_ids, 50256)" --yes',
)
def delete(
    lake: Lake,
    where: Annotated[
        str,
        typer.Option(metavar="SQL", help="Condition over the columns of samples or of plan."),
    ],
    reason: Annotated[
        str, typer.Option(metavar="TEXT", help="Kept in the manifest, for whoever asks.")
    ] = "",
    break_pins: Annotated[
        bool,
        typer.Option("--break-pins", help="Also when pinned versions are not whole afterwards."),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Delete samples for good: from the newest version, the plan and the storage.

    The other samples of their segments are rewritten bit for bit. Old versions that need the
    removed segments can be queried and not read; where such a version is pinned, nothing is done
    without --break-pins. Interrupted, the same command completes it. Exit 1 when pins forbid it or
    something could not be removed.
    """
    import hslake.versions
    from hslake.progress import Progress

    if not dry_run and not yes:
        if json:
            raise InvalidInput("--json does not ask: give --yes, or --dry-run")
        plan = hslake.versions.delete(lake, where, dry_run=True)
        _print(plan, lake)
        _ask()
    with Progress(None, "delete (segments)") as bar:
        report = hslake.versions.delete(
            lake, where, reason=reason, break_pins=break_pins, dry_run=dry_run, progress=bar
        )
    if json:
        print_json({**plain(report), "ok": not report.kept, "remains": _REMAINS})
    else:
        _print(report, lake)
        note(_REMAINS)
    if report.kept:
        segment, why = next(iter(report.kept.items()))
        raise CheckFailed(
            f"{len(report.kept)} segments are still there ({segment}: {why}): run it again"
        )


def _ask() -> None:
    if not sys.stdin.isatty():
        raise InvalidInput("delete asks before it deletes, and there is no terminal: give --yes")
    if not typer.confirm("Delete these samples for good?", err=True):
        raise InvalidInput("nothing was deleted")


def _print(report: "DeleteReport", lake: str) -> None:
    verb = "would be deleted" if report.dry_run else "deleted"
    versions = "none"
    if report.versions is not None:
        versions = f"{report.versions[0]} to {report.versions[1]}"
    rows = [
        (
            verb,
            f"{report.samples} samples ({report.live} live, {report.planned} planned), "
            f"{format_count(report.tokens)} tokens",
        ),
        ("segments", f"{report.segments} that hold them, {format_bytes(report.bytes)}"),
        ("rewritten", f"{report.moved} other samples of these segments"),
        ("not whole then", f"versions: {versions}; pins: {', '.join(report.pins) or 'none'}"),
    ]
    if not report.dry_run:
        rows.append(("removed", f"{len(report.removed)} segments"))
    print_pairs(rows, lake)
    if not report.live and not report.planned and not report.segments:
        note("nothing was left to delete: these samples were deleted before")
    if report.dry_run and report.pins:
        note("pins forbid it: without --break-pins nothing is deleted")
    for name in report.sample_ids[:_SHOWN]:
        print(f"  {name}")
    if len(report.sample_ids) > _SHOWN:
        print(f"  … {len(report.sample_ids) - _SHOWN} more; --json lists all")


@examples("hslake repair LAKE --dry-run", "hslake repair LAKE")
def repair(
    lake: Lake,
    give_up: Annotated[
        bool,
        typer.Option(
            "--give-up",
            help="The log has lost its newest entries and no copy is left: give up what data "
            "files still say of them.",
        ),
    ] = False,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Mend a lake on a local disk whose log was torn, as by a power cut.

    Damaged files are put aside, in the lake's folder .repair, never deleted. A healthy lake is not
    touched; a compactor may run. Exit 1 when something is left that only a copy can mend.
    """
    import hslake.versions

    report = hslake.versions.repair(lake, dry_run, give_up)
    if json:
        print_json({**plain(report), "ok": report.ok})
    else:
        print(f"{lake}: {len(report.findings)} findings" if report.findings else f"{lake}: healthy")
        for found in report.findings:
            print(f"  {found.table}: {found.what}")
            print(f"    {'would be ' if dry_run and found.moves else ''}{_action(found.action)}")
            if found.lost:
                print(f"    not in the lake then: {found.lost}")
        if report.moved:
            print(
                f"moved {len(report.moved)} files to {report.aside}; now run: hslake verify {lake}"
            )
    if not report.ok:
        raise CheckFailed("a log entry is lost that later ones stand on: restore it from a copy")


def _action(action: str) -> str:
    return action or "cannot be mended here"


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (delete, repair):
        app.command()(command)
