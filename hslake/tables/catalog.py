"""The lake's tables as versions, and commits to them.

Every commit is a compare-and-swap: the caller decides on the table at version V, and its rows are
in version V + 1 or nowhere. Nothing is ever updated or removed.
"""

import contextlib
import json
import random
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, Schema, Transaction
from deltalake.exceptions import DeltaError, TableNotFoundError
from deltalake.transaction import AddAction

from hslake.errors import Conflict, Corrupt, HslakeError, InvalidInput, Missing, Unavailable, reason
from hslake.schemas import arrow_schema
from hslake.store import Store, refusal, remote_failure, sync_dir, sync_file
from hslake.tables import deltalog, rollup, tablefile, tablename

# Delta's defaults clean the log up after 30 days, and pinned versions no longer load.
CONFIGURATION: dict[str, str | None] = {
    "delta.enableExpiredLogCleanup": "false",
    "delta.logRetentionDuration": "interval 36500 days",
    "delta.deletedFileRetentionDuration": "interval 36500 days",
}
_PROTOCOL = (1, 2)
_HOOKS = PostCommitHookProperties(create_checkpoint=True, cleanup_expired_logs=False)
_READERS = 8
_ROLLED_UP = ("manifest", "runs")  # the plan grows by few commits and large files
_ROLL_UPS = 16  # at most by one commit: a lake that has none yet must not stop it for minutes
_MANY_CHANGES = 64  # files with hides: more of them are quicker read as roll-ups
_MAX_CONFLICTS = 200
_MAX_FAILURES = 5
_LISTINGS = 8  # of a log whose newest entry they lack
_MOST_VERSIONS = 2**62
_FIRST_ENTRY = deltalog.entry_path(0)

# What a commit adds: one table, which becomes one file, or several tables made one after the other,
# each of which becomes a file and is let go: what is committed at once may be larger than memory.
Rows: TypeAlias = "pa.Table | Iterable[pa.Table] | None"


class TableState:
    """One version of a table; never changes."""

    def __init__(self, store: Store, name: str, table: DeltaTable) -> None:
        self.store, self.name, self._table = store, name, table
        self.version: int = table.version()
        self._files: list[str] | None = None
        self._rollups: set[str] | None = None

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
        return self.commit_files().get(version)

    def commit_files(self) -> dict[int, str]:
        """version -> name of the file that its commit added, for those that added one (the last by
        name, of several)."""
        names = (u.rpartition("/")[2] for u in self.files())
        return {v: n for n in names if (v := tablename.version_of(n)) is not None}

    def strays(self) -> list[str]:
        """Parquet files in the table's folder that no entry of its log names."""
        names = {p.removeprefix(f"{self.name}/") for p in self.store.list(self.name)}
        found = {n for n in names if tablename.version_of(n) is not None}
        now = open_table(self.store, self.name)  # after the list: others commit meanwhile
        return sorted(found - {u.rpartition("/")[2] for u in now.files()})

    def row_files(self) -> list[str]:
        """URLs of Parquet files that hold the version's rows, each once: `files`, or roll-ups of
        many of them."""
        base = self.store.url(self.name)
        return [
            f"{base}/{found.name}" if isinstance(found, rollup.Block) else found
            for found in self._cover()
        ]

    def _cover(self) -> list[str | rollup.Block]:
        """The roll-ups and the URLs of the other files that make up the version."""
        urls = {u.rpartition("/")[2]: u for u in self.files()}
        cover = rollup.cover(list(urls), self.version, self._have())
        return [f if isinstance(f, rollup.Block) else urls[f] for f in cover]

    def _have(self) -> set[str]:
        """Roll-ups that exist, as paths below the table."""
        if self._rollups is None:
            found: list[str] = []
            if self.name in _ROLLED_UP and len(self.files()) > rollup.FACTOR:
                found = self.store.list(f"{self.name}/{rollup.FOLDER}")
            self._rollups = {p.removeprefix(f"{self.name}/") for p in found}
        return self._rollups

    def newest_files(self, count: int) -> list[str]:
        """URLs of the files of the last `count` commits that added one, newest first."""
        return sorted(self.files(), reverse=True)[:count]  # the names begin with the version

    def add_actions(self) -> Any:
        """What the loaded log says of each file, an Arrow table of Delta's flattened actions."""
        return self._table.get_add_actions(flatten=True)

    def change_files(self) -> list[str]:
        """Those of `row_files` that may hold rows of another op than `add`.

        The log's statistics say which cannot, so hides are found without opening every file.
        """
        actions = pa.table(self.add_actions())
        if not {"min.op", "max.op"} <= set(actions.column_names):
            return self.row_files()
        columns = (actions[c].to_pylist() for c in ("path", "min.op", "max.op"))
        adds = {p for p, low, high in zip(*columns, strict=True) if low == high == "add"}
        changes = [f for f in self.files() if f.rpartition("/")[2] not in adds]
        return changes if len(changes) <= _MANY_CHANGES else self.row_files()

    def arrow(self, columns: Sequence[str] | None = None) -> pa.Table:
        """The rows; columns that older files lack are null. Raises Corrupt."""
        schema = arrow_schema(self.name)
        if columns is not None:
            schema = pa.schema([schema.field(c) for c in columns])
        return self.read(self._cover(), schema)

    def read(self, files: Sequence[str | rollup.Block], schema: pa.Schema) -> pa.Table:
        """The rows of some of the version's files, in the order given. Raises Corrupt."""
        if not files:
            return schema.empty_table()
        with ThreadPoolExecutor(min(_READERS, len(files))) as pool:
            return pa.concat_tables(list(pool.map(lambda f: self._rows(f, schema), files)))

    def _rows(self, file: str | rollup.Block, schema: pa.Schema) -> pa.Table:
        if isinstance(file, str):
            return self._read(file, schema)
        found = self._rolled_up(file, schema)
        if found is not None:
            return found
        base = self.store.url(self.name)
        return pa.concat_tables([self._read(f"{base}/{part}", schema) for part in file.parts])

    def _rolled_up(self, block: rollup.Block, schema: pa.Schema) -> pa.Table | None:
        """The rows of a roll-up; None when it does not read: it is only a copy."""
        try:
            return tablefile.decode(self.store.read(f"{self.name}/{block.name}"), schema)
        except (Missing, pa.ArrowException, OSError):
            return None

    def digested(self) -> set[str]:
        """Those of `files` whose name holds a digest of their content."""
        return {u for u in self.files() if tablename.digest_of(u.rpartition("/")[2])}

    def check(self, sound: set[str] | None = None) -> None:
        """Read every file, page checksums included, one at a time, and compare the roll-ups with
        their parts. Raises Corrupt.

        Files in `sound` are left out, and those that were read are added: none ever changes.
        """
        done = set() if sound is None else sound
        for url in self.files():
            if url not in done:
                self._read(url, arrow_schema(self.name))
                done.add(url)
        for path in self.bad_rollups(done):
            raise Corrupt(
                f"{self.store.url(path)} is not what the files hold that it is a copy of: "
                f"{deltalog.REPAIR}"
            )

    def bad_rollups(self, sound: set[str] | None = None) -> list[str]:
        """Paths of roll-ups that differ from the files they are copies of, or do not read."""
        schema, done, found = arrow_schema(self.name), sound if sound is not None else set(), []
        base = self.store.url(self.name)
        for block in self._cover():
            if isinstance(block, str) or block.name in done:
                continue
            parts = self.read([f"{base}/{part}" for part in block.parts], schema)
            whole = self._rolled_up(block, schema)
            if whole is None or tablefile.encode(whole) != tablefile.encode(parts):
                found.append(f"{self.name}/{block.name}")
            else:
                done.add(block.name)
        return found

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
            return tablefile.decode(self.read_file(url), schema)
        except (pa.ArrowException, OSError) as e:
            raise self._unreadable(url, e) from e

    def transaction(self, txn_id: str) -> int | None:
        """The version that transaction `txn_id` made, or None."""
        return self._table.transaction_version(txn_id)


def create_table(store: Store, name: str, schema: pa.Schema | None = None) -> TableState:
    """Make the table, or take over an empty one that an interrupted create left.

    Raises InvalidInput when it is there and holds rows.
    """
    ensure_table(store, name, schema)
    state = open_table(store, name)
    if state.files():
        raise InvalidInput(
            f"{store.url(name)} is a table with rows, expected none: another lake was here"
        )
    return state


def ensure_table(store: Store, name: str, schema: pa.Schema | None = None) -> None:
    """Make the table unless it is there, be it with rows."""
    fields = schema or arrow_schema(name)
    with store.errors(name):
        try:
            DeltaTable.create(
                store.url(name),
                Schema.from_arrow(fields),
                mode="ignore",
                name=name,
                configuration=CONFIGURATION,
                storage_options=store.delta_options(),
                commit_properties=CommitProperties(max_commit_retries=0),
            )
        except (DeltaError, OSError) as error:
            # Another create was faster; or the answer was lost. Either way the table is there.
            if not DeltaTable.is_deltatable(store.url(name), store.delta_options()):
                raise refusal(store.url(name), error) or Unavailable(
                    f"{store.url(name)}: the table cannot be made: {reason(error)}; look at the "
                    "store and run it again"
                ) from error
        if store.is_local:
            log = store.local(f"{name}/{deltalog.LOG}")
            for path in log.glob("*.json"):
                sync_file(path)
            for folder in (log, log.parent, log.parent.parent):
                sync_dir(folder)


def has_table(store: Store, name: str) -> bool:
    """Whether the table was ever made whole."""
    return store.exists(f"{name}/{_FIRST_ENTRY}")


def open_table(store: Store, name: str, version: int | None = None) -> TableState:
    """The table at `version` (default: the newest).

    Raises Missing (no table, no such version), Corrupt (an empty or torn log entry), InvalidInput
    (another client raised the table's protocol) or Unavailable.
    """
    if version is not None and (type(version) is not int or version < 0):
        raise InvalidInput(f"version: found {version!r}, expected a whole number from 0")
    if version is not None and version > _MOST_VERSIONS:  # no number that Delta could be asked for
        raise Missing(f"{store.url(name)} has no version {version}")
    if store.is_local or version is not None:
        return _load(store, name, version)
    # Delta finds the newest version by listing the log. What a store lists may be old, what it has
    # under a name is not, so the next entry is asked for by its name.
    found: TableState | None = None
    for tried in range(_LISTINGS):
        try:
            newer = _load(store, name, None)
        except Missing:
            if not store.exists(f"{name}/{_FIRST_ENTRY}"):
                raise
        else:
            if not store.exists(f"{name}/{deltalog.entry_path(newer.version + 1)}"):
                return newer
            if found is not None and newer.version > found.version:
                return newer  # others commit faster than we look: it is newer than this call
            found = newer
        time.sleep(random.uniform(0, min(1.0, 0.05 * 2**tried)))
    raise Unavailable(
        f"{store.url(name)}: the store's listing lacks entries of the table's log that are there: "
        "it lists what was, not what is; try again later"
    )


def _load(store: Store, name: str, version: int | None) -> TableState:
    newest = None
    if store.is_local:
        with store.errors(name):
            newest = deltalog.check(store, name, version)
    url = store.url(name)
    try:
        table = DeltaTable(url, version=version, storage_options=store.delta_options())
    except TableNotFoundError:
        raise Missing(
            f"{url} holds no table, expected its log in _delta_log: if this is a lake, restore it "
            "from a copy"
        ) from None
    except (DeltaError, ValueError, OSError) as e:
        refused = remote_failure(url, e) or refusal(url, e)
        if refused is not None:
            raise refused from e
        _check_access(store, name)  # raises Unavailable when that is the reason
        if version is not None:
            last = open_table(store, name).version
            if version > last:
                raise Missing(f"{url} has no version {version}: it has 0 to {last}") from None
            raise Missing(f"version {version} of {url} cannot be loaded: {reason(e)}") from e
        raise Corrupt(
            f"{url}: the table's log cannot be read: {reason(e)}; {deltalog.REPAIR}"
        ) from e
    if version is None and newest is not None and table.version() < newest:
        _check_access(store, name)
        raise Corrupt(
            f"{url}: the log goes to version {newest}, only {table.version()} loads: "
            f"an entry is missing: restore it from a copy; {deltalog.REPAIR}"
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
    for path in store.list(f"{name}/{deltalog.LOG}") if store.is_local else ():
        store.read_range(path, 0, 1)


def commit(store: Store, name: str, build: Callable[[TableState], Rows], txn_id: str) -> int:
    """Append the rows that `build` returns for the current state; return their version.

    `build` runs again on a newer state whenever another writer was faster. It returns rows without
    commit_version (and, if it likes, without committed_at; see Rows for more than fit in memory),
    None when there is nothing to do (the version it saw is returned), or raises to abort. `txn_id`
    names the content: a transaction that is in the table already is not repeated, its version is
    returned. Raises Conflict when other writers were always faster, Unavailable when the store
    keeps failing.
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
        # The data is durable before the log can name it, and so is what the entry stands on.
        adds = _put_files(store, name, version, rows)
        if not adds:
            return state.version
        with store.errors(name):
            deltalog.sync_base(store, name, state.version)
        try:
            _append(state, adds, Transaction(txn_id, version))
        except Exception as error:
            # Whatever was reported, the commit may have succeeded: only the table knows.
            now = open_table(store, name)
            done = now.transaction(txn_id)
            if done is None:
                if now.version > state.version:
                    conflicts += 1
                    # Our version is another's: these files can never be named by a log entry.
                    _delete_files(store, name, adds)
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
            deltalog.sync(store, name, version)
        if version % rollup.FACTOR == 0 and name in _ROLLED_UP:
            _roll_up(store, name, version)
        return version


def _roll_up(store: Store, name: str, version: int) -> None:
    """Make the roll-ups that are lacking. They only save time, so whatever fails, the commit that
    was made stands."""
    schema, base = arrow_schema(name), store.url(name)
    with contextlib.suppress(HslakeError, OSError, pa.ArrowException):
        state = open_table(store, name, version)
        have = {p.removeprefix(f"{name}/") for p in store.list(f"{name}/{rollup.FOLDER}")}
        parts = [u.rpartition("/")[2] for u in state.files()]
        for block in rollup.wanted(parts, version, have)[:_ROLL_UPS]:
            smaller = rollup.cover(block.parts, block.last, have)
            files = [f if isinstance(f, rollup.Block) else f"{base}/{f}" for f in smaller]
            body = tablefile.encode(state.read(files, schema))
            store.put(f"{name}/{block.name}", body)
            have.add(block.name)


def _put_files(store: Store, name: str, version: int, rows: Rows) -> list[AddAction]:
    """Write the rows of the commit of `version`, one file a table; what the log is to say of them.

    What goes wrong leaves no file, as far as that can be helped.
    """
    tables = () if rows is None else [rows] if isinstance(rows, pa.Table) else rows
    adds: list[AddAction] = []
    try:
        for table in tables:
            data = tablefile.fill(table, name, version)
            body = tablefile.encode(data)
            add = _add_action(tablename.new_name(version, body), len(body), data)
            adds.append(add)  # before: of a put whose answer was lost the file may be there
            store.put(f"{name}/{add.path}", body)
    except BaseException:
        with contextlib.suppress(HslakeError, OSError):
            _delete_files(store, name, adds)
        raise
    return adds


def _delete_files(store: Store, name: str, adds: Sequence[AddAction]) -> None:
    for add in adds:
        store.delete(f"{name}/{add.path}")


def _add_action(path: str, size: int, data: pa.Table) -> AddAction:
    ops = pc.min_max(data["op"]).as_py()
    stats = {
        "numRecords": data.num_rows,
        "minValues": {"op": ops["min"]},
        "maxValues": {"op": ops["max"]},
        "nullCount": {"op": 0},
    }
    return AddAction(path, size, {}, time.time_ns() // 1_000_000, True, json.dumps(stats))


def _append(state: TableState, adds: Sequence[AddAction], txn: Transaction) -> None:
    """Write the log entry of version `state.version + 1`, or raise: never a later one."""
    state._table.create_write_transaction(
        list(adds),
        mode="append",
        schema=state._table.schema(),
        commit_properties=CommitProperties(
            max_commit_retries=0,
            app_transactions=[txn],
            custom_metadata={deltalog.BY: deltalog.who()},
        ),
        post_commithook_properties=_HOOKS,
    )
