"""Storing an object and making sure of it: its size and the store's checksum, and its bytes read
back, a few of every object or all of them."""

import hashlib
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from hslake.errors import Corrupt
from hslake.segment import inventory
from hslake.store import Piece, Store, Written

_BYTES = 64 << 10  # of one range
_STEP = 64 << 20  # of a whole object at a time

Sample = tuple[tuple[int, bytes], ...]  # (offset, bytes) each


@dataclass(frozen=True)
class Stored:
    """What the store was given: what it ought to say of it, and some of its bytes."""

    written: Written
    sample: Sample


def put_sampled(store: Store, path: str, pieces: Sequence[Piece]) -> Stored:
    """Store an object and keep what `confirm` needs, 128 KiB at most."""
    return Stored(store.put(path, pieces), take_sample(pieces))


def confirm(
    store: Store, path: str, entry: inventory.Object, stored: Stored, paranoid: bool
) -> None:
    """Raise Corrupt unless the store holds the object: size and store's checksum as they must be,
    and two ranges read back as sent; with `paranoid`, all of it by its digest."""
    store.confirm(path, stored.written)
    if paranoid:
        check_whole(store, path, entry)
    else:
        check_sample(store, path, stored.sample)


def take_sample(pieces: Sequence[Piece]) -> Sample:
    """Two ranges of the object that `pieces` make up: one anywhere and its end, which is a shard's
    index. They are copied, so the pieces may go."""
    ends = list(accumulate(map(len, pieces)))
    size = ends[-1] if ends else 0
    if not size:
        return ()
    starts = {max(0, size - _BYTES), random.randrange(max(1, size - _BYTES))}
    return tuple((at, _cut(pieces, ends, at, min(at + _BYTES, size))) for at in sorted(starts))


def _cut(pieces: Sequence[Piece], ends: Sequence[int], start: int, stop: int) -> bytes:
    found, first = [], bisect_right(ends, start)
    for piece, end in zip(pieces[first:], ends[first:], strict=True):
        begin = end - len(piece)
        if begin >= stop:
            break
        found.append(piece[max(0, start - begin) : stop - begin])
    return b"".join(found)


def check_sample(store: Store, path: str, sample: Sample) -> None:
    """Raise Corrupt when the ranges do not read as they were sent."""
    for at, sent in sample:
        if store.read_range(path, at, at + len(sent)) != sent:
            raise _differs(store, path, f"bytes {at} to {at + len(sent)}")


def check_whole(store: Store, path: str, sent: inventory.Object) -> None:
    """Raise Corrupt when the object's digest, read back, is another."""
    found, at = hashlib.sha256(), 0
    while at < sent.size:
        data = store.read_range(path, at, min(at + _STEP, sent.size))
        if not len(data):
            break
        found.update(data)
        at += len(data)
    if found.hexdigest() != sent.sha256:
        raise _differs(store, path, "SHA-256")


def _differs(store: Store, path: str, what: str) -> Corrupt:
    return Corrupt(
        f"{store.url(path)}: {what} read back differ from what was written; nothing was committed: "
        "check the store and compact again"
    )
