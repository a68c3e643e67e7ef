"""`hslake plan`."""

import json as jsonlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hslake.cli.common import DryRun, Json, Lake, examples, note, print_json, print_table
from hslake.errors import InvalidInput
from hslake.units import format_bytes, format_count

if TYPE_CHECKING:
    from hslake.plan import PlanReport

_TEXT, _SIZE, _SPLIT = "Text and conversations", "Lengths and duplicates", "Splits"


@examples(
    "hslake plan LAKE A1.parquet --source A1",
    "hslake plan LAKE shard-*.jsonl --split-validation 0.02",
    "hslake plan LAKE chats.jsonl --source B3 --tokenizer MODEL --last-turn-only",
    "hslake plan LAKE DATASET_FOLDER --source B4 --column input_ids=tokens --max-length 8192",
    "hslake plan LAKE chats/ --source B3 --tokenizer MODEL --over-long split --max-length 8192 "
    "--dry-run",
)
def plan(
    lake: Lake,
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...",
            help="Parquet, Arrow IPC or JSONL files, folders of them, or what Hugging Face's "
            "save_to_disk wrote; paths or URLs.",
        ),
    ],
    source: Annotated[
        str | None, typer.Option(help="Source of rows that name none, for example A1.")
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OURS=THEIRS",
            help="Name of a column in the files, for example input_ids=tokens; repeat it.",
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="The model's folder, for text, messages, conversations.",
            rich_help_panel=_TEXT,
        ),
    ] = None,
    chat_template: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="A chat template instead of the tokenizer's own.",
            rich_help_panel=_TEXT,
        ),
    ] = None,
    template_arg: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="What the chat template gets, as JSON or plain text, for example "
            "enable_thinking=false; repeat it.",
            rich_help_panel=_TEXT,
        ),
    ] = None,
    last_turn_only: Annotated[
        bool,
        typer.Option(
            "--last-turn-only",
            help="Supervise the assistant's last turn of a conversation, not all of them.",
            rich_help_panel=_TEXT,
        ),
    ] = False,
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code",
            help="Run the tokenizer's own Python code in DIR, which some models need.",
            rich_help_panel=_TEXT,
        ),
    ] = False,
    max_length: Annotated[
        int | None,
        typer.Option(metavar="N", help="Most tokens of a sample.", rich_help_panel=_SIZE),
    ] = None,
    over_long: Annotated[
        str,
        typer.Option(
            metavar="reject|truncate|split",
            help="What becomes of longer ones: left out, cut after N tokens, or split into pieces "
            "of N.",
            rich_help_panel=_SIZE,
        ),
    ] = "reject",
    min_supervised: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Fewest supervised tokens of a sample (default: 1 of what was cut or split, 0 of "
            "others).",
            rich_help_panel=_SIZE,
        ),
    ] = None,
    dedup: Annotated[
        str | None,
        typer.Option(
            metavar="tokens",
            help="Leave out samples with the very tokens of another one.",
            rich_help_panel=_SIZE,
        ),
    ] = None,
    split_validation: Annotated[
        float | None,
        typer.Option(
            metavar="FRACTION",
            help="Share of the prompts that go to `validation`, of rows without a split, chosen by "
            "the hash of what precedes the first supervised token (default: all to `train`).",
            rich_help_panel=_SPLIT,
        ),
    ] = None,
    check_splits: Annotated[
        bool,
        typer.Option(
            "--check-splits",
            help="Fail when a prompt is in more than one split, instead of a warning.",
            rich_help_panel=_SPLIT,
        ),
    ] = False,
    bad_rows: Annotated[
        str,
        typer.Option(
            metavar="fail|reject",
            help="What a row does of which no sample can be made: end the call, or be left out and "
            "counted.",
        ),
    ] = "fail",
    again: Annotated[
        bool,
        typer.Option("--again", help="Plan also what was deleted from the lake (hslake delete)."),
    ] = False,
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write a JSON line for every row that is rejected, replaced, or whose text does "
            "not survive tokenisation.",
        ),
    ] = None,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Register the samples that ought to exist in the lake.

    Columns: input_ids (or, with --tokenizer, text, or chats: messages with role and content, or
    conversations with from and value, and tools), and optionally sample_id, loss_mask (0 or 1 for
    each token; default all 1), source, split. A row without a sample_id is named after its content.
    Planning a file again adds nothing; a planned id with other content is an error; what `hslake
    delete` has deleted is left out, and counted. The same conversations with another tokenizer,
    template or argument of it are a new generation: it replaces what is planned, and what was
    captured of it is captured anew. All rows of a call are registered, or none. More: docs/plan.md.
    """
    import hslake.plan
    from hslake.plan.files import parse_columns
    from hslake.progress import Progress

    if dedup not in (None, "tokens"):
        raise InvalidInput(f"--dedup: found {dedup!r}, expected tokens")
    found = hslake.plan.plan_files(
        lake,
        files,
        source,
        split_validation=split_validation,
        tokenizer=tokenizer,
        chat_template=chat_template,
        template_args=template_args(template_arg or ()),
        last_turn_only=last_turn_only,
        trust_remote_code=trust_remote_code,
        columns=parse_columns(column or ()),
        max_length=max_length,
        over_long=over_long,
        min_supervised=min_supervised,
        dedup_tokens=dedup is not None,
        bad_rows=bad_rows,
        check_splits=check_splits,
        again=again,
        dry_run=dry_run,
        report_file=report,
        progress=Progress,
    )
    if json:
        print_json(found)
    else:
        _print(found)
    _tell(found)


def template_args(pairs: Iterable[str]) -> dict[str, Any]:
    """`["enable_thinking=false", …]` with JSON values (what is none is text). Raises
    InvalidInput."""
    found: dict[str, Any] = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not sign or not key.isidentifier():
            raise InvalidInput(f"--template-arg: found {pair!r}, expected KEY=VALUE")
        if key in found:
            raise InvalidInput(f"--template-arg: {key!r} is given twice")
        try:
            found[key] = jsonlib.loads(value)
        except (ValueError, RecursionError):
            found[key] = value
    return found


def _print(report: "PlanReport") -> None:
    verb = "would add" if report.dry_run else "added"
    extra = f", {report.unchanged} planned before" if report.unchanged else ""
    if report.repeated:
        extra += f", {report.repeated} repeated rows"
    if report.replaced:
        extra += f", {report.replaced} {'would be ' if report.dry_run else ''}planned anew"
    print(f"{verb} {report.added} samples of {report.rows} rows in {report.files} files{extra}")
    if report.cut:
        print(f"over-long: {report.cut} samples became {report.pieces} pieces")
    if report.groups:
        columns = list(report.groups[0])
        print_table(columns, [list(g.values()) for g in report.groups])
    if report.rejected:
        print_table(["rejected", "samples"], sorted(report.rejected.items()))
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


def _tell(report: "PlanReport") -> None:
    """What somebody should know, on standard error, with --json too."""
    would = "would be " if report.dry_run else ""
    for text, shown in (
        (_generation(report), True),
        ("note: the files hold no rows", not report.rows),
        (
            f"note: {report.deleted} samples were deleted from this lake and are left out; --again "
            "plans them all the same",
            report.deleted,
        ),
        (f"note: {report.still_planned} of the rejected are planned from before, and stay so",
         report.still_planned),
        (f"note: {report.followed} samples {would}put into the split that their prompt is in",
         report.followed),
        (f"note: columns not used: {', '.join(report.unused_columns)}", report.unused_columns),
        (f"note: {report.unsupervised} new samples have an all-zero loss_mask",
         report.unsupervised),
        (f"warning: {report.straddling} prompts are in more than one split (--check-splits makes "
         "it an error)", report.straddling),
        (f"warning: of {report.checked} texts, {report.lost} do not survive tokenisation: the "
         "tokens are planned as they are (--report FILE lists them)", report.lost),
    ):  # fmt: skip
        if shown and text:
            note(text)
    for one in report.examples:
        what = ": ".join(str(one[k]) for k in ("row", "detail") if one.get(k))
        note(f"  {one['reason']}: {what}")


def _generation(report: "PlanReport") -> str:
    gone = report.replaced + report.superseded
    if not gone:
        return ""
    verb = "would begin" if report.dry_run else "began"
    lost = report.invalidated_committed
    text = (
        f"WARNING: another tokenizer, template or argument {verb} a new generation: {gone} planned "
        f"samples are invalidated, {lost} of them already committed and {gone - lost} not"
    )
    if report.superseded:
        text += f"; {report.superseded} are cut in another way now and not planned any more"
    text += (
        "; extract captures them anew, and compact puts them in the place of the old ones. To undo "
        "it, plan the same files with the old settings"
    )
    if report.valid:
        text += f". {report.valid} are committed already as they are to be now"
    return text


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(plan)
