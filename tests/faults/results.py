"""Where the counts of the big runs go: one key a stream, and a summary over all of them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULTS = Path("benchmarks/results/faults.json")
SUMMED = ("kills", "failpoints", "lost", "duplicated", "torn", "flips", "undetected_flips")


def record(path: Path, key: str, counts: Mapping[str, Any]) -> None:
    """Put `counts` under `key` of the JSON file and recompute its `summary`."""
    found: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    found[key] = dict(counts)
    rest = {k: v for k, v in found.items() if k != "summary"}
    summary = {
        name: sum(v[name] for v in rest.values() if name in v)
        for name in SUMMED
        if any(name in v for v in rest.values())
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"summary": summary, **rest}, indent=1) + "\n", "utf-8")
