"""`hslake verify`."""

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from hslake.cli.common import Json, Lake, examples, note, plain, print_json, print_pairs
from hslake.errors import CheckFailed
from hslake.units import format_bytes, format_count

if TYPE_CHECKING:
    from hslake.verify import VerifyReport

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
    "hslake verify LAKE --level checksum --quarantine",
    "hslake verify LAKE --json | jq .damaged_samples",
)
def verify(
    lake: Lake,
    level: Annotated[
        Level,
        typer.Option(
            help="manifest: rows, and objects by size: seconds; checksum: the bytes of every "
            "object too; full: decode every sample, compute its checksums and statistics again."
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
    threads: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Default: one a core; on an object store, 16."),
    ] = None,
    json: Json = False,
) -> None:
    """Check that the lake's samples are intact.

    Exit 0: no damage; 1: damage; 2: it could not be looked for (docs/verify.md).
    """
    import hslake.verify
    from hslake.progress import Progress

    with Progress(None, "verify (tokens)") as bar:
        report = hslake.verify.verify(lake, level.value, sample, where, quarantine, bar, threads)
    lost = report.by_sample()
    if json:
        more = {"damaged_samples": lost, "damaged_segments": report.by_segment()}
        print_json({**plain(report), **more, "ok": report.ok})
    else:
        _print(lake, report)
    if not report.ok:
        if report.quarantined:
            todo = "they are hidden now: run extract and compact to fetch them again"
        elif lost:
            todo = "run again with --quarantine to hide them, then extract fetches them again"
        else:
            todo = "every sample reads back; restore the objects named from a copy"
        raise CheckFailed(
            f"{len(report.damage)} findings, {len(lost)} samples damaged, expected none: {todo}"
        )


def _print(lake: str, report: "VerifyReport") -> None:
    looked = (
        f"{format_count(report.samples)} samples, {format_count(report.tokens)} tokens in "
        f"{report.segments} segments"
    )
    rows = [("level", report.level), ("looked at", looked)]
    if report.bytes:
        rate = report.bytes / max(report.seconds, 1e-3)
        hashed = f"{report.objects} objects, {format_bytes(report.bytes)}"
        rows.append(("read", f"{hashed}, {format_bytes(rate)}/s"))
    damage = f"{len(report.damage)} findings" if report.damage else "none"
    rows += [("damage", damage), ("quarantined", f"{report.quarantined} samples")]
    print_pairs(rows, lake)
    for segment_id, of in list(report.by_segment().items())[:_SHOWN]:
        if segment_id:
            print(f"  segment {segment_id}: {_some(of['objects'], 'objects')}", end="")
            print(f", {_some(of['samples'], 'samples')}")
        for found in [d for d in report.damage if d.segment_id == segment_id][:_SHOWN]:
            names = ", ".join(found.sample_ids[:3]) + (", …" if len(found.sample_ids) > 3 else "")
            print(f"    {found.what}" + (f" ({names})" if names else ""))
    if len(report.damage) > _SHOWN:
        print(f"  {len(report.damage)} findings in all; --json lists them")
    for warning in report.warnings[:_SHOWN]:
        note(f"warning: {warning}")
    if len(report.warnings) > _SHOWN:
        note(f"{len(report.warnings)} warnings in all; --json lists them")


def _some(names: list[str], what: str) -> str:
    return f"{len(names)} {what} damaged" if names else f"no {what}"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(verify)
