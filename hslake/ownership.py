"""Whose a writer in staging is: asked before a compactor touches anything of it, and then made its
own by locks."""

import json
from pathlib import Path

from hslake.compactreport import CompactReport, tell
from hslake.errors import Corrupt, InvalidInput
from hslake.spec import LakeSpec
from hslake.staging.check import check_part
from hslake.staging.folder import COMPACT_LOCK, LOCK, STATUS
from hslake.staging.locks import Lock, is_locked, try_lock
from hslake.staging.part import JOURNAL, READ_LOCK
from hslake.staging.reader import WriterDir, part_attributes, read_writer


def is_ours(found: WriterDir, spec: LakeSpec, report: CompactReport) -> bool:
    """Whether this writer's parts are of this lake and model; told when they are not, once for each
    writer. Only reads."""
    refused, damaged = None, []
    for path in sorted(found.path.glob("part-*")):
        try:
            check_part(path, part_attributes(path), spec)
            return True
        except InvalidInput as error:
            refused = refused or f"{error}; refused and left alone"
        except Corrupt as error:  # also one that is half made, or being recycled
            if path in found.parts and path.exists():
                damaged.append(f"{error}; left alone")
    if refused is not None:
        if not any(found.writer_id in message for message in report.refused):
            tell(report.refused, refused)
        return False
    lake_id = _lake_of(found.path)
    if lake_id is None and found.alive:  # just born, or its metadata is gone: nobody can tell
        for message in damaged:
            tell(report.damage, message)
        return False
    return lake_id in (None, spec.lake_id)


def _lake_of(folder: Path) -> str | None:
    """The lake that a writer's own summary names, for when no part of it tells."""
    try:
        found = json.loads((folder / STATUS).read_bytes())["lake_id"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return str(found)


def take(
    found: WriterDir, held: list[Lock], dead: set[Path], report: CompactReport
) -> WriterDir | None:
    """The writer as it is once it is ours alone to compact, its locks added to `held`; None when it
    is not. Raises PermissionError."""
    # One compactor a writer: a dead writer's lock, held by another compactor, would make
    # it look alive, and its parts would vanish under us.
    mine_alone = try_lock(found.path / COMPACT_LOCK)
    if mine_alone is None:
        if is_locked(found.path / COMPACT_LOCK):
            tell(report.skipped, found.path.name)
        else:
            _tell_unlockable(found.path, COMPACT_LOCK, report)
        return None
    held.append(mine_alone)
    writer = read_writer(found.path)
    if not writer.alive:
        lock = try_lock(writer.path / LOCK)
        if lock is None:
            _tell_unlockable(writer.path, LOCK, report)
            return None
        held.append(lock)
        dead.add(writer.path)
    return writer


def tell_closed(folder: Path, why: str, report: CompactReport) -> None:
    tell(
        report.refused,
        f"{folder} is another user's: {why}; left alone. If its samples are of this lake, let that "
        "user run compact",
    )


def _tell_unlockable(folder: Path, lock: str, report: CompactReport) -> None:
    """Without the file nobody can tell whether the writer lives. (A folder without either has just
    been removed.)"""
    if folder.is_dir() and not (folder / lock).exists():
        tell(
            report.damage,
            f"{folder / lock} is gone, so nobody can tell whether this writer lives: left alone. "
            f"If its server has ended, `touch {folder / lock}` lets compact take what it holds",
        )


def tell_lockless(part: Path, report: CompactReport) -> None:
    """Tell of a part whose lock is gone: it would wait for ever, unseen. One that is being recycled
    has lost its journal before."""
    lock = part / READ_LOCK
    if not lock.exists() and (part / JOURNAL).exists():
        tell(
            report.damage,
            f"{lock} is gone, so the part cannot be read beside its writer: left alone. "
            f"`touch {lock}` lets compact take what it holds",
        )
