"""What the workers of one server run tell the process that answers HTTP: files in staging.

`<staging>/.hook/<run>/<name>.json` is either a writer that belongs to this server or an error from
before there was a writer. A plugin that fails is only logged by SGLang; so /hslake/status says it.
"""

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

FOLDER = ".hook"


@dataclass(frozen=True)
class Told:
    """The workers' reports: ids of this run's writers, and errors of workers that have none."""

    writers: frozenset[str]
    errors: tuple[str, ...]


def tell_writer(staging: Path, run: str, writer_id: str) -> None:
    """Record that `writer_id` belongs to server run `run`. Raises OSError."""
    _put(staging, run, writer_id, {"writer": writer_id})


def tell_error(staging: Path, run: str, error: str) -> None:
    """Record why this process captures nothing. Never raises."""
    # If it cannot be written, the log has it, and the status shows a server without writers.
    with contextlib.suppress(OSError):
        _put(staging, run, f"error-{os.getpid()}", {"error": error})


def told(staging: Path, run: str) -> Told:
    """Everything that the workers of server run `run` have said so far."""
    writers, errors = set(), []
    for path in sorted((staging / FOLDER / run).glob("*.json")):
        try:
            item = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            errors.append(f"{path}: {error}")
            continue
        if "writer" in item:
            writers.add(str(item["writer"]))
        else:
            errors.append(str(item.get("error")))
    return Told(frozenset(writers), tuple(errors))


def _put(staging: Path, run: str, name: str, item: dict[str, str]) -> None:
    folder = staging / FOLDER / run
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f"{name}.tmp"
    temporary.write_text(json.dumps(item), "utf-8")
    temporary.replace(folder / f"{name}.json")
