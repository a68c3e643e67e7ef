"""`inventory.json`: every object of a segment with its size and digest, written last.

A segment without one was never finished. Its own digest is in the manifest.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from hslake.errors import Corrupt, InvalidInput, Missing
from hslake.schemas import parse_json, validate
from hslake.segment.layout import INVENTORY, segment_prefix
from hslake.store import Store

FORMAT = 1


@dataclass(frozen=True)
class Object:
    """One object: key below the segment, size in bytes, SHA-256 in hex."""

    key: str
    size: int
    sha256: str


def describe(key: str, pieces: Sequence[bytes | memoryview]) -> Object:
    """The inventory entry of the object under `key` that `pieces` make up together."""
    found = hashlib.sha256()
    for piece in pieces:
        found.update(piece)
    return Object(key, sum(map(len, pieces)), found.hexdigest())


def build(segment_id: str, objects: Iterable[Object]) -> bytes:
    """The text of a segment's `inventory.json`."""
    entries = [asdict(o) for o in sorted(objects, key=lambda o: o.key)]
    document = {"format": FORMAT, "segment_id": segment_id, "objects": entries}
    return (json.dumps(document, indent=1) + "\n").encode()


def digest(data: bytes) -> str:
    """SHA-256 of an inventory's bytes, as the manifest keeps it."""
    return hashlib.sha256(data).hexdigest()


def parse(data: bytes, where: str = INVENTORY) -> tuple[str, list[Object]]:
    """Segment id and objects of an inventory. Raises Corrupt naming `where`."""
    try:
        document = parse_json(data, where)
        validate(document, "inventory", where)
    except InvalidInput as e:
        raise Corrupt(f"{e}: not a readable inventory; the segment is damaged") from None
    return document["segment_id"], [Object(**o) for o in document["objects"]]


def load(store: Store, segment_id: str, expected_digest: str | None = None) -> list[Object]:
    """The inventory of a segment, checked against the manifest's digest when that is given.

    Raises Corrupt when it is missing, unreadable, of another segment or has another digest.
    """
    path = segment_prefix(segment_id) + INVENTORY
    where = store.url(path)
    try:
        data = store.read(path)
    except Missing:
        raise Corrupt(
            f"segment {segment_id}: {where} is missing: the segment was never "
            "finished or has lost it"
        ) from None
    if expected_digest is not None and digest(data) != expected_digest:
        raise Corrupt(
            f"{where}: SHA-256 {digest(data)}, the manifest says {expected_digest}: "
            "the inventory was changed after the commit"
        )
    found, objects = parse(data, where)
    if found != segment_id:
        raise Corrupt(f"{where}: it is the inventory of segment {found}, expected {segment_id}")
    return objects


def check(store: Store, segment_id: str, objects: Iterable[Object], *, content: bool) -> list[str]:
    """What is wrong with the objects of a segment, one line each; empty when all is well.

    Sizes only, or with `content` the digests too (reads every byte).
    """
    problems = []
    for o in objects:
        path = segment_prefix(segment_id) + o.key
        try:
            if content:
                data = store.read(path)
                size, sha256 = len(data), hashlib.sha256(data).hexdigest()
            else:
                size, sha256 = store.size(path), o.sha256
        except Missing:
            problems.append(f"segment {segment_id}: {o.key} is missing, expected {o.size} bytes")
            continue
        if size != o.size:
            problems.append(f"segment {segment_id}: {o.key} has {size} bytes, expected {o.size}")
        elif sha256 != o.sha256:
            problems.append(
                f"segment {segment_id}: {o.key} has SHA-256 {sha256}, expected {o.sha256}"
            )
    return problems
