"""The mirror says what the views over the tables' files say, and reads only what is new."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from hslake import query
from hslake.errors import Missing
from hslake.runlog import Figures, RunLog
from hslake.status.mirror import Mirror
from hslake.versions import delete
from tests.lakes import MadeLake, make_lake

VIEWS = {
    "samples": "select sample_id, segment_id, token_start, length, attempt, committed_at from v",
    "plan": "select sample_id, source, split, length, token_hash, commit_version from v",
    "coverage": "select * from v",
    "segments": "select * from v",
    "versions": "select * from v",
    "runs": "select * from v",
    "refusals": "select * from v",
    "hides": "select * from v",
}


@pytest.fixture
def made(tmp_path: Path) -> MadeLake:
    return make_lake(tmp_path, lengths=[10, 20, 300])


@pytest.fixture
def mirror(made: MadeLake) -> Iterator[Mirror]:
    with Mirror(made.lake) as found:
        found.refresh()
        yield found


def same(mirror: Mirror, made: MadeLake) -> None:
    with query.connect(made.lake) as con:
        for view, sql in VIEWS.items():
            text = f"{sql.replace('from v', f'from {view}')} order by all"
            assert mirror.rows(text).to_pylist() == query.execute(con, text).to_pylist(), view
        for name in ("coverage", "forecast"):
            asked = query.resolve(name, None)
            assert mirror.rows(name).to_pylist() == query.execute(con, *asked).to_pylist(), name


def test_it_follows_every_kind_of_commit(mirror: Mirror, made: MadeLake) -> None:
    same(mirror, made)
    assert not mirror.refresh()
    made.plan([40, 50])
    assert mirror.refresh()
    same(mirror, made)
    made.stage(list(made.samples)[3:])
    from hslake.compact import compact

    compact(made.url, [made.staging])
    assert mirror.refresh()
    same(mirror, made)
    name = next(iter(made.samples))
    delete(made.url, f"sample_id = '{name}'")  # hides, condemns, tombstones
    assert mirror.refresh()
    same(mirror, made)
    assert len(mirror.rows("select * from samples")) == 4
    log = RunLog(made.lake.store)  # the table is made while it is watched
    log.start({}, Figures(captured_tokens=0))
    log.refuse("A1-000000", "00", "HTTP 400", None)
    log.flush()
    assert mirror.refresh()
    log.progress(Figures(captured_tokens=7))
    log.allow("A1-000000", "00")
    log.flush()
    assert mirror.refresh() and not mirror.refresh()
    same(mirror, made)


def test_only_new_files_are_read(
    mirror: Mirror, made: MadeLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    connect = query.connect_files

    def watched(files: dict, *args: object) -> object:
        read.append(sum(map(len, files.values())))
        return connect(files, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(query, "connect_files", watched)
    made.add([10])
    read.clear()
    assert mirror.refresh()
    assert read == [1, 1]  # one file of the manifest, one of the plan
    read.clear()
    assert not mirror.refresh() and read == []


def test_what_fails_leaves_it_as_it_was(
    mirror: Mirror, made: MadeLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = mirror.rows("select * from samples").to_pylist()
    made.add([10])
    with monkeypatch.context() as patch:
        patch.setattr(Mirror, "_read", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            mirror.refresh()
    assert mirror.rows("select * from samples").to_pylist() == before
    assert mirror.refresh()
    same(mirror, made)


def test_a_lake_that_goes_away_is_told(mirror: Mirror, made: MadeLake) -> None:
    moved = Path(made.url).rename(made.staging.parent / "moved")
    with pytest.raises(Missing, match="moved or removed"):
        mirror.refresh()
    moved.rename(made.url)
    assert not mirror.refresh()
