"""`hslake extract`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hslake.cli.common import INTERRUPTED, Json, Lake, examples, note, print_json, print_table
from hslake.errors import CheckFailed

if TYPE_CHECKING:
    from hslake.extract.report import ExtractReport

Servers = Annotated[
    list[str],
    typer.Option(
        "--server",
        metavar="URL",
        help="A server's address; repeat for several. Behind commas: the `compact --listen` of the "
        "server's other machines.",
    ),
]


@examples(
    "hslake extract LAKE --server http://localhost:30000",
    "hslake extract LAKE --server http://a:30000 --server http://b:30000 --concurrency 64",
    "hslake extract LAKE --server http://localhost:30000 --where \"source = 'B3'\" --limit 1000",
    'hslake extract LAKE --server http://localhost:30000 --order "length desc"',
    "hslake extract LAKE --server http://node0:30000,http://node1:9650",
    "hslake extract LAKE --server http://localhost:30000 --until-complete --patience 7200",
    "hslake extract LAKE --server http://b:30000 --shard 2/4   # 1/4, 3/4, 4/4 on other machines",
    "hslake extract LAKE --server http://localhost:30000 --retry-refused",
    "hslake extract LAKE --server http://localhost:30000 --canary-share 0.05",
)
def extract(
    lake: Lake,
    server: Servers,
    concurrency: Annotated[
        int, typer.Option(help="Requests on their way to each server at once.")
    ] = 32,
    max_tokens: Annotated[
        int, typer.Option(help="Tokens on their way to each server at once.")
    ] = 131_072,
    limit: Annotated[int | None, typer.Option(help="Ask for so many samples at most.")] = None,
    where: Annotated[
        str | None, typer.Option(metavar="SQL", help="Only planned samples that match.")
    ] = None,
    order: Annotated[
        str | None,
        typer.Option(metavar="SQL", help="Order of the samples [default: mixed lengths]."),
    ] = None,
    shard: Annotated[
        str | None,
        typer.Option(
            metavar="I/N", help="Only the I-th of N shares of the samples: one driver for each."
        ),
    ] = None,
    staging: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR",
            help="A staging folder on this machine: what ended servers left there is not asked for "
            "again, and what is gone from it is. Repeatable.",
        ),
    ] = None,
    tries: Annotated[int, typer.Option(help="Failures of one sample before it is given up.")] = 8,
    patience: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="Seconds without a server, a sample captured (or committed, with "
            "--until-complete), or the lake's store, before the end.",
        ),
    ] = 1800.0,
    until_complete: Annotated[
        bool,
        typer.Option(
            help="Stay until all is committed: wait for the compactor, ask again for what it gives "
            "up and for what failed."
        ),
    ] = False,
    retry_refused: Annotated[
        bool, typer.Option(help="Ask again for what servers refused in earlier runs.")
    ] = False,
    canary_share: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            help="Of the requests that also ask for log-probs of the prompt's last 64 tokens, one "
            "at a time from each server; `verify --level canary` compares them with what is "
            "stored.",
        ),
    ] = 0.01,
    no_canary: Annotated[bool, typer.Option("--no-canary", help="As --canary-share 0.")] = False,
    json: Json = False,
) -> None:
    """Drive servers until every planned sample is captured.

    Asks for what is planned and neither committed nor waiting in staging, so a run that was cut
    short goes on where it was. Servers come from `hslake serve`; `hslake compact --watch` beside
    this empties staging. The last line says complete, or what is missing and why; then the exit
    code is 1. What a server refuses twice as wrong is recorded and left out by later runs.
    """
    import hslake.extract
    from hslake.extract.drive import Limits
    from hslake.progress import Progress

    options = hslake.extract.ExtractOptions(
        where=where,
        order=order,
        limit=limit,
        staging=tuple(staging or ()),
        shard=shard,
        until_complete=until_complete,
        retry_refused=retry_refused,
        canary_share=0.0 if no_canary else canary_share,
        limits=Limits(requests=concurrency, tokens=max_tokens, tries=tries, patience=patience),
    )
    report = hslake.extract.extract(lake, server, options, progress=Progress)
    if json:
        print_json(report)
    else:
        _print(report)
    if report.interrupted:
        note(report.message)
        raise typer.Exit(INTERRUPTED)
    if not report.passed:
        raise CheckFailed(report.message)
    note(report.message) if json else print(report.message)


def _print(report: "ExtractReport") -> None:
    rate = report.captured_tokens / report.seconds if report.seconds else 0.0
    print(
        f"captured {report.captured:,} samples, {report.captured_tokens:,} tokens in "
        f"{report.seconds:.1f} s ({rate:,.0f} tokens/s), {report.retried:,} asked again, "
        f"{report.dropped:,} dropped"
    )
    if len(report.servers) > 1 or any(s.state != "up" for s in report.servers):
        print_table(
            ["server", "captured", "tokens", "dropped", "outages", "state"],
            [[s.url, s.captured, s.tokens, s.dropped, s.outages, s.state] for s in report.servers],
        )
    for sample in report.missing_samples[:10]:
        # With one reason for all, the last line has it.
        why = f": {sample.reason}" if len(report.missing) > 1 else ""
        print(f"  missing {sample.sample_id} ({sample.length:,} tokens){why}")
    if sum(report.missing.values()) > 10:
        print(f"  … {sum(report.missing.values()) - 10:,} more (--json lists up to 1,000)")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(extract)
