"""History, named versions, and the removal of segments that no version names.

The manifest is append-only, so every version stays readable as long as its segments do. Vacuum only
removes orphans: segments that no manifest row ever added (a compactor died before its commit).
"""

import hashlib
import json
import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa

from hslake import catalog, manifest, query
from hslake.errors import Corrupt, InvalidInput, Missing
from hslake.lake import Lake, open_lake
from hslake.schemas import parse_json, validate

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class Pin:
    """A name for a manifest version; pinned versions are kept whatever their age."""

    name: str
    version: int
    pinned_at: str


@dataclass(frozen=True)
class VacuumReport:
    """Orphaned segments found, how many bytes they take, and whether they were removed."""

    segments: tuple[str, ...]
    bytes: int
    removed: bool


def log(lake_url: str) -> list[dict[str, Any]]:
    """One dict per manifest version, newest first: version, at, adds, hides, tokens, pins."""
    lake = open_lake(lake_url)
    names: dict[int, list[str]] = {}
    for pin in pins(lake):
        names.setdefault(pin.version, []).append(pin.name)
    text = "select * from versions order by commit_version desc"
    rows = query.execute(lake.connect(), text)
    return [{**row, "pins": names.get(row["commit_version"], [])} for row in rows.to_pylist()]


def pins(lake: Lake) -> list[Pin]:
    """All pins of a lake, by name. Raises Corrupt: a pin that is not read is not kept either."""
    return [_read_pin(lake, p) for p in sorted(lake.store.list("pins")) if p.endswith(".json")]


def _read_pin(lake: Lake, path: str) -> Pin:
    where = lake.store.url(path)
    try:
        data = parse_json(lake.store.read(path), where)
        validate(data, "pin", where)
    except InvalidInput as error:
        raise Corrupt(
            f"{error}; restore the file from a copy, or remove it and pin again"
        ) from None
    if path != _pin_path(data["name"]):
        raise Corrupt(f"{where} holds the pin {data['name']!r}: it was renamed, name it back")
    return Pin(**data)


def _pin_path(name: str) -> str:
    return f"pins/{name}.json"


def pin(lake_url: str, name: str, version: int | None = None) -> Pin:
    """Name a version (default: the newest). A name, once given, is never moved.

    Raises InvalidInput for a bad or taken name, Missing for a version that does not exist.
    """
    if not _NAME.fullmatch(name):
        raise InvalidInput(f"pin {name!r}: expected letters, digits, '.', '_' or '-', at most 64")
    lake = open_lake(lake_url)
    if version is not None and not 0 <= version <= lake.version:
        raise Missing(f"version {version}: the lake has versions 0 to {lake.version}")
    at = datetime.now(UTC).isoformat(timespec="seconds")
    found = Pin(name, lake.version if version is None else version, at)
    taken = [p for p in pins(lake) if p.name == name]
    if taken:
        if taken[0].version == found.version:
            return taken[0]
        raise InvalidInput(f"pin {name!r} names version {taken[0].version} already: use a new name")
    lake.store.put_new(_pin_path(name), json.dumps(found.__dict__).encode())
    return found


def vacuum(
    lake_url: str, retain: timedelta = timedelta(days=30), dry_run: bool = False
) -> VacuumReport:
    """Remove segments that no manifest row names and that are older than `retain`.

    They are condemned in the manifest first, so a compactor that is slow to commit one aborts and
    writes it again instead of naming what is gone.
    """
    lake = open_lake(lake_url)
    objects = list(lake.store.list("segments"))
    stored = {p.split("/")[1] for p in objects if p.count("/") >= 1}
    named = manifest.segments(catalog.open_table(lake.store, "manifest"), "add")
    limit = datetime.now(UTC) - retain
    orphans = sorted(s for s in stored - named if _born(s) < limit)
    size = sum(lake.store.size(p) for p in objects if p.split("/")[1] in set(orphans))
    if dry_run or not orphans:
        return VacuumReport(tuple(orphans), size, False)

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
    return VacuumReport(tuple(sorted(doomed)), size, True)


def _born(segment_id: str) -> datetime:
    """Creation time of a UUIDv7 (RFC 9562: the first 48 bits are Unix milliseconds)."""
    try:
        return datetime.fromtimestamp(int(segment_id.replace("-", "")[:12], 16) / 1000, UTC)
    except (ValueError, OverflowError):
        return datetime.now(UTC)


def _condemn(segment_id: str) -> dict[str, Any]:
    now = datetime.now(UTC)
    return {"op": "condemn", "segment_id": segment_id, "committed_at": now, "reason": "orphan"}
