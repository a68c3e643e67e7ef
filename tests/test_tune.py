"""Tune: the search and what it concludes, and bursts on a simulated server."""

import asyncio
import json
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import hslake
from hslake.cli import app
from hslake.compact import compact
from hslake.errors import CheckFailed, InvalidInput, Missing
from hslake.extract import extract
from hslake.plan import plan_files
from hslake.tune import TuneOptions, tune
from hslake.tune.advice import group_of, warnings
from hslake.tune.report import Trial
from hslake.tune.search import STARVED, enough, levels, search
from tests.fakeserver import FakeServer

TOKENS = 40  # of a sample, on average
FAST = TuneOptions(seconds=0.4, repeats=2, first=2, most=8)


# -- the search -----------------------------------------------------------------------------------


def trial(requests: int, rate: float, starved: float = 0.0) -> Trial:
    return Trial(requests, rate, 8.0, 100, 4000, requests, requests * TOKENS, starved, 0, 0.1, 0)


def run(knee: float, noise: float, seed: int, *, starved_from: int = 1 << 30) -> list[Trial]:
    """The search on a server whose rate grows up to a concurrency of `knee`."""
    rng = random.Random(seed)

    async def measure(requests: int) -> Trial | None:
        rate = 1000 * min(requests, knee) * (1 + noise * rng.gauss(0, 1))
        return trial(requests, max(0.0, rate), 0.9 if requests >= starved_from else 0.0)

    return asyncio.run(search(measure))


@pytest.mark.parametrize("knee", [4, 16, 24, 100])
def test_the_least_concurrency_that_is_enough(knee: int) -> None:
    found = enough(levels(run(knee, 0.0, 0)))
    assert found is not None
    assert found.requests >= knee and found.requests / 2 < knee
    assert found.bursts == 3


def test_noise_seldom_leads_far() -> None:
    off = 0
    for seed in range(100):
        found = enough(levels(run(32, 0.02, seed)))
        assert found is not None
        off += found.requests != 32
    assert off <= 20


def test_it_stops_where_nothing_is_gained() -> None:
    tried = {t.requests for t in run(8, 0.0, 0)}
    assert tried == {4, 8, 16, 32}
    assert {t.requests for t in run(1 << 20, 0.0, 0)} >= {4, 1024}


def test_it_stops_where_staging_decides() -> None:
    assert max(t.requests for t in run(1000, 0.0, 0, starved_from=16)) == 16


def test_it_goes_on_when_the_most_that_was_tried_turns_out_best() -> None:
    asked: list[int] = []

    async def measure(requests: int) -> Trial | None:
        asked.append(requests)
        unlucky = len(asked) <= 3  # the server warms up
        return trial(requests, 400.0 if unlucky else 100.0 * min(requests, 64))

    found = enough(levels(asyncio.run(search(measure))))
    assert found is not None and found.requests == 64 and 128 in asked and 256 not in asked


def test_candidates_are_measured_in_turns() -> None:
    order = [t.requests for t in run(8, 0.0, 0)]
    assert order[4:] == [32, 16, 8, 8, 16, 32]  # neither early nor late bursts favour one


def test_it_ends_when_no_more_can_be_measured() -> None:
    async def nothing(requests: int) -> Trial | None:
        return None

    assert asyncio.run(search(nothing)) == [] and enough([]) is None
    assert enough(levels([trial(4, 0.0)])) is None


RATES = st.lists(st.tuples(st.sampled_from([1, 2, 4, 8, 16]), st.floats(0, 1e6)), min_size=1)


@given(RATES)
def test_what_is_taken_is_never_much_worse_than_the_best(told: list[tuple[int, float]]) -> None:
    found = levels([trial(requests, rate) for requests, rate in told])
    assert [x.requests for x in found] == sorted({requests for requests, _ in told})
    best = enough(found)
    rates = [x.rate for x in found]
    if max(rates) <= 0:
        assert best is None
        return
    assert best is not None and best.rate >= 0.94 * max(rates) * (1 - 1e-9)
    assert not [x for x in found if x.requests < best.requests and x.rate > best.rate]


def test_doubts_are_told(tmp_path: Path) -> None:
    spec = hslake.create(tmp_path / "lake", streams=[2, "final"], hidden_size=8, num_layers=4).spec

    def told(*trials: Trial, compactor: bool | None = None) -> str:
        group = group_of(spec, 8192, ["http://a"], trials)
        return " | ".join(warnings([group], compactor))

    assert told(trial(4, 900.0), trial(8, 1000.0), trial(16, 1001.0)) == ""
    full = Trial(8, 500.0, 8.0, 9, 900, 8, 900, STARVED + 0.3, 0.9, 0.1, 0)
    assert "the compactor was behind" in told(trial(4, 400.0), full)
    assert "give the compactor more cores" in told(trial(4, 400.0), full, compactor=True)
    small = Trial(8, 500.0, 8.0, 9, 900, 8, 900, STARVED + 0.3, 0.1, 0.1, 0)
    assert "more --max-parts" in told(trial(4, 400.0), small)
    assert "try more with --most" in told(trial(4, 400.0), trial(8, 800.0))
    busy = Trial(4, 500.0, 8.0, 9, 900, 4, 900, 0.0, 0.1, 0.95, 2)
    assert "most of a core" in told(busy) and "dropped 2 captures" in told(busy)
    idle = Trial(64, 500.0, 8.0, 9, 900, 3, 900, 0.0, 0.1, 0.1, 0)
    assert "only 3 requests were on their way" in told(idle)
    assert "differ by" in told(trial(4, 500.0), trial(4, 900.0), trial(8, 400.0))
    assert "nothing was captured" in told()
    assert group_of(spec, 8192, ["http://a"], [trial(4, 900.0)]).memory_bytes


# -- on a simulated server ------------------------------------------------------------------------


@pytest.fixture
def lake(tmp_path: Path) -> str:
    made = hslake.create(tmp_path / "lake", streams=[2, "final"], hidden_size=8, num_layers=4)
    rng = np.random.default_rng(3)
    rows = [
        {"sample_id": f"A1-{i}", "source": "A1", "input_ids": [5] * int(n)}
        for i, n in enumerate(rng.integers(2, 2 * TOKENS, 600))
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "plan.parquet")
    plan_files(made.url, [tmp_path / "plan.parquet"])
    (tmp_path / "staging").mkdir()
    return made.url


@pytest.fixture
def beside(lake: str, tmp_path: Path) -> Iterator[None]:
    """A compactor at work."""
    stop = threading.Event()

    def work() -> None:
        staging = [tmp_path / "staging"]
        compact(lake, staging, watch=True, stop=stop.is_set, interval_s=0.1, max_age_s=0.5)

    thread = threading.Thread(target=work)
    thread.start()
    yield
    stop.set()
    thread.join()


def test_planned_samples_are_captured_for_good(lake: str, tmp_path: Path, beside: None) -> None:
    staging = tmp_path / "staging"
    with FakeServer(lake, staging, part_tokens=2048, max_parts=6, delay=0.05) as server:
        found = tune(lake, [server.url], FAST, staging=[staging])
        asked = {rid.sample_id for rid in server.requests}
        assert server.violations == []
        extract(lake, [server.url])
    (group,) = found.groups
    assert not found.probes and found.samples == len(asked) > 20
    assert group.chunk == 32 and group.best is not None and found.best == group
    # 50 ms a request whatever is on its way: twice as many are twice as fast.
    by = {level.requests: level.rate for level in group.levels}
    assert by[8] > 1.5 * by[2] and group.best.requests > 2
    assert group.max_tokens is not None and group.max_tokens >= group.best.most_tokens
    serve, again = found.commands
    assert serve.endswith("--chunked-prefill-size 32") and f"--staging {staging}" in serve
    flags = f"--concurrency {group.best.requests} --max-tokens {group.max_tokens}"
    assert again.endswith(flags)
    counts = "select count(*), count(distinct attempt) from samples"
    end = time.monotonic() + 60
    while (row := hslake.open(lake).sql(counts).fetchall()[0])[0] < 600:
        assert time.monotonic() < end, row
        time.sleep(0.1)
    assert row == (600, 600) and server.captured.total() == 600  # nothing was asked for twice


def test_a_covered_plan_is_tuned_with_probes(lake: str, tmp_path: Path, beside: None) -> None:
    staging = tmp_path / "staging"
    with FakeServer(lake, staging, part_tokens=2048, max_parts=6, delay=0.02) as server:
        extract(lake, [server.url])
        found = tune(lake, [server.url], FAST, staging=[staging])
        assert found.probes and found.samples == 0 and found.best is not None
    assert {rid.sample_id for rid in server.requests} > {f"A1-{i}" for i in range(600)}


def test_staging_that_fills_is_told(lake: str, tmp_path: Path) -> None:
    staging = tmp_path / "staging"
    with FakeServer(lake, staging, part_tokens=512, max_parts=2, delay=0.02) as server:
        found = tune(lake, [server.url], FAST, staging=[staging])  # nobody compacts
    assert any("staging had no room" in text for text in found.warnings), found.warnings


def test_servers_of_several_chunk_sizes_are_compared(
    lake: str, tmp_path: Path, beside: None
) -> None:
    staging, options = tmp_path / "staging", TuneOptions(seconds=0.3, repeats=1, first=4, most=4)
    slow = FakeServer(lake, staging, part_tokens=2048, max_parts=4, chunk=8, delay=0.2)
    quick = FakeServer(lake, staging, part_tokens=2048, max_parts=4, chunk=64, delay=0.02)
    with slow as one, quick as other:
        found = tune(lake, [one.url, other.url, "http://127.0.0.1:9"], options, staging=[staging])
    assert {g.chunk for g in found.groups} == {8, 64}
    assert found.best is not None and found.best.chunk == 64
    assert any("left out" in text for text in found.warnings)


def test_what_is_asked_for_wrongly(lake: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="name running servers"):
        tune(lake)
    with pytest.raises(InvalidInput, match="not both"):
        tune(lake, ["http://a"], TuneOptions(sglang_args=("--model-path", "m")))
    with pytest.raises(InvalidInput, match="--staging"):
        tune(lake, [], TuneOptions(sglang_args=("--model-path", "m")))
    for bad in ({"seconds": 0.0}, {"repeats": 0}, {"most": 1}, {"chunks": (0,)}):
        with pytest.raises(InvalidInput):
            TuneOptions(**bad)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="leave one out"):
        TuneOptions(chunks=(64,), sglang_args=("--chunked-prefill-size=32",))
    with pytest.raises(CheckFailed, match="no server is ready"):
        tune(lake, ["http://127.0.0.1:9"])
    with pytest.raises(Missing):
        tune(str(tmp_path / "nowhere"), ["http://127.0.0.1:9"])


def test_command(lake: str, tmp_path: Path, beside: None) -> None:
    runner, staging = CliRunner(), tmp_path / "staging"
    with FakeServer(lake, staging, part_tokens=2048, max_parts=6, delay=0.02) as server:
        call = ["tune", lake, "--server", server.url, "--staging", str(staging)]
        call += ["--seconds", "0.3", "--repeats", "1", "--most", "4", "--json"]
        found = json.loads(runner.invoke(app, call).stdout)
        assert found["best"]["best"]["requests"] == 4 and len(found["commands"]) == 2
        shown = runner.invoke(app, call[:-1])
        assert shown.exit_code == 0, shown.output
        assert "<- enough" in shown.output and "--concurrency 4" in shown.output
    wrong = runner.invoke(app, ["tune", lake, "--chunk", "4096"])
    assert wrong.exit_code == 2 and "behind --" in wrong.output
