"""What `GET /hslake/status` answers, made from the files of a staging root alone.

The events file is the truth: an attempt has ended once its event stands there. `status.json` is the
writer's own summary, written at most every 0.2 seconds; its `last_seq` says up to which event it
knows, so it may be behind the events file and is never ahead of it.
"""

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hslake.errors import Corrupt
from hslake.staging.frames import FrameTail
from hslake.staging.part import DONE, JOURNAL
from hslake.staging.reader import WriterDir, scan
from hslake.staging.writer import EVENTS, STATUS

_MAX_EVENTS = 5000


class StatusReader:
    """Reads the status of every writer under `root` again and again; a call costs what is new.

    Several threads may call it.
    """

    def __init__(self, root: Path) -> None:
        self.root = Path(root)
        self._tails: dict[str, FrameTail] = {}
        self._lock = threading.Lock()

    def read(self, since: Mapping[str, int] | None = None) -> dict[str, Any]:
        """Status of the writers there are, each with its events after `since[writer]`."""
        with self._lock:
            found = scan(self.root)
            self._tails = {
                w.writer_id: self._tails[w.writer_id]
                if w.writer_id in self._tails
                else FrameTail(w.path / EVENTS, "events")
                for w in found
            }
            writers = [self._writer(w, (since or {}).get(w.writer_id, 0)) for w in found]
        return _document([w for w in writers if w is not None])

    def _writer(self, found: WriterDir, cursor: int) -> dict[str, Any] | None:
        try:
            # Before the events: what the summary knows, they hold.
            status = json.loads((found.path / STATUS).read_text("utf-8"))
            events, error = self._events(found, cursor, status["last_seq"])
        except (FileNotFoundError, ValueError):
            return None  # just born, or being deleted
        for part in status["parts"]:
            # The summary of a dead writer is old, and a compactor goes on.
            path = found.path / part["name"]
            if (path / DONE).exists() or not (path / JOURNAL).exists():
                part["state"] = "done"
        return {
            **status,
            "error": error or status["error"],
            "alive": found.alive,
            "events": events,
            "cursor": events[-1]["seq"] if events else cursor,
        }

    def _events(
        self, found: WriterDir, cursor: int, last_seq: int
    ) -> tuple[list[dict[str, Any]], str | None]:
        tail = self._tails[found.writer_id]
        try:
            events = tail.read(cursor, _MAX_EVENTS)  # event `seq` is frame `seq - 1`
        except Corrupt as e:
            return [], str(e)
        if len(tail) < last_seq:
            return events, (
                f"{found.path / EVENTS} ends at event {len(tail)}, its writer has written "
                f"{last_seq}: the file is damaged"
            )
        return events, None


def read_status(root: Path, since: Mapping[str, int] | None = None) -> dict[str, Any]:
    """One look at every writer under `root`, events after `since[writer]`. Raises Missing."""
    return StatusReader(root).read(since)


def _document(writers: list[dict[str, Any]]) -> dict[str, Any]:
    alive = [w for w in writers if w["alive"]]
    errors = [w["error"] for w in alive if w["error"]]
    return {
        "format": 1,
        "armed": bool(alive) and all(w["armed"] for w in alive),
        "error": errors[0] if errors else None,
        "lake_id": alive[0]["lake_id"] if alive else None,
        "engine": alive[0]["engine"] if alive else {},
        "hook_version": alive[0]["engine"].get("hook_version") if alive else None,
        "writers": writers,
    }
