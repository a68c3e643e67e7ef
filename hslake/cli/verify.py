"""`hslake verify`."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hslake.cli.common import (
    Json,
    Lake,
    examples,
    note,
    plain,
    print_json,
    print_pairs,
    print_table,
)
from hslake.errors import CheckFailed
from hslake.units import format_bytes, format_count

if TYPE_CHECKING:
    from hslake.verify import VerifyReport
    from hslake.verify.agreement import Agreement, Figures

_SHOWN = 20
_HOURS = 100


class Level(StrEnum):
    """How deep to look."""

    manifest = "manifest"
    checksum = "checksum"
    full = "full"
    canary = "canary"


@examples(
    "hslake verify LAKE",
    "hslake verify LAKE --level manifest",
    "hslake verify LAKE --sample 500 --where \"source = 'B3'\"",
    "hslake verify LAKE --level checksum --quarantine",
    "hslake verify LAKE --level canary --model MODEL",
    "hslake verify LAKE --json | jq .damaged_samples",
)
def verify(
    lake: Lake,
    level: Annotated[
        Level,
        typer.Option(
            help="manifest: rows, and objects by size: seconds; checksum: the bytes of every "
            "object too; full: decode every sample, compute its checksums and statistics again; "
            "canary: `final` rows beside log-probs that the servers told of them (see extract "
            "--canary-share)."
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
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Of level canary: the folder of the model that the servers ran. Only its LM head "
            "is read.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Check that the lake's samples are intact, and what the model said.

    Exit 0: no damage; 1: damage; 2: it could not be looked for (docs/verify.md).
    """
    import hslake.verify
    from hslake.progress import Progress

    with Progress(None, "verify (tokens)") as bar:
        report = hslake.verify.verify(
            lake, level.value, sample, where, quarantine, bar, threads, model
        )
    lost = report.by_sample()
    if json:
        more = {"damaged_samples": lost, "damaged_segments": report.by_segment()}
        print_json({**plain(report), **more, "ok": report.ok})
    else:
        _print(lake, report)
    if not report.ok:
        if report.agreement and report.agreement.most_disagree:
            todo = "most canaries disagree, so nothing is hidden: "
            todo += _why_most(report.agreement)
        elif report.quarantined:
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
    if report.agreement:
        looked = f"{report.samples:,} canaries, {report.tokens:,} positions in {report.segments} "
        rows = [("level", report.level), ("looked at", f"{looked}segments")]
        rows += _agreement(report.agreement)
    damage = f"{len(report.damage)} findings" if report.damage else "none"
    rows += [("damage", damage), ("quarantined", f"{report.quarantined} samples")]
    print_pairs(rows, lake)
    if report.agreement and report.agreement.groups:
        _print_groups(report.agreement)
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


def _agreement(found: "Agreement") -> list[tuple[str, str]]:
    f = found.figures
    agree = f"{f.samples - f.disagreeing:,} of {f.samples:,} samples, {f.within:,} of "
    rows = [("agree", f"{agree}{f.positions:,} positions are within tolerance")]
    if f.mean_off is not None and f.max_off is not None:
        off = f"mean {f.mean_off:.2g}, largest {f.max_off:.2g} (log-prob, natural logarithm)"
        rows.append(("difference", off))
    if f.mean_told is not None and f.mean_made is not None:
        text = f"{f.mean_told:.4f} by the servers, {f.mean_made:.4f} by the stored rows"
        close = f"; correlation {f.correlation:.6f}" if f.correlation is not None else ""
        rows.append(("mean log-prob", text + close))
    if found.unlike:
        rows.append(("not compared", f"{found.unlike:,} canaries of attempts that are not live"))
    for worst in found.worst[:3] if f.disagreeing else found.worst[:1]:
        text = f"{worst.sample_id}: {worst.off:.2g} at position {worst.position}, "
        rows.append(("worst", f"{text}allowed {worst.allowed:.2g} ({worst.server})"))
    return rows


def _print_groups(found: "Agreement") -> None:
    """Server by server; hour by hour where something disagrees."""
    bad = {g.server for g in found.groups if g.figures.disagreeing}
    servers = {g.server for g in found.groups}
    shown = [g for g in found.groups if g.server in bad]
    if len(servers) == 1 and not bad:
        return
    if not shown:
        print(f"  {len(servers)} servers, and all agree (--json lists them by run and hour)")
        return

    def line(f: "Figures") -> list[object]:
        return [f.samples, f.disagreeing, f.mean_off, f.max_off]

    columns = ["server", "run", "hour (UTC)", "canaries", "disagree", "mean off", "largest off"]
    table = [[g.server, g.run_id[:8], f"{g.hour:%Y-%m-%d %H}h", *line(g.figures)] for g in shown]
    print_table(columns, table[:_HOURS])
    if len(table) > _HOURS:
        print(f"  … {len(table) - _HOURS} more (--json lists them)")


def _why_most(found: "Agreement") -> str:
    if found.fingerprint:
        return (
            f"{found.model} has the fingerprint of the lake's model, so the rows are not what "
            "those servers computed: look at the servers and hours above, and report it"
        )
    return f"is {found.model} the folder that the servers ran? Else look at the servers above"


def _some(names: list[str], what: str) -> str:
    return f"{len(names)} {what} damaged" if names else f"no {what}"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(verify)
