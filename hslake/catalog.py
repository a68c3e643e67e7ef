"""The lake's tables. The only module that knows that they are Delta tables.

Every commit is a compare-and-swap: the caller decides on the table at version V, and its rows are
in version V + 1 or nowhere. Nothing is ever updated or removed.
"""

import io
import json
import random
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from os import environ
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, Schema, Transaction
from deltalake.exceptions import DeltaError, TableNotFoundError
from deltalake.transaction import AddAction

from hslake import tablename
from hslake.errors import Conflict, Corrupt, InvalidInput, Missing, Unavailable, reason
from hslake.schemas import arrow_schema
from hslake.store import Store, refusal, sync_dir, sync_file

# Delta's defaults clean the log up after 30 days, and pinned versions no longer load.
CONFIGURATION: dict[str, str | None] = {
    "delta.enableExpiredLogCleanup": "false",
    "delta.logRetentionDuration": "interval 36500 days",
    "delta.deletedFileRetentionDuration": "interval 36500 days",
}
_PROTOCOL = (1, 2)
_HOOKS = PostCommitHookProperties(create_checkpoint=True, cleanup_expired_logs=False)
_ENTRY = re.compile(r"(\d{20})\.json")
_FIRST_ENTRY = f"_delta_log/{0:020d}.json"
_MEND = (
    "restore the entry from a copy (one torn by a power cut as the newest was never reported as "
    "committed: remove it, and what it held is captured again)"
)
_READERS = 8
_MAX_CONFLICTS = 200
_MAX_FAILURES = 5


class TableState:
    """One version of a table; never changes."""

    def __init__(self, store: Store, name: str, table: DeltaTable) -> None:
        self.store, self.name, self._table = store, name, table
        self.version: int = table.version()
        self._files: list[str] | None = None

    def files(self) -> list[str]:
        """URLs (local: absolute paths) of the version's Parquet files."""
        if self._files is None:
            urls = self._table.file_uris()
            if self.store.is_local:  # Delta gives URLs: a space or '#' in a folder comes quoted
                urls = [unquote(u.removeprefix("file://")) for u in urls]
            self._files = sorted(urls)
        return list(self._files)

    def commit_file(self, version: int) -> str | None:
        """Name of the file that the commit of `version` added; None when it added none."""
        names = (u.rpartition("/")[2] for u in self.files())
        return next((n for n in names if n.startswith(f"part-{version:020d}-")), None)

    def strays(self) -> list[str]:
        """Parquet files in the table's folder that no entry of its log names."""
        names = {p.removeprefix(f"{self.name}/") for p in self.store.list(self.name)}
        found = {n for n in names if tablename.version_of(n) is not None}
        now = open_table(self.store, self.name)  # after the list: others commit meanwhile
        return sorted(found - {u.rpartition("/")[2] for u in now.files()})

    def add_actions(self) -> Any:
        """What the loaded log says of each file, an Arrow table of Delta's flattened actions."""
        return self._table.get_add_actions(flatten=True)

    def change_files(self) -> list[str]:
        """Those of `files` that may hold rows of another op than `add`.

        The log's statistics say which cannot, so hides are found without opening every file.
        """
        actions = pa.table(self.add_actions())
        if not {"min.op", "max.op"} <= set(actions.column_names):
            return self.files()
        columns = (actions[c].to_pylist() for c in ("path", "min.op", "max.op"))
        adds = {p for p, low, high in zip(*columns, strict=True) if low == high == "add"}
        return [
            f for f in self.files() if f.removeprefix(f"{self.store.url(self.name)}/") not in adds
        ]

    def arrow(self, columns: Sequence[str] | None = None) -> pa.Table:
        """The rows; columns that older files lack are null. Raises Corrupt."""
        schema = arrow_schema(self.name)
        if columns is not None:
            schema = pa.schema([schema.field(c) for c in columns])
        files = self.files()
        if not files:
            return schema.empty_table()
        with ThreadPoolExecutor(min(_READERS, len(files))) as pool:
            return pa.concat_tables(list(pool.map(lambda f: self._read(f, schema), files)))

    def digested(self) -> set[str]:
        """Those of `files` whose name holds a digest of their content."""
        return {u for u in self.files() if tablename.digest_of(u.rpartition("/")[2])}

    def check(self, sound: set[str] | None = None) -> None:
        """Read every file, page checksums included, one at a time. Raises Corrupt.

        Files in `sound` are left out, and those that were read are added: none ever changes.
        """
        done = set() if sound is None else sound
        for url in self.files():
            if url not in done:
                self._read(url, arrow_schema(self.name))
                done.add(url)

    def read_file(self, url: str) -> bytes:
        """The bytes of one of `files`, compared with the digest in its name. Raises Corrupt: DuckDB
        and Parquet's own checksums pass over a footer that was changed."""
        name = url.rpartition("/")[2]
        try:
            data = self.store.read(f"{self.name}/{name}")
        except Missing as error:
            raise self._unreadable(url, error) from None
        if what := tablename.differs(name, data):
            raise self._unreadable(url, what)
        return data

    def _unreadable(self, url: str, why: object) -> Corrupt:
        return Corrupt(
            f"{url}: a file of version {self.version} of the table {self.name} cannot be "
            f"read: {why}; restore it from a copy"
        )

    def _read(self, url: str, schema: pa.Schema) -> pa.Table:
        try:
            body = pa.BufferReader(self.read_file(url))
            with pq.ParquetFile(body, page_checksum_verification=True) as file:
                have = set(file.schema_arrow.names)
                found = file.read(columns=[n for n in schema.names if n in have])
        except (pa.ArrowException, OSError) as e:
            raise self._unreadable(url, e) from e
        columns = [
            found[f.name].cast(f.type) if f.name in have else pa.nulls(found.num_rows, f.type)
            for f in schema
        ]
        return pa.table(columns, schema=schema)

    def transaction(self, txn_id: str) -> int | None:
        """The version that transaction `txn_id` made, or None."""
        return self._table.transaction_version(txn_id)

    def history(self) -> list[dict[str, Any]]:
        """Commits, newest first, as Delta reports them."""
        return self._table.history()


Table = TableState


def _options(store: Store) -> dict[str, str] | None:
    """Options for S3; credentials and endpoint come from the environment."""
    if store.is_local or not store.root.startswith(("s3://", "s3a://")):
        return None
    options = {"aws_conditional_put": "etag"}
    endpoint = environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL") or ""
    if endpoint:
        options["aws_endpoint_url"] = endpoint
    if endpoint.startswith("http://"):
        options["aws_allow_http"] = "true"
    return options


def create_table(store: Store, name: str, schema: pa.Schema | None = None) -> TableState:
    """Make the table, or take over an empty one that an interrupted create left.

    Raises InvalidInput when it is there and holds rows.
    """
    fields = schema or arrow_schema(name)
    with store.errors(name):
        try:
            DeltaTable.create(
                store.url(name),
                Schema.from_arrow(fields),
                mode="ignore",
                name=name,
                configuration=CONFIGURATION,
                storage_options=_options(store),
                commit_properties=CommitProperties(max_commit_retries=0),
            )
        except (DeltaError, OSError) as error:
            # Another create was faster; or the answer was lost. Either way the table is there.
            if not DeltaTable.is_deltatable(store.url(name), _options(store)):
                raise refusal(store.url(name), error) or Unavailable(
                    f"{store.url(name)}: the table cannot be made: {reason(error)}; look at the "
                    "store and run it again"
                ) from error
        if store.is_local:
            log = store.local(f"{name}/_delta_log")
            for path in log.glob("*.json"):
                sync_file(path)
            for folder in (log, log.parent, log.parent.parent):
                sync_dir(folder)
    state = open_table(store, name)
    if state.files():
        raise InvalidInput(
            f"{store.url(name)} is a table with rows, expected none: another lake was here"
        )
    return state


def open_table(store: Store, name: str, version: int | None = None) -> TableState:
    """The table at `version` (default: the newest).

    Raises Missing (no table, no such version), Corrupt (an empty or torn log entry) or
    InvalidInput (another client raised the table's protocol).
    """
    if version is not None and (type(version) is not int or version < 0):
        raise InvalidInput(f"version: found {version!r}, expected a whole number from 0")
    newest = None
    if store.is_local:
        with store.errors(name):
            newest = _check_log(store, name)
    url = store.url(name)
    try:
        table = DeltaTable(url, version=version, storage_options=_options(store))
    except TableNotFoundError:
        raise Missing(f"{url} holds no table: is this a lake?") from None
    except (DeltaError, ValueError, OSError) as e:
        _check_access(store, name)  # raises Unavailable when that is the reason
        refused = refusal(url, e)
        if refused is not None:
            raise refused from e
        if version is not None:
            last = open_table(store, name).version
            if version > last:
                raise Missing(f"{url} has no version {version}: it has 0 to {last}") from None
            raise Missing(f"version {version} of {url} cannot be loaded: {reason(e)}") from e
        raise Corrupt(f"{url}: the table's log cannot be read: {reason(e)}; {_MEND}") from e
    if version is None and newest is not None and table.version() < newest:
        _check_access(store, name)
        raise Corrupt(
            f"{url}: the log goes to version {newest}, only {table.version()} loads: "
            f"an entry is missing; {_MEND}"
        )
    protocol = table.protocol()
    found = (protocol.min_reader_version, protocol.min_writer_version)
    if found != _PROTOCOL:
        raise InvalidInput(
            f"{url} has Delta protocol {found}, expected {_PROTOCOL}: another client upgraded the "
            "table; restore its log from before that"
        )
    return TableState(store, name, table)


def _check_access(store: Store, name: str) -> None:
    """Raise Unavailable when the store or the machine keeps the log from us."""
    store.exists(f"{name}/{_FIRST_ENTRY}")
    for path in store.list(f"{name}/_delta_log") if store.is_local else ():
        store.read_range(path, 0, 1)


def _check_log(store: Store, name: str) -> int | None:
    """Newest version in a local log. Raises Corrupt for empty entries or a torn last one.

    After a power cut the last entry may be there without its content, and Delta would silently
    open the table without those rows.
    """
    log = store.local(f"{name}/_delta_log")
    if not log.is_dir():
        return None
    entries = sorted(p for p in log.iterdir() if _ENTRY.fullmatch(p.name))
    for path in entries:
        if path.stat().st_size == 0:
            raise Corrupt(f"{path} is empty: a commit was torn; {_MEND}")
    if not entries:
        return None
    last = entries[-1]
    try:
        actions = [json.loads(line) for line in last.read_bytes().splitlines() if line.strip()]
        kinds = {k for a in actions for k in a}
        operation = next((a["commitInfo"]["operation"] for a in actions if "commitInfo" in a), "")
    except (ValueError, TypeError, KeyError, RecursionError) as e:
        raise Corrupt(f"{last} is torn ({e}): expected one JSON action a line; {_MEND}") from None
    if not operation or (operation == "WRITE" and not {"add", "txn"} <= kinds):
        raise Corrupt(f"{last} is torn: found only {sorted(kinds)}; {_MEND}")
    return int(last.stem)


def commit(
    store: Store, name: str, build: Callable[[TableState], pa.Table | None], txn_id: str
) -> int:
    """Append the rows that `build` returns for the current state; return their version.

    `build` runs again on a newer state whenever another writer was faster. It returns rows without
    commit_version (and, if it likes, without committed_at), None when there is nothing to do (the
    version it saw is returned), or raises to abort. `txn_id` names the content: a transaction that
    is in the table already is not repeated, its version is returned. Raises Conflict when
    other writers were always faster, Unavailable when the store keeps failing.
    """
    conflicts = failures = 0
    while True:
        state = open_table(store, name)
        done = state.transaction(txn_id)
        if done is not None:
            return done
        rows = build(state)
        if rows is None:
            return state.version
        version = state.version + 1
        data = _fill(rows, name, version)
        body = _parquet(data)
        path = tablename.new_name(version, body)
        # The data is durable before the log can name it.
        store.put(f"{name}/{path}", body)
        try:
            _append(state, path, len(body), data, Transaction(txn_id, version))
        except Exception as error:
            # Whatever was reported, the commit may have succeeded: only the table knows.
            now = open_table(store, name)
            done = now.transaction(txn_id)
            if done is None:
                if now.version > state.version:
                    conflicts += 1
                    # Our version is another's: this file can never be named by a log entry.
                    store.delete(f"{name}/{path}")
                else:
                    failures += 1
                if failures >= _MAX_FAILURES:
                    nothing = f"{store.url(name)}: nothing was committed"
                    raise refusal(nothing, error) or Unavailable(
                        f"{store.url(name)}: the commit failed {failures} times, nothing was "
                        f"committed: {reason(error)}; look at the store and run it again"
                    ) from error
                if conflicts >= _MAX_CONFLICTS:
                    raise Conflict(
                        f"{store.url(name)}: {conflicts} commits in a row lost to other writers: "
                        "run fewer at once, or try again"
                    ) from error
                longest = 0.02 * 2 ** min(conflicts + failures, 6)
                time.sleep(random.uniform(0.005, longest))
                continue
            version = done
        with store.errors(name):
            _sync(store, name, version)
        return version


def _append(state: TableState, path: str, size: int, data: pa.Table, txn: Transaction) -> None:
    """Write the log entry of version `state.version + 1`, or raise: never a later one."""
    ops = pc.min_max(data["op"]).as_py()
    stats = {
        "numRecords": data.num_rows,
        "minValues": {"op": ops["min"]},
        "maxValues": {"op": ops["max"]},
        "nullCount": {"op": 0},
    }
    add = AddAction(path, size, {}, time.time_ns() // 1_000_000, True, json.dumps(stats))
    state._table.create_write_transaction(
        [add],
        mode="append",
        schema=state._table.schema(),
        commit_properties=CommitProperties(max_commit_retries=0, app_transactions=[txn]),
        post_commithook_properties=_HOOKS,
    )


def _fill(rows: pa.Table, name: str, version: int) -> pa.Table:
    """`rows` in the table's schema: commit_version and committed_at set, absent columns null."""
    schema, count = arrow_schema(name), rows.num_rows
    unknown = set(rows.column_names) - set(schema.names)
    if unknown:
        raise InvalidInput(f"rows for {name} have unknown columns {sorted(unknown)}")
    now = datetime.now(UTC)
    columns = []
    for field in schema:
        if field.name == "commit_version":
            columns.append(pa.array([version] * count, field.type))
        elif field.name in rows.column_names:
            columns.append(rows[field.name].cast(field.type))
        elif field.name == "committed_at":
            columns.append(pa.array([now] * count, field.type))
        elif field.nullable:
            columns.append(pa.nulls(count, field.type))
        else:
            raise InvalidInput(f"rows for {name} lack the column {field.name}")
    return pa.table(columns, schema=schema)


def _parquet(data: pa.Table) -> bytes:
    out = io.BytesIO()
    pq.write_table(data, out, compression="zstd", write_page_checksum=True)
    return out.getvalue()


def _sync(store: Store, name: str, version: int) -> None:
    """Make the log entry (and the checkpoint that may have followed it) durable."""
    if not store.is_local:
        return
    log = store.local(f"{name}/_delta_log")
    for path in log.glob(f"{version:020d}.*"):
        sync_file(path)
    last = log / "_last_checkpoint"
    if last.exists():
        sync_file(last)
    sync_dir(log)
    sync_dir(log.parent)
