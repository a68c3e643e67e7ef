"""What a compactor holds of staging: its writers and parts, each under its lock.

Locks are held from the look that finds a part until all that was taken from it is settled, or
until nothing is under way. What cannot be looked at now is told and left alone; the rest goes on.
"""

import contextlib
import logging
import os
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hslake.compact.trouble import Troubles
from hslake.compactreport import CompactReport, tell
from hslake.errors import Corrupt, HslakeError, InvalidInput, Missing
from hslake.ownership import is_ours, take, tell_closed, tell_lockless
from hslake.picks import Doubt, Key
from hslake.spec import LakeSpec
from hslake.staging.check import check_part
from hslake.staging.folder import COMPACT_LOCK, LOCK, remove_remains, remove_writer
from hslake.staging.locks import Lock, try_lock
from hslake.staging.part import DONE, JOURNAL, METADATA, READ_LOCK, PartInfo, lost_journal
from hslake.staging.reader import WriterDir, part_attributes, read_part, read_writer, scan

log = logging.getLogger("hslake.compact")

_ROWS = "hidden_states"  # in a part: key of the troubles with its rows
DAMAGED = "damaged"  # folder of a staging root: journals that were cut short, for people to look at


@dataclass
class Source:
    """A part that is held: what its journal says, and how far it is settled.

    `final`: no more rows can come, it is sealed or its writer is dead. `open`: keys of samples that
    are still to be stored from it. `judged`: the lake was asked about its rows since it is final.
    `given_up` and `duplicates` are counted in the report once, when the part goes.
    """

    info: PartInfo
    lock: Lock | None
    final: bool
    writer: Path
    judged: bool = False
    open: set[Key] = field(default_factory=set)
    given_up: Counter[str] = field(default_factory=Counter)
    duplicates: int = 0
    freed: bool = False


@dataclass
class _Writer:
    """A writer that is held. `dead`: its own lock is held, too."""

    found: WriterDir
    locks: list[Lock]
    dead: bool


class Sources:
    """All that is held. One thread calls `look`, `release`; `free` may run beside it."""

    def __init__(self, roots: list[Path], troubles: Troubles, report: CompactReport) -> None:
        self.roots, self._troubles, self._report = roots, troubles, report
        self.mutex = threading.RLock()  # around what is judged, settled and freed
        self._writers: dict[Path, _Writer] = {}
        self.parts: dict[Path, Source] = {}
        self._sealed: dict[Path, PartInfo] = {}  # read once: nothing is added to these
        self.paths: set[Path] = set()  # of all parts at the last look

    def dead(self, source: Source) -> bool:
        """Whether the part's writer is."""
        found = self._writers.get(source.writer)
        return found is not None and found.dead

    def writers(self) -> list[Path]:
        """Folders of the live writers that are held."""
        return [path for path, w in self._writers.items() if not w.dead]

    def readable(self) -> list[Source]:
        """The parts that are held and do not rest from a trouble."""
        rests = self._troubles.rests
        return [
            s
            for s in self.parts.values()
            if not s.freed and not rests(s.info.path) and not rests(s.info.path / _ROWS)
        ]

    def untried(self) -> bool:
        """Whether the lake was not asked yet about a part to which nothing more comes, but for
        those in trouble: whoever does not watch tries them once."""
        return any(
            s.final and not s.judged and not self._troubles.there(s.info.path / _ROWS)
            for s in self.readable()
        )

    def unreadable(self, part: Path, error: Exception) -> None:
        """Its rows cannot be read now, whatever a look at its journal says."""
        self._troubles.met(part / _ROWS, error)

    # -- looking ----------------------------------------------------------------------------

    def look(self, spec: LakeSpec, *, watch: bool) -> None:
        """See what there is now, and take hold of what is ours.

        Without `watch`, raises Missing or OSError for a root that cannot be read, before anything
        is touched.
        """
        found: list[WriterDir] = []
        for root in self.roots:
            if watch and self._troubles.rests(root):
                continue
            try:
                found += scan(root)
            except (Missing, OSError) as error:
                if not watch:
                    raise
                self._troubles.met(root, error)
            else:
                self._troubles.mended(root)
        for root in self.roots:
            with contextlib.suppress(OSError):
                remove_remains(root)
        self._report.skipped = []
        self.paths = set()
        for writer in found:
            self.paths.update(writer.parts)
            if self._troubles.rests(writer.path):
                continue
            try:
                self._look_at(writer, spec)
            except (HslakeError, OSError, MemoryError) as error:
                self._troubles.met(writer.path, error)
            else:
                self._troubles.mended(writer.path)
        for path in [p for p, s in self.parts.items() if s.freed]:
            del self.parts[path]
        self._sealed = {p: i for p, i in self._sealed.items() if p in self.paths}
        self._troubles.forget(self._is_gone)

    def _is_gone(self, key: str) -> bool:
        path = Path(key)
        return any(root in path.parents for root in self.roots) and not path.exists()

    def _look_at(self, found: WriterDir, spec: LakeSpec) -> None:
        if found.closed is not None:
            tell_closed(found.path, found.closed, self._report)
            return
        held = self._writers.get(found.path)
        if held is None:
            # Before any of its locks: what is touched here tells a writer that its own compactor
            # is there, and a held lock keeps that one away.
            if not is_ours(found, spec, self._report):
                return
            held = self._take(found)
            if held is None:
                return
        else:
            if not held.dead and not found.alive:
                lock = try_lock(found.path / LOCK)
                if lock is not None:
                    held.locks.append(lock)
                    held.dead = True
            held.found = read_writer(found.path)
        if not held.dead:
            os.utime(found.path / COMPACT_LOCK)  # tells the writer that a compactor is there
        for path in held.found.parts:
            if self._troubles.rests(path):
                continue
            try:
                self._look_into(path, held, spec)
            except InvalidInput as error:
                tell(self._report.refused, f"{error}; refused and left alone")
            except Corrupt as error:
                tell(self._report.damage, f"{error}; left alone")
            except (HslakeError, OSError, MemoryError) as error:
                self._troubles.met(path, error)
            else:
                self._troubles.mended(path)

    def _take(self, found: WriterDir) -> _Writer | None:
        locks: list[Lock] = []
        dead: set[Path] = set()
        try:
            writer = take(found, locks, dead, self._report)
        except PermissionError as error:
            tell_closed(found.path, str(error), self._report)
            writer = None
        except BaseException:
            _release(locks)
            raise
        if writer is None:
            _release(locks)
            return None
        held = _Writer(writer, locks, writer.path in dead)
        self._writers[found.path] = held
        return held

    def _look_into(self, path: Path, held: _Writer, spec: LakeSpec) -> None:
        source = self.parts.get(path)
        if (source is not None and (source.final or source.freed)) or (path / DONE).exists():
            return
        lock = source.lock if source is not None else None
        lock = lock or try_lock(path / READ_LOCK, shared=True)
        if lock is None:
            tell_lockless(path, self._report)
            return  # being recycled
        try:
            if source is None:
                check_part(path, part_attributes(path), spec)
            info = self._read(path, held.dead)
        except BaseException:
            if source is None or source.lock is None:
                lock.release()
            raise
        final = info.sealed or held.dead
        if source is None:
            source = self.parts[path] = Source(info, lock, final, held.found.path)
        source.info, source.final, source.lock = info, final, lock

    def let_go_of_open(self) -> None:
        """Release the locks of parts that are being filled and from which nothing is taken."""
        for source in self.parts.values():
            if not source.final and not source.open and source.lock is not None:
                source.lock.release()
                source.lock = None

    def hold(self, source: Source) -> bool:
        """Whether the part's lock is held (again)."""
        if source.lock is None:
            source.lock = try_lock(source.info.path / READ_LOCK, shared=True)
        return source.lock is not None

    def _read(self, path: Path, dead: bool) -> PartInfo:
        known = self._sealed.get(path)
        if known is not None:
            return known
        info = read_part(path, dead=dead)
        if info.sealed:
            self._sealed[path] = info
        return info

    # -- letting go -------------------------------------------------------------------------

    def settle(self, keys: Iterable[Key], bad: Mapping[Key, Doubt]) -> None:
        """These samples are in the lake, or `bad`, and given up for good."""
        for key in keys:
            source = self.parts.get(key[0])
            if source is None:
                continue
            source.open.discard(key)
            self._troubles.mended(key[0] / _ROWS)
            if key in bad:
                source.given_up[bad[key].reason] += 1
                if text := bad[key].damage:
                    tell(self._report.damage, text)

    def free(self) -> None:
        """Mark the parts DONE to which no row can come any more and of which all is settled, and
        let them go: at once, a live writer may be waiting for the room.

        Also one with a damaged journal, or a live writer's staging would fill: what the damage hid
        is captured again, and the journal is kept aside.
        """
        for source in list(self.parts.values()):
            if source.final and source.judged and not source.open and not source.freed:
                path = source.info.path
                try:
                    if source.info.damage:
                        keep_journal(path)
                    (path / DONE).touch()
                except OSError as error:
                    self._troubles.met(path / JOURNAL, error)
                    continue
                self._troubles.mended(path / JOURNAL)
                source.freed = True
                if source.lock is not None:
                    source.lock.release()
                self._report.count(source.given_up, source.duplicates)

    def bury(self) -> None:
        """Remove the folders of dead writers from which nothing more can come."""
        for path, held in list(self._writers.items()):
            if not held.dead:
                continue
            try:
                if not all((p / DONE).exists() for p in held.found.parts):
                    continue
                for part in sorted(path.glob("part-*")):
                    if lost_journal(part):
                        tell(
                            self._report.damage,
                            f"{part / JOURNAL} is gone, and with it what the part held: removed; "
                            "extract asks for its samples again",
                        )
                remove_writer(path)
            except OSError as error:
                self._troubles.met(path / COMPACT_LOCK, error)
            _release(held.locks)
            del self._writers[path]

    def release(self) -> None:
        """Let go of everything: nothing that was taken from it is under way."""
        for source in self.parts.values():
            if not source.freed and source.lock is not None:
                source.lock.release()
        self.parts.clear()
        for held in self._writers.values():
            _release(held.locks)
        self._writers.clear()


def _release(locks: list[Lock]) -> None:
    while locks:
        locks.pop().release()


def keep_journal(path: Path) -> None:
    """Keep a damaged journal aside: linked, as staging may be full."""
    aside = path.parent.parent / DAMAGED / f"{path.parent.name}.{path.name}"
    try:
        aside.mkdir(parents=True, exist_ok=True)
        for name in (JOURNAL, METADATA):
            with contextlib.suppress(FileExistsError):
                os.link(path / name, aside / name)
    except OSError as error:
        log.warning("%s is not kept aside: %s", path / JOURNAL, error)
