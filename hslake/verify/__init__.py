"""Is what the manifest says exists really there, and intact?

Levels: `manifest` looks at rows, also beside the plan's, and at the objects that the store lists,
beside the inventories; `checksum` hashes every stored object too, without decoding; `full` decodes
every sample and computes again what its row says of it, and hashes the objects that hold no states.
`canary` looks at what was captured: servers' log-probs of a few samples beside their `final` rows.
docs/verify.md says what each of them finds.
"""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hslake import manifest
from hslake.errors import InvalidInput, Unavailable
from hslake.lake import Lake, open_lake
from hslake.pins import read_pins
from hslake.progress import Bar
from hslake.segment.layout import HIDDEN
from hslake.segment.read import SegmentReader
from hslake.tables import catalog
from hslake.tables.logcheck import log_differs
from hslake.verify import anomalies, canary, objects, rows, tables
from hslake.verify.objects import Problem, Segment
from hslake.verify.pool import ordered, threads_for
from hslake.verify.quarantine import hide
from hslake.verify.report import CANARY, LEVELS, Damage, VerifyReport
from hslake.verify.states import Looked, look
from hslake.verify.stored import digest_differs

__all__ = ["CANARY", "LEVELS", "Damage", "VerifyReport", "hide", "verify"]

_INDEX_BYTES = 64 << 20


def verify(
    lake_url: str,
    level: str = "full",
    sample: int | None = None,
    where: str | None = None,
    quarantine: bool = False,
    progress: Bar | None = None,
    threads: int | None = None,
    model: str | Path | None = None,
) -> VerifyReport:
    """Check the lake's live samples; with `quarantine`, hide the damaged ones from the manifest.

    `sample`: look at that many samples only, chosen by md5 of their ids; `where`: SQL over
    `samples`; `threads`: default one a core; `model`: of level canary, the folder of the model.
    Holds, beside the rows and one bit a planned token, some 30 MB a thread (level canary:
    `verify.canary.compare`).

    Raises InvalidInput for an unknown level or a condition that DuckDB refuses or no sample meets,
    Corrupt when a file of the manifest or the plan itself is damaged: nothing it says could be
    relied on. Raises Unavailable, and hides nothing, when the store or this machine refuses. Level
    canary also raises what `verify.canary.compare` does.
    """
    if level not in (*LEVELS, CANARY):
        raise InvalidInput(f"--level {level!r}: expected one of {', '.join((*LEVELS, CANARY))}")
    if model is not None and level != CANARY:
        raise InvalidInput(f"--model is of --level {CANARY}, found --level {level}: leave it out")
    begun = time.monotonic()
    lake = open_lake(lake_url)
    report = VerifyReport(level)
    count = threads or threads_for(lake.store.is_local)
    if level == CANARY:
        canary.compare(lake, model, sample, where, report, progress, count)
    else:
        _stored(lake, level, sample, where, quarantine, report, progress, count)
    if report.damage:
        _forget_removed(lake, report)
    if quarantine and report.damage:
        sure = {(d.segment_id, s): d.what for d in report.damage if d.sure for s in d.sample_ids}
        report.quarantined = hide(lake, sure) if sure else 0
    report.seconds = round(time.monotonic() - begun, 3)
    return report


def _stored(
    lake: Lake,
    level: str,
    sample: int | None,
    where: str | None,
    quarantine: bool,
    report: VerifyReport,
    progress: Bar | None,
    count: int,
) -> None:
    """Every level but canary: add what is found to `report`."""
    for table in filter(None, (lake.manifest_table(), lake.plan_table(), lake.runs_table())):
        table.check(table.digested())  # the others, page by page
        report.damage += [Damage("", what, ()) for what in log_differs(table)]
        report.warnings += tables.strays(table)
    report.damage += [Damage("", problem, ()) for problem in read_pins(lake)[1]]
    report.damage += tables.model_differs(lake)
    con = rows.select(lake, sample, where)
    try:
        report.samples, report.tokens, report.segments = rows.totals(con)
        if where and not report.samples:
            raise InvalidInput(f"--where {where!r} selects no sample of the lake")
        if progress is not None:
            progress.resize(report.tokens)
        report.damage += rows.damaged(con, lake)
        report.warnings += rows.warnings(con, lake.spec.geometry.chunk_tokens)
        report.anomalies = anomalies.count(con)
        report.warnings += anomalies.warnings(report.anomalies)
        masks = rows.plan_masks(con) if level == "full" or quarantine else {}
        decode = level != "manifest" or quarantine
        groups = list(rows.members(con, len(lake.spec.streams), decode))
        named = rows.named_segments(con)
    finally:
        con.close()
    with ThreadPoolExecutor(count) as pool:
        try:
            _objects(lake, groups, named, masks, level, quarantine, report, progress, pool, count)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _forget_removed(lake: Lake, report: VerifyReport) -> None:
    """Damage in segments that a delete or vacuum has condemned since this began is their removal:
    what stayed of their samples lies elsewhere now."""
    state = catalog.open_table(lake.store, "manifest")
    if state.version == lake.version:
        return
    spans = manifest.spans(state)
    # One with live samples is needed, whatever condemned it.
    gone = {s for s, span in spans.items() if span.condemned and span.end is not None}
    found = sorted({d.segment_id for d in report.damage} & gone)
    report.damage = [d for d in report.damage if d.segment_id not in gone]
    report.warnings += [
        f"segment {s}: it was removed while this ran, and its samples with it or to other "
        "segments: verify again to look at those"
        for s in found
    ]


def _objects(
    lake: Lake,
    groups: Sequence[tuple[str, list[dict[str, Any]]]],
    named: set[str],
    masks: dict[str, bytes],
    level: str,
    quarantine: bool,
    report: VerifyReport,
    progress: Bar | None,
    pool: ThreadPoolExecutor,
    threads: int,
) -> None:
    """Look at what is stored, and add what is wrong to `report`."""
    names = [segment_id for segment_id, _ in groups]
    listed, all_listed = objects.listing(lake.store, names, len(named), pool)
    if quarantine and groups and not listed:
        raise Unavailable(
            f"{lake.store.url('segments')} holds nothing at all, and {len(groups)} segments are "
            "expected there: is the disk mounted, the bucket restored? Nothing was hidden"
        )
    segments = {
        s.segment_id: s
        for s in ordered(pool, lambda g: objects.load(lake, *g), groups, 4 * threads)
    }
    if all_listed:
        report.warnings += objects.strays(listed, segments, named)
    problems: dict[str, list[Problem]] = {
        s.segment_id: [*s.problems, *objects.sizes_wrong(lake.store, s, listed)]
        for s in segments.values()
    }
    made = objects.templates(lake)
    for segment in segments.values():
        differs = objects.spec_differs(lake, segment, made)
        report.warnings += [differs] if differs else []
        what = "its row names another inventory digest than its segment has"
        report.damage += [Damage(segment.segment_id, what, (n,)) for n in segment.other_rows]
    if level != "manifest":
        _hash(lake, segments, problems, level, report, progress, pool, threads)
    # Which samples it costs is told by decoding them: all of them, or those that may be hit.
    todo = list(_to_decode(lake, segments, problems, report, level, quarantine))
    reader = SegmentReader(lake.store, lake.spec, _INDEX_BYTES)
    bad: set[tuple[str, str]] = set()

    def work(row: dict[str, Any]) -> Looked:
        return look(lake, reader, row, masks.get(row["sample_id"]))

    if level == "full":  # the states' own objects; the others were counted as they were hashed
        every = [o.size for s in segments.values() for o in s.objects if _of_states(o.key)]
        report.bytes, report.objects = report.bytes + sum(every), report.objects + len(every)
    for looked in ordered(pool, work, todo, 4 * threads):
        report.damage += looked.damage
        report.warnings += [looked.warning] if looked.warning else []
        if looked.damage:
            bad.add((looked.row["segment_id"], looked.row["sample_id"]))
        if progress is not None and level == "full":
            progress.advance(looked.row["length"])
    done = {(row["segment_id"], row["sample_id"]) for row in todo}
    for segment_id, found in problems.items():
        for problem in found:
            report.damage.append(_told(lake, segments[segment_id], problem, done, bad))
    if level == "manifest" and progress is not None:
        progress.advance(report.tokens)


def _hash(
    lake: Lake,
    segments: dict[str, Segment],
    problems: dict[str, list[Problem]],
    level: str,
    report: VerifyReport,
    progress: Bar | None,
    pool: ThreadPoolExecutor,
    threads: int,
) -> None:
    """Compare the digests of what is as large as it should be; at level full, of what holds no
    states: those are decoded."""

    def todo() -> Iterator[tuple[Segment, Any, bool]]:
        for segment in segments.values():
            wrong = {p.key for p in problems[segment.segment_id]}
            some = [o for o in segment.objects if o.key not in wrong]
            if level == "full":
                some = [o for o in some if not _of_states(o.key)]
            else:  # of the shards, those that the samples lie in
                some = [
                    o
                    for o in some
                    if o.key.endswith(".json") or objects.touched(lake, o.key, segment.rows)
                ]
            for o in some:
                yield segment, o, o is some[-1]

    def work(item: tuple[Segment, Any, bool]) -> tuple[Segment, Any, bool, Problem | None]:
        segment, o, last = item
        return segment, o, last, digest_differs(lake.store, segment.segment_id, o)

    for segment, o, last, problem in ordered(pool, work, todo(), 4 * threads):
        report.objects += 1
        report.bytes += o.size
        if problem is not None:
            problems[segment.segment_id].append(problem)
        if last and progress is not None and level == "checksum":
            progress.advance(sum(row["length"] for row in segment.rows))


def _of_states(key: str) -> bool:
    return key.startswith(f"{HIDDEN}/c/")


def _to_decode(
    lake: Lake,
    segments: dict[str, Segment],
    problems: dict[str, list[Problem]],
    report: VerifyReport,
    level: str,
    quarantine: bool,
) -> Iterator[dict[str, Any]]:
    """Rows whose states are to be looked at."""
    doubted = {(d.segment_id, s) for d in report.damage if not d.sure for s in d.sample_ids}
    for segment in segments.values():
        if level == "full":
            yield from segment.rows
            continue
        if level == "manifest" and not quarantine:
            continue
        keys = [p.key for p in problems[segment.segment_id]]
        hit = {r["sample_id"] for k in keys for r in objects.touched(lake, k, segment.rows)}
        for row in segment.rows:
            if row["sample_id"] in hit or (segment.segment_id, row["sample_id"]) in doubted:
                yield row


def _told(
    lake: Lake,
    segment: Segment,
    problem: Problem,
    done: set[tuple[str, str]],
    bad: set[tuple[str, str]],
) -> Damage:
    """A damaged object with the samples that it costs, or may cost if they were not decoded."""
    members = objects.touched(lake, problem.key, segment.rows)
    keys = [(segment.segment_id, row["sample_id"]) for row in members]
    if not members:
        every = {(segment.segment_id, row["sample_id"]) for row in segment.rows}
        what = f"{problem.what}; no sample needs it"
        if every <= done:
            what += f": {len(every - bad)} of the {len(every)} samples of the segment read"
            what += " back"
        return Damage(segment.segment_id, what, (), problem.key, problem.sure)
    if not all(k in done for k in keys):
        what = f"{problem.what}; it may cost {len(keys)} samples"
        return Damage(
            segment.segment_id, what, tuple(name for _, name in keys), problem.key, sure=False
        )
    lost = tuple(name for k in keys if k in bad for name in k[1:])
    what = f"{problem.what}; {len(keys) - len(lost)} of the {len(keys)} samples in it read back"
    return Damage(segment.segment_id, what, lost, problem.key, problem.sure)
