"""Removal of segments that no retained version needs, and of unfinished files.

A version is retained when it is pinned, the newest, or was replaced less than `retain` ago. (Its
own age would not do: whoever opened the lake just before the last commit reads a version that may
be months old.) Manifest and plan files are never removed: every version can be queried for ever.
"""

import contextlib
import uuid
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from hslake import manifest, schemas
from hslake.errors import Corrupt
from hslake.lake import Lake, open_lake
from hslake.pins import Pin, pins
from hslake.progress import Bar
from hslake.segment.layout import is_segment_id
from hslake.tables import catalog, tablename
from hslake.versions.removing import remove

# Younger unfinished files may be somebody's who is writing them, whatever `retain` says.
_AT_WORK = timedelta(minutes=10)


@dataclass(frozen=True)
class VacuumReport:
    """What was found, how many bytes it takes, and whether it was removed.

    `segments`: those that no retained version needs. Of these `hidden` were committed once, and all
    their samples are hidden now; the others are orphans, which no row ever added. `kept`: hidden
    ones that are still needed, and why. `leftovers`: files that a killed writer never finished;
    `uploads`: keys of multipart uploads that were never ended (their bytes are not counted).
    """

    segments: tuple[str, ...]
    bytes: int
    removed: bool
    leftovers: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    kept: dict[str, str] = field(default_factory=dict)
    uploads: tuple[str, ...] = ()


@dataclass
class _Found:
    """segment -> reason of those to remove; segment -> reason of hidden ones that are kept."""

    remove: dict[str, str] = field(default_factory=dict)
    keep: dict[str, str] = field(default_factory=dict)


_ORPHAN, _HIDDEN = "orphan", "all samples hidden"
_UNSURE = (
    "a file of the manifest adds samples in it, and no entry of the log names the file: its writer "
    "died, or the log has lost entries: `hslake repair LAKE --dry-run`"
)


def vacuum(
    lake_url: str,
    retain: timedelta = timedelta(days=30),
    dry_run: bool = False,
    progress: Bar | None = None,
) -> VacuumReport:
    """Remove what no version younger than `retain` and no pin needs.

    Segments are condemned in the manifest first, so a compactor that is slow to commit one aborts
    and writes it again instead of naming what is gone. Killed anywhere, it may be run again; any
    number may run at once. Raises Corrupt when a pin does not read: nobody knows what it keeps.
    """
    lake = open_lake(lake_url)
    pinned = pins(lake)
    objects = lake.store.sizes("segments")  # listed once: a compactor may give its segment up now
    stored = {p.split("/")[1] for p in objects if p.count("/") >= 2}
    stored = {s for s in stored if is_segment_id(s)}  # the rest is somebody's: a copy, notes
    # After the list: whatever was committed before it is named.
    state = catalog.open_table(lake.store, "manifest")
    limit = datetime.now(UTC) - retain
    unsure = _unsure(lake, state)
    stored -= unsure
    found = _find(state, stored, pinned, limit)
    found.keep |= dict.fromkeys(sorted(unsure), _UNSURE)
    before = min(limit, datetime.now(UTC) - _AT_WORK).timestamp()
    left, uploads = lake.store.leftovers(before), lake.store.uploads(before)
    keys = tuple(key for key, _ in uploads)
    hidden = tuple(sorted(s for s, why in found.remove.items() if why == _HIDDEN))
    size = sum(left.values())
    size += sum(n for p, n in objects.items() if p.split("/")[1] in found.remove)
    if dry_run:
        names = tuple(sorted(found.remove))
        return VacuumReport(names, size, False, tuple(left), hidden, found.keep, keys)
    removed: tuple[str, ...] = ()
    if found.remove:
        _condemn(lake, stored, pinned, limit, found.remove)
        done = remove(lake, found.remove, progress=progress)
        removed = tuple(done.segments)
        found.keep.update(done.kept)
    for path in left:
        lake.store.delete(path)
    for key, upload_id in uploads:
        lake.store.abort_upload(key, upload_id)
    named = manifest.segments(state, "add")
    for segment in lake.store.folders("segments"):
        if is_segment_id(segment) and segment not in named and _born(segment) < limit:
            lake.store.delete_empty(f"segments/{segment}")
    hidden = tuple(s for s in hidden if s in removed)
    gone = bool(removed or left or uploads)
    return VacuumReport(removed, size, gone, tuple(left), hidden, found.keep, keys)


def _unsure(lake: Lake, state: catalog.TableState) -> set[str]:
    """Segments that a data file adds which may have been committed, by an entry that the log has
    lost: with the entry restored from a copy, they are needed."""
    found: set[str] = set()
    for name in state.strays():
        if (tablename.version_of(name) or 0) > state.version:
            url = lake.store.url(f"{state.name}/{name}")
            with contextlib.suppress(Corrupt):  # its writer was killed, or it went away meanwhile
                rows = state.read([url], schemas.arrow_schema(state.name))
                found |= set(rows.filter(pc.equal(rows["op"], "add"))["segment_id"].to_pylist())
    return found - {None}


def _find(
    state: catalog.TableState, stored: Collection[str], pinned: list[Pin], limit: datetime
) -> _Found:
    """Which of the `stored` segments no version needs that was replaced after `limit`."""
    spans = manifest.spans(state)
    found = _Found()
    for segment in stored:
        span = spans.get(segment)
        if span is None or span.first is None:
            # Condemned: an earlier vacuum did not come to its end, or a writer went on after it.
            if span is not None or _born(segment) < limit:
                found.remove[segment] = _ORPHAN
            continue
        if span.end is None:
            continue
        names = [p.name for p in pinned if span.shows(p.version)]
        if names:
            found.keep[segment] = f"pinned: {', '.join(names)}"
        elif not span.condemned and span.ended_at is not None and span.ended_at >= limit:
            found.keep[segment] = (
                f"versions before {span.end} need it, which was made at "
                f"{span.ended_at:%Y-%m-%d %H:%M} UTC"
            )
        else:
            found.remove[segment] = _HIDDEN
    return found


def _condemn(
    lake: Lake,
    stored: Collection[str],
    pinned: list[Pin],
    limit: datetime,
    wanted: Collection[str],
) -> None:
    """Condemn those of `wanted` that the newest manifest still has no need for."""

    def build(state: catalog.TableState) -> pa.Table | None:
        done = manifest.segments(state, "condemn")
        now = _find(state, stored, pinned, limit).remove
        spans = manifest.spans(state)
        new = [s for s in wanted if s in now and s not in done]
        return manifest.rows(condemn_row(s, now[s], spans.get(s)) for s in new)

    # Of this call: what it does is decided in `build`, the id only finds a lost answer.
    catalog.commit(lake.store, "manifest", build, f"condemn-{uuid.uuid4().hex}")


def condemn_row(segment_id: str, reason: str, span: manifest.Span | None) -> dict[str, Any]:
    """The manifest row that condemns a segment, with the bytes that this gives back."""
    return {
        "op": "condemn",
        "segment_id": segment_id,
        "segment_raw_bytes": span.raw_bytes if span else None,
        "segment_stored_bytes": span.bytes if span else None,
        "committed_at": datetime.now(UTC),
        "reason": reason,
    }


def _born(segment_id: str) -> datetime:
    """Creation time of a UUIDv7 (RFC 9562: the first 48 bits are Unix milliseconds)."""
    try:
        return datetime.fromtimestamp(int(segment_id.replace("-", "")[:12], 16) / 1000, UTC)
    except (ValueError, OverflowError):
        return datetime.now(UTC)
