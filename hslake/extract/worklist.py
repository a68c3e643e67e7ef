"""What extraction still has to ask for, from DuckDB: the plan less the manifest less staging.

Only names and lengths are held for the whole plan; token ids are read block by block.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hslake import query
from hslake.errors import InvalidInput
from hslake.extract.items import Item, Items
from hslake.lake import Lake
from hslake.server import ServerStatus

# md5 mixes lengths, so short prompts fill the tails of prefill chunks and the rate is even; it is
# the same on every machine and DuckDB version, unlike hash() and random().
DEFAULT_ORDER = "md5(sample_id)"
_SHARE = "('0x' || md5(sample_id)[1:12])::bigint"  # the same on every machine, as above


@dataclass(frozen=True)
class Worklist:
    """The plan's samples that were selected: how many, how many committed, and what lacks.

    `refused`: sample id -> why, of those that lack and that an earlier run recorded as refused."""

    planned: int
    planned_tokens: int
    committed: int
    committed_tokens: int
    missing: Items
    refused: dict[str, str]


def worklist(
    lake: Lake,
    where: str | None = None,
    order: str | None = None,
    shard: tuple[int, int] | None = None,
) -> Worklist:
    """Planned samples and, in `order`, those without a committed sample of the same tokens.

    `where` is an SQL condition and `order` an SQL ordering over the plan's columns; `shard`: (i, n)
    for the i-th of n shares, i from 1. Raises InvalidInput with DuckDB's message when one of them
    does not work.
    """
    chosen = f"(select * from plan where ({where}\n))" if where else "plan"
    by = f"{order}\n, sample_id" if order else f"{DEFAULT_ORDER}, sample_id"
    share = f"where {_SHARE} % {shard[1]} = {shard[0] - 1}" if shard else ""
    sql = f"""
        with chosen as (select * from {chosen}), marked as (
            select c.*, s.sample_id is not null as is_committed, r.reason as refused
            from (select * from chosen {share}) c
            left join samples s
              on s.sample_id = c.sample_id and s.token_hash = c.token_hash
              and coalesce(s.mask_hash = c.mask_hash, true)
            left join refusals r
              on r.sample_id = c.sample_id and r.token_hash = c.token_hash
        )
        select sample_id, source, length, token_hash, is_committed, refused
        from marked order by {by}"""
    try:
        rows = query.run(lake, sql)
    except InvalidInput as error:
        given = [f"--{k} {v!r}" for k, v in (("where", where), ("order", order)) if v]
        if not given:
            raise
        raise InvalidInput(f"{' '.join(given)}: {error}") from error
    planned, tokens = len(rows), int(pc.sum(rows["length"]).as_py() or 0)
    left = rows.filter(pc.invert(rows["is_committed"]))
    said = left.filter(pc.is_valid(left["refused"])).select(["sample_id", "refused"])
    left = left.append_column("place", pa.array(np.arange(len(left))))
    source = left.schema.get_field_index("source")
    left = left.set_column(source, "source", left["source"].dictionary_encode())
    missing = Items(left.combine_chunks())
    return Worklist(
        planned,
        tokens,
        planned - len(missing),
        tokens - missing.tokens,
        missing,
        {r["sample_id"]: r["refused"] or "no reason given" for r in said.to_pylist()},
    )


def read_ids(lake: Lake, items: Sequence[Item]) -> dict[str, pa.Array]:
    """Token ids (int32 arrays) of `items` by sample id, in one pass over the plan."""
    if not items:
        return {}
    rows = query.run(
        lake,
        "select sample_id, input_ids from plan where sample_id in (select unnest($names))",
        {"names": [item.sample_id for item in items]},
    )
    names = rows.column("sample_id").to_pylist()
    ids = rows.column("input_ids").combine_chunks()
    return {name: ids[i].values for i, name in enumerate(names)}


def of_lake(statuses: Iterable[ServerStatus], lake_id: str) -> list[ServerStatus]:
    """`statuses` with the writers of this lake only, and those of which nobody can tell; one that
    shows nothing but others' is left out.

    Another lake may have the same sample ids, and its staging may lie in the same folder: what
    waits for that one does not wait for this one.
    """
    found = []
    for status in statuses:
        raw = dict(status.raw)
        for key in ("writers", "others"):
            ours = [w for w in raw.get(key, ()) if w["lake_id"] in (None, lake_id)]
            raw[key] = ours
        if raw["writers"] or raw["others"] or not status.writers:
            names = {w["writer"] for w in (*raw["writers"], *raw["others"])}
            writers, others = (
                tuple(w for w in some if w.writer in names)
                for some in (status.writers, status.others)
            )
            found.append(replace(status, writers=writers, others=others, raw=raw))
    return found


def captured_attempts(statuses: Iterable[ServerStatus]) -> dict[str, str]:
    """attempt -> sample id of what lies complete in the staging behind these servers."""
    return {attempt: sample for attempt, (sample, _) in held_attempts(statuses).items()}


def held_attempts(statuses: Iterable[ServerStatus]) -> dict[str, tuple[str, str]]:
    """attempt -> (sample id, writer) of what lies complete in the staging behind these servers."""
    found: dict[str, tuple[str, str]] = {}
    for status in statuses:
        for writer in status.everyone:
            held = filter(writer.holder(), writer.events)
            found |= {e.attempt: (e.sample_id, writer.writer) for e in held}
    return found


def waiting_samples(lake: Lake, attempts: Mapping[str, str]) -> set[str]:
    """Sample ids among `attempts` (attempt -> sample id) that no commit has taken in yet.

    An attempt that was committed and then hidden (quarantine) is not waiting: its sample is to be
    asked for again.
    """
    done = committed_attempts(lake, attempts)
    return {sample for attempt, sample in attempts.items() if attempt not in done}


def committed_attempts(lake: Lake, attempts: Collection[str]) -> set[str]:
    """Those of `attempts` whose sample was committed, be it hidden since."""
    if not attempts:
        return set()
    rows = query.run(
        lake,
        "select distinct attempt from manifest where attempt in (select unnest($attempts))",
        {"attempts": list(attempts)},
    )
    return set(rows.column("attempt").to_pylist())
