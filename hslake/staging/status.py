"""What `GET /hslake/status` answers, made from the files of a staging root alone.

The events file is the truth: an attempt has ended once its event stands there. `status.json` is the
writer's own summary, written at most every 0.2 seconds; its `last_seq` says up to which event it
knows, so it may be behind the events file and is never ahead of it.
"""

import contextlib
import re
import socket
import threading
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from hslake.errors import Corrupt, InvalidInput, Unavailable
from hslake.schemas import parse_json, validate
from hslake.staging.drops import OTHER
from hslake.staging.folder import EVENTS, STATUS
from hslake.staging.frames import FrameTail
from hslake.staging.part import DONE, JOURNAL
from hslake.staging.reader import WriterDir, part_attributes, scan

_MAX_EVENTS = 5000
_CLOSED = (PermissionError, IsADirectoryError, NotADirectoryError)

# What a writer says about the hook's own work, and what stands for a writer that says nothing.
_MOMENT_S = 0.02
NO_FIGURES: dict[str, float] = {
    "forwards": 0,
    "forward_s": 0.0,
    "in_flight": 0,
    "wait_s": 0.0,
    "wait_max_s": 0.0,
    "copies": 0,
    "copy_s": 0.0,
    "copy_max_s": 0.0,
    "gpu_bytes": 0,
    "gpu_retries": 0,
}


class StatusReader:
    """Reads the status of every writer under `root` again and again; a call costs what is new.

    Several threads may call it.
    """

    def __init__(self, root: Path) -> None:
        self.root = Path(root)
        self.root_id = f"{socket.gethostname()}:{self.root.resolve()}"  # the same after a reboot
        self._tails: dict[str, FrameTail] = {}
        self._lock = threading.Lock()

    def read(
        self,
        since: Mapping[str, int] | None = None,
        *,
        limit: int | None = None,
        only: Collection[str] | None = None,
    ) -> dict[str, Any]:
        """Status of the writers there are, each with its events after `since[writer]`, at most
        `limit` of them (default: 5,000). With `only`, nothing of other writers is looked at."""
        limit = _MAX_EVENTS if limit is None else limit
        with self._lock:
            found = scan(self.root, only)
            if only is None:
                found = [w for w in found if w.closed is None]  # another user's: not ours to see
            self._tails = {
                w.writer_id: self._tails[w.writer_id]
                if w.writer_id in self._tails
                else FrameTail(w.path / EVENTS, "events")
                for w in found
            }
            writers = [self._writer(w, (since or {}).get(w.writer_id, 0), limit) for w in found]
        return document([w for w in writers if w is not None])

    def _writer(self, found: WriterDir, cursor: int, limit: int) -> dict[str, Any] | None:
        try:
            # Before the events: what the summary knows, they hold.
            status = _summary(found)
            events, error = self._events(found, cursor, limit, status["last_seq"])
        except FileNotFoundError:
            return None  # just born, or being deleted
        for part in status["parts"]:
            # The summary of a dead writer is old, and a compactor goes on.
            if _is_over(found.path / part["name"], dead=not found.alive):
                part["state"] = "done"
        return {
            **status,
            "root": self.root_id,
            "hook": {**NO_FIGURES, **status.get("hook", {})},
            "dropped_by": status.get("dropped_by") or {OTHER: status["dropped"]},
            "error": error or status["error"],
            "alive": found.alive,
            "events": events,
            "cursor": events[-1]["seq"] if events else cursor,
        }

    def _events(
        self, found: WriterDir, cursor: int, limit: int, last_seq: int
    ) -> tuple[list[dict[str, Any]], str | None]:
        tail = self._tails[found.writer_id]
        try:
            events = tail.read(cursor, limit)  # event `seq` is frame `seq - 1`
        except _CLOSED as e:
            return [], f"{found.path / EVENTS} cannot be read: {e}"
        except Corrupt as e:
            return [], f"{e}; restart the server: what it has captured stays in staging"
        if len(tail) < last_seq:
            return events, (
                f"{found.path / EVENTS} ends at event {len(tail)}, its writer has written "
                f"{last_seq}: the file is damaged"
            )
        return events, None


def _is_over(path: Path, *, dead: bool) -> bool:
    """Whether nothing will come out of this part any more: it is done, or nobody will ever read it.
    A living writer's metadata may be whole again in a moment, as it is recycled."""
    if (path / DONE).exists() or not (path / JOURNAL).exists():
        return True
    if dead:
        try:
            part_attributes(path)
        except (Corrupt, InvalidInput):  # the compactor leaves it alone
            return True
        except Unavailable:
            return False
    return False


def _summary(found: WriterDir) -> dict[str, Any]:
    """The writer's `status.json`; one that is damaged or cannot be read as the summary of a writer
    that only has an error.

    Raises FileNotFoundError.
    """
    path = found.path / STATUS
    try:
        if found.closed is not None:
            raise InvalidInput(found.closed)
        try:
            status = _parsed(path)
        except InvalidInput:  # half written, on a full filesystem: whole in a moment
            time.sleep(_MOMENT_S)
            status = _parsed(path)
        if status["writer"] != found.writer_id:
            raise InvalidInput(f"{path} is that of writer {status['writer']!r}: it was moved here")
    except InvalidInput as error:
        counts = ("free_rows", "capacity_rows", "largest_reservation", "last_seq")
        done = ("samples_captured", "tokens_captured", "bytes_captured", "dropped")
        return {
            "writer": found.writer_id,
            "armed": False,
            "error": f"{error}; a live writer writes it anew with its next sample",
            "lake_id": _lake_of(found),
            "engine": {},
            "parts": [
                {"name": p.name, "rows": 0, "reserved": 0, "state": "open"} for p in found.parts
            ],
            "updated_at": 0.0,
            **dict.fromkeys((*counts, *done), 0),
        }
    return status


def _lake_of(found: WriterDir) -> str | None:
    """The lake that a writer's parts name; None when none does."""
    for path in found.parts:
        with contextlib.suppress(Corrupt, InvalidInput, Unavailable):
            return str(part_attributes(path)["lake_id"])
    return None


def _parsed(path: Path) -> dict[str, Any]:
    try:
        data = path.read_bytes()
    except _CLOSED as error:
        raise InvalidInput(f"{path} cannot be read: {error}") from error
    status: dict[str, Any] = parse_json(data, str(path))
    validate(status, "status", str(path), "writer")
    return status


def read_status(root: Path, since: Mapping[str, int] | None = None) -> dict[str, Any]:
    """One look at every writer under `root`, events after `since[writer]`. Raises Missing."""
    return StatusReader(root).read(since)


def document(writers: list[dict[str, Any]]) -> dict[str, Any]:
    """What `writers` say together: the answer of /hslake/status."""
    alive = [w for w in writers if w["alive"]]
    # Those first whose summary reads: the others' engine is not known.
    known = sorted((w for w in alive if w["lake_id"]), key=lambda w: w.get("updated_at") == 0)
    errors = [w["error"] for w in alive if w["error"]]
    return {
        "format": 1,
        "armed": bool(alive) and all(w["armed"] for w in alive),
        "error": errors[0] if errors else None,
        "lake_id": known[0]["lake_id"] if known else None,
        "engine": known[0]["engine"] if known else {},
        "hook_version": known[0]["engine"].get("hook_version") if known else None,
        "writers": writers,
    }


def parse_since(text: str | None) -> dict[str, int]:
    """`a:5,b:7` -> {"a": 5, "b": 7}. Raises InvalidInput."""
    cursors: dict[str, int] = {}
    for item in filter(None, (text or "").split(",")):
        writer, _, cursor = item.rpartition(":")
        if not writer or not re.fullmatch(r"[0-9]{1,18}", cursor):
            raise InvalidInput(f"since={text!r}: expected <writer>:<cursor>,<writer>:<cursor>")
        cursors[writer] = int(cursor)
    return cursors
