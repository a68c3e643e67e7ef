"""A probe: a real capture request under a sample id that no plan holds.

The compactor gives it up, so a probe never reaches the lake.
"""

import asyncio
import secrets
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hslake.checks import Check, failed
from hslake.errors import Corrupt, HslakeError, InvalidInput
from hslake.ids import PROBE_PREFIX, RequestId, new_attempt
from hslake.server import CAPTURED, Event, RequestRefused, Server, ServerStatus
from hslake.spec import LakeSpec
from hslake.staging import PartInfo, Reserved, read_part, scan
from hslake.staging.locks import try_lock
from hslake.staging.part import READ_LOCK
from hslake.staging.reader import read_rows

SOURCE = "probe"
_POLL_S = 0.1
_SOME = 1024  # rows of one probe, where many are fetched: a long one is GB
_LOCKED_S = 2.0  # a compactor of this process may be reading the part


@dataclass(frozen=True)
class Probe:
    """A captured prompt and the server's answer."""

    sample_id: str
    ids: list[int]
    answer: Any
    refused: str | None = None  # why the server gave no log-probs, when they were asked for


@dataclass(frozen=True)
class Rows:
    """A probe's rows, copied from staging: bits [n, hidden] per stream, and token ids."""

    part: PartInfo
    reserved: Reserved
    hidden: list[np.ndarray]
    input_ids: np.ndarray


def probe_id() -> str:
    """A sample id for one probe."""
    return f"{PROBE_PREFIX}{secrets.token_hex(4)}"


async def capture(
    server: Server,
    status: ServerStatus,
    spec: LakeSpec,
    ids: Sequence[int],
    wait_s: float,
    *,
    logprobs: bool = False,
    name: str = "probe",
) -> Probe | Check:
    """Send `ids` and wait for the hook's word; a failed check `name` when that does not come.

    `logprobs`: ask for the prompt's log-probs too, if the server gives them.
    """
    rid = RequestId(spec.lake8, new_attempt(), len(ids), SOURCE, probe_id())
    more = {"return_logprob": True, "logprob_start_len": 0} if logprobs else {}
    refused = None
    try:
        try:
            answer = await server.generate(rid, list(ids), **more)
        except RequestRefused as error:
            if not more:
                raise
            refused = str(error)
            rid = RequestId(spec.lake8, new_attempt(), len(ids), SOURCE, probe_id())
            answer = await server.generate(rid, list(ids))
        event = await _event(server, status, rid, wait_s)
    except HslakeError as error:
        return failed(name, str(error), "see the server's log")
    if event is None:
        found = f"the server answered, but within {wait_s:.0f} s the hook acknowledged nothing"
        return failed(name, found, "see the server's log: the hook is loaded but sees no request")
    if event.state != CAPTURED:
        todo = "see the reason; staging that is full wants `hslake compact`"
        return failed(name, f"the hook dropped it: {event.reason}", todo)
    return Probe(rid.sample_id, list(ids), answer, refused)


async def _event(
    server: Server, status: ServerStatus, rid: RequestId, wait_s: float
) -> Event | None:
    """The event of `rid`'s attempt, or None when it does not come in time."""
    end = time.monotonic() + wait_s
    cursors = status.cursors
    while True:
        now = await server.status(cursors)
        cursors = now.cursors
        for writer in now.writers:
            for event in writer.events:
                if event.attempt == rid.attempt:
                    return event
        if time.monotonic() > end:
            return None
        if not now.more:
            await asyncio.sleep(_POLL_S)


async def fetch(roots: Sequence[Path], sample_id: str) -> Rows | None:
    """The rows of one probe from local staging, None when they are not there (any more).

    Raises Corrupt or InvalidInput when they do not read.
    """
    end = time.monotonic() + _LOCKED_S
    while True:
        found, locked = await asyncio.to_thread(_find, roots, {sample_id})
        if found or not locked or time.monotonic() > end:
            return found[0] if found else None
        await asyncio.sleep(_POLL_S)


async def fetch_many(roots: Sequence[Path], names: Collection[str], limit: int) -> list[Rows]:
    """The first rows of those probes that are still there, up to about `limit` bytes of them."""
    return (await asyncio.to_thread(_find, roots, names, _SOME, limit))[0]


def _find(
    roots: Sequence[Path], names: Collection[str], most: int | None = None, limit: int | None = None
) -> tuple[list[Rows], bool]:
    """(rows, whether a part could not be looked into). Held locks keep a writer from recycling a
    part whose probes a compactor has given up meanwhile."""
    rows: list[Rows] = []
    locked, size = False, 0
    for root in roots:
        if not root.is_dir():
            continue  # a check of its own says so
        for path in (p for w in scan(root) for p in w.parts):
            lock = try_lock(path / READ_LOCK, shared=True)
            if lock is None:
                locked = locked or path.exists()
                continue
            try:
                part = read_part(path)
                mine = [r for r in part.reserved if r.sample_id in names and r.state == "complete"]
                for reserved in mine:
                    maps, ids = read_rows(part, reserved)
                    hidden = [np.array(m[:most]) for m in maps]
                    rows.append(Rows(part, reserved, hidden, np.array(ids[:most])))
                    size += sum(h.nbytes for h in hidden)
                    if limit is not None and size >= limit:
                        return rows, locked
            except FileNotFoundError:
                continue  # recycled before it was locked
            except (Corrupt, InvalidInput):
                if path.exists() and len(names) == 1:
                    raise
            finally:
                lock.release()
    return rows, locked
