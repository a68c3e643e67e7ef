"""Which staged samples are stored: planned, not live, one attempt each."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from hslake import manifest
from hslake.compact.due import is_probe
from hslake.compact.sources import Source
from hslake.compactreport import CompactReport, tell
from hslake.lake import Lake
from hslake.picks import Doubt, Key, Pick, doubt, key_of, plan_rows
from hslake.staging.rows import PartUnavailable


class Stopped(Exception):
    """The compactor is to end, and nothing is half done."""


def choose(
    lake: Lake,
    sources: Iterable[Source],
    under_way: Mapping[Key, str],
    bad: dict[Key, Doubt],
    sound: set[str],
    report: CompactReport,
    stop: Callable[[], bool],
    trouble: Callable[[Path, PartUnavailable], None],
) -> tuple[list[Pick], set[Key]]:
    """What is to be stored, in order, and what needs no commit: live, unplanned or given up. A live
    sample of a former generation of the plan is stored anew.

    `lake` was opened after the journals were read: whatever they hold was planned before that; and
    after `under_way` was: samples on their way into the lake, and their ids. `bad`: what was found
    to be damaged; grows. `sound`: files of the plan that earlier calls checked.

    Sets what each source still holds. Calls `trouble` for parts that cannot be read now, from which
    nothing is taken. Raises Stopped, Corrupt for a damaged plan or manifest, and what the store
    raises.
    """
    judged = list(sources)
    complete = [
        (s, r) for s in judged for r in s.info.reserved if r.state == "complete" and not is_probe(r)
    ]
    table = lake.manifest_table() if complete else None
    held = manifest.held(table, {r.sample_id for _, r in complete}) if table else {}
    committed = manifest.attempts(table, {r.attempt for _, r in complete}) if table else set()
    # Of a live sample only a new attempt matters: it may be of a later generation of the plan.
    asked = {r.sample_id for _, r in complete if r.sample_id not in held}
    asked |= {r.sample_id for _, r in complete if r.attempt not in committed}
    plan = plan_rows(lake, asked, sound)
    # Live, and not to be replaced.
    live = {n for n, row in held.items() if n not in plan or not row.gives_way(plan[n])}
    leaving = set(under_way.values())
    picks: dict[str, Pick] = {}
    given_up: dict[Key, str] = {}
    duplicates: set[Key] = set()
    known: set[Key] = set()
    waits: set[Key] = set()  # for what becomes of another attempt, or for its part to be readable
    unread: set[Path] = set()
    for source, row in complete:
        if stop():
            raise Stopped
        key = key_of(source.info, row)
        if key in under_way:
            continue
        rival = picks.get(row.sample_id)
        if rival is not None and rival.part.path not in unread:
            try:
                if (found := doubt(rival)) is not None:  # then this attempt may be the better one
                    bad[rival.key] = found
                    given_up[rival.key] = found.reason
                    del picks[row.sample_id]
            except PartUnavailable as error:
                trouble(error.part, error)
                unread.add(error.part)
        if row.sample_id in leaving and row.sample_id not in live:
            waits.add(key)
            continue
        if row.sample_id in picks:
            waits.add(key)
            continue
        if row.sample_id in live:
            # One committed from a part that was open then, or just before a crash, is no duplicate.
            if row.attempt not in committed:
                duplicates.add(key)
            known.add(key)
            continue
        if row.attempt in committed and row.sample_id in held:
            known.add(key)  # it is what is to be replaced
            continue
        if row.sample_id not in plan:
            given_up[key] = "not in the plan"
            known.add(key)
            continue
        if source.info.path in unread:
            waits.add(key)
            continue
        pick = Pick(source.info, row, plan[row.sample_id])
        try:
            if key not in bad and (found := doubt(pick, states=False)) is not None:
                bad[key] = found
        except PartUnavailable as error:
            trouble(error.part, error)
            unread.add(error.part)
            waits.add(key)
            continue
        if key in bad:
            given_up[key] = bad[key].reason
            known.add(key)
        else:
            picks[row.sample_id] = pick
    for name in [n for n, p in picks.items() if p.part.path in unread]:
        waits.add(picks.pop(name).key)
    for key in given_up.keys() & bad.keys():
        known.add(key)
        if text := bad[key].damage:
            tell(report.damage, text)
    for source in judged:
        _judge(source, picks.values(), under_way, waits, given_up, duplicates)
        if source.info.damage:
            tell(report.damage, source.info.damage)
    report.waiting = sum(r.state == "open" for s in judged if not s.final for r in s.info.reserved)
    return list(picks.values()), known


def _judge(
    source: Source,
    picks: Iterable[Pick],
    under_way: Mapping[Key, str],
    waits: set[Key],
    given_up: Mapping[Key, str],
    duplicates: set[Key],
) -> None:
    """Write down what a source still holds, and what is to be counted when it goes."""
    path = source.info.path
    source.open = {p.key for p in picks if p.part.path == path}
    source.open |= {k for k in (*under_way, *waits) if k[0] == path}
    counts: Counter[str] = Counter()
    for row in source.info.reserved:
        key = key_of(source.info, row)
        if is_probe(row):
            continue
        if row.state != "complete":
            counts[row.reason or "writer died"] += 1
        elif key in given_up:
            counts[given_up[key]] += 1
    source.given_up = counts
    source.duplicates = sum(k[0] == path for k in duplicates)
    # What waits for another attempt is judged again when that one is settled.
    source.judged = source.final and not any(k[0] == path for k in waits)
