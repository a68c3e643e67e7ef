"""Is what the manifest says exists really there, and intact?

Levels: `manifest` looks at rows, also beside the plan's, and at object sizes; `checksum` hashes
every stored object against the segment's inventory without decoding; `full` decodes every sample,
recomputes its checksum and token hash, compares its loss mask with the plan's, and hashes the
objects that hold no states.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa

from hslake import catalog, manifest, rowcheck
from hslake.checksum import sample_checksum
from hslake.errors import Corrupt, InvalidInput, Missing
from hslake.ids import token_hash
from hslake.lake import Lake, open_lake
from hslake.picks import mask_fits
from hslake.pins import read_pins
from hslake.progress import Bar
from hslake.segment import inventory
from hslake.segment.layout import HIDDEN
from hslake.segment.read import SegmentReader

LEVELS = ("manifest", "checksum", "full")


@dataclass(frozen=True)
class Damage:
    """One thing found wrong. `sample_ids`: the live samples it costs; `segment_id`: "" of a pin."""

    segment_id: str
    what: str
    sample_ids: tuple[str, ...]


@dataclass
class VerifyReport:
    """What was looked at and what was found. `warnings` may be harmless."""

    level: str
    samples: int = 0
    tokens: int = 0
    segments: int = 0
    damage: list[Damage] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    quarantined: int = 0

    @property
    def ok(self) -> bool:
        return not self.damage


def verify(
    lake_url: str,
    level: str = "full",
    sample: int | None = None,
    where: str | None = None,
    quarantine: bool = False,
    progress: Bar | None = None,
) -> VerifyReport:
    """Check the lake's live samples; with `quarantine`, hide the damaged ones from the manifest.

    `sample`: look at that many samples only, chosen by md5 of their ids; `where`: SQL over
    `samples`. Raises InvalidInput for an unknown level or a condition that DuckDB refuses or no
    sample meets, Corrupt when a file of the manifest or the plan itself is damaged: nothing it says
    could be relied on.
    """
    if level not in LEVELS:
        raise InvalidInput(f"--level {level!r}: expected one of {', '.join(LEVELS)}")
    lake = open_lake(lake_url)
    strays: list[str] = []
    for table in (lake.manifest_table(), lake.plan_table()):
        table.check()
        strays += _strays(table)
    rows = rowcheck.read(lake, sample, where)
    if where and not rows:
        raise InvalidInput(f"--where {where!r} selects no sample of the lake")
    tokens = sum(r["length"] or 0 for r in rows)
    report = VerifyReport(level, len(rows), tokens, warnings=strays)
    report.damage += [Damage("", problem, ()) for problem in read_pins(lake)[1]]
    by_segment: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        lacking = rowcheck.lacking(row, lake.spec.streams)
        what = lacking or rowcheck.differing(row)
        if what:
            names = (row["sample_id"],) if row["sample_id"] and row["segment_id"] else ()
            report.damage.append(Damage(row["segment_id"] or "", what, names))
        if lacking:
            continue  # neither found nor compared without it
        by_segment.setdefault(row["segment_id"], []).append(row)
    report.segments = len(by_segment)
    reader = SegmentReader(lake.store, lake.spec)
    for segment_id, members in by_segment.items():
        report.damage += _segment(lake, reader, segment_id, members, level, progress)
    report.damage += _twice(rows)
    if quarantine and report.damage:
        report.quarantined = hide(
            lake, {(d.segment_id, s): d.what for d in report.damage for s in d.sample_ids}
        )
    return report


def _strays(table: catalog.TableState) -> list[str]:
    """A writer that died before its commit leaves the same trace as a log that lost its newest
    entry, whose number the next commit then takes: so it is no damage, but worth a look."""
    return [
        f"{table.store.url(table.name)}/{name}: no entry of the log names it. Either its writer "
        "lost a race, died before its commit or is at it now, and all is well; or the log lost its "
        "newest entries: if what the file holds was reported as committed, restore them from a "
        "copy before anything else commits"
        for name in table.strays()
    ]


def _twice(rows: Sequence[dict[str, Any]]) -> list[Damage]:
    seen: set[str] = set()
    found = []
    for row in rows:
        if row["sample_id"] in seen:
            found.append(Damage(row["segment_id"], "sample is live twice", (row["sample_id"],)))
        seen.add(row["sample_id"])
    return found


def _segment(
    lake: Lake,
    reader: SegmentReader,
    segment_id: str,
    members: list[dict[str, Any]],
    level: str,
    bar: Bar | None,
) -> list[Damage]:
    everyone = tuple(m["sample_id"] for m in members)
    found = _overlaps(segment_id, members)
    try:
        objects = inventory.load(lake.store, segment_id, members[0]["inventory_digest"])
        states = [o for o in objects if o.key.startswith(f"{HIDDEN}/c/")]
        rest = [o for o in objects if o not in states]
        problems = [
            *inventory.check(lake.store, segment_id, states, content=level == "checksum"),
            *inventory.check(lake.store, segment_id, rest, content=level != "manifest"),
        ]
    except Corrupt as e:
        problems = [str(e)]
    if level != "full":
        # Without decoding, a damaged object may cost any sample of the segment.
        found += [Damage(segment_id, p, everyone) for p in problems]
        if bar is not None:
            bar.advance(sum(m["length"] for m in members))
        return found
    masks = rowcheck.plan_masks(lake, members)
    damaged = []
    for row in members:
        what = _sample(lake, reader, row, masks.get(row["sample_id"]))
        if what:
            damaged.append(Damage(segment_id, what, (row["sample_id"],)))
        if bar is not None:
            bar.advance(row["length"])
    # Decoding says which samples an object costs: here it costs none.
    whole = f"{len(members) - len(damaged)} of the {len(members)} samples of the segment read back"
    found += [Damage(segment_id, f"{p}; {whole}", ()) for p in problems]
    return found + damaged


def _overlaps(segment_id: str, members: list[dict[str, Any]]) -> list[Damage]:
    found = []
    end = 0
    for row in sorted(members, key=lambda m: m["token_start"]):
        stop = row["token_start"] + row["length"]
        if row["token_start"] < end or stop > row["segment_tokens"]:
            what = f"rows {row['token_start']}..{stop} overlap or leave the segment"
            found.append(Damage(segment_id, what, (row["sample_id"],)))
        end = max(end, stop)
    return found


def _sample(
    lake: Lake, reader: SegmentReader, row: dict[str, Any], planned: list[int] | None
) -> str | None:
    """What is wrong with a stored sample, or None. `planned`: its loss mask in the plan."""
    try:
        hidden, ids, mask = reader.sample(row["segment_id"], row["token_start"], row["length"])
    except (Corrupt, Missing, InvalidInput) as e:  # the last: a row that leads nowhere
        return str(e)
    if token_hash(ids) != row["token_hash"]:
        return "stored input_ids differ from the manifest's token hash"
    if not mask_fits(mask, row["length"], row["supervised_tokens"]):
        return f"stored loss_mask differs: {row['supervised_tokens']} ones expected"
    if planned is not None and mask.tolist() != planned:
        return "stored loss_mask differs from the plan's"
    for stream, rows, want in zip(lake.spec.streams, hidden, row["checksum"], strict=True):
        if sample_checksum(np.ascontiguousarray(rows)) != want:
            return f"stream {stream} differs from the checksum taken at capture"
    return None


def hide(lake: Lake, damaged: dict[tuple[str, str], str]) -> int:
    """Append `hide` rows for (segment_id, sample_id) -> reason; returns how many were live."""
    count = 0

    def build(state: catalog.TableState) -> pa.Table | None:
        nonlocal count
        wanted = damaged.keys() & {(segment, sample) for sample, segment in manifest.live(state)}
        if not wanted:
            count = 0
            return None
        hides = []
        for row in state.arrow().to_pylist():
            key = (row["segment_id"], row["sample_id"])
            if row["op"] == "add" and key in wanted:
                more = {"committed_at": datetime.now(UTC), "reason": damaged[key][:500]}
                hides.append({**row, "op": "hide", **more})
        count = len(hides)
        return manifest.rows(hides)

    keys = "".join(sorted(f"{s}{i}" for s, i in damaged))
    catalog.commit(
        lake.store, "manifest", build, f"hide-{lake.version}-{token_hash(list(keys.encode()))}"
    )
    return count
