"""Mending a local lake whose log a power cut has torn: what is damaged goes aside, nothing is
deleted.

Why it is safe beside a running compactor:
- A torn newest entry is no commit in progress: Delta makes an entry whole under another name. While
  it is there every commit is refused. Only repair moves it, repair holds a lock, and what was moved
  is looked at again: were it whole, it goes back.
- A checkpoint is a copy of entries; without it they are read.
- A data file `part-<v>-…` can be named by the entry of version v only. It is moved when the log has
  that version and names another file; a row of repair's own takes the number first if need be.
- A roll-up is a copy of data files; without it they are read.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hslake import runlog
from hslake.errors import Conflict, Corrupt, HslakeError, InvalidInput, reason
from hslake.lake import TABLES
from hslake.schemas import arrow_schema
from hslake.spec import read_spec
from hslake.staging.locks import try_lock
from hslake.store import Store, open_store, sync_dir
from hslake.tables import catalog, deltalog, tablefile, tablename

ASIDE = ".repair"
_AGAIN = {
    "manifest": "extract captures its samples again",
    "plan": "plan its files again",
    "runs": "refused samples in it are asked for again",
}
_AHEAD = 100  # versions past the newest that a stray data file may be of


@dataclass(frozen=True)
class Finding:
    """One thing found. `action`: what is done about it, "" when only a copy can help; `lost`: what
    is not in the lake afterwards; `moves`: files to put aside, as paths in the lake; `reach`: the
    version that the log must have before."""

    table: str
    what: str
    action: str
    lost: str = ""
    moves: tuple[str, ...] = ()
    reach: int | None = None


@dataclass
class RepairReport:
    """What was found, and where the files went that were moved. `ok`: nothing is left that only a
    copy can mend."""

    findings: list[Finding]
    dry_run: bool
    aside: str | None = None
    moved: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return all(f.action for f in self.findings)


def repair(lake_url: str, dry_run: bool = False, give_up: bool = False) -> RepairReport:
    """Find what is torn in a local lake's tables, and put it aside.

    `give_up`: the log has lost its newest entries, and no copy of them is left: what data files say
    of them goes aside too, and their numbers are taken. A healthy lake is not touched. Raises
    Conflict when another repair is at it, Missing when there is no lake. An object store's objects
    are whole or absent: nothing is found there.
    """
    store = open_store(lake_url)
    read_spec(store.url())
    if not store.is_local:
        return RepairReport([], dry_run)
    with store.errors(deltalog.LOG):
        found = list(_look(store, give_up))
        if dry_run or not any(f.moves for f in found):
            return RepairReport(found, dry_run)
        with _alone(store):
            return _mend(store, give_up)


def _tables(store: Store) -> tuple[str, ...]:
    """Those that every lake has, and the run log where there is one."""
    return TABLES if not store.list(runlog.TABLE) else (*TABLES, runlog.TABLE)


def _look(store: Store, give_up: bool) -> Iterator[Finding]:
    for table in _tables(store):
        found = list(_log_problems(store, table))
        yield from found
        if not any(f.moves or not f.action for f in found):
            yield from _data_problems(store, table, give_up)


def _mend(store: Store, give_up: bool) -> RepairReport:
    """What `_look` finds, looked for again under the lock. First the logs: then the tables open."""
    at = datetime.now(UTC)
    aside = f"{ASIDE}/{at:%Y%m%dT%H%M%S}.{at.microsecond:06d}Z"
    report = RepairReport([], False)
    torn: dict[str, int] = {}  # data files of torn commits -> version
    for table in _tables(store):
        for finding in list(_log_problems(store, table)):
            report.findings.append(finding)
            if finding.reach is not None:
                data = _data_files(store, table)
                torn |= {f"{table}/{n}": finding.reach for n in data[finding.reach]}
            _put_aside(store, finding.moves, aside, report)
    for path, version in torn.items():
        _reach(store, path.partition("/")[0], version)
        _put_aside(store, (path,), aside, report)
    for table in _tables(store):
        for finding in list(_data_problems(store, table, give_up)):
            report.findings.append(finding)
            if finding.reach is not None:
                _reach(store, table, finding.reach)
            _put_aside(store, finding.moves, aside, report)
    return report


def _put_aside(store: Store, paths: tuple[str, ...], aside: str, report: RepairReport) -> None:
    for path in paths:
        if _move(store, path, aside):
            report.moved.append(path)
            report.aside = store.url(aside)


@contextmanager
def _alone(store: Store) -> Iterator[None]:
    path = store.local(f"{ASIDE}/lock")
    path.parent.mkdir(exist_ok=True)
    lock = try_lock(path, create=True)
    if lock is None:
        raise Conflict(f"{path} is held: another repair is at this lake, wait for it")
    try:
        yield
    finally:
        lock.release()


# -- the log --------------------------------------------------------------------------------------


def _log_problems(store: Store, table: str) -> Iterator[Finding]:
    log = deltalog.scan(store, table)
    if log is None or not log.entries:
        folder = store.url(f"{table}/{deltalog.LOG}")
        yield Finding(table, f"{folder} has no entries: restore it from a copy", "")
        return
    wrong = dict(deltalog.problems(store, table))
    newest, torn = log.entries[-1], []
    # Torn entries at the end; one alone, unless writers raced each other into the power cut.
    while newest > 0 and newest in wrong:
        torn.append(newest)
        newest -= 1
    for version in torn:
        if log.entry(version).exists():
            yield _torn(store, table, log, version, wrong[version])
    for version, what in sorted(wrong.items()):
        if version <= newest:
            yield Finding(table, f"{what}; {_beyond(log, version)}", "")
    stale = {v: names for v, names in log.checkpoints.items() if v > newest or _damaged(log, names)}
    if stale:
        moves = [n for names in stale.values() for n in names]
        if (log.folder / deltalog.HINT).exists():
            moves.append(deltalog.HINT)
        yield Finding(
            table,
            f"{log.folder}: checkpoints of versions {', '.join(map(str, sorted(stale)))} do not "
            "read, or are of entries that are not there",
            "put aside: the entries hold all that they held",
            moves=tuple(f"{table}/{deltalog.LOG}/{name}" for name in moves),
        )
    elif _bad_hint(log):
        yield Finding(
            table,
            f"{log.folder / deltalog.HINT} is torn",
            "put aside: it only says which checkpoint is the newest",
            moves=(f"{table}/{deltalog.LOG}/{deltalog.HINT}",),
        )


def _torn(store: Store, table: str, log: deltalog.LogFiles, version: int, what: str) -> Finding:
    held = "; ".join(_held(store, table, n) for n in _data_files(store, table)[version])
    again = _AGAIN[table]
    return Finding(
        table,
        f"{what}: the newest commit, which was never reported as done",
        f"put aside, with the data that it named; {again}",
        lost=held or "what it held is not known: its data is not there either",
        moves=(f"{table}/{deltalog.LOG}/{log.entry(version).name}",),
        reach=version,
    )


def _beyond(log: deltalog.LogFiles, version: int) -> str:
    after = min((v for v in log.checkpoints if v >= version), default=None)
    reach = (
        "no version opens" if after is None else f"versions {version} to {after - 1} do not open"
    )
    return f"later entries stand on it, {reach}: restore it from a copy"


def _damaged(log: deltalog.LogFiles, names: tuple[str, ...]) -> bool:
    try:
        for name in names:
            pq.read_table(log.folder / name)
    except (pa.ArrowException, OSError):
        return True
    return False


def _bad_hint(log: deltalog.LogFiles) -> bool:
    try:
        found = json.loads((log.folder / deltalog.HINT).read_bytes())
        return int(found["version"]) not in log.checkpoints
    except FileNotFoundError:
        return False
    except (ValueError, TypeError, KeyError, RecursionError):
        return True


# -- data files and roll-ups ----------------------------------------------------------------------


def _data_files(store: Store, table: str) -> defaultdict[int, list[str]]:
    """Names of all data files by version, be they named by the log or not."""
    found: defaultdict[int, list[str]] = defaultdict(list)
    for path in store.list(table):
        name = path.removeprefix(f"{table}/")
        version = tablename.version_of(name)
        if version is not None:
            found[version].append(name)
    return found


def _data_problems(store: Store, table: str, give_up: bool) -> Iterator[Finding]:
    try:
        state = catalog.open_table(store, table)
        names, copies = state.strays(), state.bad_rollups()
    except (Corrupt, InvalidInput) as error:
        yield Finding(table, str(error), "")
        return
    for path in copies:
        yield Finding(
            table,
            f"{store.url(path)} is not what its parts hold",
            "put aside: it is only a copy of them",
            moves=(path,),
        )
    newest = catalog.open_table(store, table).version
    for name in names:
        version = tablename.version_of(name) or 0
        url, held = store.url(f"{table}/{name}"), _held(store, table, name)
        if version <= newest:
            yield Finding(
                table,
                f"{url}: the log names another file as that of its version: its writer lost a race "
                "or died",
                "put aside: it is not part of the table",
                moves=(f"{table}/{name}",),
            )
            continue
        what = f"{url}: no entry names it, the log ends at version {newest}; it holds {held}"
        if not give_up or version > newest + _AHEAD:
            yield Finding(
                table,
                what,
                "left alone: its writer died before it committed, or is about to. Only if the log "
                "has lost entries, restore them from a copy before anything commits (or, without "
                "a copy, --give-up)",
            )
            continue
        yield Finding(
            table,
            what,
            f"put aside, once the log has reached version {version}",
            lost=f"{held}, if that was committed: extract captures it again",
            moves=(f"{table}/{name}",),
            reach=version,
        )


def _held(store: Store, table: str, name: str) -> str:
    """What a data file holds, in words."""
    try:
        rows = tablefile.decode(store.read(f"{table}/{name}"), arrow_schema(table))
    except (HslakeError, pa.ArrowException, OSError) as error:
        return f"{name} does not read ({reason(error)})"
    ids = {i for i in rows["sample_id"].to_pylist() if i is not None}
    some = ", ".join(sorted(ids)[:3]) + (", …" if len(ids) > 3 else "")
    ops = ", ".join(sorted(set(rows["op"].to_pylist())))
    return f"{rows.num_rows} rows ({ops}) of {len(ids)} samples ({some})"


def _reach(store: Store, table: str, version: int) -> None:
    """Let the log reach `version`, so that no commit can name a data file of it any more.

    Whoever is about to commit that version loses the race and goes on with the next one.
    """
    while (now := catalog.open_table(store, table).version) < version:
        text = f"versions up to {version} taken by repair, so that a stray data file can go aside"
        catalog.commit(store, table, _note(table, text), f"repair-{version}-{now}")


def _note(table: str, text: str) -> Callable[[catalog.TableState], pa.Table]:
    """Builds a row that says nothing of any sample or run."""
    now = datetime.now(UTC)
    rows: dict[str, dict[str, Any]] = {
        "manifest": {"committed_at": now, "reason": text},
        "plan": {"sample_id": "", "planned_at": now},
        "runs": {"run_id": "", "seq": 0, "told_at": now, "reason": text},
    }
    fields = [f for f in arrow_schema(table) if f.name != "commit_version"]
    found = pa.Table.from_pylist([{"op": "repair", **rows[table]}], schema=pa.schema(fields))
    return lambda _: found


def _move(store: Store, path: str, aside: str) -> bool:
    """Put one file of the lake aside, durably; whether it was there."""
    source, target = store.local(path), store.local(f"{aside}/{path}")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        source.rename(target)
    except FileNotFoundError:
        return False
    if source.suffix == ".json" and deltalog.problem(target) is None:
        _put_back(target, source)
        raise Conflict(f"{source} was whole after all and was put back: run repair again")
    for folder in (target.parent, source.parent):
        sync_dir(folder)
    return True


def _put_back(target: Path, source: Path) -> None:
    source.hardlink_to(target)  # fails when somebody has taken the name
    target.unlink()
    sync_dir(source.parent)
