"""History, and the removal of segments that no version names.

The manifest is append-only, so every version stays readable as long as its segments do. Vacuum only
removes orphans: segments that no manifest row ever added (a compactor died before its commit).
"""

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa

from hslake import catalog, manifest, query
from hslake.lake import Lake, open_lake
from hslake.pins import read_pins

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class VacuumReport:
    """What was found, how many bytes it takes, and whether it was removed.

    `segments`: those that no row names; `leftovers`: files that a killed writer never finished;
    `uploads`: keys of multipart uploads that were never ended (their bytes are not counted).
    """

    segments: tuple[str, ...]
    bytes: int
    removed: bool
    leftovers: tuple[str, ...] = ()
    uploads: tuple[str, ...] = ()


# Younger unfinished files may be somebody's who is writing them, whatever `retain` says.
_AT_WORK = timedelta(minutes=10)


def log(lake_url: str, warn: Callable[[str], object] = _LOG.warning) -> list[dict[str, Any]]:
    """One dict per manifest version, newest first: version, at, adds, hides, tokens, pins.

    `warn` is told of pins that cannot be read: they are left out.
    """
    lake = open_lake(lake_url)
    names: dict[int, list[str]] = {}
    good, problems = read_pins(lake)
    for problem in problems:
        warn(problem)
    for pin in good:
        names.setdefault(pin.version, []).append(pin.name)
    text = "select * from versions order by commit_version desc"
    rows = query.execute(lake.connect(), text)
    return [{**row, "pins": names.get(row["commit_version"], [])} for row in rows.to_pylist()]


def vacuum(
    lake_url: str, retain: timedelta = timedelta(days=30), dry_run: bool = False
) -> VacuumReport:
    """Remove segments that no manifest row names, and unfinished files, older than `retain`.

    Segments are condemned in the manifest first, so a compactor that is slow to commit one aborts
    and writes it again instead of naming what is gone.
    """
    lake = open_lake(lake_url)
    objects = list(lake.store.list("segments"))
    stored = {p.split("/")[1] for p in objects if p.count("/") >= 1}
    named = manifest.segments(catalog.open_table(lake.store, "manifest"), "add")
    limit = datetime.now(UTC) - retain
    orphans = sorted(s for s in stored - named if _born(s) < limit)
    before = min(limit, datetime.now(UTC) - _AT_WORK).timestamp()
    left, uploads = lake.store.leftovers(before), lake.store.uploads(before)
    keys = tuple(key for key, _ in uploads)
    size = sum(lake.store.size(p) for p in objects if p.split("/")[1] in set(orphans))
    size += sum(left.values())
    if dry_run:
        return VacuumReport(tuple(orphans), size, False, tuple(left), keys)
    removed = _remove_orphans(lake, objects, orphans) if orphans else ()
    for path in left:
        lake.store.delete(path)
    for key, upload_id in uploads:
        lake.store.abort_upload(key, upload_id)
    for segment in lake.store.folders("segments"):
        if segment not in named and _born(segment) < limit:
            lake.store.delete_empty(f"segments/{segment}")
    return VacuumReport(removed, size, bool(removed or left or uploads), tuple(left), keys)


def _remove_orphans(lake: Lake, objects: list[str], orphans: list[str]) -> tuple[str, ...]:
    def build(now: catalog.TableState) -> pa.Table | None:
        named = manifest.segments(now, "add")
        return manifest.rows(_condemn(s) for s in orphans if s not in named)

    catalog.commit(
        lake.store,
        "manifest",
        build,
        f"condemn-{hashlib.sha256('/'.join(orphans).encode()).hexdigest()}",
    )
    # Only what is condemned now, not what was orphaned then: a commit may have come in between.
    now = catalog.open_table(lake.store, "manifest")
    doomed = manifest.segments(now, "condemn") & set(orphans)
    for path in objects:
        if path.split("/")[1] in doomed:
            lake.store.delete(path)
    return tuple(sorted(doomed))


def _born(segment_id: str) -> datetime:
    """Creation time of a UUIDv7 (RFC 9562: the first 48 bits are Unix milliseconds)."""
    try:
        return datetime.fromtimestamp(int(segment_id.replace("-", "")[:12], 16) / 1000, UTC)
    except (ValueError, OverflowError):
        return datetime.now(UTC)


def _condemn(segment_id: str) -> dict[str, Any]:
    now = datetime.now(UTC)
    return {"op": "condemn", "segment_id": segment_id, "committed_at": now, "reason": "orphan"}
