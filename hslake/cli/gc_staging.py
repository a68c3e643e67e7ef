"""`hslake gc-staging`."""

from typing import Annotated

import typer

from hslake.cli.common import DryRun, Json, examples, plain, print_json, print_table
from hslake.units import format_bytes


@examples(
    "hslake gc-staging /dev/shm/hslake --dry-run",
    "hslake gc-staging /dev/shm/hslake --lake LAKE",
    "hslake gc-staging /dev/shm/hslake --older-than 7d --force",
)
def gc_staging(
    roots: Annotated[
        list[str], typer.Argument(metavar="DIR...", help="Staging folders, e.g. /dev/shm/hslake.")
    ],
    lake: Annotated[
        str | None,
        typer.Option(metavar="LAKE", help="What this lake has committed holds nothing back."),
    ] = None,
    older_than: Annotated[
        str, typer.Option(metavar="AGE", help="Leave alone what was written to since, e.g. 7d.")
    ] = "0s",
    force: Annotated[
        bool, typer.Option("--force", help="Throw away complete samples, too.")
    ] = False,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Remove what dead writers left in staging.

    A compactor of the right lake takes a dead writer's samples and then its folder: this is for
    what no compactor will take. Folders with complete samples are kept without --force. Live
    writers, writers that a compactor is at, and files of other programs are never touched.
    """
    from hslake.cli.versions import parse_duration
    from hslake.gcstaging import gc_staging as run

    age = parse_duration(older_than, "--older-than")
    report = run(roots, lake_url=lake, older=age, force=force, dry_run=dry_run)
    if json:
        print_json({**plain(report), "removed": report.count("removed")[0]})
        return
    if report.folders:
        columns = ["folder", "state", "lake", "samples", "tokens", "bytes", "age"]
        rows = [
            [
                f.path.rpartition("/")[2],
                f.state,
                (f.lake_id or "")[:8],
                f.samples,
                f.tokens,
                format_bytes(f.bytes),
                f"{f.age_s / 3600:.1f} h",
            ]
            for f in report.folders
        ]
        print_table(columns, rows)
        for f in report.folders:
            if f.why:
                print(f"{f.path}: {f.state}: {f.why}")
    count, size = report.count("removable" if dry_run else "removed")
    verb = "would remove" if dry_run else "removed"
    print(f"{verb} {count} folders, {format_bytes(size)}")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(name="gc-staging")(gc_staging)
