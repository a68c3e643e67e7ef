"""`hslake plan`."""

from typing import TYPE_CHECKING, Annotated

import typer

from hslake.cli.common import DryRun, Json, Lake, examples, note, print_json, print_table
from hslake.units import format_bytes, format_count

if TYPE_CHECKING:
    from hslake.plan import PlanReport


@examples(
    "hslake plan LAKE A1.parquet --source A1",
    "hslake plan LAKE shard-*.jsonl --split-validation 0.02",
    "hslake plan LAKE chats.jsonl --source B3 --tokenizer MODEL",
    "hslake plan LAKE A1.parquet --source A1 --dry-run",
)
def plan(
    lake: Lake,
    files: Annotated[
        list[str],
        typer.Argument(metavar="FILE...", help="Parquet, Arrow IPC or JSONL files or URLs."),
    ],
    source: Annotated[
        str | None, typer.Option(help="Source of rows that name none, for example A1.")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="The model's folder, for text, messages, conversations."),
    ] = None,
    split_validation: Annotated[
        float | None,
        typer.Option(
            metavar="FRACTION",
            help="Share of the rows without a split that go to `validation`, chosen by the hash "
            "of their tokens (default: all to `train`).",
        ),
    ] = None,
    again: Annotated[
        bool,
        typer.Option("--again", help="Plan also what was deleted from the lake (hslake delete)."),
    ] = False,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Register the samples that ought to exist in the lake.

    Columns: input_ids (or, with --tokenizer, text, or chats: messages with role and content, or
    conversations with from and value), and optionally sample_id,
    loss_mask (0 or 1 for each token; default all 1), source, split. A row without a sample_id is
    named after its content. Planning a file again adds nothing; a planned id with other content is
    an error; what `hslake delete` has deleted is left out, and counted. All rows of a call are
    registered, or none.
    """
    import hslake.plan
    from hslake.progress import Progress

    report = hslake.plan.plan_files(
        lake,
        files,
        source,
        split_validation=split_validation,
        tokenizer=tokenizer,
        again=again,
        dry_run=dry_run,
        progress=Progress,
    )
    if json:
        print_json(report)
    else:
        _print(report)


def _print(report: "PlanReport") -> None:
    verb = "would add" if report.dry_run else "added"
    extra = f", {report.unchanged} planned before" if report.unchanged else ""
    if report.repeated:
        extra += f", {report.repeated} repeated rows"
    print(f"{verb} {report.added} samples of {report.rows} rows in {report.files} files{extra}")
    if report.groups:
        columns = list(report.groups[0])
        print_table(columns, [list(g.values()) for g in report.groups])
    for name, samples, tokens, raw, stored in (
        ("new ", report.added, report.tokens, report.raw_bytes, report.forecast_stored_bytes),
        ("plan", report.plan_samples, report.plan_tokens, report.plan_raw_bytes,
         report.plan_forecast_stored_bytes),
    ):  # fmt: skip
        print(
            f"{name}  {format_count(samples)} samples, {format_count(tokens)} tokens: "
            f"{format_bytes(raw)} raw, {format_bytes(stored)} stored "
            f"({report.ratio_basis} ratio {report.ratio:.3f})"
        )
    if not report.rows:
        note("note: the files hold no rows")
    if report.deleted:
        note(
            f"note: {report.deleted} samples were deleted from this lake and are left out; --again "
            "plans them all the same"
        )
    if report.unused_columns:
        note(f"note: columns not used: {', '.join(report.unused_columns)}")
    if report.unsupervised:
        note(f"note: {report.unsupervised} new samples have an all-zero loss_mask")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(plan)
