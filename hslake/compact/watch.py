"""The compactor: staging -> verified segments -> one manifest commit each -> staging freed.

The order is the guarantee. A segment is written and checked, then the manifest names it, and only
then are parts marked DONE. A crash before the commit leaves an invisible orphan; a crash after it
leaves rows that the next look finds already live and gives up as duplicates.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hslake.compact.choose import Stopped, choose
from hslake.compact.due import Due, Waiting, backlog, due, settled
from hslake.compact.line import Line
from hslake.compact.sources import Source, Sources
from hslake.compact.trouble import Troubles
from hslake.compactreport import CompactReport
from hslake.errors import Corrupt, InvalidInput
from hslake.lake import Lake, open_lake
from hslake.picks import Doubt, Key, Pick, batches
from hslake.progress import Bar
from hslake.segment.write import workers
from hslake.staging.check import check_apart, check_no_lake
from hslake.staging.rows import PartUnavailable

log = logging.getLogger("hslake.compact")

MAX_AGE_S = 60.0
GRACE_S = 20.0
_LOOK_S = 0.1  # between looks at `stop` while waiting
_LAKE = "lake"  # key of the troubles with it


@dataclass(frozen=True)
class Options:
    """How to compact. `watch`: go on until told to stop, and gather what waits: until a segment is
    full, a sample has waited for `max_age_s`, or a live writer is short of rows or idle.

    `paranoid`: read every object back whole before its segment is committed, not only a sample of
    its bytes; `segment_tokens`: most tokens of a segment (default: the lake's geometry);
    `interval_s`: pause between looks; `grace_s`: for how long a segment that was begun may go on
    after `stop`; `threads`: that encode (default: by the cores).
    """

    watch: bool = False
    segment_tokens: int | None = None
    interval_s: float = 1.0
    max_age_s: float = MAX_AGE_S
    grace_s: float = GRACE_S
    threads: int | None = None
    paranoid: bool = False


def compact(
    lake_url: str,
    staging_roots: Sequence[str | Path],
    *,
    watch: bool = False,
    segment_tokens: int | None = None,
    progress: Bar | None = None,
    stop: Callable[[], bool] = lambda: False,
    interval_s: float = 1.0,
    max_age_s: float = MAX_AGE_S,
    grace_s: float = GRACE_S,
    threads: int | None = None,
    paranoid: bool = False,
    report: CompactReport | None = None,
    clock: Callable[[], float] = time.time,
) -> CompactReport:
    """Move every complete sample from staging into the lake; with `watch`, until `stop()`.

    The settings are those of Options. `report` is filled while it goes on, and returned. `clock`:
    Unix time. A part of another lake or model, and one that does not read, is reported and left
    alone; the others go on.

    Raises InvalidInput for a staging folder that is a lake, or lies in this one or around it.
    Without `watch`, raises Missing for a staging folder that is not there (or no lake), before
    anything is written, and what the store raises; a part or writer that cannot be read now is
    among the report's `troubles`. With `watch` such troubles, and all of the store's, are logged
    once, and tried again with growing pauses; what ends it is what waiting cannot mend: another
    lake's spec at this place, a damaged plan or manifest (InvalidInput, Corrupt), and at the start
    any error with the lake.
    """
    options = Options(watch, segment_tokens, interval_s, max_age_s, grace_s, threads, paranoid)
    roots = [Path(r) for r in staging_roots]
    return _Run(lake_url, roots, options, progress, stop, report or CompactReport(), clock).all()


class _Failed(Exception):
    """Storing or committing failed, with the error as its cause."""


class _Run:
    """One call."""

    def __init__(
        self,
        lake_url: str,
        roots: list[Path],
        options: Options,
        progress: Bar | None,
        stop: Callable[[], bool],
        report: CompactReport,
        clock: Callable[[], float],
    ) -> None:
        self._url, self._options, self._progress = lake_url, options, progress
        self._stop, self._report = stop, report
        self._troubles = Troubles()
        self._sources = Sources(roots, self._troubles, report)
        self._waiting = Waiting(options.max_age_s, clock)
        self._settled: deque[Key] = deque()  # by the line's thread
        self._bad: dict[Key, Doubt] = {}
        self._sound: set[str] = set()
        self._told: list[str] = []
        self._stopped_at: float | None = None

    def all(self) -> CompactReport:
        """Until there is nothing to do any more, or until it is to stop."""
        self._spec = open_lake(self._url).spec
        for root in self._sources.roots:
            check_no_lake(root)
            check_apart(self._url, root)
        with workers(self._options.threads) as threads:
            self._line = Line(
                threads,
                self._report,
                self._bad,
                self._settle,
                self._over,
                self._progress,
                self._options.paranoid,
            )
            try:
                while self._go_on():
                    pass
            except Stopped:
                self._report.stopped = True
            finally:
                self._line.close()
                self._sources.bury()
                self._sources.release()
                self._tell()
        return self._report

    def _go_on(self) -> bool:
        """One round; whether there is to be another."""
        if self._stopping():
            self._line.drain()
            raise Stopped
        if not self._options.watch:
            self._step()
            self._line.drain()
            self._sources.bury()
            return self._sources.untried()
        try:
            looked = not self._troubles.rests(_LAKE)
            if looked and self._step():
                return True
            if self._line.busy:
                self._pause(_LOOK_S)
                return True
            self._drained()
            if looked:
                self._troubles.mended(_LAKE)
        except Stopped:
            raise
        except _Failed as failed:
            self._in_trouble(failed.__cause__ or failed)
        except (InvalidInput, Corrupt):
            raise
        except Exception as error:
            self._in_trouble(error)
        self._tell()
        self._pause(self._options.interval_s)
        return True

    def _drained(self) -> None:
        """Nothing is due: wait for what is under way, and let go of staging."""
        try:
            self._line.drain()
        except Stopped:
            raise
        except Exception as error:
            raise _Failed from error
        self._sources.bury()
        self._sources.release()

    def _in_trouble(self, error: BaseException) -> None:
        if not isinstance(error, OSError | MemoryError) and type(error).__module__ == "builtins":
            log.warning("unexpected", exc_info=error)
        self._troubles.met(_LAKE, error)
        try:
            self._line.drain()
        except Stopped:
            raise
        except Exception as more:  # the same, most likely
            log.debug("while draining", exc_info=more)
        self._sources.release()

    # -- one look ---------------------------------------------------------------------------

    def _step(self) -> bool:
        """Look at staging, and store what is due. Whether there was anything."""
        self._report.looks += 1
        self._tell()
        self._sources.look(self._spec, watch=self._options.watch)
        under_way = self._line.under_way()  # before the lake is opened, and before what is settled
        while self._settled:
            self._waiting.known.add(self._settled.popleft())
        self._waiting.prune(self._sources.paths)
        limit = self._options.segment_tokens or self._spec.geometry.segment_tokens
        what = Due.ALL
        if self._options.watch:
            what = due(self._sources, self._waiting, under_way, limit)
        report = self._report
        report.backlog_samples, report.backlog_rows = backlog(self._sources, self._waiting)
        if what is not Due.ALL:
            self._sources.let_go_of_open()
        parts = [s for s in self._targets(what) if self._sources.hold(s)]
        if not parts:
            return False
        # Opened after the journals were read: whatever they hold was planned before that.
        lake = self._open()
        with self._sources.mutex:
            picks, known = choose(
                lake, parts, under_way, self._bad, self._sound, report, self._stopping,
                self._sources.unreadable,
            )  # fmt: skip
            self._waiting.known |= known
            self._sources.free()
        if self._progress is not None and not self._options.watch:
            self._progress.resize(sum(p.row.length for p in picks) + report.tokens)
        found = list(batches(picks, limit))
        if what is Due.FULL and found and sum(p.row.length for p in found[-1]) < limit:
            found.pop()
        for batch in found if what is not Due.NOTHING else ():
            if self._stopping():
                self._line.drain()
                raise Stopped
            self._put(lake, batch)
        return bool(found)

    def _targets(self, what: Due) -> list[Source]:
        """The parts to choose from, those first that free rows, and what has waited longest."""
        if what is Due.NOTHING:
            return settled(self._sources, self._waiting)
        parts = [s for s in self._sources.readable() if s.final or what is Due.ALL]
        return sorted(parts, key=lambda s: (not s.final, self._waiting.since(s), s.info.path))

    def _open(self) -> Lake:
        lake = open_lake(self._url)
        if lake.spec.lake_id != self._spec.lake_id:
            raise InvalidInput(
                f"{lake.url} is lake {lake.spec.lake_id} now, it was {self._spec.lake_id} when "
                "compact started: another lake was put here; start compact for the one you mean"
            )
        return lake

    def _put(self, lake: Lake, batch: list[Pick]) -> None:
        while batch:
            try:
                return self._line.put(lake, batch)
            except PartUnavailable as error:
                self._sources.unreadable(error.part, error)
                batch = [p for p in batch if p.part.path != error.part]
            except Stopped:
                raise
            except Exception as error:
                if not self._options.watch:
                    raise
                raise _Failed from error

    def _settle(self, keys: list[Key]) -> None:
        self._settled.extend(keys)
        with self._sources.mutex:
            self._sources.settle(keys, self._bad)
            self._sources.free()

    # -- stopping, telling ------------------------------------------------------------------

    def _stopping(self) -> bool:
        if self._stopped_at is None and self._stop():
            self._stopped_at = time.monotonic()
        return self._stopped_at is not None

    def _over(self) -> bool:
        """Whether the time to finish a segment in is over, too."""
        if not self._stopping() or self._stopped_at is None:
            return False
        return time.monotonic() - self._stopped_at >= self._options.grace_s

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self._stopping() and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _LOOK_S))

    def _tell(self) -> None:
        """Bring the report up to date; log what was not said before: a watching compactor's report
        would come days too late."""
        report = self._report
        report.troubles = self._troubles.messages()
        report.tries, report.last_error = self._troubles.met_count, self._troubles.last
        messages = report.messages()
        if self._options.watch:
            for message in messages:
                if message not in self._told:
                    log.warning("%s", message)
        self._told = messages
