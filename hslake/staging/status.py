"""What `GET /hslake/status` answers, made from the files of a staging root alone."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hslake.errors import Corrupt
from hslake.staging.frames import read_frames
from hslake.staging.reader import scan
from hslake.staging.writer import EVENTS, STATUS

_MAX_EVENTS = 5000


def read_status(root: Path, since: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Status of every writer under `root` (schemas/status.json), events after `since[writer]`."""
    writers = []
    for found in scan(root):
        try:
            status = json.loads((found.path / STATUS).read_text("utf-8"))
            events = _events(found.path / EVENTS, (since or {}).get(found.writer_id, 0))
        except (FileNotFoundError, ValueError):
            continue  # just born, or being deleted
        except Corrupt as e:
            events, status["error"] = [], str(e)
        status["alive"] = found.alive
        status["events"] = events
        last = events[-1]["seq"] if events else (since or {}).get(found.writer_id, 0)
        status["cursor"] = last
        writers.append(status)
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


def _events(path: Path, since: int) -> list[dict[str, Any]]:
    found = [row for row in read_frames(path, "events") if row["seq"] > since]
    return found[:_MAX_EVENTS]
