"""The parts of one writer: made ahead of need, filled one at a time, sealed, recycled."""

import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hslake.errors import NoSpace
from hslake.spec import LakeSpec
from hslake.staging.files import is_full
from hslake.staging.folder import COMPACT_LOCK
from hslake.staging.locks import try_lock
from hslake.staging.memory import PageLock, PartMemory
from hslake.staging.part import DONE, READ_LOCK, Part, reset_folder

_RETRY_S = 5.0  # after a part that found no room

log = logging.getLogger("hslake.staging")


class Parts:
    """At most `limit` parts of `capacity` rows in a writer's folder.

    With `ahead` all are made at once, as far as there is room; if some are not, somebody else makes
    them in the background (`wanted`, `make`, `add`, `refuse`). `room` never does then, as making
    one takes seconds. Not thread-safe but for `make`.
    """

    def __init__(
        self,
        folder: Path,
        spec: LakeSpec,
        *,
        capacity: int,
        limit: int,
        attributes: dict[str, Any],
        clock: Callable[[], float],
        idle_s: float,
        page_lock: PageLock | None,
        ahead: bool,
    ) -> None:
        self.capacity, self.limit = capacity, limit
        self.all: list[Part] = []
        self._folder, self._spec, self._attributes = folder, spec, attributes
        self._clock, self._idle_s = clock, idle_s
        self._page_lock, self._ahead = page_lock, ahead
        self._next = 1
        self._making = False
        self._refusal: str | None = None  # why the last part could not be made
        self._refused_at = 0.0
        self.add(self.make(self._path()))
        while ahead and len(self.all) < limit and self._refusal is None:
            try:
                self.add(self.make(self._path()))
            except NoSpace as error:
                self.refuse(str(error))

    @property
    def capacity_rows(self) -> int:
        """Rows of the parts there are, and of those that can still be made as far as is known."""
        unmade = 0 if self._refusal else self.limit - len(self.all)
        return (len(self.all) + unmade) * self.capacity

    # -- room -------------------------------------------------------------------------------

    def free_rows(self) -> int:
        """Rows that new reservations could get now: the open parts' rest, and parts that can still
        be made as far as is known."""
        unmade = 0 if self._refusal else self.limit - len(self.all)
        rest = sum(p.capacity - p.used for p in self.all if not p.sealed)
        return rest + unmade * self.capacity

    def room(self, length: int) -> Part:
        """A part with `length` free rows; parts that it passes over are sealed. Raises NoSpace."""
        part = self._with_room(length)
        if part is None:
            self.recycle()
            part = self._with_room(length)
        refusal = f"all {self.limit} parts are full: the compactor has to catch up"
        if part is None and len(self.all) < self.limit:
            being_made = "the next part is still being made"
            refusal = being_made if self._making else self._refusal or being_made
            if not self._ahead:
                try:
                    part = self.add(self.make(self._path()))
                except NoSpace as error:
                    refusal = str(error)
        for other in self.all:
            if other is part:
                break
            other.passed_over = True
            self._seal(other)
        if part is None:
            raise NoSpace(f"staging: {length} rows asked, {refusal}")
        return part

    def _with_room(self, length: int) -> Part | None:
        fit = (p for p in self.all if not p.sealed and p.capacity - p.used >= length)
        return next(fit, None)

    # -- making them ------------------------------------------------------------------------

    def wanted(self) -> Path | None:
        """The part that ought to be made now; the caller makes it and calls `add` or `refuse`."""
        if not self._ahead or self._making or len(self.all) >= self.limit:
            return None
        if self._refusal and 0 <= self._clock() - self._refused_at < _RETRY_S:
            return None
        self._making = True
        return self._path()

    def make(self, path: Path) -> Part:
        """Make a part; touches nothing but its folder. Raises NoSpace and leaves nothing."""
        memory = None
        try:
            path.mkdir()
            memory = PartMemory(path, self._spec, self.capacity, self._page_lock)
            return Part(path, self._spec, memory, self._attributes)
        except BaseException:
            if memory is not None:
                memory.close()
            shutil.rmtree(path, ignore_errors=True)  # half made: nobody else would
            raise

    def add(self, part: Part) -> Part:
        """Take in a part that was made."""
        self.all.append(part)
        self._making, self._refusal = False, None
        return part

    def refuse(self, reason: str) -> None:
        """The wanted part could not be made: nobody is promised its rows until one can."""
        if self._refusal is None:
            log.error(
                "%s: ONLY %d OF %d PARTS, no further one for now: %s",
                self._folder,
                len(self.all),
                self.limit,
                reason,
            )
        self._making, self._refusal, self._refused_at = False, reason, self._clock()

    def _path(self) -> Path:
        path = self._folder / f"part-{self._next:06d}"
        self._next += 1
        return path

    # -- their end --------------------------------------------------------------------------

    def seal_due(self) -> bool:
        """Seal the parts that are to go to the compactor. Returns whether there was one."""
        due = [p for p in self.all if not p.sealed and (p.passed_over or self.idle(p))]
        return sum(self._seal(p) for p in due) > 0

    def seal_all(self) -> None:
        """Seal every part: no more rows come."""
        for part in self.all:
            part.passed_over = True  # if it cannot be sealed now, then at a later tick
            seal(part)

    def _seal(self, part: Part) -> bool:
        """Seal a part that holds something, unless a sample is arriving in it."""
        if part.sealed or not part.used or part.filling:
            return False
        seal(part)
        return part.sealed

    def idle(self, part: Part) -> bool:
        """Whether nothing came to it for a while and a compactor has been here since. Without
        one, a half-full part stays open to whatever comes."""
        now = self._clock()
        part.touched = min(part.touched, now)  # a clock that was put back: else not for hours
        if not part.used or now - part.touched < self._idle_s:
            return False
        return (self._folder / COMPACT_LOCK).stat().st_mtime >= part.touched

    def recycle(self) -> bool:
        """Make empty parts of those that a compactor has done. Returns whether there was one."""
        found = False
        for part in list(self.all):
            if part.filling or part.in_flight or not (part.path / DONE).exists():
                continue
            lock = try_lock(part.path / READ_LOCK)
            if lock is None:
                continue  # a compactor is still reading it
            memory = part.let_go()
            lock.release()
            self.all.remove(part)
            fresh, found = self._path(), True
            try:
                reset_folder(part.path, fresh)
                self.all.append(Part(fresh, self._spec, memory, self._attributes))
            except (NoSpace, OSError) as error:
                memory.close()
                shutil.rmtree(fresh, ignore_errors=True)
                if not is_full(error):
                    raise
                log.warning(
                    "%s is given up, a new part is made when there is room: %s", fresh, error
                )
        return found

    def states(self) -> Iterator[dict[str, Any]]:
        """Rows of `parts` in the status."""
        for part in self.all:
            state = "sealed" if part.sealed else "open"
            yield {
                "name": part.path.name,
                "rows": part.capacity,
                "reserved": part.used,
                "state": "done" if (part.path / DONE).exists() else state,
                "sealed_at": part.sealed_at,
            }

    def close(self) -> None:
        """End all parts and their memory."""
        for part in self.all:
            part.close()


def seal(part: Part) -> None:
    """Seal a part; without room for that it stays as it is, for the next tick or the compactor of
    a dead writer."""
    try:
        part.seal()
    except (NoSpace, OSError) as error:
        if not is_full(error):
            raise
        if not part.seal_failed:
            log.warning("%s is not sealed yet: %s", part.path, error)
        part.seal_failed = True
