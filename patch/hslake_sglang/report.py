"""What the workers of one server run tell the process that answers HTTP: files in staging.

`<staging>/.hook/<run>/<name>.json` (hslake.staging.runs) is either a writer that belongs to this
server or an error from before there was a writer. A plugin that fails is only logged by SGLang; so
/hslake/status says it.
"""

import contextlib
import json
import logging
import multiprocessing.util
import os
from dataclasses import dataclass
from pathlib import Path

from hslake.schemas import parse_json
from hslake.staging.runs import RUNS, begin_run, end_run, remove_dead_runs

log = logging.getLogger("hslake")


@dataclass(frozen=True)
class Told:
    """The workers' reports: ids of this run's writers, and errors of workers that have none."""

    writers: frozenset[str]
    errors: tuple[str, ...]

    def __or__(self, later: "Told") -> "Told":
        """Both; of the same error only one."""
        errors = dict.fromkeys((*self.errors, *later.errors))
        return Told(self.writers | later.writers, tuple(errors))


def begin(staging: Path, run: str) -> None:
    """In the server's first process: make the run's folder, to be removed when this process ends
    in order, and remove those that dead servers left. Never raises."""
    remove_dead_runs(staging)
    try:
        lock = begin_run(staging, run)
    except OSError as error:
        log.error("hslake: %s: %s", staging, error)  # the workers say what that means for them
        return
    multiprocessing.util.Finalize(None, end_run, args=(lock,), exitpriority=0)


def tell_writer(staging: Path, run: str, writer_id: str) -> None:
    """Record that `writer_id` belongs to server run `run`. Raises OSError."""
    _put(staging, run, writer_id, {"writer": writer_id})


def tell_error(staging: Path, run: str, error: str) -> None:
    """Record why this process captures nothing. Never raises."""
    # If it cannot be written, the log has it, and the status shows a server without writers.
    with contextlib.suppress(OSError):
        _put(staging, run, f"error-{os.getpid()}", {"error": error})


def told(staging: Path, run: str) -> Told:
    """Everything that the workers of server run `run` have said so far. Raises OSError, or
    InvalidInput for a damaged file."""
    writers, errors = set(), []
    for path in sorted((staging / RUNS / run).glob("*.json")):
        try:
            item = parse_json(path.read_bytes(), str(path))
        except FileNotFoundError:  # somebody deletes staging
            continue
        if "writer" in item:
            writers.add(str(item["writer"]))
        else:
            errors.append(str(item.get("error")))
    return Told(frozenset(writers), tuple(errors))


def _put(staging: Path, run: str, name: str, item: dict[str, str]) -> None:
    folder = staging / RUNS / run
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f"{name}.tmp"
    temporary.write_text(json.dumps(item), "utf-8")
    temporary.replace(folder / f"{name}.json")
