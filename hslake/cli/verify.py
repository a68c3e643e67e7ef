"""`hslake verify`."""

from enum import StrEnum
from typing import Annotated

import typer

from hslake.cli.common import Json, Lake, examples, note, plain, print_json, print_pairs
from hslake.errors import CheckFailed
from hslake.units import format_count

_SHOWN = 20


class Level(StrEnum):
    """How deep to look."""

    manifest = "manifest"
    checksum = "checksum"
    full = "full"


@examples(
    "hslake verify LAKE",
    "hslake verify LAKE --level manifest",
    "hslake verify LAKE --sample 500 --where \"source = 'B3'\"",
    "hslake verify LAKE --quarantine",
)
def verify(
    lake: Lake,
    level: Annotated[
        Level,
        typer.Option(
            help="manifest: rows and inventories; checksum: objects too; full: decode every "
            "sample and recompute its checksum."
        ),
    ] = Level.full,
    sample: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Look at N samples only.")
    ] = None,
    where: Annotated[
        str | None, typer.Option(metavar="SQL", help="Condition over the view samples.")
    ] = None,
    quarantine: Annotated[
        bool,
        typer.Option(
            "--quarantine", help="Hide damaged samples, so that extract fetches them anew."
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Check that the lake's samples are intact. Exit 1 on damage."""
    import hslake.verify
    from hslake.progress import Progress

    with Progress(None, "verify (tokens)") as bar:
        report = hslake.verify.verify(lake, level.value, sample, where, quarantine, bar)
    if json:
        print_json({**plain(report), "ok": report.ok})
    else:
        looked = (
            f"{format_count(report.samples)} samples, {format_count(report.tokens)} tokens in "
            f"{report.segments} segments"
        )
        print_pairs(
            [
                ("level", report.level),
                ("looked at", looked),
                ("damage", f"{len(report.damage)} findings" if report.damage else "none"),
                ("quarantined", f"{report.quarantined} samples"),
            ],
            lake,
        )
        for found in report.damage[:_SHOWN]:
            names = ", ".join(found.sample_ids[:3]) + (", …" if len(found.sample_ids) > 3 else "")
            segment = f"segment {found.segment_id}: " if found.segment_id else ""
            print(f"  {segment}{found.what}" + (f" ({names})" if names else ""))
        if len(report.damage) > _SHOWN:
            print(f"  … {len(report.damage) - _SHOWN} more; --json lists all")
        for warning in report.warnings[:_SHOWN]:
            note(f"warning: {warning}")
    if not report.ok:
        lost = len({s for d in report.damage for s in d.sample_ids})
        if report.quarantined:
            todo = "they are hidden now: run extract and compact to fetch them again"
        elif lost:
            todo = "run again with --quarantine to hide them, then extract fetches them again"
        else:
            todo = "every sample reads back; restore the objects named from a copy"
        raise CheckFailed(
            f"{len(report.damage)} findings, {lost} samples damaged, expected none: {todo}"
        )


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(verify)
