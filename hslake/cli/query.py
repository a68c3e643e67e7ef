"""`hslake query`."""

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from hslake.cli.common import (
    Json,
    check_parent,
    examples,
    note,
    parse_params,
    plain,
    print_json,
    print_table,
)
from hslake.errors import InvalidInput

if TYPE_CHECKING:
    import pyarrow as pa

_TABLE_ROWS = 200


class Format(StrEnum):
    """How rows are printed."""

    table = "table"
    json = "json"
    csv = "csv"
    parquet = "parquet"


@examples(
    "hslake query LAKE coverage",
    "hslake query LAKE gaps --param source=B3 --param limit=20",
    'hslake query LAKE "select source, sum(length) from samples group by 1" --format csv',
    'hslake query LAKE "select * from samples where length > $n" --param n=4096 --json',
    "hslake query LAKE storage_growth --version 12 --format parquet --output growth.parquet",
    "hslake query --list",
)
def query(
    lake: Annotated[str, typer.Argument(metavar="LAKE", help="Directory or URL of the lake.")] = "",
    sql: Annotated[
        str,
        typer.Argument(metavar="SQL|NAME", help="A SELECT statement, or a named query; - = stdin."),
    ] = "",
    show: Annotated[bool, typer.Option("--list", help="List the named queries.")] = False,
    param: Annotated[
        list[str] | None,
        typer.Option("--param", "-p", metavar="K=V", help="Value of $K in the query. Repeatable."),
    ] = None,
    format: Annotated[Format, typer.Option("--format", "-f", help="Output format.")] = Format.table,
    json: Json = False,
    version: Annotated[
        str | None,
        typer.Option(metavar="N|PIN", help="Version or pin to read (default: the newest)."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to write (needed by parquet on a terminal)."),
    ] = None,
) -> None:
    """Query the lake with SQL, or run a named query.

    Views: samples, segments, plan, coverage, versions. DuckDB's SQL, only SELECT is accepted. The
    columns are in docs/sql.md; `hslake query LAKE "describe samples"` prints them.
    """
    chosen = Format.json if json else format
    if show:
        _list(chosen)
        return
    if not lake or not sql:
        raise InvalidInput("expected LAKE and a query: hslake query LAKE SQL|NAME (or --list)")
    if output is not None:
        check_parent(output, "--output")
    if chosen is Format.parquet and output is None and sys.stdout.isatty():
        raise InvalidInput("--format parquet would go to the terminal: give --output FILE")
    from hslake.query import run

    text = sys.stdin.read() if sql == "-" else sql
    rows = run(lake, text, parse_params(param or []), version)
    if output is None:
        sys.stdout.flush()
        _write(rows, chosen, None)
        return
    if output.exists() and not output.is_file():  # a pipe or a terminal; a directory is refused
        with output.open("wb") as file:
            _write(rows, chosen, file)
    else:
        _write_whole(rows, chosen, output)
    note(f"{rows.num_rows} rows written to {output}")


def _write_whole(rows: "pa.Table", format: Format, output: Path) -> None:
    """Whole or not at all, also on a full disk."""
    unfinished = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        with unfinished.open("wb") as file:
            _write(rows, format, file)
        unfinished.replace(output)
    finally:
        unfinished.unlink(missing_ok=True)


def _list(format: Format) -> None:
    from hslake.query import named

    queries = named().values()
    if format is Format.json:
        print_json(
            [{"name": q.name, "description": q.description, "params": q.params} for q in queries]
        )
        return
    rows = [
        (q.name, q.description, ", ".join(f"{k}={v}" for k, v in q.params.items())) for q in queries
    ]
    width = max(len(r[0]) for r in rows)
    for name, description, params in rows:
        print(f"{name:<{width}}  {description}")
        if params:
            print(f"{'':<{width}}  parameters: {params}")


def _write(rows: "pa.Table", format: Format, file: IO[bytes] | None) -> None:
    import io

    if format in (Format.table, Format.json):
        out: Any = io.TextIOWrapper(file, "utf-8") if file is not None else sys.stdout
        if format is Format.json:
            _json(rows, out)
        else:
            _table(rows, out, limit=_TABLE_ROWS if file is None else None)
        out.flush()
        if file is not None:
            out.detach()
        return
    sink = file if file is not None else sys.stdout.buffer
    if format is Format.csv:
        _csv(rows, sink)
    else:
        import pyarrow.parquet as pq

        buffer = io.BytesIO()  # a pipe cannot be sought
        pq.write_table(rows, buffer)
        sink.write(buffer.getbuffer())
    sink.flush()


def _json(rows: "pa.Table", out: Any) -> None:
    import json

    # One row a line inside one array: a JSON document that line tools can read too.
    out.write("[")
    first = True
    for batch in rows.to_batches(max_chunksize=1000):
        for row in batch.to_pylist():
            out.write(("\n" if first else ",\n") + json.dumps(plain(row), ensure_ascii=False))
            first = False
    out.write("\n]\n" if not first else "]\n")


def _table(rows: "pa.Table", out: Any, limit: int | None) -> None:
    shown = rows if limit is None else rows.slice(0, limit)
    print_table(rows.column_names, [list(r.values()) for r in _records(shown)], out)
    if shown.num_rows < rows.num_rows:
        out.flush()
        note(f"… {rows.num_rows - shown.num_rows} more rows; --format csv prints all of them")


def _records(rows: "pa.Table") -> list[dict[int, Any]]:
    """Rows keyed by position: two columns may have one name."""
    columns = [c.to_pylist() for c in rows.columns]
    return [dict(enumerate(values)) for values in zip(*columns, strict=True)]


def _csv(rows: "pa.Table", sink: IO[bytes]) -> None:
    import csv
    import io
    import json

    text = io.TextIOWrapper(sink, "utf-8", newline="", write_through=True)
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(rows.column_names)
    for record in _records(rows):
        values = [plain(v) for v in record.values()]
        writer.writerow([json.dumps(v) if isinstance(v, list | dict) else v for v in values])
    text.flush()
    text.detach()


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(query)
