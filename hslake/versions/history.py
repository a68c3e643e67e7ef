"""What each commit did, and who made it."""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hslake import query
from hslake.lake import open_lake
from hslake.pins import read_pins
from hslake.tables import catalog, deltalog

_LOG = logging.getLogger(__name__)
_READERS = 8
# What a commit was for, by the first word of its transaction id.
_ACTIONS = {
    "segment": "compact",
    "hide": "quarantine",
    "condemn": "vacuum",
    "delete": "delete",
    "rewrite": "delete",
    "repair": "repair",
}


def log(
    lake_url: str, limit: int | None = None, warn: Callable[[str], object] = _LOG.warning
) -> list[dict[str, Any]]:
    """One dict per manifest version that has rows, newest first; only the newest `limit` (None or
    0: all), which is all that is read then.

    commit_version, committed_at, action (compact, quarantine, vacuum, delete, repair), by
    (user@host), the counts of the view `versions`, and pins. `warn` is told of pins that cannot be
    read: they are left out.
    """
    lake = open_lake(lake_url)
    names: dict[int, list[str]] = {}
    good, problems = read_pins(lake)
    for problem in problems:
        warn(problem)
    for pin in good:
        names.setdefault(pin.version, []).append(pin.name)
    state = lake.manifest_table()
    files = state.newest_files(limit) if limit else state.row_files()
    with query.connect_files(
        {"manifest": files, "plan": []}, lake.spec, query.filesystem(lake.store)
    ) as con:
        text = "select * from versions order by commit_version desc"
        rows = query.execute(con, text).to_pylist()
    with ThreadPoolExecutor(_READERS) as pool:
        found = pool.map(lambda row: _made(state, row["commit_version"]), rows)
        made = list(found)
    return [
        {**_head(row), **how, **_counts(row), "pins": names.get(row["commit_version"], [])}
        for row, how in zip(rows, made, strict=True)
    ]


def _made(state: catalog.TableState, version: int) -> dict[str, str]:
    made = deltalog.commit_info(state.store, state.name, version)
    kind = made.transaction.partition("-")[0]
    return {"action": _ACTIONS.get(kind, kind), "by": made.by}


_HEAD = ("commit_version", "committed_at")


def _head(row: dict[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in _HEAD}


def _counts(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in _HEAD}
