"""A lake's tables in memory, kept up to date by reading only the files of new versions.

The views are those of `hslake.query`, over copies of the tables' small columns: a figure costs
milliseconds, and a look at a lake in which nothing was committed costs one request a table.
"""

from collections.abc import Mapping, Sequence

import pyarrow as pa

from hslake import query, runlog
from hslake.errors import Missing
from hslake.lake import Lake
from hslake.schemas import arrow_schema
from hslake.tables import catalog, deltalog, tablename
from hslake.views import LOGS, TAKEN_AWAY

# Large, and no figure of a status needs them. They are null here.
LEFT_OUT = frozenset(
    {"input_ids", "loss_mask", "checksum", "rms", "absmax", "nonfinite", "log_probs"}
)


class Mirror:
    """Copies of the tables of `lake`; `con` has the views over them. Close it."""

    def __init__(self, lake: Lake) -> None:
        self.store, self.spec = lake.store, lake.spec
        self.con = query.connect_files({}, lake.spec)
        self.versions: dict[str, int] = {}  # table -> the version that is copied
        self._known: dict[str, pa.Table] = {}  # rows of SELECTs without parameters, until a change
        for view in LOGS:
            self.con.execute(f"create temp table _{view} as select * from {view}")
            self.con.execute(f"create or replace temp view {view} as select * from _{view}")

    def close(self) -> None:
        """Let go of the memory."""
        self.con.close()

    def refresh(self) -> bool:
        """Take in what was committed since the last call; whether that was anything.

        The manifest comes before the plan: what was committed was planned before. Raises what
        opening a lake's tables does, and then holds what it held, table by table.
        """
        have = self.versions.get("manifest")
        if have is not None:
            entry = f"manifest/{deltalog.entry_path(have)}"
            if not self.store.exists(entry):
                raise Missing(
                    f"{self.store.url(entry)} was there and is not any more: was the lake moved or "
                    "removed, or its disk unmounted?"
                )
        changed = [self._update(view, table) for view, table in LOGS.items()]
        return any(changed)

    def _update(self, view: str, name: str) -> bool:
        have = self.versions.get(name)
        if have is not None and not self.store.exists(f"{name}/{deltalog.entry_path(have + 1)}"):
            return False
        state = self._open(name)
        if state is None or state.version == have:
            self.versions.setdefault(name, -1)  # no table yet: its first entry is looked for
            return False
        numbers = {url: tablename.version_of(url.rpartition("/")[2]) for url in state.files()}
        if have in (None, -1) or None in numbers.values():
            fresh, files = True, state.row_files()  # roll-ups: some files for all
        else:
            newer = (u for u, n in numbers.items() if n is not None and n > (have or 0))
            fresh, files = False, list(newer)
        rows = self._read(view, name, files)
        self.con.execute("begin")
        try:
            if fresh:
                self.con.execute(f"delete from _{view}")
            self.con.register("_new", rows)
            self.con.execute(f"insert into _{view} by name select * from _new")
            self.con.unregister("_new")
            for table, of, sql in TAKEN_AWAY:
                if of == name:
                    self.con.execute(f"delete from {table}")
                    log = sql.format(log=f"select * from _{view}")
                    self.con.execute(f"insert into {table} {log}")
            self.con.execute("commit")
            self._known.clear()
        except BaseException:
            self.con.execute("rollback")
            raise
        self.versions[name] = state.version
        return True

    def _open(self, name: str) -> catalog.TableState | None:
        if name == runlog.TABLE:
            return runlog.open_runs(self.store)
        return catalog.open_table(self.store, name)

    def _read(self, view: str, name: str, files: Sequence[str]) -> pa.Table:
        columns = [f.name for f in arrow_schema(name) if f.name not in LEFT_OUT]
        store = query.filesystem(self.store)
        with query.connect_files({name: files}, self.spec, store, {name: []}) as con:
            return query.execute(con, f"select {', '.join(columns)} from {view}")

    def rows(self, sql_or_name: str, params: Mapping[str, object] | None = None) -> pa.Table:
        """The rows of one SELECT, or of the named query of that name. Without parameters, and so
        without the time of day, they are asked for once a version."""
        if params is None and sql_or_name in self._known:
            return self._known[sql_or_name]
        sql, values = query.resolve(sql_or_name, params)
        found = query.execute(self.con, sql, values)
        if params is None:
            self._known[sql_or_name] = found
        return found

    def __enter__(self) -> "Mirror":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
