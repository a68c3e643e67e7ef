"""Segments on their way into the lake: one is encoded while those before are stored and committed.

The caller's thread encodes (on the workers); a thread of the line waits for the objects, commits
in order, and settles what was committed. A segment is in the manifest, or nothing of it counts.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from hslake import manifest
from hslake.compact.choose import Stopped
from hslake.compactreport import CompactReport
from hslake.errors import Corrupt, Missing
from hslake.lake import Lake
from hslake.manifest import Condemned, Deleted, refuse_condemned, refuse_deleted
from hslake.picks import Doubt, Key, Pick, doubt, manifest_row, segment_sample
from hslake.progress import Bar
from hslake.segment.write import Filled, SegmentInfo, Workers, fill, new_segment_id
from hslake.tables import catalog

log = logging.getLogger("hslake.compact")

_TRIES = 5  # at a segment that vacuums take away
_LOOK_S = 0.2  # between two looks whether it is over
_RATE_S = 120.0  # over which the rate is taken
REPLACED = "planned anew: another generation takes its place"
_BEHIND = 2  # segments that are being stored and committed, or wait for it


class Line:
    """`put` batches, then `drain`. `settle` is told what is in the lake, or given up, and is called
    from the line's thread. `over`: whether what is unfinished is to be abandoned now."""

    def __init__(
        self,
        threads: Workers,
        report: CompactReport,
        bad: dict[Key, Doubt],
        settle: Callable[[list[Key]], None],
        over: Callable[[], bool],
        progress: Bar | None,
        paranoid: bool = False,
    ) -> None:
        self._workers, self._report, self._bad = threads, report, bad
        self._settle, self._over, self._progress = settle, over, progress
        self._paranoid = paranoid
        self._committer = ThreadPoolExecutor(1, "commit")
        self._behind: deque[tuple[Future[None], Filled | None]] = deque()
        self._lock = threading.Lock()
        self._under_way: dict[Key, str] = {}
        self._rate = _Rate()

    def under_way(self) -> dict[Key, str]:
        """Samples that were put and are not settled yet, with their ids."""
        with self._lock:
            return dict(self._under_way)

    @property
    def busy(self) -> bool:
        """Whether something is being stored or committed."""
        return any(not f.done() for f, _ in self._behind)

    def put(self, lake: Lake, batch: list[Pick]) -> None:
        """Encode a batch and hand it on. Raises what went wrong with it or with one before it: of
        what was not committed nothing is left then. Raises Stopped when it is over."""
        self._go_on()
        with self._lock:
            self._under_way |= {p.key: p.row.sample_id for p in batch}
        try:
            while len(self._behind) >= _BEHIND:
                self._wait()
            sound, filled = self._fill(lake, batch)
        except BaseException:
            self._forget(batch)
            raise
        committed = self._committer.submit(self._commit, lake, batch, sound, filled)
        self._behind.append((committed, filled))

    def drain(self) -> None:
        """Wait until everything is committed. Raises as `put`."""
        while self._behind:
            while not self._behind[0][0].done():
                self._go_on()
                wait([self._behind[0][0]], _LOOK_S)
            self._wait()

    def close(self) -> None:
        """Give up what is not being committed yet, and end."""
        for future, filled in self._behind:
            if future.cancel() and filled is not None:
                filled.abandon()
        self._behind.clear()
        self._committer.shutdown()
        with self._lock:
            self._under_way.clear()

    def _wait(self) -> None:
        future, _ = self._behind[0]
        try:
            future.result()
        except BaseException:
            # Those behind it would meet the same trouble, each for as long as the store's patience.
            for later, filled in list(self._behind)[1:]:
                if later.cancel() and filled is not None:
                    filled.abandon()
            for later, _ in list(self._behind)[1:]:
                if not later.cancelled():
                    later.exception()
            self._behind.clear()
            with self._lock:
                self._under_way.clear()
            raise
        self._behind.popleft()

    def _forget(self, batch: list[Pick]) -> None:
        with self._lock:
            for pick in batch:
                self._under_way.pop(pick.key, None)

    def _go_on(self) -> None:
        if self._over():
            raise Stopped

    # -- one segment ------------------------------------------------------------------------

    def _fill(self, lake: Lake, batch: list[Pick]) -> tuple[list[Pick], Filled | None]:
        """The picks of a batch that are sound, and their segment; None when none is."""
        try:
            return batch, self._filled(lake, batch)
        except Corrupt:  # StatesDiffer, or a file of staging is cut short
            sound = [p for p in batch if not self._doubted(p)]
            if len(sound) == len(batch):
                raise  # staging is as it was captured: the damage was done here
            return self._fill(lake, sound) if sound else ([], None)

    def _doubted(self, pick: Pick) -> bool:
        found = doubt(pick)
        if found is not None:
            self._bad[pick.key] = found
        return found is not None

    def _filled(self, lake: Lake, batch: list[Pick]) -> Filled:
        samples = (segment_sample(p) for p in batch)
        return fill(lake.store, lake.spec, new_segment_id(), samples, self._workers, self._go_on)

    def _commit(
        self, lake: Lake, batch: list[Pick], sound: list[Pick], filled: Filled | None
    ) -> None:
        """In the line's thread: finish and commit; again under a new id when a vacuum takes the
        unfinished segment away."""
        if filled is not None:
            self._tell(self._store(lake, sound, filled))
        self._settle([p.key for p in batch])
        self._forget(batch)

    def _store(self, lake: Lake, sound: list[Pick], filled: Filled) -> list[Pick]:
        """The samples that were added."""
        for left in reversed(range(_TRIES)):
            try:
                info = _finish(filled, self._paranoid)
            except Missing as error:  # condemned, and its objects are gone already
                why: Exception = error
            else:
                try:
                    return commit(lake, sound, info, self._report)
                except Deleted as error:
                    filled.abandon()  # no commit names it, and none will
                    sound, why = self._without(sound, error.ids), error
                    if not sound:
                        return []
                except Condemned as error:
                    filled.abandon()
                    why = error
            if not left:
                raise why
            log.warning("%s; written again", why)
            filled = self._filled(lake, sound)
        raise AssertionError("unreachable")

    def _without(self, batch: list[Pick], deleted: Collection[str]) -> list[Pick]:
        """A batch less what was deleted while it was stored."""
        abandoned = self._report.abandoned
        abandoned["deleted"] = abandoned.get("deleted", 0) + len(deleted)
        return [p for p in batch if p.row.sample_id not in deleted]

    def _tell(self, added: list[Pick]) -> None:
        report, tokens = self._report, sum(p.row.length for p in added)
        report.tokens_per_s = self._rate.add(tokens)
        # Of the last look, which counted these too; the next one counts anew.
        report.backlog_samples = max(0, report.backlog_samples - len(added))
        report.backlog_rows = max(0, report.backlog_rows - tokens)
        if self._progress is not None:
            self._progress.advance(tokens)
            self._progress.note(
                f"committed {len(added):,} samples, {tokens:,} tokens, version {report.version}; "
                f"{report.tokens_per_s:,.0f} tokens/s, backlog {report.backlog_samples:,} samples, "
                f"{report.backlog_rows:,} tokens"
            )


class _Rate:
    """Tokens a second of late."""

    def __init__(self) -> None:
        self._commits: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])

    def add(self, tokens: int) -> float:
        """The rate over the last minutes, this commit included."""
        now = time.monotonic()
        self._commits.append((now, tokens))
        while len(self._commits) > 2 and self._commits[1][0] < now - _RATE_S:
            self._commits.popleft()
        since = self._commits[0][0]  # the end of what came before those that count
        return sum(n for _, n in list(self._commits)[1:]) / max(now - since, 1e-3)


def _finish(filled: Filled, paranoid: bool) -> SegmentInfo:
    try:
        return finish(filled, paranoid)
    except BaseException:
        filled.abandon()
        raise


def finish(filled: Filled, paranoid: bool = False) -> SegmentInfo:
    """Wait for a segment's objects, confirm them, write its inventory."""
    return filled.finish(paranoid)


def commit(lake: Lake, batch: list[Pick], info: SegmentInfo, report: CompactReport) -> list[Pick]:
    """Commit a stored segment; those of its samples that were not live by then, or live of a former
    generation of the plan: that row is hidden in the same commit.

    When it fails the objects stay, an orphan for a vacuum: a commit whose answer was lost may still
    arrive, and what it names must be there. (It cannot once the segment was condemned.)
    """
    starts = dict(info.placements)
    added: list[Pick] = []
    replaced: list[str] = []

    def build(state: catalog.TableState) -> pa.Table | None:
        refuse_condemned(state, info.segment_id)
        # `lake` says what was planned: whatever was deleted since must not come back.
        refuse_deleted(state, starts.keys(), lake.version)
        held = manifest.held(state, starts.keys())
        added[:] = [p for p in batch if _is_wanted(held.get(p.row.sample_id), p)]
        replaced[:] = [p.row.sample_id for p in added if p.row.sample_id in held]
        return manifest.rows(
            [
                *_hides(state, {name: held[name].segment_id for name in replaced}),
                *(manifest_row(p, starts[p.row.sample_id], info) for p in added),
            ]
        )

    report.version = catalog.commit(lake.store, "manifest", build, f"segment-{info.segment_id}")
    report.segments += 1
    report.replaced += len(replaced)
    report.samples += len(added)
    report.tokens += sum(p.row.length for p in added)
    report.raw_bytes += info.raw_bytes
    report.stored_bytes += info.stored_bytes
    report.committed_at = time.time()
    return list(added)


def _is_wanted(held: manifest.Held | None, pick: Pick) -> bool:
    return held is None or held.gives_way(pick.plan)


def _hides(state: catalog.TableState, segments: Mapping[str, str]) -> list[dict[str, Any]]:
    """Rows that hide these samples in their segments."""
    if not segments:
        return []
    now = datetime.now(UTC)
    return [
        {**row, "op": "hide", "committed_at": now, "reason": REPLACED}
        for row in manifest.add_rows(state, segments.keys())
        if row["segment_id"] == segments[row["sample_id"]]
    ]
