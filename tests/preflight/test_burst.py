"""The timed burst against simulated servers with real staging, with and without a compactor."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import hslake
from hslake.checks import FAIL, PASS, WARN, Check
from hslake.cli import app
from hslake.compact import compact
from hslake.extract import extract
from hslake.extract.drive import Limits
from hslake.extract.worklist import worklist
from hslake.ids import PROBE_PREFIX, RequestId
from hslake.plan import plan_files
from hslake.preflight import Pace, PreflightReport, preflight, probe
from hslake.preflight.burst import SHARE, Burst, compactor_seen
from hslake.preflight.compaction import measure
from hslake.preflight.forecast import burst_check, forecast
from hslake.preflight.probe import Rows
from hslake.segment.shard import NAME_BYTES
from hslake.server import Server, new_session
from hslake.staging import read_part, scan
from hslake.staging.folder import COMPACT_LOCK
from hslake.staging.locks import try_lock
from hslake.staging.part import READ_LOCK
from hslake.status import local_statuses
from hslake.store import Store
from tests.fakeserver import FakeServer

LENGTHS = [40, 190, 7, 60, 33, 120]
LIMITS = Limits(requests=4)


@pytest.fixture
def lake(tmp_path: Path) -> str:
    rng = np.random.default_rng(1)
    rows = [
        {"sample_id": f"s{i}", "source": "A1", "input_ids": rng.integers(0, 100, n).tolist()}
        for i, n in enumerate(LENGTHS * 4)
    ]
    made = hslake.create(tmp_path / "lake", streams=[2, 4, "final"], hidden_size=8, num_layers=8)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "plan.parquet")
    plan_files(made.url, [tmp_path / "plan.parquet"])
    return made.url


@pytest.fixture
def staging(tmp_path: Path) -> Path:
    (tmp_path / "staging").mkdir()
    return tmp_path / "staging"


def named(report: PreflightReport, name: str) -> Check:
    (found,) = [c for c in report.checks if c.name == name]
    assert bool(found.todo) == (found.result != PASS)
    return found


@contextmanager
def watching(lake: str, staging: Path) -> Iterator[None]:
    """`hslake compact --watch` on a thread."""
    over = threading.Event()
    work = threading.Thread(
        target=compact,
        args=(lake, [staging]),
        kwargs={"watch": True, "stop": over.is_set, "interval_s": 0.1},
    )
    work.start()
    try:
        yield
    finally:
        over.set()
        work.join(30)
        assert not work.is_alive()


def test_without_a_compactor_it_leaves_staging_its_room(lake: str, staging: Path) -> None:
    with FakeServer(lake, staging, part_tokens=2048, delay=0.05) as server:
        before = 4 * 2048
        report = preflight(lake, [server.url], staging=[staging], burst_s=30, limits=LIMITS)
        assert report.passed, report.failures
        pace = report.pace
        assert pace is not None and server.writer is not None
        # The burst's share of what the probes before it left free, nearly all of it, and no more:
        # the short one, one of 190 tokens alone and among others of at most 190.
        probes = 10 + 2 * 190 + (17 + 96 + 33 + 160 + 5 + 190 + 64)
        share = SHARE * (before - probes)
        assert share - 190 < pace.tokens <= share
        lost = before - probes - pace.tokens - server.writer.free_rows()
        assert 0 <= lost < 4 * 190  # at the ends of parts
        assert not server.violations and server.no_space == 0
        found = named(report, "burst")
        assert "ended early, to leave staging its room" in found.found
        assert "their rows stay in staging" in found.found
        assert "the longest sample (190 tokens) among them" in found.found
        assert set(pace.server_rates) == {server.url}
        # 4 at once, of at most 190 tokens, and no answer before 50 ms.
        assert 0 < pace.server_rate < 4 * 190 / 0.05
    # Probes only: nothing reaches the lake.
    done = compact(lake, [staging])
    assert done.samples == 0 and done.abandoned == {}


def test_beside_a_compactor_it_goes_on_and_all_rows_come_back(lake: str, staging: Path) -> None:
    rows = 6 * 1024
    with FakeServer(lake, staging, part_tokens=1024, max_parts=6, delay=0.01, idle_s=0.3) as server:
        with watching(lake, staging):
            assert not compactor_seen([staging / "nowhere"])
            end = time.monotonic() + 20
            while not compactor_seen([staging]) and time.monotonic() < end:
                time.sleep(0.05)
            report = preflight(lake, [server.url], staging=[staging], burst_s=2, limits=LIMITS)
            assert report.passed, report.failures
            assert report.pace is not None
            # More than the share that it would be allowed alone: also a compactor that was too slow
            # to free anything leaves it half of what was free, less the rows lost at ends of parts.
            assert report.pace.tokens > SHARE * rows
            assert "stay in staging" not in named(report, "burst").found
            assert server.writer is not None
            end = time.monotonic() + 20
            while server.writer.free_rows() < rows and time.monotonic() < end:
                time.sleep(0.05)
            assert server.writer.free_rows() == rows
        assert not server.violations
    assert hslake.open(lake).sql("select count(*) from samples").fetchall() == [(0,)]


def test_a_burst_that_turned_staging_over_is_the_evidence(lake: str, staging: Path) -> None:
    # Half of the rows last for 3 s: a compactor on a busy machine frees some in time.
    with FakeServer(lake, staging, part_tokens=256, max_parts=16, delay=0.5, idle_s=0.3) as server:
        with watching(lake, staging):
            end = time.monotonic() + 20
            while not compactor_seen([staging]) and time.monotonic() < end:
                time.sleep(0.05)
            report = preflight(lake, [server.url], staging=[staging], burst_s=12, limits=LIMITS)
    pace = report.pace
    assert pace is not None and pace.compactor_rate is not None and pace.staging_rate is not None
    found = named(report, "forecast")
    assert pace.staging_from == "burst" and "rows came free again" in found.found, found
    assert pace.staging_rate == pytest.approx(pace.server_rate, rel=0.05)
    assert found.result == PASS and pace.bottleneck == "server"


class Tight(FakeServer):
    """Its GPU runs out of memory at every request."""

    async def _capture(self, rid: RequestId, ids: list[int]) -> None:
        assert self.writer is not None
        self.writer.set_figures({"gpu_retries": self.captured.total()})
        await super()._capture(rid, ids)


@pytest.mark.parametrize("kind", [FakeServer, Tight])
def test_a_gpu_that_runs_out_of_memory_is_told(
    lake: str, staging: Path, kind: type[FakeServer]
) -> None:
    with kind(lake, staging, part_tokens=2048, delay=0.01, idle_s=0.1) as server:
        report = preflight(lake, [server.url], staging=[staging], burst_s=1, limits=LIMITS)
    assert report.passed, report.failures
    told = [c for c in report.checks if c.name == "GPU memory"]
    assert bool(told) == (kind is Tight)
    for check in told:
        assert check.result == WARN and server.url in check.found and "ran out" in check.found
        assert "--mem-fraction-static" in check.todo


def test_who_held_the_burst_back_is_told(lake: str, staging: Path) -> None:
    with FakeServer(lake, staging, part_tokens=512, max_parts=4) as server:
        extract(lake, [server.url])
        (status,) = local_statuses(staging)
        opened = hslake.open(lake)
        parts = [read_part(p) for w in scan(staging) for p in w.parts]
        rows = [_rows(part, reserved) for part in parts for reserved in part.reserved]
    burst = Burst(9.0, 60, 4500, 500.0, {}, frozenset(), 190, False, (), 0, False, 2049, 0.1)
    listing = worklist(opened)

    def judge(burst: Burst) -> Pace:
        return forecast(opened, listing, burst, [status], rows, LIMITS, looked=True)[1]

    assert (judge(burst).staging_from, judge(burst).bottleneck) == ("burst", "server")
    assert judge(replace(burst, held_back=0.5)).bottleneck == "staging"
    assert judge(replace(burst, turned=2048)).staging_from == "model"
    assert judge(replace(burst, rough=True)).staging_from == "model"


@contextmanager
def seems_watched(staging: Path) -> Iterator[None]:
    """A compactor that looks in now and then, and frees nothing."""
    over = threading.Event()

    def touch() -> None:
        while not over.wait(0.1):
            for writer in scan(staging):
                os.utime(writer.path / COMPACT_LOCK)

    work = threading.Thread(target=touch)
    work.start()
    try:
        yield
    finally:
        over.set()
        work.join(10)


def test_a_compactor_that_frees_nothing_does_not_let_it_fill_staging(
    lake: str, staging: Path
) -> None:
    with FakeServer(lake, staging, part_tokens=2048, delay=0.01) as server:
        with seems_watched(staging):
            time.sleep(0.3)
            report = preflight(lake, [server.url], staging=[staging], burst_s=30, limits=LIMITS)
        assert report.passed and "ended early" in named(report, "burst").found
        assert server.writer is not None
        # Half of what was free, less what was on its way then, or was seen late.
        assert server.writer.free_rows() > 0.25 * 4 * 2048
        assert not server.violations and server.no_space == 0


def test_when_the_time_is_over_nothing_more_is_sent(lake: str, staging: Path) -> None:
    with FakeServer(lake, staging, part_tokens=65_536, delay=0.2) as server:
        with seems_watched(staging):
            time.sleep(0.3)
            report = preflight(lake, [server.url], staging=[staging], burst_s=1, limits=LIMITS)
    assert report.pace is not None
    # 4 at once, each at least 0.2 s: at most 5 rounds in a second, and one that is waited for.
    assert 4 <= report.pace.samples <= 4 * 6
    assert "ended early" not in named(report, "burst").found
    parts = [read_part(p) for w in scan(staging) for p in w.parts]
    assert {r.state for part in parts for r in part.reserved} == {"complete"}


def test_the_compactor_and_the_forecast(lake: str, staging: Path) -> None:
    with FakeServer(lake, staging, part_tokens=2048, delay=0.01) as server:
        report = preflight(lake, [server.url], staging=[staging], burst_s=1, limits=LIMITS)
    pace = report.pace
    assert pace is not None and pace.ratio is not None and pace.compactor_rate is not None
    assert pace.bottleneck in ("server", "staging", "compactor") and pace.codec == "standard"
    assert pace.tokens_left == sum(LENGTHS) * 4
    assert pace.stored_bytes == pytest.approx(pace.tokens_left * 48 * pace.ratio, abs=1)
    assert "the burst's ratio" in named(report, "disk space").found
    assert named(report, "compactor").found.startswith("about ")
    assert f"the {pace.bottleneck} sets the pace" in named(report, "forecast").found
    assert not list(Path(lake).glob(".hslake-probe-*"))  # what was put is gone


def test_the_ratio_is_what_the_compactor_reaches(lake: str, staging: Path) -> None:
    """The same rows through the real compactor, without its metadata and tokens."""
    from hslake.segment.layout import segment_prefix

    with FakeServer(lake, staging) as server:
        extract(lake, [server.url])
        opened = hslake.open(lake)
        rows = [
            _rows(part, reserved)
            for w in scan(staging)
            for part in map(read_part, w.parts)
            for reserved in part.reserved
        ]
        found = measure(opened.spec, rows, opened.store)
    done = compact(lake, [staging])
    prefix = Path(lake) / segment_prefix(
        hslake.open(lake).sql("select distinct segment_id from samples").fetchall()[0][0]
    )
    shards = sum(
        p.stat().st_size for p in (prefix / "hidden_states" / "c").rglob("*") if p.is_file()
    )
    assert done.raw_bytes == found.tokens * opened.spec.bytes_per_token
    # A shard's name and index are all that comes on top: 16 bytes for each of its chunks.
    index = (
        16 * len(opened.spec.streams) * opened.spec.geometry.shard_tokens // 256 + 4 + NAME_BYTES
    )
    assert shards == pytest.approx(found.ratio * done.raw_bytes + index, abs=1)


def _rows(part: object, reserved: object) -> Rows:
    from hslake.staging.reader import read_rows

    hidden, ids = read_rows(part, reserved)  # type: ignore[arg-type]
    return Rows(part, reserved, [np.array(h) for h in hidden], np.array(ids))  # type: ignore[arg-type]


async def test_of_a_long_probe_only_the_beginning_is_measured(
    lake: str, staging: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "_SOME", 16)
    ids = list(range(1, 60))
    spec = hslake.open(lake).spec
    with FakeServer(lake, staging) as server:
        async with new_session() as session:
            client = Server(server.url, session)
            made = await probe.capture(client, await client.status(), spec, ids, 10.0)
        assert isinstance(made, probe.Probe)
        whole = await probe.fetch([staging], made.sample_id)
        assert whole is not None and whole.input_ids.tolist() == ids
        (some,) = await probe.fetch_many([staging], {made.sample_id}, 1 << 20)
        assert some.input_ids.tolist() == ids[:16]
        assert all(
            np.array_equal(a, b[:16]) for a, b in zip(some.hidden, whole.hidden, strict=True)
        )
        assert await probe.fetch([staging], "nobody") is None
        # While a compactor reads the part, its rows are waited for.
        monkeypatch.setattr(probe, "_LOCKED_S", 0.2)
        lock = try_lock(whole.part.path / READ_LOCK)
        assert lock is not None
        assert await probe.fetch([staging], made.sample_id) is None
        lock.release()
        assert await probe.fetch([staging], made.sample_id) is not None


def test_a_slow_target_is_told(lake: str, staging: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Store, "time_put", lambda self, data: len(data) / 1000.0)  # 1 kB/s
    with FakeServer(lake, staging, part_tokens=2048, delay=0.01) as server:
        report = preflight(lake, [server.url], staging=[staging], burst_s=1, limits=LIMITS)
    assert report.pace is not None and report.pace.bottleneck == "compactor"
    found = named(report, "compactor")
    assert found.result == WARN and "slower than the servers" in found.found
    assert "writing to the lake holds it back" in found.todo
    assert named(report, "forecast").result == WARN
    assert report.pace.ratio is not None
    per_token = 48 * report.pace.ratio  # bytes
    assert report.pace.compactor_rate == pytest.approx(1000 / per_token, rel=0.05)
    assert report.pace.eta_seconds == pytest.approx(
        report.pace.tokens_left / report.pace.compactor_rate  # type: ignore[operator]
    )


def test_staging_too_small_for_the_speed_is_told(lake: str, staging: Path) -> None:
    with FakeServer(lake, staging, part_tokens=800, max_parts=2) as server:
        report = preflight(lake, [server.url], staging=[staging], burst_s=1, limits=LIMITS)
    pace = report.pace
    assert pace is not None and pace.staging_rate is not None
    assert pace.bottleneck == "staging" and pace.staging_rate < 800 / 2
    assert pace.staging_from == "model" and "computed from its parts" in _forecast(report)
    found = named(report, "forecast")
    assert found.result == WARN and "--max-parts" in found.todo


def _forecast(report: PreflightReport) -> str:
    return named(report, "forecast").found


def test_several_servers_at_once_and_without_local_staging(
    lake: str, staging: Path, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    with (
        FakeServer(lake, staging, delay=0.02) as a,
        FakeServer(lake, tmp_path / "other", delay=0.02) as b,
    ):
        report = preflight(lake, [a.url, b.url], burst_s=1, limits=LIMITS)
        pace = report.pace
        assert report.passed and pace is not None
        assert all(rate > 0 for rate in pace.server_rates.values()) and len(pace.server_rates) == 2
        assert pace.server_rate == pytest.approx(sum(pace.server_rates.values()))
        assert pace.ratio is None and pace.compactor_rate is None
        assert named(report, "compactor").result == WARN
        assert "not known" in named(report, "forecast").found
        assert {c.where for c in report.checks if c.name == "probe"} == {a.url, b.url}
        probes = [n for s in (a, b) for n in s.captured if n.startswith(PROBE_PREFIX)]
        assert len(probes) == len(set(probes))


def test_one_of_two_servers_is_down(lake: str, staging: Path) -> None:
    with FakeServer(lake, staging, delay=0.02) as server:
        urls = ["http://127.0.0.1:9", server.url]
        report = preflight(lake, urls, staging=[staging], burst_s=1, limits=LIMITS)
    assert [c.name for c in report.failures] == ["server"]
    assert report.pace is not None and set(report.pace.server_rates) == {server.url}


def test_probes_that_fail_are_no_go(lake: str, staging: Path) -> None:
    def script(rid: object, nth: int) -> str:  # it would succeed when asked again
        return "error" if rid.sample_id.endswith("-00002") and nth == 0 else "ok"  # type: ignore[attr-defined]

    with FakeServer(lake, staging, script=script) as server:
        report = preflight(lake, [server.url], staging=[staging], burst_s=1, limits=LIMITS)
    found = named(report, "burst")
    assert not report.passed and found.result == FAIL and "HTTP 500: CUDA error" in found.found


def test_drops_are_told(lake: str, staging: Path) -> None:
    def script(rid: object, nth: int) -> str:
        return "drop" if "-00003" in rid.sample_id and nth == 0 else "ok"  # type: ignore[attr-defined]

    with FakeServer(lake, staging, script=script, delay=0.01) as server:
        report = preflight(lake, [server.url], staging=[staging], burst_s=1, limits=LIMITS)
    found = named(report, "burst")
    assert report.passed and found.result == WARN and "the hook dropped 1" in found.found


def test_little_room_little_burst(lake: str, staging: Path) -> None:
    with FakeServer(lake, staging, part_tokens=200, max_parts=1) as server:
        report = preflight(lake, [server.url], staging=[staging], burst_s=1, limits=LIMITS)
        assert not server.violations
    found = named(report, "burst")
    assert found.result == WARN and report.pace is not None
    assert "ended early" in found.found and "too little for a rate" in found.found
    assert "compact" in found.todo and "--burst" not in found.todo


def test_no_room_no_burst(lake: str, staging: Path) -> None:
    with FakeServer(lake, staging, part_tokens=24, max_parts=1) as server:
        report = preflight(lake, [server.url], staging=[staging], burst_s=1, limits=LIMITS)
        assert not server.violations
    found = named(report, "burst")
    assert found.result == WARN and "not run" in found.found and report.pace is None


def test_a_longest_sample_that_was_not_tried_is_told(lake: str) -> None:
    listing = worklist(hslake.open(lake))
    tried = Burst(9.0, 60, 4500, 500.0, {}, frozenset(), 190, False, (), 0, False, 0, 0.0)
    short = replace(tried, longest=120)
    assert burst_check(tried, listing, True, 4096, 4096).result == PASS
    never, later = (burst_check(short, listing, True, 4096, rows) for rows in (759, 760))
    assert never.result == later.result == WARN and "(190 tokens) was not tried" in later.found
    assert "760 rows or more" in never.todo and "free staging rows" in later.todo


def test_in_flight_against_the_quota(lake: str, staging: Path) -> None:
    with FakeServer(lake, staging, part_tokens=256, max_parts=3) as server:
        few = preflight(lake, [server.url], limits=Limits(requests=1))
        many = preflight(lake, [server.url], limits=Limits(requests=24))
    assert named(few, "in flight").result == PASS
    found = named(many, "in flight")
    assert found.result == WARN and "24 requests at once" in found.found
    assert "--concurrency" in found.todo and many.passed
    with FakeServer(lake, staging, part_tokens=4096, max_parts=1) as server:
        single = preflight(lake, [server.url], limits=Limits(requests=1))
    assert named(single, "in flight").result == WARN


def test_command(lake: str, staging: Path) -> None:
    runner = CliRunner()
    with FakeServer(lake, staging, part_tokens=4096, delay=0.01) as server:
        call = ["preflight", lake, "--server", server.url, "--staging", str(staging)]
        good = runner.invoke(app, [*call, "--burst", "0.5"])
        assert good.exit_code == 0 and "sets the pace" in good.output
        json = runner.invoke(app, [*call, "--burst", "0.5", "--json"])
        assert '"bottleneck"' in json.output and json.exit_code == 0
        off = runner.invoke(app, [*call, "--burst", "0"])
        assert (
            off.exit_code == 0 and "burst" not in off.output and "sets the pace" not in off.output
        )
        bad = runner.invoke(app, [*call, "--burst", "-1"])
        assert bad.exit_code == 2 and "--burst" in bad.output
