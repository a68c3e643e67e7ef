"""The objects of segments: what the store lists beside what manifest and inventories name."""

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from hslake.errors import Corrupt, Missing
from hslake.lake import Lake
from hslake.segment import inventory
from hslake.segment.layout import INVENTORY, hidden_grid, metadata_documents, segment_prefix
from hslake.store import Store
from hslake.verify.pool import ordered

# With fewer segments than this share of the lake's to look at, they are listed one by one.
_FEW = 0.1
_HIDDEN = re.compile(r"hidden_states/c/0/(\d+)/0")
_TOKENS = re.compile(r"(?:input_ids|loss_mask)/c/(\d+)")


@dataclass(frozen=True)
class Problem:
    """Something wrong with an object of a segment. `key`: below the segment; `sure`: what is lost
    by it may be hidden."""

    key: str
    what: str
    sure: bool = True


@dataclass(frozen=True)
class Segment:
    """A segment that is looked at: its rows, and its objects as its inventory tells them; none when
    that does not read, of which `problems` then speaks."""

    segment_id: str
    rows: Sequence[dict[str, Any]]
    objects: Sequence[inventory.Object]
    problems: tuple[Problem, ...]
    other_rows: tuple[str, ...]  # samples whose rows name another inventory digest


def listing(
    store: Store, segments: Sequence[str], all_segments: int, pool: ThreadPoolExecutor
) -> tuple[dict[str, int], bool]:
    """(bytes of every object, by path; whether those are all that there are under segments/)."""
    if len(segments) >= _FEW * all_segments or len(segments) > 1000:
        return store.sizes("segments"), True
    found: dict[str, int] = {}
    for some in ordered(pool, store.sizes, map(segment_prefix, segments), 64):
        found |= some
    return found, False


def load(lake: Lake, segment_id: str, rows: Sequence[dict[str, Any]]) -> Segment:
    """A segment with its inventory, whose digest must be that of the rows."""
    path = segment_prefix(segment_id) + INVENTORY
    where = f"segment {segment_id}: {INVENTORY}"
    digests = {row["inventory_digest"] for row in rows}
    try:
        data = lake.store.read(path)
    except Missing:
        what = f"{where} is missing: the segment was never finished or has lost it"
        return Segment(segment_id, rows, (), (Problem(INVENTORY, what),), ())
    found = inventory.digest(data)
    if found not in digests:
        what = (
            f"{where} has SHA-256 {found}, the manifest says {' or '.join(sorted(digests))}: it "
            "was changed after the commit"
        )
        return Segment(segment_id, rows, (), (Problem(INVENTORY, what),), ())
    try:
        of, objects = inventory.parse(data, where)
    except Corrupt as error:
        return Segment(segment_id, rows, (), (Problem(INVENTORY, str(error)),), ())
    problems = []
    if of != segment_id:
        problems.append(Problem(INVENTORY, f"{where} is that of segment {of}"))
    total = sum(o.size for o in objects) + len(data)
    told = {row["segment_stored_bytes"] for row in rows}
    if told != {total}:
        what = f"{where} adds up to {total} bytes, the manifest says {sorted(told)}"
        problems.append(Problem(INVENTORY, what))
    others = tuple(r["sample_id"] for r in rows if r["inventory_digest"] != found)
    return Segment(segment_id, rows, objects, tuple(problems), others)


def sizes_wrong(store: Store, segment: Segment, listed: Mapping[str, int]) -> list[Problem]:
    """Objects that are missing or of another size. The list of a store may be late: what it says
    is asked again, one by one, before it counts."""
    prefix, found = segment_prefix(segment.segment_id), []
    for o in segment.objects:
        if listed.get(prefix + o.key) == o.size:
            continue
        name = f"segment {segment.segment_id}: {o.key}"
        try:
            size = store.size(prefix + o.key)
        except Missing:
            found.append(Problem(o.key, f"{name} is missing, expected {o.size} bytes"))
            continue
        if size != o.size:
            found.append(Problem(o.key, f"{name} has {size} bytes, expected {o.size}"))
    return found


_ANY_ID, _ANY_TOKENS = "00000000-0000-7000-8000-000000000000", 987_654_321_987


def templates(lake: Lake) -> dict[str, bytes]:
    """The metadata of a segment as the lake's spec makes it, with a place for its id and length."""
    return metadata_documents(lake.spec, _ANY_ID, _ANY_TOKENS)


def spec_differs(lake: Lake, segment: Segment, made: Mapping[str, bytes]) -> str | None:
    """How the segment's metadata differs from what the lake's spec makes it (`templates`); None
    when it does not.

    Nothing that reads through hslake looks at that metadata; another reader does.
    """
    if not segment.rows or not segment.objects:
        return None
    tokens = segment.rows[0]["segment_tokens"]
    have = {o.key: o.sha256 for o in segment.objects}
    for key, template in made.items():
        text = template.replace(_ANY_ID.encode(), segment.segment_id.encode())
        text = text.replace(str(_ANY_TOKENS).encode(), str(tokens).encode())
        if have.get(key) == hashlib.sha256(text).hexdigest():
            continue
        try:  # as a document: another version of hslake may space it differently
            data = lake.store.read(segment_prefix(segment.segment_id) + key)
            if json.loads(data) == json.loads(text):
                continue
        except (Missing, ValueError, RecursionError):
            continue  # told as a damaged object
        return f"segment {segment.segment_id}: {key} says other than the lake's spec"
    return None


def touched(lake: Lake, key: str, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows whose sample needs the object `key` to be read; all of them of an inventory."""
    spec = lake.spec
    if match := _HIDDEN.fullmatch(key):
        size = hidden_grid(spec).shard
    elif match := _TOKENS.fullmatch(key):
        size = -(-spec.geometry.segment_tokens // spec.geometry.chunk_tokens)
        size *= spec.geometry.chunk_tokens
    else:
        return list(rows) if key == INVENTORY else []
    first, last = int(match[1]) * size, (int(match[1]) + 1) * size
    return [r for r in rows if r["token_start"] < last and r["token_start"] + r["length"] > first]


def strays(
    listed: Mapping[str, int], segments: Mapping[str, Segment], named: Collection[str]
) -> list[str]:
    """Objects that nothing names: whole segments (`named`: those of the manifest), and keys that an
    inventory lacks."""
    orphans: dict[str, int] = {}
    inside: list[str] = []
    known = {
        sid: {o.key for o in s.objects} | {INVENTORY} for sid, s in segments.items() if s.objects
    }
    for path, size in listed.items():
        _, _, rest = path.partition("/")
        segment_id, _, key = rest.partition("/")
        if segment_id not in named:
            orphans[segment_id] = orphans.get(segment_id, 0) + size
        elif segment_id in known and key not in known[segment_id]:
            inside.append(path)
    found = []
    if orphans:
        first = min(orphans)
        found.append(
            f"{len(orphans)} segments with {sum(orphans.values())} bytes are in no row of the "
            f"manifest (the first: {first}): of a compactor that is at work, or died before its "
            "commit; `hslake vacuum` removes them when they are old enough"
        )
    if inside:
        found.append(
            f"{len(inside)} objects are in the folder of a segment and not in its inventory (the "
            f"first: {inside[0]}): nothing reads them"
        )
    return found
