"""A watcher looks again and again: what is new is read, what fails is told, what it knew stays."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import hslake
from hslake.compact import compact
from hslake.compact.listen import Listener
from hslake.compactreport import CompactReport
from hslake.errors import Missing
from hslake.extract import ExtractOptions, extract
from hslake.extract.drive import Limits
from hslake.plan import plan_files
from hslake.preflight import preflight
from hslake.runlog import TABLE, Figures, RunLog
from hslake.schemas import arrow_schema
from hslake.server import Server
from hslake.status import StatusReport, Watcher, status
from hslake.status.report import COMPACTOR, NOBODY, NOTHING, SERVER
from hslake.status.screen import lines
from hslake.store import open_store
from hslake.tables import catalog
from tests.fakeserver import FakeServer


@pytest.fixture
def lake(tmp_path: Path) -> str:
    made = hslake.create(tmp_path / "lake", streams=[2, "final"], hidden_size=8, num_layers=4)
    rows = [
        {"sample_id": f"A1-{i}", "source": "A1", "input_ids": [5] * (10 + i)} for i in range(40)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "plan.parquet")
    plan_files(made.url, [tmp_path / "plan.parquet"])
    (tmp_path / "staging").mkdir()
    return made.url


@pytest.fixture
def server(lake: str, tmp_path: Path) -> Iterator[FakeServer]:
    with FakeServer(lake, tmp_path / "staging") as made:
        yield made


def screen(report: StatusReport) -> str:
    return "\n".join(line.plain for line in lines(report))


def told_by_a_run(lake: str, minutes: list[float], ago_s: float, **end: Any) -> None:
    """A run that told its figures every minute, the last time `ago_s` seconds ago."""
    ensure = open_store(lake)
    catalog.ensure_table(ensure, TABLE)
    begun = datetime.now(UTC) - timedelta(seconds=ago_s + 60 * len(minutes))
    rows, tokens = [], 0.0
    for k, some in enumerate([0.0, *minutes]):
        tokens += some
        rows.append(
            {
                "op": "progress" if k else "start",
                "run_id": f"run-{ago_s}",
                "seq": k + 1,
                "told_at": begun + timedelta(minutes=k),
                "elapsed_ms": 60_000 * k,
                "command": "extract",
                "host": "here",
                "captured": k,
                "captured_tokens": int(tokens),
                "retried": 3,
                "dropped": 1,
                "refused": 0,
            }
        )
    if end:
        rows.append({**rows[-1], "op": "end", "seq": len(rows) + 1, **end})
    fields = [f for f in arrow_schema(TABLE) if f.name != "commit_version"]
    table = pa.Table.from_pylist(rows, schema=pa.schema(fields))
    catalog.commit(ensure, TABLE, lambda _: table, f"runs-{ago_s}")


def test_rate_and_time_left_of_a_live_run(lake: str) -> None:
    told_by_a_run(lake, [6000.0, 5400.0, 6600.0] * 20, ago_s=20.0)
    found = status(lake)
    (run,) = found.runs
    assert run.live and (run.retried, run.dropped, run.captured) == (3, 1, 60)
    pace, left = found.pace, found.tokens_left
    assert pace.basis == "run log" and pace.average == pytest.approx(100.0)
    assert pace.now == pytest.approx(100.0, rel=0.1)
    assert pace.eta_seconds == pytest.approx(left / 100.0, rel=0.05)
    assert pace.eta_soonest is not None and pace.eta_latest is not None
    assert pace.eta_soonest <= pace.eta_seconds <= pace.eta_latest
    shown = screen(found)
    assert "done  in " in shown and " to " in shown and "live, extract on here" in shown
    assert "3 retries, 1 dropped" in shown


def test_runs_of_shards_add_up(lake: str) -> None:
    told_by_a_run(lake, [6000.0] * 30, ago_s=20.0)
    told_by_a_run(lake, [3000.0] * 30, ago_s=21.0)
    found = status(lake)
    assert len(found.runs) == 2 and found.pace.average == pytest.approx(150.0, rel=0.01)
    assert found.pace.now == pytest.approx(150.0, rel=0.05)


def test_a_run_that_ended_or_fell_silent_has_no_time_left(lake: str) -> None:
    told_by_a_run(lake, [6000.0] * 30, ago_s=3600.0)
    silent = status(lake)
    assert not silent.runs[0].live and silent.eta_seconds is None
    assert silent.bottleneck.name == NOBODY and any("cut off" in text for text in silent.needs)
    told_by_a_run(lake, [6000.0] * 30, ago_s=5.0, outcome="incomplete", reason="2 refused")
    ended = status(lake)
    assert ended.runs[0].outcome == "incomplete" and ended.eta_seconds is None
    assert any("ended incomplete: 2 refused" in text for text in ended.needs)
    assert "STOPPED" in screen(ended)


def test_commits_of_a_run_that_is_over_are_no_work_that_goes_on(
    lake: str, tmp_path: Path, server: FakeServer
) -> None:
    def run(compacted: bool) -> StatusReport:
        """The last word of a run comes after the compactor, or before it."""
        log = RunLog(open_store(lake))
        extract(lake, [server.url], ExtractOptions(limit=8))
        if compacted:
            compact(lake, [tmp_path / "staging"])
            log.end("incomplete", "done", Figures())
            log.flush()
        else:
            log.end("incomplete", "done", Figures())
            log.flush()
            compact(lake, [tmp_path / "staging"])
        return status(lake)

    assert run(compacted=False).eta_seconds is not None  # the compactor is at it
    found = run(compacted=True)
    assert found.eta_seconds is None and found.bottleneck.name == NOBODY


def test_what_is_refused_counts_until_it_is_allowed_or_there(
    lake: str, server: FakeServer, tmp_path: Path
) -> None:
    hashes = dict(hslake.open(lake).sql("select sample_id, token_hash from plan").fetchall())
    log = RunLog(hslake.open(lake).store)
    for name in ("A1-0", "A1-1", "A1-2"):
        log.refuse(name, hashes[name], "HTTP 400: bad", server.url)
    log.refuse("A1-3", "of other tokens", "HTTP 400: bad", server.url)
    log.canary("A1-5", hashes["A1-5"], "a", server.url, 0, [-1.0])
    log.flush()
    with Watcher(lake, [server.url], [tmp_path / "staging"]) as watcher:
        (refused,) = watcher.look().refusals
        assert (refused.reason, refused.samples) == ("HTTP 400: bad", 3)
        log.allow("A1-0", hashes["A1-0"])
        log.flush()
        report = watcher.look()
        assert report.refusals[0].samples == 2 and report.canaries == 1
        assert any("2 samples are refused" in text for text in report.needs)


def test_a_look_costs_what_is_new(
    lake: str, server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    real = Server.status

    async def watched(self: Server, since: Any = None, **more: Any) -> Any:
        found = await real(self, since, **more)
        asked.append(sum(len(w.events) for w in found.writers))
        return found

    staging = tmp_path / "staging"
    monkeypatch.setattr(Server, "status", watched)
    with Watcher(lake, [server.url], [staging]) as watcher:
        first = watcher.look()
        assert first.servers[0].tokens_per_second is None and first.waiting == 0
        extract(lake, [server.url], ExtractOptions(limit=30))
        asked.clear()
        busy = watcher.look()
        assert (busy.waiting, busy.missing) == (30, 10)
        assert busy.servers[0].tokens_per_second and busy.tokens_per_second
        assert busy.bottleneck.name == SERVER  # no run log, but it captured since the last look
        assert watcher.look().waiting == 30
        assert asked == [30, 0]
        compact(lake, [staging])
        done = watcher.look()
        assert (done.committed, done.waiting) == (30, 0) and done.version == 1
        extract(lake, [server.url])
        preflight(lake, [server.url])
        last = watcher.look()
        assert [w.samples_captured for w in last.writers] == [40]  # probes are none
        assert last.waiting == 10


def test_a_server_that_dies_is_told_and_its_figures_stay(
    lake: str, server: FakeServer, tmp_path: Path
) -> None:
    with Watcher(lake, [server.url]) as watcher:
        extract(lake, [server.url], ExtractOptions(limit=20))
        assert watcher.look().waiting == 20
        server.die()
        dead = watcher.look()
        (state,) = dead.servers
        assert "no answer" in state.state and state.age_seconds is not None
        assert state.samples_captured == 20 and dead.waiting == 20
        assert any("no answer" in text for text in dead.needs)
        assert not any(w.alive for w in dead.writers) and dead.eta_seconds is None
        shown = screen(dead)
        assert "old)" in shown and "STOPPED" in shown
        server.start()
        back = watcher.look()
        # It shows what the one before it left, and counts it as nobody's now.
        assert back.servers[0].state == "up" and back.waiting == 20
        assert back.servers[0].samples_captured == 0 and len(back.writers) == 2
        server.tells_others = False  # as those of before do not
        assert watcher.look().missing == 40


def test_a_lake_that_cannot_be_read_is_told_and_its_figures_stay(lake: str, tmp_path: Path) -> None:
    with Watcher(lake) as watcher:
        assert watcher.look().planned == 40
        moved = Path(lake).rename(tmp_path / "moved")
        with pytest.raises(Missing):
            watcher.look()
        report = watcher.look(strict=False)
        assert report.planned == 40 and report.lake_error and report.lake_age_seconds > 0
        assert "NOT READ" in screen(report) and "cannot be read now" in report.needs[0]
        moved.rename(lake)
        assert watcher.look(strict=False).lake_error is None
    with pytest.raises(Missing):
        Watcher(str(tmp_path / "nowhere"))


def test_staging_that_goes_away_is_told(lake: str, tmp_path: Path) -> None:
    staging = tmp_path / "staging"
    with Watcher(lake, [], [staging]) as watcher:
        assert watcher.look().waiting == 0
        shutil.rmtree(staging)
        assert any(str(staging) in text for text in watcher.look(strict=False).needs)


def test_drops_by_reason(lake: str, tmp_path: Path) -> None:
    def script(rid: Any, nth: int) -> str:
        return "drop" if rid.sample_id == "A1-3" and nth < 2 else "ok"

    with FakeServer(lake, tmp_path / "staging", script=script) as made:
        extract(lake, [made.url])
        found = status(lake, servers=[made.url], staging=[tmp_path / "staging"])
    assert sum(found.dropped_by.values()) == 2 and found.servers[0].dropped == 2
    assert "drops  2 " in screen(found)


def test_staging_that_waits_for_the_compactor(lake: str, tmp_path: Path) -> None:
    staging = tmp_path / "staging"
    with FakeServer(lake, staging, part_tokens=64, max_parts=3) as made:
        with Watcher(lake, [made.url]) as watcher:
            watcher.look()
            limits = Limits(patience=0.5)  # it fills staging and gives up
            extract(lake, [made.url], ExtractOptions(limits=limits))
            full = watcher.look()
            assert full.bottleneck.name == COMPACTOR, full.bottleneck
            assert "running?" in full.needs[0]


def test_the_compactors_own_word(lake: str, tmp_path: Path, server: FakeServer) -> None:
    report, spec = CompactReport(backlog_samples=5, tokens_per_s=12.0), hslake.open(lake).spec
    report.troubles.append("the store does not answer")
    with Listener("127.0.0.1:0", [tmp_path / "staging"], report, spec.lake_id) as listener:
        found = status(lake, servers=[listener.address])
    (compactor,) = found.compactors
    assert compactor.backlog_samples == 5 and compactor.tokens_per_second == 12.0
    assert any("the store does not answer" in text for text in found.needs)
    assert "5 samples wait" in screen(found)


def test_done(lake: str, server: FakeServer, tmp_path: Path) -> None:
    extract(lake, [server.url])
    compact(lake, [tmp_path / "staging"])
    found = status(lake, servers=[server.url])
    assert found.bottleneck.name == NOTHING and found.needs == [] and found.done == 1.0
    assert "DONE" in screen(found) and "100.00 %" in screen(found)


def test_hardly_done_is_not_done(lake: str) -> None:
    report = status(lake)

    almost = replace(report, committed_tokens=999_999, planned_tokens=1_000_000, tokens_left=1)
    assert "99.99 %" in screen(almost) and "100.00 %" not in screen(almost)
