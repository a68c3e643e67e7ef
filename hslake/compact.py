"""The compactor: staging -> verified segments -> one manifest commit -> staging freed.

The order is the guarantee. A segment is written and checked, then the manifest names it, and only
then are parts marked DONE. A crash before the commit leaves an invisible orphan; a crash after it
leaves rows that the next pass finds already live and gives up as duplicates.
"""

import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from hslake import catalog, manifest
from hslake.compactreport import CompactReport, tell
from hslake.errors import Conflict, Corrupt, InvalidInput, Missing
from hslake.ids import PROBE_PREFIX
from hslake.lake import Lake, open_lake
from hslake.ownership import is_ours, take, tell_closed, tell_lockless
from hslake.picks import Doubt, Pick, batches, doubt, manifest_row, plan_rows, segment_sample
from hslake.progress import Bar
from hslake.segment.write import StatesDiffer, new_segment_id, write_segment
from hslake.spec import LakeSpec, read_spec
from hslake.staging.check import check_part
from hslake.staging.folder import COMPACT_LOCK, remove_remains, remove_writer
from hslake.staging.locks import Lock, try_lock
from hslake.staging.part import (
    DONE,
    JOURNAL,
    METADATA,
    READ_LOCK,
    SEALED,
    PartInfo,
    Reserved,
    lost_journal,
)
from hslake.staging.reader import (
    WriterDir,
    part_attributes,
    read_part,
    scan,
)

log = logging.getLogger("hslake.compact")

DAMAGED = "damaged"  # folder of a staging root: journals that were cut short, for people to look at
_TRIES = 5  # at a segment that vacuums take away
_LOOK_S = 0.1  # between looks at `stop` while waiting


class Condemned(Conflict):
    """A vacuum has condemned a segment that was about to be committed."""


class _Stopped(Exception):
    """`stop` said so, between two segments."""


@dataclass
class _Source:
    """A part under this pass: its shared lock, what its journal says, whose it is."""

    info: PartInfo
    lock: Lock
    final: bool  # no more rows can come: sealed, or its writer is dead
    freed: bool = False


def compact(
    lake_url: str,
    staging_roots: Sequence[str | Path],
    *,
    watch: bool = False,
    segment_tokens: int | None = None,
    progress: Bar | None = None,
    stop: Callable[[], bool] = lambda: False,
    interval_s: float = 1.0,
) -> CompactReport:
    """Move every complete sample from staging into the lake; with `watch`, until `stop()`.

    `watch` leaves a live writer's part until it is sealed (full, or idle for some seconds): taken
    as they come, samples would end in a segment and a commit each. Without it everything complete
    is taken. `stop` is asked between segments. A part of another lake or model, and one that does
    not read, is reported and left alone; the others go on. Raises Missing for a staging folder that
    is not there (or no lake), before anything is written, Corrupt for a damaged plan.
    """
    report, roots = CompactReport(), [Path(r) for r in staging_roots]
    sound: set[str] = set()
    told: list[str] = []
    while True:
        try:
            _pass(lake_url, roots, watch, segment_tokens, progress, sound, report, stop)
        except _Stopped:
            report.stopped = True
            return report
        finally:
            if watch:  # for days: the report would come too late
                _log_new(report.messages(), told)
        if not watch or _stops_within(interval_s, stop):
            report.stopped = watch
            return report


def _log_new(messages: list[str], told: list[str]) -> None:
    """Log what was not said at the last pass."""
    for message in messages:
        if message not in told:
            log.warning("%s", message)
    told[:] = messages


def _stops_within(seconds: float, stop: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while not stop():
        left = end - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(left, _LOOK_S))
    return True


def _pass(
    lake_url: str,
    roots: list[Path],
    watch: bool,
    segment_tokens: int | None,
    progress: Bar | None,
    sound: set[str],
    report: CompactReport,
    stop: Callable[[], bool],
) -> None:
    """`sound`: files of the plan that earlier passes checked."""
    spec = read_spec(lake_url)
    writers = [w for root in roots for w in scan(root)]
    for root in roots:
        remove_remains(root)
    report.skipped = []
    held: list[Lock] = []
    dead: set[Path] = set()
    mine: list[WriterDir] = []
    sources: list[_Source] = []
    try:
        for found in writers:
            if found.closed is not None:
                tell_closed(found.path, found.closed, report)
                continue
            # Before any of its locks: what is touched here tells a writer that its own compactor
            # is there, and a held lock keeps that one away.
            if not is_ours(found, spec, report):
                continue
            try:
                writer = take(found, held, dead, report)
            except PermissionError as error:
                tell_closed(found.path, str(error), report)
                continue
            if writer is not None:
                mine.append(writer)
                sources += _sources(writer, writer.path in dead, watch, spec, report)
        # Opened after the journals were read: whatever they hold was planned before that.
        lake = open_lake(lake_url)
        wanted = _choose(lake, sources, sound, report, stop)
        left = Counter(pick.part.path for pick in wanted)
        _free(s for s in sources if not left[s.info.path])
        for batch in batches(wanted, segment_tokens or lake.spec.geometry.segment_tokens):
            if stop():
                raise _Stopped
            _publish(lake, batch, report, progress)
            left -= Counter(pick.part.path for pick in batch)
            # At once: a live writer may be waiting for the room.
            _free(s for s in sources if not left[s.info.path])
        for writer in mine:
            if writer.path not in dead:
                os.utime(writer.path / COMPACT_LOCK)  # tells the writer that a compactor is there
            elif all((p / DONE).exists() for p in writer.parts):
                _tell_lost(writer, report)
                remove_writer(writer.path)
    finally:
        for source in sources:
            if not source.freed:
                source.lock.release()
        for lock in held:
            lock.release()


def _tell_lost(writer: WriterDir, report: CompactReport) -> None:
    for path in sorted(writer.path.glob("part-*")):
        if lost_journal(path):
            tell(
                report.damage,
                f"{path / JOURNAL} is gone, and with it what the part held: removed; extract asks "
                "for its samples again",
            )


def _sources(
    writer: WriterDir, dead: bool, watch: bool, spec: LakeSpec, report: CompactReport
) -> list[_Source]:
    found = []
    for path in writer.parts:
        if (path / DONE).exists():
            continue
        lock = try_lock(path / READ_LOCK, shared=True)
        if lock is None:
            tell_lockless(path, report)
            continue  # being recycled
        try:
            check_part(path, part_attributes(path), spec)
            if dead or not watch or (path / SEALED).exists():
                info = read_part(path, dead=dead)
                found.append(_Source(info, lock, info.sealed or dead))
                continue
        except InvalidInput as error:
            tell(report.refused, f"{error}; refused and left alone")
        except Corrupt as error:
            tell(report.damage, f"{error}; left alone")
        lock.release()
    return found


def _choose(
    lake: Lake,
    sources: list[_Source],
    sound: set[str],
    report: CompactReport,
    stop: Callable[[], bool],
) -> list[Pick]:
    """Complete samples that are planned and not live, one attempt each; the rest is counted."""
    complete = [(s, r) for s in sources for r in s.info.reserved if r.state == "complete"]
    table = lake.manifest_table() if complete else None
    live = manifest.live_ids(table) if table else set()
    committed = manifest.attempts(table, {r.attempt for _, r in complete}) if table else set()
    plan = plan_rows(lake, {r.sample_id for _, r in complete} - live, sound)
    picks: dict[str, Pick] = {}
    abandoned: Counter[str] = Counter(report.abandoned)
    for source, row in complete:
        if stop():
            raise _Stopped
        rival = picks.get(row.sample_id)
        if rival is not None and (found := doubt(rival)) is not None:
            _give_up(rival, found, report, abandoned)  # then this attempt may be the better one
            del picks[row.sample_id]
        if row.sample_id in live or row.sample_id in picks:
            # One committed from a part that was open then, or just before a crash, is no duplicate.
            report.duplicates += source.final and row.attempt not in committed
            continue
        if row.sample_id not in plan:
            if source.final and not _is_probe(row):
                abandoned["not in the plan"] += 1
            continue
        pick = Pick(source.info, row, plan[row.sample_id], source.final)
        found = doubt(pick, states=False)
        if found is None:
            picks[row.sample_id] = pick
        else:
            _give_up(pick, found, report, abandoned)
    for source in sources:
        if source.final:
            abandoned.update(
                r.reason or "writer died"
                for r in source.info.reserved
                if r.state != "complete" and not _is_probe(r)
            )
        if source.info.damage:
            tell(report.damage, source.info.damage)
    report.abandoned = dict(abandoned)
    report.waiting = sum(r.state == "open" for s in sources if not s.final for r in s.info.reserved)
    return list(picks.values())


def _give_up(pick: Pick, why: Doubt, report: CompactReport, abandoned: dict[str, int]) -> None:
    if why.damage:
        tell(report.damage, why.damage)
    # Counted once, when the part goes: a live writer's open part is read on every pass.
    if pick.final and not _is_probe(pick.row):
        abandoned[why.reason] = abandoned.get(why.reason, 0) + 1


def _is_probe(row: Reserved) -> bool:
    return row.sample_id.startswith(PROBE_PREFIX)


def _publish(lake: Lake, batch: list[Pick], report: CompactReport, progress: Bar | None) -> None:
    """Store a batch; again under a new id when a vacuum takes the unfinished segment away, and
    without the samples that are damaged in staging."""
    for left in reversed(range(_TRIES)):
        try:
            return _publish_once(lake, batch, report, progress)
        except StatesDiffer:
            sound = _sound(batch, report)
            if len(sound) == len(batch):
                raise  # staging is as it was captured: the damage was done here
            return _publish(lake, sound, report, progress) if sound else None
        except (Condemned, Missing) as error:  # condemned, or its objects are gone already
            if not left:
                raise
            log.warning("%s; written again", error)


def _sound(batch: list[Pick], report: CompactReport) -> list[Pick]:
    """The picks whose states are what their writer captured; the others are given up."""
    found = [(pick, doubt(pick)) for pick in batch]
    for pick, why in found:
        if why is not None:
            _give_up(pick, why, report, report.abandoned)
    return [pick for pick, why in found if why is None]


def _publish_once(
    lake: Lake, batch: list[Pick], report: CompactReport, progress: Bar | None
) -> None:
    info = write_segment(
        lake.store, lake.spec, new_segment_id(), (segment_sample(p) for p in batch)
    )
    starts = dict(info.placements)
    added: list[Pick] = []

    def build(state: catalog.TableState) -> pa.Table | None:
        refuse_condemned(state, info.segment_id)
        live = manifest.live_ids(state)
        added[:] = [p for p in batch if p.row.sample_id not in live]
        return manifest.rows(manifest_row(p, starts[p.row.sample_id], info) for p in added)

    report.version = catalog.commit(lake.store, "manifest", build, f"segment-{info.segment_id}")
    report.segments += 1
    report.samples += len(added)
    report.tokens += sum(p.row.length for p in added)
    report.raw_bytes += info.raw_bytes
    report.stored_bytes += info.stored_bytes
    if progress is not None:
        tokens = sum(p.row.length for p in added)
        progress.advance(tokens)
        progress.note(
            f"committed {len(added):,} samples, {tokens:,} tokens, version {report.version}"
        )


def refuse_condemned(state: catalog.TableState, segment_id: str) -> None:
    """Raise Condemned when a vacuum took the segment for an orphan: it must be written again."""
    if segment_id in manifest.segments(state, "condemn"):
        raise Condemned(
            f"segment {segment_id} was condemned by a vacuum before it was committed: run compact "
            "again, the samples are still in staging"
        )


def _free(sources: Iterable[_Source]) -> None:
    """Mark the parts DONE to which no row can come any more and of which all is settled, and let
    them go. May be called again with the same ones.

    Also one with a damaged journal, or a live writer's staging would fill: what the damage hid is
    captured again, and the journal is kept aside.
    """
    for source in sources:
        if not source.final or source.freed:
            continue
        path = source.info.path
        if source.info.damage:
            _keep_journal(path)
        (path / DONE).touch()
        source.lock.release()
        source.freed = True


def _keep_journal(path: Path) -> None:
    """Keep a damaged journal aside: linked, as staging may be full."""
    aside = path.parent.parent / DAMAGED / f"{path.parent.name}.{path.name}"
    try:
        aside.mkdir(parents=True, exist_ok=True)
        for name in (JOURNAL, METADATA):
            with contextlib.suppress(FileExistsError):
                os.link(path / name, aside / name)
    except OSError as error:
        log.warning("%s is not kept aside: %s", path / JOURNAL, error)
