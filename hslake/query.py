"""SQL over a lake: a DuckDB connection with its views, and the named queries in `queries/`.

The connection sees one pinned manifest version and nothing else: file access is limited to the
Parquet files of that version, statements to SELECT, and the configuration is locked. Works without
any DuckDB extension; files on object stores are read through fsspec.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import pyarrow as pa

from hslake import schemas
from hslake.errors import Corrupt, HslakeError, InvalidInput, Missing, NoSpace, Unavailable
from hslake.spec import LakeSpec
from hslake.store import Store, open_store, remote_failure
from hslake.store.duckfs import ForThreads
from hslake.views import LOGS, TAKEN_AWAY, VIEWS

if TYPE_CHECKING:
    from hslake.lake import Lake

MEMORY = "HSLAKE_DUCKDB_MEMORY"
_GIB = 1 << 30
_LARGEST = (1 << 63) - 1  # of a bigint
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PARAM = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)\s*=\s*(\S*)(?:\s+min\s+([0-9.]+))?")
_SQL_TYPES = {
    "int32": "integer",
    "int64": "bigint",
    "float": "float",
    "string": "varchar",
    "timestamp": "timestamptz",
    "list<int32>": "integer[]",
    "list<int64>": "bigint[]",
    "list<float>": "float[]",
}
_READS = ("SELECT", "EXPLAIN")
# Errors of the SQL alone: for others it is worth reading the tables' files to find damage.
_ABOUT_SQL = (
    duckdb.BinderException,
    duckdb.CatalogException,
    duckdb.ConversionException,
    duckdb.InterruptException,
    duckdb.OutOfRangeException,
    duckdb.ParserException,
    duckdb.PermissionException,
)


@dataclass(frozen=True)
class NamedQuery:
    """One file of `queries/`: its SQL, what it answers, and its parameters with their defaults.

    `least`: the smallest value of the parameters that have one.
    """

    name: str
    description: str
    params: dict[str, int | float | str]
    sql: str
    least: dict[str, int | float]


# -- connection ---------------------------------------------------------------------------------


def connect(lake: Lake) -> duckdb.DuckDBPyConnection:
    """A read-only connection with the views of `lake` at the version it is open at."""
    tables = {"manifest": lake.manifest_table(), "plan": lake.plan_table()}
    if (runs := lake.runs_table()) is not None:
        tables["runs"] = runs
    return connect_files(
        {name: table.row_files() for name, table in tables.items()},
        lake.spec,
        filesystem(lake.store),
        {name: table.change_files() for name, table in tables.items()},
    )


def connect_files(
    files: Mapping[str, Sequence[str]],
    spec: LakeSpec | None = None,
    filesystem: Any = None,
    changes: Mapping[str, Sequence[str]] | None = None,
    memory: int | None = None,
) -> duckdb.DuckDBPyConnection:
    """A connection over explicit Parquet files: of "manifest", "plan" and "runs", as far as
    they are in `files`.

    `filesystem`: the fsspec filesystem that opens them when they are not local; `changes`: those
    of the files that may hold hides and tombstones (default: all); `memory`: bytes that it may
    use before it spills, where the environment does not say (default: half of the machine's).
    """
    spill = Path(tempfile.gettempdir()) / f"hslake-duckdb-{uuid.uuid4().hex}"
    con = duckdb.connect(
        ":memory:",
        config={
            "memory_limit": os.environ.get(MEMORY) or f"{(memory or _memory()) // (1 << 20)}MiB",
            # Made by DuckDB when it first spills, removed by it at close. A directory of its own:
            # two processes in one directory would take each other's files.
            "temp_directory": str(spill),
            "autoinstall_known_extensions": "false",
            "autoload_known_extensions": "false",
            "python_enable_replacements": "false",
        },
    )
    with contextlib.suppress(duckdb.Error):  # a build without ICU has no time zones: UTC anyway
        con.execute("set TimeZone = 'UTC'")
    con.execute("set enable_progress_bar = false")  # it would write into what a command prints
    con.execute("set parquet_metadata_cache = true")  # the files never change
    if filesystem is not None:
        con.register_filesystem(filesystem)

    def canonical(urls: Sequence[str]) -> list[str]:
        # The names DuckDB gets back from fsspec, which are those it asks leave for.
        return [_canonical(filesystem, u) for u in urls] if filesystem else list(urls)

    paths = {name: canonical(urls) for name, urls in files.items()}
    for table, name, sql in TAKEN_AWAY:
        some = canonical((changes or files).get(name, []))
        _run(con, f"create temp table {table} as {sql.format(log=_rows(name, some))}", some)
    _spec_view(con, spec)
    # Making a view binds it, which opens every file under it, and the views stand on one another:
    # so they are made over no files, which are put under them afterwards.
    for view, name in LOGS.items():
        con.execute(f"create temp view {view} as {_rows(name, [])}")
    for view, sql in VIEWS.items():
        con.execute(f"create temp view {view} as {sql}")
    for view, name in LOGS.items():
        have = paths.get(name, [])
        _run(con, f"create or replace temp view {view} as {_rows(name, have)}", have)
    con.execute(f"set allowed_paths = {_literal([p for some in paths.values() for p in some])}")
    con.execute("set enable_external_access = false")
    con.execute("set lock_configuration = true")
    return con


def _rows(schema: str, files: Sequence[str]) -> str:
    """SQL for the rows of a table's Parquet files; the schema's columns also when there are none,
    or only files of before a column was added."""
    fields = schemas.load(schema)["fields"]
    columns = (f"null::{_SQL_TYPES[f['type']]} as {f['name']}" for f in fields)
    none = f"select {', '.join(columns)} limit 0"
    if not files:
        return none
    # DuckDB drops the empty side, and pushes columns and filters down to the files.
    read = f"read_parquet({_literal(files)}, union_by_name = true)"
    return f"select * from ({none}) union all by name select * from {read}"


def _run(con: duckdb.DuckDBPyConnection, sql: str, files: Sequence[str]) -> None:
    try:
        con.execute(sql)
    except duckdb.Error as error:
        raise _unreadable(con, files) or _failed(con, error) from error


def _unreadable(con: duckdb.DuckDBPyConnection, files: Sequence[str]) -> HslakeError | None:
    """What is wrong with the first of the tables' files that does not read, if one does not.

    DuckDB's own message may be "Out of buffer", without a name.
    """
    for path in files:
        folder, _, name = path.rpartition("/")
        try:
            open_store(folder).read_range(name, 0, 1)  # a file that is kept from us is not damaged
            every = f"select bit_xor(hash(t)) from read_parquet({_literal([path])}) t"
            con.execute(every).fetchall()
        except Unavailable as error:
            return error
        except (Missing, duckdb.Error) as error:
            return remote_failure(path, error) or Corrupt(
                f"{path}: a file of the lake's tables cannot be read: {_first_line(error)}; a "
                "table needs every file that its log names: restore it from a copy"
            )
    return None


def _spec_view(con: duckdb.DuckDBPyConnection, spec: LakeSpec | None) -> None:
    row: dict[str, Any] = dict.fromkeys(
        ("lake_id", "model", "num_layers", "hidden_size", "streams", "dtype", "codec",
         "bytes_per_token", "chunk_tokens", "estimate_tokens", "estimate_bytes")
    )  # fmt: skip
    if spec is not None:
        row.update(
            lake_id=spec.lake_id,
            model=spec.model.name,
            num_layers=spec.num_layers,
            hidden_size=spec.hidden_size,
            streams=list(spec.streams),
            dtype=spec.dtype,
            codec=spec.codec,
            bytes_per_token=spec.bytes_per_token,
            chunk_tokens=spec.geometry.chunk_tokens,
            estimate_tokens=spec.estimate.tokens,
            estimate_bytes=spec.estimate.bytes,
        )
    kinds = {"streams": pa.list_(pa.string())} | dict.fromkeys(
        ("lake_id", "model", "dtype", "codec"), pa.string()
    )
    table = pa.Table.from_pydict(
        {k: pa.array([v], kinds.get(k, pa.int64())) for k, v in row.items()}
    )
    con.register("_spec", table)
    con.execute("create temp table spec as select * from _spec")
    con.unregister("_spec")


def filesystem(store: Store) -> Any:
    """What `connect_files` needs to read the files of `store`: None when they are local."""
    return None if store.is_local else ForThreads(store.fs)


def _canonical(filesystem: Any, url: str) -> str:
    return str(filesystem.unstrip_protocol(filesystem._strip_protocol(url)))


def _memory() -> int:
    """Half of what this process may use, at most 8 GiB: the loader and DuckDB share a machine."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(path).read_text("ascii")))
        except (OSError, ValueError):
            continue  # no such cgroup, or "max"
    return max(min(total // 2, 8 * _GIB), _GIB // 2)


def _literal(texts: Sequence[str]) -> str:
    return "[" + ", ".join("'" + t.replace("'", "''") + "'" for t in texts) + "]"


# -- named queries ------------------------------------------------------------------------------


@cache
def named() -> dict[str, NamedQuery]:
    """The named queries, by name."""
    found = [parse(p.read_text("utf-8"), p.name) for p in schemas.data_dir("queries").glob("*.sql")]
    return {q.name: q for q in sorted(found, key=lambda q: q.name)}


def parse(text: str, where: str) -> NamedQuery:
    """Parse one query file: `-- name:`, `-- description:`, `-- params: k=default [min n], ...`."""
    head: dict[str, str] = {}
    for line in text.splitlines():
        match = re.fullmatch(r"--\s*(name|description|params):\s*(.*)", line.strip())
        if match:
            head.setdefault(match[1], match[2].strip())
    if not _NAME.fullmatch(head.get("name", "")) or not head.get("description"):
        raise InvalidInput(f"{where}: expected header lines `-- name:` and `-- description:`")
    params: dict[str, int | float | str] = {}
    least: dict[str, int | float] = {}
    for part in filter(None, (p.strip() for p in head.get("params", "").split(","))):
        match = _PARAM.fullmatch(part)
        if not match:
            raise InvalidInput(f"{where}: params: found {part!r}, expected name=default [min n]")
        params[match[1]] = _value(match[2])
        if match[3]:
            least[match[1]] = float(match[3]) if "." in match[3] else int(match[3])
    return NamedQuery(head["name"], head["description"], params, text, least)


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


# -- running ------------------------------------------------------------------------------------


def run(
    lake: Lake | str,
    sql_or_name: str,
    params: Mapping[str, Any] | None = None,
    version: int | str | None = None,
) -> pa.Table:
    """Run one SELECT, or the named query of that name, and return the rows.

    `lake`: an open Lake, or its URL; `version`: a version or a pin's name (default: the one `lake`
    is open at, or the newest); `params`: values for the query's `$name`s. Raises InvalidInput with
    DuckDB's message when the query fails.
    """
    import hslake

    sql, values = resolve(sql_or_name, params)
    if isinstance(lake, str) or (version is not None and version != lake.version):
        lake = hslake.open(lake if isinstance(lake, str) else lake.url, version=version)
    with connect(lake) as con:
        return execute(con, sql, values)


def resolve(sql_or_name: str, params: Mapping[str, Any] | None) -> tuple[str, dict[str, Any]]:
    """(SQL, parameters) of a named query with its defaults filled in, or of plain SQL."""
    text, given = sql_or_name.strip(), dict(params or {})
    if not _NAME.fullmatch(text):
        return text, {k: _value(v) if isinstance(v, str) else v for k, v in given.items()}
    query = named().get(text)
    if query is None:
        near = difflib.get_close_matches(text, named(), 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise InvalidInput(
            f"no query is named {text!r}: {hint}There are {', '.join(named())}; "
            'or write SQL, for example "select count(*) from samples"'
        )
    values = dict(query.params)
    for key, value in given.items():
        if key not in values:
            have = ", ".join(f"{k} (default {v!r})" for k, v in values.items()) or "none"
            raise InvalidInput(f"query {text}: no parameter {key!r}; its parameters: {have}")
        values[key] = _typed(query, key, value)
    return query.sql, values


def _typed(query: NamedQuery, key: str, value: Any) -> Any:
    """`value` in the type of the default: text from a command line becomes a number."""
    default, least = query.params[key], query.least.get(key, -_LARGEST)
    if isinstance(default, str):
        return str(value)
    found: Any = _value(value) if isinstance(value, str) else value
    wanted = (int,) if isinstance(default, int) else (int, float)
    fits = isinstance(found, wanted) and not isinstance(found, bool)
    if not fits or not least <= found <= _LARGEST:  # false for NaN too
        kind = "a whole number" if wanted == (int,) else "a number"
        kind += f" of at least {least}" if key in query.least else ""
        raise InvalidInput(f"query {query.name}: parameter {key}: found {value!r}, expected {kind}")
    return found


def check_select(con: duckdb.DuckDBPyConnection, sql: str) -> None:
    """Raise InvalidInput unless `sql` is exactly one statement that only reads."""
    try:
        statements = con.extract_statements(sql)
    except duckdb.Error as error:
        raise _failed(con, error) from error
    if len(statements) != 1:
        raise InvalidInput(f"the query holds {len(statements)} statements, expected one SELECT")
    kind = statements[0].type.name
    if kind not in _READS:
        raise InvalidInput(
            f"the query is a {kind} statement, expected a SELECT: SQL only reads a lake. To keep "
            "a result, use `hslake query --format parquet --output FILE`"
        )


def relation(
    con: duckdb.DuckDBPyConnection, sql: str, params: Mapping[str, Any] | None = None
) -> duckdb.DuckDBPyRelation:
    """One SELECT, planned and not yet run. Raises InvalidInput with DuckDB's message."""
    check_select(con, sql)
    try:
        return con.sql(sql, params=dict(params)) if params else con.sql(sql)
    except duckdb.Error as error:
        raise _failed(con, error) from error


def execute(
    con: duckdb.DuckDBPyConnection, sql: str, params: Mapping[str, Any] | None = None
) -> pa.Table:
    """Run one SELECT on a connection of `connect`. Raises InvalidInput with DuckDB's message."""
    found = relation(con, sql, params)
    try:
        return found.to_arrow_table()
    except (duckdb.Error, pa.ArrowException) as error:
        raise _failed(con, error) from error


def stream(
    con: duckdb.DuckDBPyConnection, sql: str, tables: Mapping[str, pa.Table], rows: int
) -> Iterator[pa.RecordBatch]:
    """The rows of one SELECT, which may name `tables` besides the views, some `rows` at a time:
    never all of them in memory. Raises as `execute` does."""
    try:
        for name, table in tables.items():
            con.register(name, table)
        yield from con.sql(sql).to_arrow_reader(rows)
    except (duckdb.Error, pa.ArrowException) as error:
        raise _failed(con, error) from error


def keep(con: duckdb.DuckDBPyConnection, name: str, sql: str) -> None:
    """Copy the rows of one SELECT into the temporary table `name`. Raises as `execute` does."""
    try:
        con.execute(f"create or replace temp table {name} as {sql}")
    except duckdb.Error as error:
        raise _failed(con, error) from error


def _failed(con: duckdb.DuckDBPyConnection, error: Exception) -> HslakeError:
    if isinstance(error, duckdb.OutOfMemoryException):
        return NoSpace(
            f"the query needs more memory than it may use: {_first_line(error)}. Select fewer "
            f"columns or rows, or set {MEMORY}, for example to 8GB"
        )
    if unreachable := remote_failure("the lake's tables", error):
        return unreachable
    if not isinstance(error, _ABOUT_SQL):
        (allowed,) = con.execute("select current_setting('allowed_paths')").fetchall()[0]
        damage = _unreadable(con, allowed)
        if damage is not None:
            return damage
    return InvalidInput(
        f"the query failed. DuckDB says: {str(error).strip()}\n"
        "Views: samples, segments, plan, coverage, versions, runs, refusals, canaries (columns: "
        'docs/sql.md, or "describe samples")'
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
