"""The log of a local table, file by file: is every entry that a reader needs there, and whole?

After a power cut the newest entry may have its name without its content. Delta would open the table
without those rows and say nothing, so the log is looked at before Delta is asked.
"""

import getpass
import json
import os
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hslake.errors import Corrupt, Missing, reason
from hslake.store import Store, sync_dir, sync_file

LOG = "_delta_log"
HINT = "_last_checkpoint"
BY = "hslake.by"  # in a log entry: who committed
_ENTRY = re.compile(r"(\d{20})\.json")
_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint(\..+)?\.parquet")
REPAIR = "`hslake repair LAKE --dry-run` says what can be done"
_RESTORE = "restore the entry from a copy"


def entry_path(version: int) -> str:
    """Path of the entry of `version` below its table."""
    return f"{LOG}/{version:020d}.json"


def actions_of(store: Store, name: str, version: int) -> list[Any]:
    """The actions of an entry. Raises Missing, and what `_parse` does."""
    return _parse(store.read(f"{name}/{entry_path(version)}"))


def _parse(data: bytes) -> list[Any]:
    """The actions in an entry's bytes. Raises ValueError or RecursionError when they are not one
    JSON value a line."""
    return [json.loads(line) for line in data.splitlines() if line.strip()]


@dataclass(frozen=True)
class LogFiles:
    """What a log folder holds: versions of its entries and of its checkpoints, ascending.

    `checkpoints`: version to file names.
    """

    folder: Path
    entries: tuple[int, ...]
    checkpoints: dict[int, tuple[str, ...]]

    def entry(self, version: int) -> Path:
        """Path of the entry of `version`, be it there or not."""
        return self.folder.parent / entry_path(version)


def scan(store: Store, name: str) -> LogFiles | None:
    """The log of a local table; None when it has no folder."""
    folder = store.local(f"{name}/{LOG}")
    try:
        names = [e.name for e in os.scandir(folder)]
    except (FileNotFoundError, NotADirectoryError):
        return None
    entries = sorted(int(m[1]) for n in names if (m := _ENTRY.fullmatch(n)))
    checkpoints: dict[int, tuple[str, ...]] = {}
    for found in sorted(names):
        if m := _CHECKPOINT.fullmatch(found):
            checkpoints[int(m[1])] = (*checkpoints.get(int(m[1]), ()), found)
    return LogFiles(folder, tuple(entries), checkpoints)


def problem(path: Path) -> str | None:
    """What is wrong with one log entry, or None. Raises OSError when it cannot be read."""
    data = path.read_bytes()
    if not data:
        return f"{path} is empty: a commit was torn"
    if not data.strip(b"\0"):
        return f"{path} is torn: {len(data)} zero bytes"
    try:
        actions = _parse(data)
        kinds = {k for a in actions for k in a}
        operation = next((a["commitInfo"]["operation"] for a in actions if "commitInfo" in a), "")
    except (ValueError, TypeError, KeyError, RecursionError) as e:
        return f"{path} is torn ({e}): expected one JSON action a line"
    if not operation or (operation == "WRITE" and not {"add", "txn"} <= kinds):
        return f"{path} is torn: found only {sorted(kinds)}"
    return None


def check(store: Store, name: str, version: int | None = None) -> int | None:
    """Newest version of a local log, after a look at the entries that open `version` (default: the
    newest): those since the checkpoint before it. Raises Corrupt.

    The cost does not grow with the log, but for listing it.
    """
    log = scan(store, name)
    if log is None or not log.entries:
        return None
    newest = log.entries[-1]
    last = newest if version is None else min(version, newest)
    base = max((v for v in log.checkpoints if v <= last), default=-1)
    have = set(log.entries)
    for at in range(base + 1, last + 1):
        # Asked by name: what is made while a folder is being listed may not be in the list.
        if at not in have and not log.entry(at).exists():
            raise Corrupt(
                f"{log.entry(at)} is missing, the log goes to version {newest}: {_RESTORE}; "
                f"{REPAIR}"
            )
        if log.entry(at).stat().st_size == 0:
            raise Corrupt(f"{log.entry(at)} is empty: a commit was torn; {_mend(at, newest)}")
    ahead = max(log.checkpoints, default=-1)
    if version is None and ahead > newest and not log.entry(ahead).exists():
        raise Corrupt(_outlived(log, ahead))
    if last == newest and (wrong := problem(log.entry(newest))):
        raise Corrupt(f"{wrong}; {_mend(newest, newest)}")
    return newest


def _outlived(log: LogFiles, version: int) -> str:
    return (
        f"{log.folder}: there is a checkpoint of version {version}, the entries end at "
        f"{log.entries[-1]}: entries are missing; {_RESTORE}; {REPAIR}"
    )


def _mend(version: int, newest: int) -> str:
    if version < newest:
        return f"{_RESTORE}; {REPAIR}"
    return (
        "a commit that a power cut tore was never reported as done, what it held is captured "
        f"again: {REPAIR} (or {_RESTORE})"
    )


def problems(store: Store, name: str) -> Iterator[tuple[int, str]]:
    """(version, what is wrong) for every entry of a local log: reads all of it."""
    log = scan(store, name)
    if log is None or not log.entries:
        return
    have = set(log.entries)
    for at in range(log.entries[-1] + 1):
        wrong = problem(log.entry(at)) if at in have else f"{log.entry(at)} is missing"
        if wrong:
            yield at, wrong


def sync_base(store: Store, name: str, version: int) -> None:
    """Make the entry of `version` durable, before one that stands on it is made.

    It may be another writer's who has not come to that yet. As everybody does it, only the newest
    entry can be torn by a power cut.
    """
    path = store.local(f"{name}/{entry_path(version)}")
    if store.is_local and path.exists():
        sync_file(path)


def sync(store: Store, name: str, version: int) -> None:
    """Make the entry of `version`, and the checkpoint that may have followed it, durable."""
    if not store.is_local:
        return
    folder = store.local(f"{name}/{LOG}")
    files = [folder.parent / entry_path(version)]
    checkpoint = folder / f"{version:020d}.checkpoint.parquet"
    if checkpoint.exists():
        files += [checkpoint, folder / HINT]
    for path in files:
        if path.exists():
            sync_file(path)
    sync_dir(folder)
    sync_dir(folder.parent)


@dataclass(frozen=True)
class CommitInfo:
    """`by`: user@host, "" in older commits; `transaction`: its id, which begins with its kind."""

    by: str
    transaction: str


def commit_info(store: Store, name: str, version: int) -> CommitInfo:
    """Who made a version of a table, local or not, and in which transaction. Raises Corrupt."""
    try:
        actions = actions_of(store, name, version)
        info: dict[str, Any] = next((a["commitInfo"] for a in actions if "commitInfo" in a), {})
        txn = next((a["txn"]["appId"] for a in actions if "txn" in a), "")
    except (Missing, ValueError, TypeError, KeyError, RecursionError) as error:
        raise Corrupt(
            f"{store.url(name)}/{entry_path(version)}: the log entry cannot be read: "
            f"{reason(error)}; {REPAIR}"
        ) from None
    return CommitInfo(str(info.get(BY, "")), str(txn))


def who() -> str:
    """This process's user and machine, for a commit's `BY`."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError, ImportError):  # a container's user may have no name
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"
