"""Hiding damaged samples, so that nobody reads them and extract asks for them again."""

from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from hslake import manifest
from hslake.ids import token_hash
from hslake.lake import Lake
from hslake.tables import catalog


def hide(lake: Lake, damaged: dict[tuple[str, str], str]) -> int:
    """Append `hide` rows for (segment_id, sample_id) -> reason; returns how many were live."""
    count = 0

    def build(state: catalog.TableState) -> pa.Table | None:
        nonlocal count
        wanted = damaged.keys() & {(segment, sample) for sample, segment in manifest.live(state)}
        if not wanted:
            count = 0
            return None
        hides: list[dict[str, Any]] = []
        table, names = state.arrow(), pa.array({sample for _, sample in wanted}, pa.string())
        for row in table.filter(pc.is_in(table["sample_id"], names)).to_pylist():
            key = (row["segment_id"], row["sample_id"])
            if row["op"] == "add" and key in wanted:
                more = {"committed_at": datetime.now(UTC), "reason": damaged[key][:500]}
                hides.append({**row, "op": "hide", **more})
        count = len(hides)
        return manifest.rows(hides)

    keys = "".join(sorted(f"{s}{i}" for s, i in damaged))
    catalog.commit(
        lake.store, "manifest", build, f"hide-{lake.version}-{token_hash(list(keys.encode()))}"
    )
    return count
