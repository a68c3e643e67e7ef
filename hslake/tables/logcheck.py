"""A table's log beside its files: what a changed bit in it would make others read.

A log entry has no checksum: what it says is compared with what the files say, whose names hold
their digest, and with what was loaded, which may have come from a checkpoint.
"""

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from hslake.errors import Missing
from hslake.schemas import arrow_schema
from hslake.tables.catalog import CONFIGURATION, TableState
from hslake.tables.deltalog import actions_of, entry_path
from hslake.tables.tablename import version_of

_READERS = 16


def log_differs(table: TableState) -> list[str]:
    """What the log of a table at its version says wrongly, one line each. Raises Corrupt for a
    file that does not read."""
    store, name = table.store, table.name
    sizes = store.sizes(name)
    found: list[str] = []

    def entry(version: int) -> tuple[str, list[dict[str, Any]] | str]:
        where = f"{store.url(name)}/{entry_path(version)}"
        try:
            return where, actions_of(store, name, version)
        except Missing:
            return where, "it is missing"
        except (ValueError, RecursionError) as error:
            return where, f"it is not one JSON action a line ({error})"

    added: dict[str, dict[str, Any]] = {}
    with ThreadPoolExecutor(_READERS) as pool:
        for version, (where, actions) in enumerate(pool.map(entry, range(table.version + 1))):
            if isinstance(actions, str):
                found.append(f"{where}: {actions}; restore it from a copy")
                continue
            wrong = _entry_differs(version, actions, name)
            found += [f"{where}: {what}; restore it from a copy" for what in wrong]
            adds = [a["add"] for a in actions if isinstance(a, dict) and "add" in a]
            added |= {unquote(str(add.get("path"))): add for add in adds}
        loaded = _loaded(table)
        if loaded.keys() != added.keys():
            some = sorted(loaded.keys() ^ added.keys())[0]
            found.append(
                f"{store.url(name)}: the log's entries name {len(added)} files, {len(loaded)} were "
                f"loaded (the first that differs: {some}): a checkpoint or an entry is damaged; "
                "restore _delta_log from a copy"
            )
        both = sorted(loaded.keys() & added.keys())
        facts = pool.map(lambda p: _facts(table, p), both)
        for path, fact in zip(both, facts, strict=True):
            fact = {**fact, "size": sizes.get(f"{name}/{path}", fact["size"])}
            for of, action in (("entry", added[path]), ("loaded state", loaded[path])):
                what = _add_differs(action, fact)
                if what:
                    found.append(f"{store.url(name)}/{path}: the log's {of} says {what}")
    return found


def _entry_differs(version: int, actions: list[Any], name: str) -> list[str]:
    kinds = [k for a in actions for k in (a if isinstance(a, dict) else {"?": 0})]
    expected = (
        {"commitInfo", "protocol", "metaData"} if not version else {"commitInfo", "add", "txn"}
    )
    # Of a large plan, one commit adds several files.
    once = [k for k in kinds if k != "add"]
    if set(kinds) != expected or len(once) != len(expected - {"add"}):
        return [f"it has the actions {sorted(kinds)}, expected {sorted(expected)}"]
    of = {k: v for a in actions for k, v in a.items()}
    if not all(isinstance(v, dict) for a in actions for v in a.values()):
        return ["an action in it is no object"]
    if not version:
        meta, protocol = of["metaData"], of["protocol"]
        wrong = _schema_differs(str(meta.get("schemaString")), name)
        if meta.get("configuration") != CONFIGURATION:
            wrong.append(f"configuration {meta.get('configuration')}, expected {CONFIGURATION}")
        if meta.get("partitionColumns") != []:
            wrong.append(f"partitionColumns {meta.get('partitionColumns')}, expected none")
        if set(protocol) != {"minReaderVersion", "minWriterVersion"}:
            wrong.append(f"a protocol of {sorted(protocol)}")
        return wrong
    wrong = []
    if of["txn"].get("version") != version:
        wrong.append(f"its transaction is of version {of['txn'].get('version')}")
    for add in (a["add"] for a in actions if "add" in a):
        if version_of(unquote(str(add.get("path")))) != version:
            wrong.append(f"it adds {add.get('path')!r}, which is no file of its version")
        for key, want in (("dataChange", True), ("partitionValues", {})):
            if add.get(key) != want:
                wrong.append(f"its add has {key} {add.get(key)!r}, expected {want!r}")
    return wrong


def _schema_differs(text: str, name: str) -> list[str]:
    try:
        fields = {f["name"]: f for f in json.loads(text)["fields"]}
    except (ValueError, KeyError, TypeError):
        return ["its schema does not read"]
    from deltalake import Schema

    want = {
        f["name"]: f for f in json.loads(Schema.from_arrow(arrow_schema(name)).to_json())["fields"]
    }
    # Columns that came after the table was made are in newer files only.
    wrong = [n for n, f in fields.items() if want.get(n) != f]
    return [f"its schema has {', '.join(map(repr, wrong))} other than expected"] if wrong else []


def _loaded(table: TableState) -> dict[str, dict[str, Any]]:
    """The add actions of the loaded state, as the entries have them."""
    rows = pa.table(table.add_actions()).to_pylist()
    return {
        unquote(row["path"]): {
            "size": row["size_bytes"],
            "stats": json.dumps(
                {
                    "numRecords": row["num_records"],
                    "minValues": {"op": row.get("min.op")},
                    "maxValues": {"op": row.get("max.op")},
                    "nullCount": {"op": row.get("null_count.op")},
                }
            ),
        }
        for row in rows
    }


def _facts(table: TableState, path: str) -> dict[str, Any]:
    """What the file itself says, of which its name holds the digest."""
    data = table.read_file(f"{table.store.url(table.name)}/{path}")
    ops = pq.read_table(pa.BufferReader(data), columns=["op"])["op"].to_pylist()
    return {"size": len(data), "rows": len(ops), "low": min(ops), "high": max(ops)}


def _add_differs(action: Mapping[str, Any], fact: Mapping[str, Any]) -> str | None:
    try:
        stats = json.loads(action["stats"])
        told = (
            action["size"],
            stats["numRecords"],
            stats["minValues"]["op"],
            stats["maxValues"]["op"],
            stats["nullCount"]["op"],
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return "nothing that can be read of its size and rows; restore _delta_log from a copy"
    want = (fact["size"], fact["rows"], fact["low"], fact["high"], 0)
    if told == want:
        return None
    return (
        f"size, rows, least and greatest op {told}, it has {want}; restore _delta_log from a copy"
    )
