"""Staged samples on their way into the lake: each beside its row of the plan, and what speaks
against it; then the row that commits it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from hslake import query
from hslake.checksum import rows_checksum, to_int64
from hslake.errors import Corrupt, InvalidInput
from hslake.ids import token_hash
from hslake.lake import Lake
from hslake.segment.write import SegmentInfo, SegmentSample
from hslake.staging.part import PartInfo, Reserved
from hslake.staging.rows import StagedRows, staged_rows


@dataclass(frozen=True)
class Pick:
    """A complete sample in staging and its row of the plan."""

    part: PartInfo
    row: Reserved
    plan: dict[str, Any]

    @property
    def key(self) -> "Key":
        """What tells it from every other one."""
        return key_of(self.part, self.row)


Key = tuple[Path, str, int]  # part, attempt, incarnation


def key_of(part: PartInfo, row: Reserved) -> Key:
    """What tells a reservation from every other one: parts are never called the same again."""
    return part.path, row.attempt, row.incarnation


@dataclass(frozen=True)
class Doubt:
    """Why a staged sample must not be stored. `damage`: what to tell, when something is broken."""

    reason: str
    damage: str | None = None


def plan_rows(lake: Lake, ids: set[str], sound: set[str]) -> dict[str, dict[str, Any]]:
    """Rows of the plan by sample id; of a later generation, with the token hashes of all as
    `former`. `sound`: files of it that were checked; grows.

    DuckDB checks no page checksums, and a loss mask has no other copy to be compared with: the
    plan's files are checked before it reads them. Raises Corrupt.
    """
    if not ids:
        return {}
    lake.plan_table().check(sound)
    found = query.execute(
        lake.connect(),
        "select sample_id, source, split, length, supervised_tokens, token_hash, loss_mask, "
        "mask_hash, coalesce(generation, 1) as generation "
        "from plan where sample_id in (select unnest($ids))",
        {"ids": sorted(ids)},
    )
    rows = {row["sample_id"]: row for row in found.to_pylist()}
    anew = sorted(name for name, row in rows.items() if row["generation"] > 1)
    if anew:  # what is staged may be of what was planned before
        former = query.execute(
            lake.connect(),
            "select sample_id, list(distinct token_hash) as hashes from plan_log "
            "where op = 'add' and sample_id in (select unnest($ids)) group by sample_id",
            {"ids": anew},
        )
        for row in former.to_pylist():
            rows[row["sample_id"]]["former"] = row["hashes"]
    return rows


def doubt(pick: Pick, *, states: bool = True) -> Doubt | None:
    """Why a staged sample must not be stored, or None: RAM and other processes err too.

    Without `states` they are not read: `fill` compares what it has encoded with the writer's
    checksum, and raises StatesDiffer. Raises PartUnavailable when staging cannot be read now.
    """
    plan, row = pick.plan, pick.row
    name = f"sample {row.sample_id!r} in {pick.part.path}"
    if plan["length"] != row.length:  # the journal has a CRC: it was planned anew since
        former = "former" in plan
        return Doubt(
            "of a former generation of the plan" if former else "tokens differ from the plan"
        )
    if not mask_fits(plan["loss_mask"], plan["length"], plan["supervised_tokens"]):
        return Doubt(
            "loss mask damaged",
            f"{name}: its loss mask in the plan does not have its {plan['length']} values with "
            f"{plan['supervised_tokens']} ones: the plan is damaged, restore its files from a copy",
        )
    try:
        hidden, staged_ids = staged_rows(pick.part, row)
        ids = staged_ids.read()
        for stream in hidden:
            stream.check()
        found = token_hash(ids)
        fits = found == plan["token_hash"]
        same = not states or [_checksum(stream) for stream in hidden] == list(row.checksum)
    except (Corrupt, InvalidInput) as error:
        return Doubt("rows do not read", f"{name}: {error}")
    if not fits and found in plan.get("former", ()):
        return Doubt("of a former generation of the plan")
    if not fits:
        return Doubt(
            "tokens differ from the plan",
            f"{name}: its input_ids are not the plan's: staging is damaged, or the sample was "
            "planned anew with other tokens; given up",
        )
    if not same:
        return Doubt(
            "checksum differs from the writer's",
            f"{name}: its states differ from the checksum that its writer took: staging is "
            "damaged; given up",
        )
    return None


_ROWS = 256  # read at a time


def _checksum(rows: StagedRows) -> int:
    """The stored checksum of a sample's stream."""
    total = 0
    for at in range(0, rows.shape[0], _ROWS):
        part = np.empty((min(_ROWS, rows.shape[0] - at), *rows.shape[1:]), rows.dtype)
        rows.read_into(at, part)
        total += rows_checksum(part, at)
    return to_int64(total)


def mask_fits(mask: Any, length: int, supervised_tokens: int) -> bool:
    """Whether a loss mask is one of `length` values, zeros but for `supervised_tokens` ones."""
    values = np.asarray([] if mask is None else mask)
    return (
        len(values) == length
        and bool(np.isin(values, (0, 1)).all())
        and int(values.sum()) == supervised_tokens
    )


def batches(picks: Sequence[Pick], limit: int) -> Iterator[list[Pick]]:
    """Split picks, in order, into segments of at most `limit` tokens (one longer sample alone)."""
    batch: list[Pick] = []
    tokens = 0
    for pick in picks:
        if batch and tokens + pick.row.length > limit:
            yield batch
            batch, tokens = [], 0
        batch.append(pick)
        tokens += pick.row.length
    if batch:
        yield batch


def segment_sample(pick: Pick) -> SegmentSample:
    """The sample as a segment takes it: its states are read as they are encoded."""
    hidden, ids = staged_rows(pick.part, pick.row)
    return SegmentSample(
        pick.row.sample_id,
        hidden,
        ids.read(),
        np.asarray(pick.plan["loss_mask"], np.uint8),
        list(pick.row.checksum),
    )


def manifest_row(pick: Pick, token_start: int, info: SegmentInfo) -> dict[str, Any]:
    """The row that commits the sample, stored from `token_start` of a segment."""
    row, plan = pick.row, pick.plan
    engine = pick.part.attributes["engine"]
    return {
        "op": "add",
        "sample_id": row.sample_id,
        "source": plan["source"],
        "split": plan["split"],
        "length": row.length,
        "supervised_tokens": plan["supervised_tokens"],
        "segment_id": info.segment_id,
        "token_start": token_start,
        "attempt": row.attempt,
        "token_hash": plan["token_hash"],
        "checksum": list(row.checksum),
        "rms": list(row.rms),
        "absmax": list(row.absmax),
        "nonfinite": list(row.nonfinite),
        "segment_tokens": info.tokens,
        "segment_raw_bytes": info.raw_bytes,
        "segment_stored_bytes": info.stored_bytes,
        "inventory_digest": info.inventory_digest,
        "engine": engine.get("engine"),
        "engine_version": engine.get("engine_version"),
        "hook_version": engine.get("hook_version"),
        "chunk_size": int(engine.get("chunk_size") or 0),
        "tp": int(engine.get("tp") or 1),
        "dp_rank": int(engine.get("dp_rank") or 0),
        "writer": pick.part.path.parent.name,
        "captured_at": row.at,
        "committed_at": datetime.now(UTC),
        "reason": None,
        "mask_hash": plan.get("mask_hash"),
        "generation": plan.get("generation"),
    }
