"""Deletion for good: samples leave the lake's newest version, its plan and its storage.

1. The plan gets a tombstone for each id, so nobody asks for the samples again.
2. One manifest commit hides their live rows, and a `delete` row for each id makes commits that were
   prepared on an older version leave it out.
3. Each segment that holds a copy is rewritten without them: one commit hides its other samples,
   adds them in the new segment and condemns the old one.
4. What is condemned is removed (`removing`).

Each step is a compare-and-swap that looks at what is still to do, so a run that was killed is
completed by the same call, and samples that were not selected are live at every version.
"""

import uuid
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa

from hslake import manifest, schemas
from hslake.errors import CheckFailed, Conflict, Corrupt
from hslake.ids import token_hash
from hslake.lake import Lake, open_lake
from hslake.picks import mask_fits
from hslake.pins import pins
from hslake.progress import Bar
from hslake.segment.read import SegmentReader
from hslake.segment.write import (
    SegmentInfo,
    SegmentSample,
    StatesDiffer,
    new_segment_id,
    write_segment,
)
from hslake.tables import catalog
from hslake.versions.removing import remove
from hslake.versions.selection import Selection, select
from hslake.versions.vacuuming import condemn_row

_TRIES = 5  # at a segment that vacuums take away
_DELETED = "deleted"


@dataclass
class DeleteReport:
    """What was selected and done, or with `dry_run` would be.

    `samples` are ids: `live` of them were readable, `planned` still planned. `segments` held copies
    of them; `moved` other samples are rewritten into new segments. `pins` name versions that are
    not whole afterwards, `versions` is the range (first, last) of such versions. `removed`:
    segments that are gone; `kept`: those that are not, and why.
    """

    samples: int
    live: int
    planned: int
    tokens: int
    segments: int
    bytes: int
    moved: int
    pins: list[str]
    versions: tuple[int, int] | None
    dry_run: bool
    removed: list[str] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)
    sample_ids: list[str] = field(default_factory=list)


def delete(
    lake_url: str,
    where: str,
    *,
    reason: str = "",
    break_pins: bool = False,
    dry_run: bool = False,
    progress: Bar | None = None,
) -> DeleteReport:
    """Delete every sample that the SQL condition `where` selects, over the columns of `samples` or
    of `plan`, and all its copies.

    `reason` is kept in the manifest, for whoever looks for the sample. Other lakes, staging, files
    that were planned from, and the token ids in older files of the plan are not touched. Raises
    InvalidInput for a condition that does not work or selects nothing, CheckFailed when a pinned
    version would not be whole afterwards and `break_pins` is not set (before anything is changed),
    Corrupt when another sample of a segment is damaged and cannot be moved (the selected ones are
    hidden by then).
    """
    lake = open_lake(lake_url)
    chosen = select(lake, where)
    report = _report(lake, chosen, dry_run)
    if report.pins and not break_pins and not dry_run:
        raise CheckFailed(_broken_pins(report.pins, report.segments))
    if dry_run:
        return report
    if chosen.tombstones:
        _tombstone(lake, chosen.tombstones)
    if chosen.markers or chosen.live:
        _hide(lake, chosen, reason)
    # What was committed of these ids since the look is hidden now, too.
    segments = chosen.segments | manifest.holding(
        catalog.open_table(lake.store, "manifest"), chosen.ids
    )
    for segment in sorted(segments):
        _take_out(lake, segment, chosen.ids, break_pins, progress)
    done = remove(lake, segments, break_pins=break_pins)
    report.removed, report.kept = done.segments, done.kept
    return report


def _report(lake: Lake, chosen: Selection, dry_run: bool) -> DeleteReport:
    spans = manifest.spans(lake.manifest_table())
    found = [spans[s] for s in chosen.segments]
    # Of a segment that was condemned before, by a run that was killed, nothing more breaks.
    whole = [s for s in found if not s.condemned]
    broken = [p.name for p in pins(lake) if any(s.shows(p.version) for s in whole)]
    first = min((s.first for s in whole if s.first is not None), default=None)
    last = max((lake.version if s.end is None else s.end - 1 for s in whole), default=0)
    inside = Counter(segment for _, segment in manifest.live(lake.manifest_table()))
    ours = Counter(
        segment for sample, segment in manifest.live(lake.manifest_table()) if sample in chosen.ids
    )
    return DeleteReport(
        samples=len(chosen.ids),
        live=len(chosen.live),
        planned=len(chosen.planned),
        tokens=chosen.tokens,
        segments=len(found),
        bytes=sum(s.bytes for s in found),
        moved=sum(inside[s.segment_id] - ours[s.segment_id] for s in found),
        pins=broken,
        versions=None if first is None else (first, last),
        dry_run=dry_run,
        sample_ids=sorted(chosen.ids),
    )


def _broken_pins(names: Collection[str], segments: int) -> str:
    return (
        f"pinned versions need the segments that hold these samples ({segments}): "
        f"{', '.join(sorted(names))}; nothing was deleted. Remove the pins (`hslake pin LAKE NAME "
        "--remove`), or give --break-pins: reading a removed segment at those versions then says so"
    )


def _tombstone(lake: Lake, ids: Collection[str]) -> None:
    now = datetime.now(UTC)
    rows = [{"op": "tombstone", "sample_id": i, "planned_at": now} for i in sorted(ids)]
    fields = [f for f in schemas.arrow_schema("plan") if f.name != "commit_version"]
    table = pa.Table.from_pylist(rows, schema=pa.schema(fields))
    catalog.commit(lake.store, "plan", lambda _: table, f"delete-{uuid.uuid4().hex}")


def _hide(lake: Lake, chosen: Selection, reason: str) -> None:
    """Hide what is live of the ids, and mark them as deleted, in one commit."""
    why = f"{_DELETED}: {reason}" if reason else _DELETED

    def build(state: catalog.TableState) -> pa.Table | None:
        live = manifest.live(state)
        hides = [
            {**row, "op": "hide", "committed_at": datetime.now(UTC), "reason": why}
            for row in manifest.add_rows(state, chosen.ids)
            if (row["sample_id"], row["segment_id"]) in live
        ]
        now = datetime.now(UTC)
        marks = [
            {"op": "delete", "sample_id": i, "committed_at": now, "reason": reason or None}
            for i in sorted(chosen.markers)
        ]
        return manifest.rows([*hides, *marks])

    catalog.commit(lake.store, "manifest", build, f"delete-{uuid.uuid4().hex}")


def _take_out(
    lake: Lake, segment: str, ids: Collection[str], break_pins: bool, bar: Bar | None
) -> None:
    """Move the samples that stay out of `segment` and condemn it. Raises Corrupt, CheckFailed."""
    for left in reversed(range(_TRIES)):
        state = catalog.open_table(lake.store, "manifest")
        span = manifest.spans(state)[segment]
        if span.condemned:
            return
        late = [p.name for p in pins(lake) if span.shows(p.version)]
        if late and not break_pins:  # made since the look before the first step
            raise CheckFailed(_broken_pins(late, 1).replace("nothing was deleted", "all is hidden"))
        live = manifest.live(state)
        stay = [
            row
            for row in manifest.add_rows(state, segments={segment})
            if (row["sample_id"], segment) in live and row["sample_id"] not in ids
        ]
        info = _rewrite(lake, segment, stay) if stay else None
        try:
            _commit(lake, segment, stay, info, ids)
        except manifest.Condemned:
            if not left:
                raise
            continue
        if bar is not None:
            bar.advance(1)
        return


def _rewrite(lake: Lake, segment: str, rows: list[dict[str, Any]]) -> SegmentInfo:
    """The samples of these rows, bit for bit, in a new segment."""
    try:
        return write_segment(lake.store, lake.spec, new_segment_id(), _samples(lake, rows))
    except StatesDiffer as error:
        raise Corrupt(_damaged(segment, str(error))) from error


def _samples(lake: Lake, rows: list[dict[str, Any]]) -> Iterator[SegmentSample]:
    reader = SegmentReader(lake.store, lake.spec)
    bits = np.uint16 if lake.spec.itemsize == 2 else np.uint32
    for row in rows:
        name, segment = row["sample_id"], row["segment_id"]
        try:
            hidden, ids, mask = reader.sample(segment, row["token_start"], row["length"])
        except Corrupt as error:
            raise Corrupt(_damaged(segment, str(error))) from error
        sound = mask_fits(mask, row["length"], row["supervised_tokens"])
        if token_hash(ids) != row["token_hash"] or not sound:
            raise Corrupt(_damaged(segment, f"tokens of {name!r} are not those of the manifest"))
        yield SegmentSample(name, [h.view(bits) for h in hidden], ids, mask, row["checksum"])


def _damaged(segment: str, what: str) -> str:
    return (
        f"segment {segment} cannot be rewritten, a sample that stays is damaged: {what}. Hide it "
        "with `hslake verify LAKE --quarantine` and delete again; what was selected is hidden "
        "already, and its bytes are still there"
    )


def _commit(
    lake: Lake,
    segment: str,
    rows: list[dict[str, Any]],
    info: SegmentInfo | None,
    ids: Collection[str],
) -> None:
    """Hide `rows` in `segment`, add them in the new one, condemn `segment`: all in one commit."""
    starts = dict(info.placements) if info else {}

    def build(state: catalog.TableState) -> pa.Table | None:
        if segment in manifest.segments(state, "condemn"):
            return None  # another delete was faster
        if info is not None:
            manifest.refuse_condemned(state, info.segment_id)
        inside = {sample for sample, at in manifest.live(state) if at == segment}
        if inside - starts.keys():  # never: segments do not grow, and these ids are hidden
            raise Conflict(f"segment {segment} has got live samples: {sorted(inside)[:3]}")
        now = datetime.now(UTC)
        found = [condemn_row(segment, _DELETED, manifest.spans(state).get(segment))]
        for row in rows:
            if info is None or row["sample_id"] not in inside:
                continue  # hidden meanwhile
            moved = f"moved to segment {info.segment_id}, as others of its segment were deleted"
            found.append({**row, "op": "hide", "committed_at": now, "reason": moved})
            found.append(
                {
                    **row,
                    "segment_id": info.segment_id,
                    "token_start": starts[row["sample_id"]],
                    "segment_tokens": info.tokens,
                    "segment_raw_bytes": info.raw_bytes,
                    "segment_stored_bytes": info.stored_bytes,
                    "inventory_digest": info.inventory_digest,
                    "committed_at": now,
                    "reason": None,
                }
            )
        return manifest.rows(found)

    name = info.segment_id if info else uuid.uuid4().hex
    catalog.commit(lake.store, "manifest", build, f"rewrite-{name}")
