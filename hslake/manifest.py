"""What the manifest's rows mean: which samples are live, which segments are named or condemned.

The SQL twin, for readers, is in `hslake.views`; this is for commits, which decide on a TableState.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from hslake.errors import Conflict
from hslake.schemas import arrow_schema
from hslake.tables.catalog import TableState


class Deleted(Conflict):
    """Samples that were about to be committed have been deleted meanwhile."""

    def __init__(self, ids: set[str]) -> None:
        super().__init__(f"{len(ids)} samples were deleted before they were committed")
        self.ids = ids


class Condemned(Conflict):
    """A vacuum has condemned a segment that was about to be committed."""


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


@dataclass(frozen=True)
class Held:
    """What a live row holds of a sample. `mask_hash`: None in rows that recorded none;
    `generation`: of the plan's row that it was captured for."""

    segment_id: str
    token_hash: str | None
    mask_hash: str | None
    generation: int

    def is_same(self, planned: Mapping[str, Any]) -> bool:
        """Whether it is what a row of the plan asks for (`hslake.views.SAME`)."""
        mask = planned.get("mask_hash")
        same_mask = self.mask_hash is None or mask is None or self.mask_hash == mask
        return self.token_hash == planned["token_hash"] and same_mask

    def gives_way(self, planned: Mapping[str, Any]) -> bool:
        """Whether a capture for this row of the plan takes its place: only one of a later
        generation does, so that two compactors never put each other's back."""
        later = (planned.get("generation") or 1) > self.generation
        return later and not self.is_same(planned)


def held(state: TableState, ids: Collection[str]) -> dict[str, Held]:
    """What the live rows of some samples hold."""
    columns = ["op", "sample_id", "segment_id"]
    wanted = pa.array(ids, pa.string())
    if not pc.any(pc.is_in(state.arrow(columns[1:2])["sample_id"], wanted)).as_py():
        return {}  # as nearly always, and before more of each row is read
    columns += ["token_hash", "mask_hash", "generation"]
    table = state.arrow(columns)
    table = table.filter(pc.is_in(table["sample_id"], wanted))
    rows = list(zip(*(table[c].to_pylist() for c in columns), strict=True))
    hidden = {(sample, segment) for op, sample, segment, *_ in rows if op == "hide"}
    return {
        sample: Held(segment, tokens, mask, generation or 1)
        for op, sample, segment, tokens, mask, generation in rows
        if op == "add" and (sample, segment) not in hidden
    }


def attempts(state: TableState, wanted: Collection[str]) -> set[str]:
    """Those of the `wanted` attempts that were committed once."""
    column = state.arrow(["attempt"])["attempt"]
    found = column.filter(pc.is_in(column, pa.array(wanted, column.type)))
    return set(found.to_pylist())


def segments(state: TableState, op: str) -> set[str]:
    """Segments that rows of this `op` (`add`, `hide`, `condemn`) name."""
    table = state.arrow(["op", "segment_id"])
    found = table.filter(pc.equal(table["op"], op))["segment_id"]
    return set(pc.unique(found).to_pylist()) - {None}


def condemned(state: TableState, segment_id: str) -> dict[str, Any] | None:
    """commit_version, committed_at and reason of a segment's condemnation; None without one."""
    columns = ["op", "segment_id", "commit_version", "committed_at", "reason"]
    table = state.arrow(columns)
    wanted = pc.and_(pc.equal(table["op"], "condemn"), pc.equal(table["segment_id"], segment_id))
    rows: list[dict[str, Any]] = table.filter(wanted).slice(0, 1).to_pylist()
    return rows[0] if rows else None


def refuse_condemned(state: TableState, segment_id: str) -> None:
    """Raise Condemned when a vacuum took the segment for an orphan: it must be written again."""
    if segment_id in segments(state, "condemn"):
        raise Condemned(
            f"segment {segment_id} was condemned by a vacuum before it was committed: run the "
            "command again, no sample is lost"
        )


def refuse_deleted(state: TableState, ids: Collection[str], version: int) -> None:
    """Raise Deleted when some of `ids` were deleted after `version`: who read the plan at that
    version must not add them, nor leave their states in a segment.

    The plan's tombstone comes before the manifest's `delete`. So whoever opened a manifest that has
    the `delete`, and then the plan, does not find the sample planned.
    """
    table = state.arrow(["op", "sample_id", "commit_version"])
    gone = pc.and_(pc.equal(table["op"], "delete"), pc.greater(table["commit_version"], version))
    found = set(table.filter(gone)["sample_id"].to_pylist()) & set(ids)
    if found:
        raise Deleted(found)


@dataclass(frozen=True)
class Span:
    """In which versions a segment is needed: from `first` to before `end` (None: to the newest).

    `first` is None when no row added it. `ended_at`: when version `end` was made. `bytes` are those
    of all its objects, `raw_bytes` those of its states before the codec.
    """

    segment_id: str
    first: int | None
    end: int | None
    ended_at: datetime | None
    condemned: bool
    bytes: int
    raw_bytes: int

    def shows(self, version: int) -> bool:
        """Whether the samples of `version` are in it."""
        if self.first is None or version < self.first:
            return False
        return self.end is None or version < self.end


def spans(state: TableState) -> dict[str, Span]:
    """The segments that rows name, by id."""
    columns = ["op", "sample_id", "segment_id", "commit_version", "committed_at"]
    table = state.arrow([*columns, "segment_stored_bytes", "segment_raw_bytes"])
    at: dict[int, datetime] = {}
    adds: dict[str, dict[str, int]] = {}
    hides: dict[str, dict[str, int]] = {}
    condemned: set[str] = set()
    size: dict[str, tuple[int, int]] = {}
    values = (table[c].to_pylist() for c in table.column_names)
    for op, sample, segment, version, committed_at, stored, raw in zip(*values, strict=True):
        at[version] = max(at.get(version, committed_at), committed_at)
        if segment is None:
            continue
        if op == "add":
            adds.setdefault(segment, {})[sample] = version
            size[segment] = stored or 0, raw or 0
        elif op == "hide":
            ends = hides.setdefault(segment, {})
            ends[sample] = min(version, ends.get(sample, version))
        elif op == "condemn":
            condemned.add(segment)
    times = _running(at)
    found = {}
    for segment in adds.keys() | condemned:
        added, hidden = adds.get(segment, {}), hides.get(segment, {})
        end = max((hidden[s] for s in added), default=0) if hidden.keys() >= added.keys() else None
        found[segment] = Span(
            segment,
            min(added.values(), default=None),
            end,
            times.get(end) if end is not None else None,
            segment in condemned,
            *size.get(segment, (0, 0)),
        )
    return found


def _running(at: dict[int, datetime]) -> dict[int, datetime]:
    """Times that never go back: a committer's clock may be behind the others'."""
    found: dict[int, datetime] = {}
    latest = None
    for version in sorted(at):
        latest = at[version] if latest is None else max(latest, at[version])
        found[version] = latest
    return found


def add_rows(
    state: TableState, ids: Collection[str] | None = None, segments: Collection[str] | None = None
) -> list[dict[str, Any]]:
    """Whole `add` rows of some samples, or of some segments, without commit_version."""
    table = state.arrow()
    wanted = pc.equal(table["op"], "add")
    for column, values in (("sample_id", ids), ("segment_id", segments)):
        if values is not None:
            wanted = pc.and_(wanted, pc.is_in(table[column], pa.array(values, pa.string())))
    return table.filter(wanted).drop_columns(["commit_version"]).to_pylist()


def holding(state: TableState, ids: Collection[str]) -> set[str]:
    """Segments with a copy of one of `ids`, be it hidden, that are not condemned."""
    table = state.arrow(["op", "sample_id", "segment_id"])
    wanted = pc.is_in(table["sample_id"], pa.array(ids, pa.string()))
    found = table.filter(pc.and_(pc.equal(table["op"], "add"), wanted))["segment_id"]
    return set(found.to_pylist()) - segments(state, "condemn")


def all_attempts(state: TableState) -> set[str]:
    """Attempts that were ever committed."""
    return set(pc.unique(state.arrow(["attempt"])["attempt"]).to_pylist()) - {None}
