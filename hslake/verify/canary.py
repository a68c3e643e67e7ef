"""Level `canary`: log-probs that servers told of prompts, made again from the stored `final` rows.

Rows of many samples go through the LM head together, as many as fit `_ROW_BYTES`, so the head is
read a few times in all, whatever the number of samples.
"""

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np

from hslake import query
from hslake.checksum import to_float32
from hslake.errors import Corrupt, HslakeError, InvalidInput, Missing
from hslake.fingerprint import check_fingerprint, model_fingerprint
from hslake.lake import Lake
from hslake.lmhead import LmHead, Unsupported, find_head, next_log_probs, tolerance
from hslake.progress import Bar
from hslake.segment.read import SegmentReader
from hslake.streams import FINAL
from hslake.verify.agreement import (
    Agreement,
    Canary,
    Compared,
    Group,
    Tally,
    hour_of,
    judge,
    sample_text,
    worst_of,
)
from hslake.verify.media import broken
from hslake.verify.pool import ordered
from hslake.verify.report import Damage, VerifyReport

_ROW_BYTES = 256 << 20  # of rows as they go through the head
_INDEX_BYTES = 64 << 20
_WORST = 20

_LIVE = """
    select s.sample_id, s.segment_id, s.token_start, s.length, s.source, c.server, c.run_id,
        c.asked_at, c.first_position, c.log_probs
    from ({chosen}) s join canaries c
        on c.sample_id = s.sample_id and c.token_hash = s.token_hash and c.attempt = s.attempt
    qualify row_number() over (partition by s.sample_id order by c.asked_at) = 1
"""
_UNLIKE = """
    select count(*) from canaries c anti join samples s
        on c.sample_id = s.sample_id and c.token_hash = s.token_hash and c.attempt = s.attempt
"""


@dataclass(frozen=True)
class _Rows:
    """What was read of one canary's sample: `final` [n, hidden] as it is stored and the token ids
    [n + 1] that go with it; or what is wrong."""

    canary: Canary
    rows: np.ndarray | None = None
    ids: np.ndarray | None = None
    damage: Damage | None = None


def compare(
    lake: Lake,
    model: str | Path | None,
    sample: int | None,
    where: str | None,
    report: VerifyReport,
    progress: Bar | None,
    threads: int,
) -> None:
    """Compare the lake's canaries with its rows, and add what is found to `report`.

    `sample`: so many canaries only, chosen by md5 of the sample ids; `where`: SQL over `samples`.
    Holds the log-probs, twice `_ROW_BYTES` and 100 MB a thread. Raises InvalidInput (no `final`
    stream or model, another model, a bad condition), Missing (no canary to compare), Unsupported
    (an LM head that cannot be applied: then nothing was judged).
    """
    head, sure = _head(lake, model, report)
    canaries, unlike = _select(lake, sample, where)
    canaries = _fitting(canaries, report)
    if not canaries:
        others = f" ({unlike:,} are of attempts that are not live)" if unlike else ""
        some = f" that --where {where!r} selects" if where else ""
        raise Missing(
            f"{lake.url} has no canary of a live sample{some}{others}: nothing can be compared. "
            "`hslake extract` records them unless --no-canary is given, and servers that refuse "
            "log-probs give none"
        )
    report.samples = len(canaries)
    report.tokens = sum(len(c.told) for c in canaries)
    report.segments = len({c.segment_id for c in canaries})
    if progress is not None:
        progress.resize(report.tokens)
    found = Agreement(str(model), sure, unlike=unlike)
    report.agreement = found
    every, groups = Tally(), dict[tuple[str, str, datetime], Tally]()
    compared: list[Compared] = []
    with ThreadPoolExecutor(threads) as pool:
        for batch in _batches(canaries, lake):
            read = _read(lake, batch, pool, threads, report)
            for one, told, made in _through(head, read, lake, progress):
                compared.append(one)
                every.add(one, told, made)
                key = one.server, one.run_id, hour_of(one.asked_at)
                groups.setdefault(key, Tally()).add(one, told, made)
    if not compared:
        return  # nothing reads: the damage says so
    found.figures = every.total()
    found.groups = [Group(*key, groups[key].total()) for key in sorted(groups)]
    found.worst = worst_of(compared, _WORST)
    _verdict(found, compared, lake, report)


def _verdict(
    found: Agreement, compared: Sequence[Compared], lake: Lake, report: VerifyReport
) -> None:
    """What disagrees is damage; that others agree may mean nothing."""
    for one in compared:
        if not one.agrees:
            what = sample_text(one, lake.spec.dtype)
            # Never hidden when it is most of them: then it is not the samples.
            sure = not found.most_disagree
            report.damage.append(Damage(one.segment_id, what, (one.sample_id,), sure=sure))
    found.untelling = sum(one.agrees and not one.telling for one in compared)
    if found.untelling == len(compared):
        raise Unsupported(
            f"all {len(compared)} canaries agree, and with rows shifted by one they would as well: "
            "nothing can be said. Random weights (--load-format dummy) look like this, or prompts "
            "that end in the same token many times"
        )
    if found.untelling:
        report.warnings.append(
            f"{found.untelling} of {len(compared)} samples agree, and with rows shifted by one "
            "they would as well: they say nothing"
        )


def _head(lake: Lake, model: str | Path | None, report: VerifyReport) -> tuple[LmHead, bool]:
    """The LM head of the lake's model, and whether the folder is known to be that model's."""
    if not lake.spec.has_final:
        raise InvalidInput(
            f"{lake.url} has no `final` stream (it has {', '.join(lake.spec.streams)}): canaries "
            "compare that one"
        )
    if model is None:
        raise InvalidInput(
            "--level canary: give the folder of the model that the servers ran with --model DIR; "
            "the LM head in it makes log-probs of the stored rows"
        )
    if not Path(model).is_dir():
        raise Missing(f"--model {model}: there is no such folder")
    lakes, have = lake.spec.model.fingerprint, dict[str, str | None]()
    try:
        have = model_fingerprint(model)
    except (Missing, Corrupt) as error:  # one file of many may be all that is here
        report.warnings.append(f"whether --model is the lake's model could not be told: {error}")
    else:
        check_fingerprint(lakes, have, f"--model {model}")
    try:
        head = find_head(model)
    except (HslakeError, OSError, KeyError, ValueError) as error:
        raise Unsupported(f"canaries cannot be checked: {error}") from error
    if head.weight.shape[1] != lake.spec.hidden_size:
        raise InvalidInput(
            f"--model {model}: its LM head is for hidden size {head.weight.shape[1]}, the lake's "
            f"is {lake.spec.hidden_size}: name the folder that the servers ran"
        )
    return head, bool(have.get("weights") and lakes.get("weights"))


def _select(lake: Lake, sample: int | None, where: str | None) -> tuple[list[Canary], int]:
    """(canaries of live samples by place, how many canaries of the lake are of other attempts)."""
    # A comment in the condition ends at the line's end.
    chosen = "select * from samples" + (f" where ({where}\n)" if where else "")
    few = f"order by md5(sample_id) limit {min(int(sample), 2**62)}" if sample else ""
    with query.connect(lake) as con:
        try:
            query.relation(con, chosen)  # one SELECT, and nothing else
            some = f"select * from ({_LIVE.format(chosen=chosen)}) {few}"
            rows = query.execute(con, f"select * from ({some}) order by segment_id, token_start")
        except InvalidInput as error:
            raise InvalidInput(f"--where {where!r}: {error}" if where else str(error)) from error
        unlike = con.execute(_UNLIKE).fetchall()[0][0]
    found = []
    for batch in rows.to_batches(max_chunksize=4096):
        told = batch.column(batch.schema.get_field_index("log_probs"))
        for i, row in enumerate(batch.drop_columns(["log_probs"]).to_pylist()):
            values = np.asarray(told[i].values, np.float32) if told[i].is_valid else np.empty(0)
            found.append(
                Canary(
                    row["sample_id"],
                    row["segment_id"],
                    row["token_start"],
                    row["length"],
                    row["server"] or "",
                    row["run_id"],
                    row["asked_at"],
                    row["first_position"] or 0,
                    values,
                )
            )
    return found, int(unlike)


def _fitting(canaries: list[Canary], report: VerifyReport) -> list[Canary]:
    """Those with a log-prob for each position from their first one on."""

    def fits(c: Canary) -> bool:
        return c.first >= 1 and 0 < len(c.told) == c.length - c.first

    fit = [c for c in canaries if fits(c)]
    if len(fit) < len(canaries):
        odd = next(c.sample_id for c in canaries if not fits(c))
        report.warnings.append(
            f"{len(canaries) - len(fit)} canaries are not compared: they have not one log-prob for "
            f"each position to their sample's end (the first: {odd})"
        )
    return fit


def _batches(canaries: Sequence[Canary], lake: Lake) -> Iterator[list[Canary]]:
    """As many at a time as fit `_ROW_BYTES`."""
    # Next to the float32 rows, float32 lakes have them in float64.
    size = lake.spec.hidden_size * (12 if lake.spec.dtype == "float32" else 4)
    most, some, held = max(1, _ROW_BYTES // size), list[Canary](), 0
    for canary in canaries:
        if some and held + len(canary.told) > most:
            yield some
            some, held = [], 0
        some.append(canary)
        held += len(canary.told)
    if some:
        yield some


def _read(
    lake: Lake,
    canaries: Sequence[Canary],
    pool: ThreadPoolExecutor,
    threads: int,
    report: VerifyReport,
) -> list[_Rows]:
    """The rows that go with canaries; those that do not read are damage."""
    reader = SegmentReader(lake.store, lake.spec, _INDEX_BYTES)

    def read(canary: Canary) -> _Rows:
        place = canary.segment_id, canary.token_start, canary.length
        try:
            rows = reader.rows(*place, [FINAL], slice(canary.first - 1, canary.length - 1))
            ids, _ = reader.tokens(*place, rows=slice(canary.first - 1, canary.length))
        except (Corrupt, Missing, InvalidInput) as error:
            where = canary.segment_id, str(error), (canary.sample_id,)
            return _Rows(canary, damage=Damage(*where, getattr(error, "object", "")))
        except Exception as error:
            fails = broken(error)
            if fails is None:
                raise
            damage = Damage(canary.segment_id, fails, (canary.sample_id,), sure=False)
            return _Rows(canary, damage=damage)
        return _Rows(canary, rows[0], ids.astype(np.int64))

    found = list(ordered(pool, read, canaries, 4 * threads))
    report.damage += [r.damage for r in found if r.damage is not None]
    return [r for r in found if r.damage is None]


def _through(
    head: LmHead, read: Sequence[_Rows], lake: Lake, progress: Bar | None
) -> Iterator[tuple[Compared, np.ndarray, np.ndarray]]:
    """Each with both log-probs, float64: one pass over the head for all."""
    if not read:
        return
    counts = [len(r.canary.told) for r in read]
    rows = np.empty((sum(counts), lake.spec.hidden_size), np.float32)
    targets = np.empty((len(rows), 2), np.int64)
    starts = [0, *itertools.accumulate(counts)]
    for at, r in zip(starts, read, strict=False):
        assert r.rows is not None and r.ids is not None
        end = at + len(r.rows)
        rows[at:end] = to_float32(r.rows, lake.spec.dtype)
        targets[at:end] = np.stack([r.ids[1:], r.ids[:-1]], axis=1)
    done = 0.0

    def tell(share: float) -> None:
        nonlocal done
        if progress is not None:
            progress.advance((share - done) * len(rows))
        done = share

    try:
        made = next_log_probs(head, rows, targets, lake.spec.dtype, tell)
    except Unsupported as error:
        raise Unsupported(f"canaries cannot be checked: {error}") from error
    allowed = tolerance(lake.spec.dtype, made.peaks)
    for at, end, r in zip(starts, starts[1:], read, strict=False):
        values, shifted = made.values[at:end, 0], made.values[at:end, 1]
        one = judge(r.canary, values, shifted, allowed[at:end])
        yield one, r.canary.told.astype(np.float64), values
