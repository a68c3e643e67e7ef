"""The benchmark of the hook, as far as it goes without a server: cells and ratios, merged results,
prompts, flatness, what is deleted, and the check of what a run sent against a real lake."""

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.hook import machine, measure, prompts, results, servers, settings
from benchmarks.hook.lakeside import LakeSide
from benchmarks.hook.settings import HSLAKE, HTTP, NONE, PLAIN, TORCH_SAVE, Settings
from tests.lakes import damage_sample, make_lake


def some_settings(**changes: Any) -> Settings:
    values: dict[str, Any] = {
        "model": Path("model"),
        "modes": (NONE, HSLAKE, TORCH_SAVE),
        "cells": (NONE, HSLAKE, TORCH_SAVE),
        "prompts": (100,),
        "concurrency": (8,),
        "tokens": 1000,
        "other_tokens": 500,
        "http_tokens": 250,
        "warmup": 300,
        "repeats": 2,
        "other_repeats": 1,
        "instances": 1,
        "tp": 1,
        "dp": 1,
        "capture": "eagle3",
        "codec": "standard",
        "attention_backend": "fa3",
        "chunk": 512,
        "kv_tokens": 4096,
        "sglang_python": Path("python"),
        "server_args": (),
        "part_tokens": 1024,
        "staging_bytes": 0,
        "lake_dir": "auto",
        "port": 18_000,
        "jitter": 0.0,
        "ready": 60.0,
        "smoke": False,
    }
    return Settings(**(values | changes))


def a_run(mode: str, rate: float, started: float, **changes: Any) -> dict[str, Any]:
    run = {"config": "1gpu", "prompt": 100, "concurrency": 8, "session": "a", "errors": []}
    return {**run, "mode": mode, "rate": rate, "started": started, "tokens": 1000, **changes}


def found(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {"tokens": 10, "lost": 0, "duplicated": 0, "foreign": 0}
    return {**values, "damage": [], "verified_tokens": 10, **changes}


def test_a_run_is_compared_with_the_none_runs_beside_it() -> None:
    runs = [
        a_run(NONE, 100, 1),
        a_run(HSLAKE, 99, 2),
        a_run(TORCH_SAVE, 30, 3),
        a_run(HSLAKE, 75, 4),
        a_run(NONE, 50, 5),
        a_run(NONE, 1000, 6),  # further away
        a_run(NONE, 7, 1.5, session="b"),
        a_run(NONE, 7, 1.5, concurrency=32),
        a_run(NONE, 7, 1.5, errors=["HTTP 500"]),
    ]
    ours = [c for c in results.cells(runs) if c["concurrency"] == 8]
    of = {c["mode"]: c for c in ours}
    assert of[HSLAKE]["ratios"] == [99 / 75, 75 / 75]
    assert of[HSLAKE]["ratio_to_none"] == pytest.approx((99 / 75 + 1) / 2)
    assert of[TORCH_SAVE]["ratio_to_none"] == 30 / 75
    assert of[NONE]["ratio_to_none"] is None and of[NONE]["failed_runs"] == 1
    assert [c["mode"] for c in ours] == [NONE, HSLAKE, TORCH_SAVE]


def test_plain_is_compared_with_on_the_same_server_only() -> None:
    runs = [
        a_run(PLAIN, 100, 1, instance=0),
        a_run(HSLAKE, 98, 2, instance=0),
        a_run(PLAIN, 5000, 3, instance=1),
        a_run(HSLAKE, 4000, 4, instance=1),
        a_run(PLAIN, 96, 5, instance=0),
    ]
    of = {c["mode"]: c for c in results.cells(runs)}
    assert of[HSLAKE]["ratios_to_plain"] == [98 / 98, 4000 / 5000]
    assert of[HSLAKE]["ratio_to_plain"] == pytest.approx(0.9)
    assert of[HSLAKE]["ratio_to_none"] is None and "ratio_to_plain" not in of[PLAIN]


def test_the_summary_names_the_worst_cell_and_adds_what_was_checked() -> None:
    all_of = results.empty() | {
        "runs": [
            a_run(NONE, 100, 1),
            a_run(HSLAKE, 99, 2, found=found()),
            a_run(NONE, 100, 1, concurrency=32),
            a_run(HSLAKE, 97, 2, concurrency=32, found=found(lost=2, tokens=8, verified_tokens=8)),
        ],
        "endurance": [{"found": found(duplicated=1, damage=["x"], tokens=30, verified_tokens=29)}],
    }
    total = results.summary(all_of)
    assert total["min_ratio_to_none"] == 0.97 and total["cells"] == 2
    assert (total["tokens"], total["lost"], total["duplicated"]) == (48, 2, 1)
    assert (total["verified_tokens"], total["damage"]) == (47, 1)


@pytest.mark.parametrize(
    "change",
    [{"lost": 1}, {"duplicated": 1}, {"foreign": 1}, {"damage": ["x"]}, {"verified_tokens": 9}],
)
def test_verified_means_all_of_it(change: dict[str, Any]) -> None:
    assert results.verified(found())
    assert not results.verified(found(**change))
    assert not results.verified(found(tokens=0, verified_tokens=0))


def test_results_of_several_calls_go_together_once(tmp_path: Path) -> None:
    for name in "ab":
        one = results.empty() | {
            "sessions": [{"id": name}],
            "runs": [a_run(NONE, 1, 1, session=name)],
            "missing": [{"session": name, "what": "w", "why": "y"}],
        }
        results.save(one, [tmp_path / f"{name}.json", tmp_path / "deep" / f"{name}.json"])
    files = [tmp_path / "a.json", tmp_path / "none.json", tmp_path / "b.json"]
    both = results.load([*files, tmp_path / "deep" / "a.json"])
    assert [r["session"] for r in both["runs"]] == ["a", "b"]
    assert len(both["sessions"]) == len(both["missing"]) == 2
    results.save(both, [tmp_path / "all.json"])
    results.show(both)
    assert json.loads((tmp_path / "all.json").read_text())["summary"]["missing"] == 2


def measuring(s: Settings, runs: list[dict[str, Any]], tmp_path: Path) -> measure.Measure:
    (tmp_path / "config.json").write_text('{"vocab_size": 100}')
    out, clock = results.empty() | {"runs": runs}, measure.Clock(100)
    s = Settings(**{**s.__dict__, "model": tmp_path})
    there: dict[str, Any] = dict.fromkeys(s.modes)
    return measure.Measure(s, None, there, None, tmp_path, out, "x", clock, [])  # type: ignore[arg-type]


def test_modes_take_turns(tmp_path: Path) -> None:
    turns = measuring(some_settings(repeats=3), [], tmp_path).turns(100, 8)
    assert [m for _, m in turns] == [
        *(NONE, HSLAKE, TORCH_SAVE),
        *(HSLAKE, NONE),
        *(NONE, HSLAKE),
    ]


def test_plain_takes_its_turns_on_the_servers_of_hslake(tmp_path: Path) -> None:
    s = some_settings(cells=(NONE, HSLAKE, PLAIN), modes=(NONE, HSLAKE), instances=2, repeats=4)
    it = measuring(s, [], tmp_path)
    it.servers = {NONE: ["n0", "n1"], HSLAKE: ["h0", "h1"], PLAIN: ["h0", "h1"]}  # type: ignore[dict-item,list-item]
    turns = it.turns(100, 8)
    assert sorted(turns) == sorted((r, m) for r in range(4) for m in (NONE, HSLAKE, PLAIN))
    assert all(it._server(PLAIN, r) == it._server(HSLAKE, r) for r, _ in turns)


def test_what_an_earlier_call_measured_is_not_measured_again(tmp_path: Path) -> None:
    done = [a_run(m, 1, t) for m in (NONE, HSLAKE) for t in (1, 2)]
    assert [m for _, m in measuring(some_settings(), done, tmp_path).turns(100, 8)] != []
    done.append(a_run(TORCH_SAVE, 1, 3))
    assert measuring(some_settings(), done, tmp_path).turns(100, 8) == []
    done[0]["errors"] = ["x"]
    again = measuring(some_settings(), done, tmp_path).turns(100, 8)
    assert [m for _, m in again] == [NONE, HSLAKE, HSLAKE, NONE]
    done[0]["errors"], done[0]["concurrency"] = [], 32
    assert measuring(some_settings(), done, tmp_path).turns(100, 8) != []


def test_prompts_are_distinct_and_the_same_every_time() -> None:
    s = some_settings()
    warm, run = prompts.run_batches(s, HSLAKE, 100, 8, 0)
    assert (warm.count, run.count) == (3, 10)
    both = np.concatenate([warm.prompts(1000), run.prompts(1000)])
    assert len(np.unique(both, axis=0)) == 13 and both.min() >= 16 and both.max() < 1000
    assert (prompts.run_batches(s, NONE, 100, 8, 0)[1].prompts(1000) == run.prompts(1000)).all()
    assert not set(warm.sample_ids()) & set(run.sample_ids())
    other = prompts.run_batches(s, HSLAKE, 100, 8, 1)[1]
    assert not set(other.sample_ids()) & set(run.sample_ids())
    assert (other.prompts(1000) != run.prompts(1000)).any()


def test_http_gets_no_more_at_once_than_fits() -> None:
    s = some_settings(http_tokens=250)
    assert s.run_tokens(HTTP, 100) == 300 and s.in_flight(HTTP, 32, 100) == 2
    assert s.run_tokens(HTTP, 8192) == 8192 and s.in_flight(HTTP, 32, 8192) == 1
    assert s.in_flight(HSLAKE, 32, 8192) == 32
    assert s.run_tokens(TORCH_SAVE, 100) == 500 and s.run_tokens(NONE, 300) == 1200


def test_endurance_lengths_are_those_of_the_corpus() -> None:
    rng = np.random.default_rng(1)
    lengths = np.array(prompts._lengths(rng, 5_000_000, 878, 8192))
    assert abs(lengths.sum() - 5_000_000) < 10_000
    assert lengths.min() >= 1 and lengths.max() == 8192
    assert np.median(lengths) < 0.8 * lengths.mean()


def test_flat_and_rising_memory_are_told_apart() -> None:
    points = [{"t": float(t), "flat": 5.0, "up": 100.0 + t} for t in range(0, 300, 5)]
    points[2]["flat"] = 999.0  # in the first minute
    flat, up = machine.flatness(points, "flat"), machine.flatness(points, "up")
    assert flat["range"] == 0 and abs(flat["slope_per_minute"]) < 1e-9
    assert up["range"] == 235 and up["slope_per_minute"] == pytest.approx(60)
    assert machine.flatness(points, "nothing") == {"points": 0}


def test_the_deleter_keeps_the_folder_small_and_counts(tmp_path: Path) -> None:
    deleter = measure.Deleter(tmp_path, 6000)
    for i in range(20):
        (tmp_path / f"{i}.pt").write_bytes(bytes(1000))
        os.utime(tmp_path / f"{i}.pt", (i, i))
    deadline = time.monotonic() + 20
    while len(list(tmp_path.glob("*.pt"))) > 6 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert sorted(int(p.stem) for p in tmp_path.glob("*.pt")) == list(range(14, 20))
    deleter.stop()
    assert not list(tmp_path.glob("*.pt"))
    assert (deleter.files, deleter.size) == (20, 20_000)


def test_what_a_killed_call_left_is_removed(tmp_path: Path) -> None:
    gone, mine = tmp_path / "gone", tmp_path / "mine"
    gone.mkdir(), mine.mkdir()
    dead = tmp_path / "notes" / "leftovers-999999999.json"
    dead.parent.mkdir()
    dead.write_text(json.dumps({"groups": [1], "folders": [str(gone)]}))  # 1 is no server: kept
    alive = servers.Leftovers(tmp_path / "notes")
    alive.add(folder=mine)
    assert not gone.exists() and not dead.exists()
    servers.Leftovers(tmp_path / "notes")  # another call beside a living one
    assert mine.exists()
    alive.clear()
    assert not mine.exists() and not alive.file.exists()


def test_servers_differ_only_in_their_mode() -> None:
    args = servers.common_args(some_settings(tp=2, dp=2))
    assert args[args.index("--tp-size") + 1] == args[args.index("--dp-size") + 1] == "2"
    assert "--enable-return-hidden-states" not in args and "--disable-radix-cache" in args
    assert some_settings(tp=2, dp=2).config == "dp2" and some_settings(tp=2).config == "tp2"
    with pytest.raises(Exception, match="unknown mode"):
        settings.modes("none,hslke")


def test_check_finds_what_is_lost_and_damaged_then_removes_the_files(tmp_path: Path) -> None:
    made = make_lake(tmp_path, lengths=(5, 300, 40))
    names, lake = list(made.samples), made.lake
    side = LakeSide(made.url, made.staging, tmp_path / "log")
    sources = sorted({t.source for t in made.samples.values()})
    try:
        assert side.count(sources) == 3
        damage_sample(lake, names[1])
        report = side.check(sources, [*names[:2], "never-came"])
    finally:
        side.stop()
    assert (report.samples, report.tokens, report.lost, report.duplicated) == (3, 345, 1, 0)
    assert report.foreign == 1 and report.verified_samples == 3
    assert len(report.damage) >= 1
    assert not list((Path(made.url) / "segments").glob("*/inventory.json"))
