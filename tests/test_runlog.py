"""The run log: what is told is committed once, whatever fails between, and views tell it."""

from pathlib import Path

import pytest

import hslake
from hslake import query, runlog
from hslake.errors import Unavailable
from hslake.runlog import Figures, RunLog
from hslake.tables import catalog
from hslake.verify import verify
from hslake.versions import repair
from tests.lakes import make_lake


def rows(lake_url: str, sql: str) -> list[dict]:
    return query.run(hslake.open(lake_url), sql).to_pylist()


def test_a_lake_without_runs_has_empty_views(tmp_path: Path) -> None:
    made = make_lake(tmp_path, lengths=[10])
    for view in ("run_log", "runs", "refusals", "canaries"):
        assert rows(made.url, f"select * from {view}") == []
    assert not (Path(made.url) / "runs").exists()


def test_a_run_from_start_to_end(tmp_path: Path) -> None:
    made = make_lake(tmp_path, lengths=[10])
    log = RunLog(made.lake.store)
    log.start({"where": "source = 'A1'"}, Figures(planned=3, missing=3))
    log.progress(Figures(captured=1, captured_tokens=10), [{"url": "http://a", "tokens": 10}])
    assert log.kept == 2
    log.flush()
    (run,) = rows(made.url, "select * from runs")
    assert (run["captured"], run["planned"], run["outcome"], run["ended_at"]) == (1, 3, None, None)
    log.end(runlog.COMPLETE, "complete: all 3", Figures(3, 3, 0, 3, 60, 1, 2, 0))
    log.flush()
    assert log.kept == 0
    (run,) = rows(made.url, "select * from runs")
    assert run["run_id"] == log.run_id and run["command"] == "extract"
    assert (run["captured"], run["captured_tokens"], run["retried"]) == (3, 60, 1)
    assert run["outcome"] == runlog.COMPLETE and run["ended_at"] >= run["started_at"]
    assert run["options"] == '{"where":"source = \'A1\'"}'
    log.flush()  # nothing left
    assert catalog.open_table(made.lake.store, runlog.TABLE).version == 2


def test_refusals_stand_until_allowed(tmp_path: Path) -> None:
    made = make_lake(tmp_path, lengths=[10])
    log = RunLog(made.lake.store)
    log.refuse("a", "00", "HTTP 400", "http://a")
    log.refuse("b", "00", "HTTP 400", "http://a")
    log.allow("b", "00")
    log.flush()
    assert [r["sample_id"] for r in rows(made.url, "select * from refusals")] == ["a"]
    other = RunLog(made.lake.store)  # its rows count from 1 again
    other.allow("a", "00")
    other.refuse("b", "11", "too long", None)
    other.flush()
    (left,) = rows(made.url, "select * from refusals")
    assert (left["sample_id"], left["token_hash"], left["run_id"]) == ("b", "11", other.run_id)


def test_canaries(tmp_path: Path) -> None:
    made = make_lake(tmp_path, lengths=[10])
    log = RunLog(made.lake.store)
    log.canary("a", "00", "attempt", "http://a", 3, [-0.5, -1.25])
    log.flush()
    (found,) = rows(made.url, "select * from canaries")
    assert (found["first_position"], found["log_probs"]) == (3, [-0.5, -1.25])


def test_rows_that_could_not_be_committed_are_not_lost_nor_doubled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_lake(tmp_path, lengths=[10])
    log = RunLog(made.lake.store)
    log.refuse("a", "00", "HTTP 400", None)
    commit = catalog.commit

    def lose_the_answer(*args: object) -> int:
        commit(*args)  # type: ignore[arg-type]
        raise Unavailable("no answer")

    monkeypatch.setattr(catalog, "commit", lose_the_answer)
    with pytest.raises(Unavailable):
        log.flush()
    log.refuse("b", "00", "HTTP 400", None)
    assert log.kept == 2
    monkeypatch.setattr(catalog, "commit", commit)
    log.flush()
    found = rows(made.url, "select sample_id from run_log order by seq")
    assert [r["sample_id"] for r in found] == ["a", "b"]


def test_two_drivers_make_the_table_at_once(tmp_path: Path) -> None:
    made = make_lake(tmp_path, lengths=[10])
    one, two = RunLog(made.lake.store), RunLog(made.lake.store)
    for log in (one, two):
        log.start({})
        catalog.ensure_table(made.lake.store, runlog.TABLE)
    one.flush()
    catalog.ensure_table(made.lake.store, runlog.TABLE)  # with rows in it
    two.flush()
    assert len(rows(made.url, "select * from runs")) == 2


def test_verify_and_repair_look_at_it(tmp_path: Path) -> None:
    made = make_lake(tmp_path, lengths=[10])
    log = RunLog(made.lake.store)
    for at in range(2):
        log.progress(Figures(captured=at))
        log.flush()
    assert verify(made.url).ok
    entry = Path(made.url) / "runs" / "_delta_log" / f"{2:020d}.json"
    entry.write_bytes(entry.read_bytes()[:40])
    with pytest.raises(hslake.errors.Corrupt, match="repair"):
        rows(made.url, "select * from runs")
    assert [f.table for f in repair(made.url).findings] == ["runs"]
    (run,) = rows(made.url, "select * from runs")
    assert run["captured"] == 0
    log.progress(Figures(captured=7))
    log.flush()
    (run,) = rows(made.url, "select * from runs")
    assert run["captured"] == 7 and verify(made.url).ok


def test_a_log_that_is_made_while_it_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake_store = make_lake(tmp_path, lengths=[10]).lake.store
    first = catalog.open_table

    def too_early(store: object, name: str) -> catalog.TableState:
        monkeypatch.setattr(catalog, "open_table", first)
        try:
            return first(store, name)  # type: ignore[arg-type]
        finally:
            catalog.ensure_table(lake_store, runlog.TABLE)

    monkeypatch.setattr(catalog, "open_table", too_early)
    assert runlog.open_runs(lake_store) is not None
