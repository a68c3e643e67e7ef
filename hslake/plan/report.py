"""What a call to plan found and did: counts by reason, examples, tokens and bytes."""

from dataclasses import dataclass
from typing import Any

from hslake import query
from hslake.plan import decisions
from hslake.plan.decide import Decision, straddling_examples
from hslake.plan.prepare import DUPLICATE, Prepared
from hslake.spec import LakeSpec
from hslake.store import Store
from hslake.tables import catalog

_EXAMPLES = 3


@dataclass(frozen=True)
class PlanReport:
    """What a call to plan_files added or, with `dry_run`, would add. Bytes are those of states.

    `unchanged` were planned before, `deleted` were deleted from the lake and are left out,
    `repeated` are rows without an id that repeat another row exactly; `unsupervised` new samples
    have no token to train on. `rejected`: samples (of bad rows: rows) by reason; `still_planned` of
    them are planned from before and stay. `cut` samples were too long and gave `pieces`.

    A new generation: `replaced` samples are planned anew, and `superseded` are not planned any more
    as their text is cut in another way; `invalidated_committed` of both were captured, and `valid`
    of the replaced are captured already as they are to be now.

    `followed`: new samples whose prompt is in a split already, which they follow; `straddling`:
    prompts in more than one. `checked` rows had their text compared with its tokens, and of `lost`
    it does not come back. `examples`: some of each reason, by row.

    `ratio` (stored / raw) is `ratio_basis`: "measured" in this lake or "typical" of its codec and
    dtype. `plan_*` describe the whole plan with the new samples. `groups`: new samples by source
    and split.
    """

    lake: str
    dry_run: bool
    files: int
    rows: int
    added: int
    unchanged: int
    repeated: int
    deleted: int
    unsupervised: int
    rejected: dict[str, int]
    still_planned: int
    cut: int
    pieces: int
    replaced: int
    superseded: int
    invalidated_committed: int
    valid: int
    followed: int
    straddling: int
    checked: int
    lost: int
    tokens: int
    supervised_tokens: int
    longest: int
    raw_bytes: int
    forecast_stored_bytes: int
    plan_samples: int
    plan_tokens: int
    plan_raw_bytes: int
    plan_forecast_stored_bytes: int
    ratio: float
    ratio_basis: str
    groups: list[dict[str, int | str]]
    unused_columns: list[str]
    examples: list[dict[str, Any]]
    tokenizer_hash: str | None
    template_hash: str | None


_GROUPS = """
    select source, split, count(*) as samples, sum(length)::bigint as tokens,
        sum(supervised)::bigint as supervised_tokens
    from chosen where state = 'new' group by source, split order by source, split
"""
_FIGURES = """
    select
        count(*) filter (state = 'new') as added,
        count(*) filter (state = 'replaced') as replaced,
        count(*) filter (state = 'new' and supervised = 0) as unsupervised,
        count(*) filter (followed) as followed,
        coalesce(sum(length) filter (state = 'new'), 0)::bigint as tokens,
        coalesce(sum(supervised) filter (state = 'new'), 0)::bigint as supervised_tokens,
        coalesce(max(length) filter (state = 'new'), 0) as longest
    from chosen
"""
_STATES = """
    select count(*) filter (state = 'unchanged') as unchanged,
        count(*) filter (state = 'deleted') as deleted,
        count(*) filter (state = 'duplicate') as duplicate
    from decided
"""
_PLAN = """
    with left_over as (select length from planned anti join ended using (sample_id))
    select (select count(*) from left_over) + (select count(*) from chosen) as samples,
        (select coalesce(sum(length), 0) from left_over)::bigint
        + (select coalesce(sum(length), 0) from chosen)::bigint as tokens
"""


def figures(decision: Decision, prepared: Prepared) -> dict[str, Any]:
    """The fields of a report that the rows and the plan decide."""
    found = {**decision.rows(_FIGURES)[0], **decision.rows(_STATES)[0]}
    plan = decision.rows(_PLAN)[0]
    duplicates = found.pop("duplicate")
    rejected = dict(prepared.rejected)
    if duplicates:
        rejected[DUPLICATE] = duplicates
    duplicated = "select file, row, sample_id from decided where state = 'duplicate' order by n"
    examples = [
        *prepared.examples,
        *(
            {"reason": DUPLICATE, "row": decision.at(row), "sample_id": row["sample_id"]}
            for row in decision.rows(f"{duplicated} limit $count", count=_EXAMPLES)
        ),
        *(
            {"reason": "prompt in two splits", "detail": text}
            for text in straddling_examples(decision, _EXAMPLES)
        ),
    ]
    kept = decision.one("select count(*) from kept")
    return {
        **found,
        "rejected": rejected,
        "repeated": decision.one("select count(*) from heads where reason is null") - kept,
        "still_planned": decision.one(
            "select count(distinct sample_id) from heads semi join planned using (sample_id) "
            "where reason is not null"
        ),
        "superseded": decision.one("select count(*) from siblings where superseded"),
        "invalidated_committed": decision.one(decisions.CAPTURED_ENDED),
        "valid": decision.one(decisions.CAPTURED_BEGUN),
        "straddling": decision.one("select count(*) from straddling"),
        "plan_samples": plan["samples"],
        "plan_tokens": plan["tokens"],
        "groups": decision.rows(_GROUPS),
        "examples": examples,
        "rows": prepared.rows,
        "checked": prepared.checked,
        "lost": prepared.lost,
        "cut": prepared.cut,
        "pieces": prepared.pieces,
    }


def notes(decision: Decision) -> list[dict[str, Any]]:
    """What the plan decides about single samples, for `--report`."""
    told = decision.rows(
        "select file, row, sample_id, state from decided "
        "where state in ('duplicate', 'replaced', 'deleted') order by n"
    )
    kinds = {"duplicate": DUPLICATE, "replaced": "new generation", "deleted": "deleted before"}
    found = [
        {"kind": kinds[r["state"]], "row": decision.at(r), "sample_id": r["sample_id"]}
        for r in told
    ]
    ended = decision.rows("select planned from siblings where superseded order by planned")
    found += [{"kind": "not planned any more", "sample_id": r["planned"]} for r in ended]
    count = decision.one("select count(*) from straddling")
    for text in straddling_examples(decision, count):
        found.append({"kind": "prompt in two splits", "detail": text})
    return found


def ratio(store: Store, spec: LakeSpec) -> tuple[float, str]:
    """(stored / raw, where it comes from), as the named query `forecast` says."""
    files = {"manifest": catalog.open_table(store, "manifest").row_files(), "plan": []}
    sql, params = query.resolve("forecast", None)
    with query.connect_files(files, spec, query.filesystem(store)) as con:
        found = query.execute(con, sql, params).to_pylist()[0]
    return float(found["ratio"]), str(found["basis"])
