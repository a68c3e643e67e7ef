"""What dead writers left in staging, and its removal.

A compactor of the right lake takes a dead writer's samples and then its folder. What stays is of
lakes that nobody compacts any more, or that no compactor can read. A folder goes only under both of
its locks, the writer's and the compactor's, so never from under a live process.
"""

import os
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from hslake import manifest
from hslake.errors import Corrupt, InvalidInput
from hslake.ids import PROBE_PREFIX
from hslake.spec import read_spec
from hslake.staging.check import check_no_lake
from hslake.staging.folder import COMPACT_LOCK, LOCK, remains, remove_writer
from hslake.staging.locks import Lock, try_lock
from hslake.staging.part import DONE
from hslake.staging.reader import WriterDir, part_attributes, read_part, read_writer, scan
from hslake.store import open_store
from hslake.tables import catalog


@dataclass
class Found:
    """One folder: of a writer, or what was half removed of one (`lake_id` None then).

    `samples`, `tokens`: complete and not known to be in their lake. `bytes` are those allocated;
    `age_s` since anything in it was written. `state`: live, busy (a compactor is at it), closed
    (another user's), kept, removable or removed; `why`: of kept and closed.
    """

    path: str
    lake_id: str | None
    samples: int
    tokens: int
    bytes: int
    age_s: float
    state: str
    why: str = ""


@dataclass
class GcReport:
    """All folders that were looked at."""

    folders: list[Found] = field(default_factory=list)
    dry_run: bool = False

    def count(self, state: str) -> tuple[int, int]:
        """(folders, bytes) in this state."""
        some = [f.bytes for f in self.folders if f.state == state]
        return len(some), sum(some)


def gc_staging(
    roots: Iterable[str | Path],
    *,
    lake_url: str | None = None,
    older: timedelta = timedelta(0),
    force: bool = False,
    dry_run: bool = False,
) -> GcReport:
    """Remove folders of dead writers that hold no complete sample any more; with `force`, of all
    dead writers.

    `lake_url`: a lake whose manifest says which of its samples were committed: those hold nothing
    back. `older`: leave alone what was written to since. Live writers, writers that a compactor is
    at, and whatever is no writer's folder are never touched. Raises Missing, and
    InvalidInput for a lake.
    """
    report = GcReport(dry_run=dry_run)
    committed = _committed(lake_url)
    for root in (Path(r) for r in roots):
        check_no_lake(root)
        for writer in scan(root):
            report.folders.append(_writer(writer, committed, older, force, dry_run))
        for path in remains(root):
            found = Found(str(path), None, 0, 0, _bytes(path), _age(path), "removable")
            if not dry_run:
                shutil.rmtree(path, ignore_errors=True)
                found.state = "removed"
            report.folders.append(found)
    return report


@dataclass(frozen=True)
class _Committed:
    lake_id: str
    attempts: frozenset[str]


def _committed(lake_url: str | None) -> _Committed | None:
    if lake_url is None:
        return None
    spec = read_spec(lake_url)
    state = catalog.open_table(open_store(lake_url), "manifest")
    return _Committed(spec.lake_id, frozenset(manifest.all_attempts(state)))


def _writer(
    found: WriterDir, committed: _Committed | None, older: timedelta, force: bool, dry_run: bool
) -> Found:
    if found.closed is not None:
        return Found(str(found.path), None, 0, 0, 0, 0.0, "closed", found.closed)
    held: list[Lock] = []
    try:
        state = "live" if found.alive else _take(found.path, held)
        row = _describe(read_writer(found.path), committed, state)
        if state == "unknown":
            row.state, row.why = "kept", "a lock file is gone: nobody can tell whether it lives"
        if state != "dead":
            return row
        row.state, row.why = _verdict(row, older, force)
        if row.state == "removable" and not dry_run:
            remove_writer(found.path)
            row.state = "removed"
        return row
    except PermissionError as error:
        return Found(str(found.path), None, 0, 0, 0, 0.0, "closed", str(error))
    finally:
        for lock in held:
            lock.release()


def _take(path: Path, held: list[Lock]) -> str:
    """Both locks of a dead writer, the compactor's first, as a compactor takes them."""
    for name, state in ((COMPACT_LOCK, "busy"), (LOCK, "live")):
        lock = try_lock(path / name)
        if lock is not None:
            held.append(lock)
        else:
            return state if (path / name).exists() else "unknown"
    return "dead"


def _verdict(row: Found, older: timedelta, force: bool) -> tuple[str, str]:
    if row.age_s < older.total_seconds():
        return "kept", "younger than --older-than"
    if row.why and not force:
        return "kept", row.why
    if row.samples and not force:
        return "kept", (
            f"{row.samples} complete samples: `hslake compact` of lake "
            f"{row.lake_id or '(unknown)'} takes them, --force throws them away"
        )
    return "removable", ""


def _describe(writer: WriterDir, committed: _Committed | None, state: str) -> Found:
    lake: str | None = None
    samples = tokens = 0
    why = ""
    for path in writer.parts:
        if (path / DONE).exists():
            continue
        try:
            part = read_part(path, dead=state != "live")
        except (Corrupt, InvalidInput) as error:
            why = f"what it holds is not known: {error}; --force throws it away"
            continue
        lake = lake_id = str(part.attributes["lake_id"])
        known = committed.attempts if committed and committed.lake_id == lake_id else frozenset()
        for row in part.reserved:
            probe = row.sample_id.startswith(PROBE_PREFIX)  # preflight's, which nobody keeps
            if row.state == "complete" and not probe and row.attempt not in known:
                samples, tokens = samples + 1, tokens + row.length
    size, age = _bytes(writer.path), _age(writer.path)
    lake = lake or _any_lake(writer)
    return Found(str(writer.path), lake, samples, tokens, size, age, state, why)


def _any_lake(writer: WriterDir) -> str | None:
    for path in sorted(writer.path.glob("part-*")):
        try:
            return str(part_attributes(path)["lake_id"])
        except (Corrupt, InvalidInput):
            continue
    return None


def _files(folder: Path) -> Iterable[os.stat_result]:
    for at, _, names in os.walk(folder):
        for name in names:
            try:
                yield (Path(at) / name).stat(follow_symlinks=False)
            except OSError:
                continue  # it goes away meanwhile


def _bytes(folder: Path) -> int:
    """Bytes that the folder's files take: chunk files are preallocated, not always filled."""
    return sum(s.st_blocks * 512 for s in _files(folder))


def _age(folder: Path) -> float:
    newest = max((s.st_mtime for s in _files(folder)), default=0.0)
    return max(0.0, time.time() - newest)
