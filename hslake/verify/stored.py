"""Level `checksum`: stored bytes against the digests of their inventory, without decoding."""

import hashlib

from hslake.errors import Missing
from hslake.segment import inventory
from hslake.segment.layout import segment_prefix
from hslake.store import Store
from hslake.verify.media import broken
from hslake.verify.objects import Problem

BLOCK = 8 << 20  # held by each thread, however large the object


def digest_differs(store: Store, segment_id: str, o: inventory.Object) -> Problem | None:
    """What is wrong with the bytes of an object, or None. Looked at again before it counts: the
    memory and the cables of this machine err too. Raises Unavailable."""
    return _differs(store, segment_id, o) and _differs(store, segment_id, o)


def _differs(store: Store, segment_id: str, o: inventory.Object) -> Problem | None:
    path, name = segment_prefix(segment_id) + o.key, f"segment {segment_id}: {o.key}"
    found, done = hashlib.sha256(), 0
    try:
        while True:
            # One byte more than there should be, at the end: it may have grown.
            data = store.read_range(path, done, min(done + BLOCK, o.size + 1))
            found.update(data)
            done += len(data)
            if len(data) < BLOCK or done > o.size:
                break
    except Missing:
        return Problem(o.key, f"{name} is missing, expected {o.size} bytes")
    except Exception as error:
        what = broken(error)
        if what is None:
            raise
        return Problem(o.key, f"{name}: {what}", sure=False)
    if done != o.size:
        more = "more than the expected" if done > o.size else f"{done} bytes, expected"
        return Problem(o.key, f"{name} has {more} {o.size} bytes")
    if found.hexdigest() != o.sha256:
        return Problem(o.key, f"{name} has SHA-256 {found.hexdigest()}, expected {o.sha256}")
    return None
