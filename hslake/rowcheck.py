"""The manifest rows of live samples as `verify` reads them, and what is wrong with a row itself."""

from collections.abc import Sequence
from typing import Any

from hslake import query
from hslake.errors import InvalidInput
from hslake.lake import Lake

_PLANNED = ("source", "split", "length", "supervised_tokens")
_REQUIRED = (
    "sample_id",
    *_PLANNED,
    "segment_id",
    "token_start",
    "token_hash",
    "checksum",
    "segment_tokens",
    "inventory_digest",
)


def read(lake: Lake, sample: int | None, where: str | None) -> list[dict[str, Any]]:
    """The rows (`verify` explains the arguments), each with what the plan says as `plan_…`.

    The plan's row is that of the same tokens; without one, `plan_length` is None.
    """
    text = f"select {', '.join(_REQUIRED)} from samples"
    if where:
        text += f" where ({where}\n)"  # a comment in it ends there
    if sample:
        text += f" order by md5(sample_id) limit {int(sample)}"
    order = "md5(s.sample_id)" if sample else "s.segment_id, s.token_start"
    planned = ", ".join(f"p.{c} as plan_{c}" for c in _PLANNED)
    try:
        return query.execute(
            lake.connect(),
            f"select s.*, {planned} from ({text}) s left join plan p "
            f"on p.sample_id = s.sample_id and p.token_hash = s.token_hash order by {order}",
        ).to_pylist()
    except InvalidInput as error:
        raise InvalidInput(f"--where {where!r}: {error}" if where else str(error)) from error


def lacking(row: dict[str, Any], streams: Sequence[str]) -> str | None:
    """What the row must have and has not, so that its sample cannot be looked at; or None."""
    absent = [name for name in _REQUIRED if row[name] is None]
    if absent:
        return f"its manifest row has no {', '.join(absent)}: the manifest is damaged"
    if len(row["checksum"]) != len(streams) or None in row["checksum"]:
        return f"its manifest row has checksums {row['checksum']}, expected {len(streams)}"
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


def plan_masks(lake: Lake, members: Sequence[dict[str, Any]]) -> dict[str, list[int]]:
    """Loss masks of those samples that are planned, by id."""
    ids = [row["sample_id"] for row in members if row["plan_length"] is not None]
    if not ids:
        return {}
    found = query.execute(
        lake.connect(),
        "select sample_id, loss_mask from plan where sample_id in (select unnest($ids))",
        {"ids": ids},
    )
    return {row["sample_id"]: row["loss_mask"] for row in found.to_pylist()}
