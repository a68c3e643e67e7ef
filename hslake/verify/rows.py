"""The manifest's rows as `verify` looks at them, and what SQL alone finds wrong with them."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import duckdb
import numpy as np

from hslake import query
from hslake.errors import InvalidInput
from hslake.lake import Lake
from hslake.verify.report import Damage
from hslake.views import SAME

_PLANNED = ("source", "split", "length", "supervised_tokens")
_REQUIRED = (
    "sample_id",
    *_PLANNED,
    "segment_id",
    "token_start",
    "token_hash",
    "checksum",
    "segment_tokens",
    "segment_raw_bytes",
    "segment_stored_bytes",
    "inventory_digest",
)
_LISTS = ("checksum", "rms", "absmax", "nonfinite")
_ALL = (*_REQUIRED, "commit_version", "rms", "absmax", "nonfinite", "mask_hash", "generation")
_OF_SEGMENT = ("segment_tokens", "segment_raw_bytes", "segment_stored_bytes", "inventory_digest")
# The table of the rows that are looked at.
LOOKED = "looked"
# All rows of the manifest, in a few columns.
LOGGED = "logged"
_LOGGED = ("op", "sample_id", "segment_id", "token_start", "length", "segment_tokens")


def select(lake: Lake, sample: int | None, where: str | None) -> duckdb.DuckDBPyConnection:
    """A connection with the rows in a table, each with what the plan says as `plan_…`.

    The plan's row is that of the same tokens and mask; `other_hash` is the plan's, when it plans
    others under the same id, and `is_former` says that it does so since: a generation of the plan
    made what is stored a former one. The view `samples` has the same rows from then on.
    Raises InvalidInput for a condition that does not work.
    """
    con = query.connect(lake)
    chosen = f"select {', '.join(_ALL)} from samples"
    if where:
        chosen += f" where ({where}\n)"  # a comment in it ends there
    if sample:
        chosen += f" order by md5(sample_id) limit {min(int(sample), 2**62)}"
    former = "coalesce(p.generation, 1) > coalesce(s.generation, 1)"
    planned = ", ".join(f"case when {SAME} then p.{c} end as plan_{c}" for c in _PLANNED)
    try:
        query.relation(con, chosen)  # one SELECT, and nothing else: `keep` takes what it is given
        query.keep(
            con,
            LOOKED,
            f"select s.*, {planned}, case when {SAME} then null else p.token_hash end as "
            f"other_hash, coalesce(not {SAME} and {former}, false) as is_former, "
            f"p.sample_id is not null as is_planned from ({chosen}) s left join "
            f"(select sample_id, token_hash, mask_hash, generation, {', '.join(_PLANNED)} "
            "from plan) p "
            "on p.sample_id = s.sample_id",
        )
        # Every mention of a view opens every file of its table again: once is enough here.
        query.keep(con, LOGGED, f"select {', '.join(_LOGGED)} from manifest")
        con.execute(f"create or replace temp view samples as select * from {LOOKED}")
    except InvalidInput as error:
        con.close()
        raise InvalidInput(f"--where {where!r}: {error}" if where else str(error)) from error
    return con


def totals(con: duckdb.DuckDBPyConnection) -> tuple[int, int, int]:
    """(samples, tokens, segments) that are looked at."""
    text = f"select count(*), coalesce(sum(length), 0), count(distinct segment_id) from {LOOKED}"
    samples, tokens, segments = con.execute(text).fetchall()[0]
    return samples, int(tokens), segments


def named_segments(con: duckdb.DuckDBPyConnection) -> set[str]:
    """Segments that a row of the manifest adds samples of, live or not."""
    text = f"select distinct segment_id from {LOGGED} where op = 'add'"
    return {row[0] for row in con.execute(text).fetchall()}


def damaged(con: duckdb.DuckDBPyConnection, lake: Lake) -> list[Damage]:
    """What is wrong with the rows themselves and beside each other."""
    found = []
    for row in _suspects(con, len(lake.spec.streams)):
        what = lacking(row, lake.spec.streams) or differing(row)
        if what:
            names = (row["sample_id"],) if row["sample_id"] and row["segment_id"] else ()
            found.append(Damage(row["segment_id"] or "", what, names))
    bad = {(d.segment_id, s) for d in found for s in d.sample_ids}
    checks = _CHECKS.format(
        chunk=lake.spec.geometry.chunk_tokens,
        token=lake.spec.bytes_per_token,
        t=LOOKED,
        logged=LOGGED,
    )
    for segment, name, what, sure in con.execute(checks).fetchall():
        if (segment, name) not in bad:  # told already, and it is why
            found.append(Damage(segment, what, (name,) if name else (), sure=sure))
    return found


def warnings(con: duckdb.DuckDBPyConnection, chunk: int) -> list[str]:
    """What is odd about the rows and costs nothing."""
    texts = con.execute(_WARNINGS.format(chunk=chunk, t=LOOKED, logged=LOGGED)).fetchall()
    return [text for count, text in texts if count]


# (segment, sample, what, sure): two samples in one place are not both wrong: their states tell.
_CHECKS = """
    with named as (
        select * from {t} where segment_id is not null and sample_id is not null
    ), placed as (
        select sample_id, segment_id, token_start, length, segment_tokens,
            max(token_start + length) over (
                partition by segment_id order by token_start, sample_id
                rows between unbounded preceding and 1 preceding
            ) as reached
        from named where token_start is not null
    )
    select segment_id, sample_id, printf('rows %d..%d overlap or leave the segment',
        token_start, token_start + length), token_start + length > segment_tokens
    from placed where token_start < reached or token_start + length > segment_tokens
    union all
    select segment_id, sample_id, printf('its rows begin at %d and are %d: expected at least one, '
        || 'from a multiple of {chunk}', token_start, length), true
    from named where length < 1 or token_start < 0 or token_start % {chunk} <> 0
    union all
    select segment_id, sample_id, 'sample is live twice', true
    from (
        select segment_id, sample_id, row_number() over (
            partition by sample_id order by commit_version, segment_id
        ) as copy
        from named where sample_id in (
            select sample_id from named group by sample_id having count(*) > 1)
    ) where copy > 1
    union all
    select segment_id, sample_id, 'its token hash is ' || token_hash || ', the plan has ' ||
        other_hash || ' under this id', true
    from named where other_hash is not null and not is_former
    union all
    select t.segment_id, t.sample_id, 'its row describes the segment in another way than the '
        || 'rows of other samples in it', false
    from named t join (
        select segment_id from named group by segment_id
        having count(distinct segment_tokens) > 1 or count(distinct segment_raw_bytes) > 1
            or count(distinct segment_stored_bytes) > 1 or count(distinct inventory_digest) > 1
    ) s using (segment_id)
    union all
    select segment_id, null, printf('its samples have %d bytes of states, the '
        || 'manifest says %d for the segment', sum(length) * {token}, any_value(segment_raw_bytes)),
        false
    from named group by segment_id having sum(length) * {token} > min(segment_raw_bytes)
    union all
    select s.segment_id, s.sample_id, 'its segment was condemned by a vacuum, which removes it',
        false
    from named s semi join {logged} c on c.segment_id = s.segment_id and c.op = 'condemn'
    order by 1, 2, 3
"""

_WARNINGS = """
    select count(*), printf('%d samples are not in the plan (the first: %s)', count(*),
        min(sample_id))
    from {t} where not is_planned
    union all
    select count(*), printf('%d samples are of a former generation of the plan, until extract has '
        || 'captured them anew (the first: %s)', count(*), min(sample_id))
    from {t} where is_former
    union all
    select count(*), printf('%d tokens of %d segments belong to no row: samples that another '
        || 'compactor committed first (vacuum never takes a part of a segment)',
        sum(free)::bigint, count(*))
    from (
        select segment_id, any_value(segment_tokens)
            - sum((length + {chunk} - 1) // {chunk} * {chunk}) as free
        from (
            select distinct segment_id, token_start, length, segment_tokens from {logged}
            where op = 'add' and segment_id in (select segment_id from {t})
        ) group by segment_id
    ) where free > 0
    union all
    select count(*), printf('%d rows hide samples that were never added (the first: %s)',
        count(*), min(h.sample_id))
    from hides h anti join {logged} m
        on m.sample_id = h.sample_id and m.segment_id = h.segment_id and m.op = 'add'
"""


def _suspects(con: duckdb.DuckDBPyConnection, streams: int) -> list[dict[str, Any]]:
    """The rows in which something is wrong, or may be."""
    other = [f"(plan_length is not null and {c} is distinct from plan_{c})" for c in _PLANNED]
    conditions = " or ".join([_lacks(streams), *other])
    text = f"select * from {LOOKED} where {conditions} order by segment_id, sample_id"
    return query.execute(con, text).to_pylist()


def _lacks(streams: int) -> str:
    """SQL for `lacking`."""
    lists = [f"len({c}) is distinct from {streams}" for c in _LISTS]
    lists += [f"list_count({c}) is distinct from {streams}" for c in _LISTS]
    return " or ".join([*(f"{c} is null" for c in _REQUIRED), *lists])


def lacking(row: dict[str, Any], streams: Sequence[str]) -> str | None:
    """What the row must have and has not, so that its sample cannot be looked at; or None."""
    absent = [name for name in _REQUIRED if row[name] is None]
    if absent:
        return f"its manifest row has no {', '.join(absent)}: the manifest is damaged"
    for name in _LISTS:
        values = row[name] or []
        if len(values) != len(streams) or None in values:
            return f"its manifest row has {name} {row[name]}, expected {len(streams)} values"
    return None


def differing(row: dict[str, Any]) -> str | None:
    """Where the row says other than the plan, which has the same sample with the same tokens."""
    if row["plan_length"] is None:
        return None
    wrong = [
        f"{name} {row[name]!r} in the manifest, {row['plan_' + name]!r} in the plan"
        for name in _PLANNED
        if row[name] != row["plan_" + name]
    ]
    return "; ".join(wrong) or None


def members(
    con: duckdb.DuckDBPyConnection, streams: int, decode: bool
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Segment by segment, the rows of it that can be looked at, by place. Without `decode`, only
    what their objects are found and compared by."""
    columns: tuple[str, ...] = ("sample_id", "segment_id", "token_start", "length", *_OF_SEGMENT)
    if decode:
        columns = (*_REQUIRED, "rms", "absmax", "nonfinite", "plan_length")
    table = query.execute(
        con,
        f"select {', '.join(columns)} from {LOOKED} where not ({_lacks(streams)}) "
        "order by segment_id, token_start, sample_id",
    ).combine_chunks()
    if not len(table):
        return
    # Names of segments as numbers: a table of a million rows is held while they are read.
    at = table.schema.get_field_index("segment_id")
    table = table.set_column(at, "segment_id", table["segment_id"].dictionary_encode())
    numbers = table["segment_id"].chunk(0).indices.to_numpy()
    starts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(table)]
    for start, end in itertools.pairwise(starts):
        rows = table.slice(start, end - start).to_pylist()
        yield rows[0]["segment_id"], rows


def plan_masks(con: duckdb.DuckDBPyConnection) -> dict[str, bytes]:
    """Loss masks in the plan of what is looked at, by sample id: eight values a byte, as
    numpy.packbits makes them. One pass over the plan; `masked` compares."""
    reader = query.relation(
        con,
        "select p.sample_id, p.loss_mask from plan p semi join "
        f"(select sample_id, token_hash, mask_hash from {LOOKED}) s on {SAME}",
    ).to_arrow_reader(1024)
    found: dict[str, bytes] = {}
    for batch in reader:
        names, masks = batch.column(0).to_pylist(), batch.column(1)
        for name, mask in zip(names, masks, strict=True):
            values = mask.values
            if values is not None:
                found[name] = packed(values.to_numpy(zero_copy_only=False))
    return found


def packed(mask: np.ndarray) -> bytes:
    """A mask as `plan_masks` keeps it. Values other than 0 and 1 do not pass for one of them."""
    if mask.dtype.kind not in "iu" or (len(mask) and (mask.min() < 0 or mask.max() > 1)):
        return b"not a mask"
    return np.packbits(mask.astype(np.uint8)).tobytes()
