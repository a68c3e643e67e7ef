"""What a deletion concerns: ids, and every segment that holds a copy, hidden ones too."""

from collections import Counter
from dataclasses import dataclass

from hslake import manifest, query
from hslake.errors import InvalidInput
from hslake.lake import Lake

# commit_version is left out of the plan's columns: it is not that of the manifest.
_COPIES = "(select * exclude (op, reason) from manifest where op = 'add')"
_PLANNED = """(
    select * exclude (op, commit_version) from plan_log where op = 'add'
    qualify row_number() over (partition by sample_id order by commit_version desc) = 1
)"""


@dataclass(frozen=True)
class Selection:
    """`ids` are deleted; of these `live` are readable now and `planned` still planned (`tokens` of
    either). `tombstones` need one in the plan, `markers` a `delete` row in the manifest.
    `segments` hold copies and are not gone yet."""

    ids: frozenset[str]
    live: frozenset[str]
    planned: frozenset[str]
    tokens: int
    tombstones: frozenset[str]
    markers: frozenset[str]
    segments: frozenset[str]


def select(lake: Lake, where: str) -> Selection:
    """Evaluate the condition over committed copies and over the plan, be they hidden or
    tombstoned: so a second run finds what a killed one left.

    A column that only one of the two has makes that one decide. Raises InvalidInput when the
    condition works on neither, or selects nothing.
    """
    if not where.strip():
        raise InvalidInput("--where is empty: expected an SQL condition such as \"source = 'B7'\"")
    copies, first = _matching(lake, f"sample_id, segment_id from {_COPIES}", where)
    planned, second = _matching(lake, f"sample_id, null from {_PLANNED}", where)
    if first is not None and second is not None:
        raise InvalidInput(f"--where {where!r}: {first}")
    state = lake.manifest_table()
    live = dict(manifest.live(state))
    # A hidden copy alone does not select an id that has a live one, which does not match.
    matched = {(sample, segment) for sample, segment in copies if segment is not None}
    ids = {s for s, segment in matched if live.get(s, segment) == segment}
    ids |= {sample for sample, _ in planned}
    if not ids and not matched:
        raise InvalidInput(f"--where {where!r} selects no sample of the lake and its plan")
    table = state.arrow(["op", "sample_id", "segment_id"])
    marks: Counter[str] = Counter()
    holding = {segment for _, segment in matched}
    columns = (table[c].to_pylist() for c in table.column_names)
    for op, sample, segment in zip(*columns, strict=True):
        if op == "add" and sample in ids:
            holding.add(segment)
        elif op == "delete":
            marks[sample] += 1
    gone = manifest.segments(state, "condemn")
    segments = {s for s in holding if s not in gone or lake.store.list(f"segments/{s}")}
    now_planned, lengths, tombs = _plan(lake, ids)
    for row in query.run(lake, "select sample_id, length from samples").to_pylist():
        if row["sample_id"] in ids:
            lengths[row["sample_id"]] = row["length"]
    now_live = ids & live.keys()
    # Each run writes a tombstone and then a marker for the same ids: where there are more of the
    # first, it was killed in between.
    tombstones = {i for i in ids if i in now_planned or not tombs[i]}
    return Selection(
        ids=frozenset(ids),
        live=frozenset(now_live),
        planned=frozenset(now_planned),
        tokens=sum(lengths.values()),
        tombstones=frozenset(tombstones),
        markers=frozenset(tombstones | {i for i in ids if tombs[i] > marks[i]}),
        segments=frozenset(segments),
    )


def _matching(
    lake: Lake, source: str, where: str
) -> tuple[set[tuple[str, str | None]], InvalidInput | None]:
    """(sample_id, segment_id or None) of the rows that meet the condition, or DuckDB's refusal."""
    try:
        # A comment in the condition ends at the line.
        rows = query.run(lake, f"select distinct {source} where ({where}\n)")
    except InvalidInput as error:
        return set(), error
    first, second = (column.to_pylist() for column in rows.columns)
    return set(zip(first, second, strict=True)), None


def _plan(lake: Lake, ids: set[str]) -> tuple[set[str], dict[str, int], Counter[str]]:
    """Of `ids`: those planned now, their lengths, and how many tombstones each has."""
    rows = query.run(lake, "select sample_id, length from plan").to_pylist()
    lengths = {r["sample_id"]: r["length"] for r in rows if r["sample_id"] in ids}
    # Those with a generation are no deletions: the id was planned anew.
    text = (
        "select sample_id, count(*) as n from plan_log "
        "where op = 'tombstone' and generation is null group by 1"
    )
    tombs = {r["sample_id"]: r["n"] for r in query.run(lake, text).to_pylist()}
    return set(lengths), lengths, Counter({i: n for i, n in tombs.items() if i in ids})
