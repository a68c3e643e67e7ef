"""The result file: runs, cells of them, a summary; and the table.

A cell is (config, mode, prompt, concurrency) with all its runs. The ratio of an hslake (or other)
run is its rate over the mean of the `none` runs next to it in time, one on each side where there
are, of the same prompts, concurrency and call: machines drift. The
ratio to `plain` is made of the runs of the very same server.
"""

import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.hook.settings import HSLAKE, MODES, NONE, PLAIN

Row = dict[str, Any]
KEY = ("config", "prompt", "concurrency")


def empty() -> Row:
    """A result file without anything measured."""
    return {"sessions": [], "runs": [], "endurance": [], "missing": []}


def load(files: Sequence[Path]) -> Row:
    """The results of several files together; files that are not there count for nothing."""
    found = empty()
    seen: set[str] = set()
    for file in files:
        if not file.is_file():
            continue
        other = json.loads(file.read_text("utf-8"))
        fresh = {x["id"] for x in other["sessions"]} - seen
        seen |= fresh
        for name in ("runs", "endurance"):
            found[name] += [x for x in other[name] if x["session"] in fresh]
        found["sessions"] += [x for x in other["sessions"] if x["id"] in fresh]
        found["missing"] += [m for m in other["missing"] if m["session"] in fresh]
    return found


def good(run: Row) -> bool:
    """Whether a run counts: everything sent was answered."""
    return not run["errors"]


def neighbours(run: Row, others: Sequence[Row]) -> list[Row]:
    """The runs of `others` of the same session and prompts just before and just after `run`."""
    same = [n for n in others if n["session"] == run["session"]]
    same = [n for n in same if all(n[k] == run[k] for k in KEY)]
    before = [n for n in same if n["started"] < run["started"]]
    after = [n for n in same if n["started"] > run["started"]]
    pair = [max(before, key=lambda n: n["started"])] if before else []
    return pair + ([min(after, key=lambda n: n["started"])] if after else [])


def cells(runs: Sequence[Row]) -> list[Row]:
    """Runs grouped into cells, with medians and ratios to `none` and to `plain`."""
    nones, plains = ([r for r in runs if r["mode"] == m and good(r)] for m in (NONE, PLAIN))
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for run in sorted(runs, key=lambda r: r["started"]):
        groups.setdefault((*(run[k] for k in KEY), run["mode"]), []).append(run)
    found = []
    for (config, prompt, concurrency, mode), members in groups.items():
        fine = [r for r in members if good(r)]
        ratios = _ratios(fine, nones) if mode != NONE else []
        same = []
        for run in fine if mode == HSLAKE else ():
            same += _ratios([run], [p for p in plains if p["instance"] == run["instance"]])
        cell: Row = {"config": config, "mode": mode, "prompt": prompt, "concurrency": concurrency}
        cell["tokens"] = sum(r["tokens"] for r in fine)
        cell["rate"] = statistics.median(r["rate"] for r in fine) if fine else None
        cell["rates"] = [r["rate"] for r in fine]
        cell["ratio_to_none"] = statistics.median(ratios) if ratios else None
        cell["ratios"] = ratios
        if same:
            cell |= {"ratio_to_plain": statistics.median(same), "ratios_to_plain": same}
        cell["failed_runs"] = len(members) - len(fine)
        found.append(cell)
    order = {m: i for i, m in enumerate(MODES)}
    return sorted(found, key=lambda c: (*(c[k] for k in KEY), order[c["mode"]]))


def _ratios(runs: Sequence[Row], others: Sequence[Row]) -> list[float]:
    """The rate of each run over that of its neighbours; none for a run without any."""
    pairs = [(run, neighbours(run, others)) for run in runs]
    return [run["rate"] / statistics.mean(n["rate"] for n in near) for run, near in pairs if near]


def summary(results: Row) -> Row:
    """The few numbers that count. Tokens, lost and so on are those of hslake runs, warm-ups
    included, and of endurance runs."""
    ours = [c for c in cells(results["runs"]) if c["mode"] == HSLAKE]
    ratios = [c["ratio_to_none"] for c in ours if c["ratio_to_none"] is not None]
    checked = [r["found"] for r in results["runs"] if "found" in r] + [
        e["found"] for e in results["endurance"]
    ]
    total = lambda name: sum(f[name] for f in checked)  # noqa: E731
    return {
        "min_ratio_to_none": min(ratios, default=None),
        "cells": len(ours),
        "tokens": total("tokens"),
        "lost": total("lost"),
        "duplicated": total("duplicated"),
        "verified_tokens": total("verified_tokens"),
        "damage": sum(len(f["damage"]) for f in checked),
        "failed_runs": sum(not good(r) for r in results["runs"]),
        "missing": len(results["missing"]),
    }


def verified(found: Row) -> bool:
    """Whether everything that was sent is in the lake once and reads back."""
    wrong = found["lost"] + found["duplicated"] + found["foreign"] + len(found["damage"])
    return not wrong and found["verified_tokens"] == found["tokens"] > 0


def save(results: Row, files: Sequence[Path]) -> None:
    """Write the results, cells and summary, to all `files`, each in one step."""
    whole = {"summary": summary(results), "cells": cells(results["runs"]), **results}
    text = json.dumps(whole, indent=1) + "\n"
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
        temporary.write_text(text, "utf-8")
        temporary.replace(file)


def show(results: Row) -> None:
    """Print the table."""
    console = Console(width=120)
    table = Table(title="prefill tokens/s: median of a cell's runs")
    names = ("config", "prompt", "at once", "mode", "runs", "tokens", "tokens/s", "of none")
    for name in (*names, "of plain"):
        left = name in ("config", "mode")
        table.add_column(name, justify="left" if left else "right")
    for c in cells(results["runs"]):
        ratios = (c["ratio_to_none"], c.get("ratio_to_plain"))
        table.add_row(
            *(str(c["config"]), f"{c['prompt']:,}", str(c["concurrency"]), c["mode"]),
            str(len(c["rates"])) + (f" (+{c['failed_runs']} failed)" if c["failed_runs"] else ""),
            *(f"{c['tokens']:,}", f"{c['rate']:,.0f}" if c["rate"] else "-"),
            *(f"{ratio:.3f}" if ratio is not None else "" for ratio in ratios),
        )
    console.print(table)
    for e in results["endurance"]:
        f = e["found"]
        console.print(
            f"endurance ({e['config']}): {e['captured_tokens']:,} tokens in {e['seconds']:.0f} s "
            f"({e['rate']:,.0f}/s), lost {f['lost']}, duplicated {f['duplicated']}, verified "
            f"{f['verified_tokens']:,}; " + e["ended"],
            highlight=False,
            markup=False,
        )
        for name, flat in e["flatness"].items():
            if "range" in flat:
                console.print(
                    f"  {name}: {flat['min'] / 2**30:.2f} to {flat['max'] / 2**30:.2f} GiB after "
                    f"the first minute, {flat['slope_per_minute'] / 2**20:+.1f} MiB/min",
                    highlight=False,
                )
    console.print_json(json.dumps(summary(results)))
    for m in results["missing"]:
        why = (m["why"].splitlines() or ["?"])[-1]
        console.print(f"missing: {m['what']}: {why}", highlight=False, markup=False)
