"""What the manifest's rows mean: which samples are live, which segments are named or condemned.

The SQL twin, for readers, is in `hslake.views`; this is for commits, which decide on a TableState.
"""

from collections.abc import Collection, Iterable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from hslake.catalog import TableState
from hslake.schemas import arrow_schema


def rows(records: Iterable[dict[str, Any]]) -> pa.Table | None:
    """Rows to commit (keys that are no column are left out), or None when there are none."""
    found = list(records)
    fields = [f for f in arrow_schema("manifest") if f.name != "commit_version"]
    return pa.Table.from_pylist(found, schema=pa.schema(fields)) if found else None


def live(state: TableState) -> set[tuple[str, str]]:
    """(sample_id, segment_id) of every live sample: added there, and that add not hidden."""
    table = state.arrow(["op", "sample_id", "segment_id"])
    keys = list(zip(*(table[c].to_pylist() for c in table.column_names), strict=True))
    hidden = {k[1:] for k in keys if k[0] == "hide"}
    return {k[1:] for k in keys if k[0] == "add"} - hidden


def live_ids(state: TableState) -> set[str]:
    """Ids of the live samples."""
    return {sample_id for sample_id, _ in live(state)}


def attempts(state: TableState, wanted: Collection[str]) -> set[str]:
    """Those of the `wanted` attempts that were committed once."""
    column = state.arrow(["attempt"])["attempt"]
    found = column.filter(pc.is_in(column, pa.array(wanted, column.type)))
    return set(found.to_pylist())


def segments(state: TableState, op: str) -> set[str]:
    """Segments that rows of this `op` (`add`, `hide`, `condemn`) name."""
    table = state.arrow(["op", "segment_id"])
    pairs = zip(table["op"].to_pylist(), table["segment_id"].to_pylist(), strict=True)
    return {segment for kind, segment in pairs if kind == op}
