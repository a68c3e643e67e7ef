"""Empty lakes to plan into, and what is planned in them."""

import json
from pathlib import Path
from typing import Any

import hslake
from hslake import query
from hslake.store import open_store
from hslake.tables import catalog


def new_lake(folder: Path) -> str:
    """URL of an empty lake."""
    lake = hslake.create(
        folder / "lake", streams=[2, "final"], hidden_size=8, num_layers=4, name="plan"
    )
    return lake.url


def write(path: Path, *rows: dict[str, Any]) -> Path:
    """A JSONL file of these rows."""
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def planned(url: str, columns: str = "*") -> dict[str, dict[str, Any]]:
    """Rows of the view `plan` by sample id."""
    rows = query.run(url, f"select {columns} from plan").to_pylist()
    assert len({r["sample_id"] for r in rows}) == len(rows)
    return {r["sample_id"]: r for r in rows}


def entry_files(url: str, version: int) -> list[str]:
    """Names of the data files that a version of the plan added."""
    store = open_store(url)
    names = [f.rpartition("/")[2] for f in catalog.open_table(store, "plan").files()]
    return [n for n in names if n.startswith(f"part-{version:020d}")]
