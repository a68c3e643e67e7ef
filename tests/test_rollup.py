"""Roll-ups change how fast a table is read, never what is read."""

import random
import shutil
from pathlib import Path

import pyarrow as pa
import pytest

from hslake import query
from hslake.errors import Corrupt
from hslake.store import Store, open_store
from hslake.tables import catalog, rollup


def part(version: int, salt: str = "0") -> str:
    return f"part-{version:020d}-{salt * 32}.parquet"


def expand(cover: list[str | rollup.Block]) -> list[str]:
    return [p for f in cover for p in (f.parts if isinstance(f, rollup.Block) else (f,))]


def test_every_part_exactly_once_whatever_exists() -> None:
    rng = random.Random(0)
    parts = [part(v) for v in range(1, 3000) if v % 7]
    everything = {b.name for b in rollup.wanted(parts, 2999, ())}
    assert len(everything) == 2 + 93
    for version in (1, 31, 32, 33, 1024, 2048, 2999):
        visible = [p for p in parts if (rollup.version_of(p) or 0) <= version]
        for share in (0.0, 0.5, 1.0):
            have = {n for n in everything if rng.random() < share}
            cover = rollup.cover(visible, version, have)
            assert expand(cover) == visible  # in order, none twice
    assert len(rollup.cover(parts, 2999, everything)) < 2 + 31 + 32
    # Foreign files are read as they are.
    assert expand(rollup.cover(["x.parquet", *parts], 2999, everything)) == ["x.parquet", *parts]


def test_another_commit_of_the_number_is_another_rollup() -> None:
    parts = [part(v) for v in range(1, 33)]
    (old,) = rollup.blocks(parts, 32, 32)
    retaken = [*parts[:-1], part(32, "1")]
    assert rollup.cover(retaken, 32, {old.name}) == retaken


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = open_store(tmp_path_factory.mktemp("whole") / "a lake #1")
    catalog.create_table(store, "manifest")
    for i in range(70):
        op = "hide" if i % 9 == 8 else "add"
        row = pa.table({"op": [op], "sample_id": [f"s{i}"], "segment_id": [f"g{i}"]})
        catalog.commit(store, "manifest", lambda _, row=row: row, f"t{i}")
    return store


@pytest.fixture
def store(whole: Store, tmp_path: Path) -> Store:
    shutil.copytree(whole.root, tmp_path / "a lake #1")
    return open_store(tmp_path / "a lake #1")


def ids(state: catalog.TableState) -> list[str]:
    return state.arrow(["sample_id"])["sample_id"].to_pylist()


def rolled(store: Store) -> list[Path]:
    return sorted(store.local("manifest/_rollup").glob("*.parquet"))


def test_commits_make_them_and_readers_use_them(store: Store) -> None:
    assert len(rolled(store)) == 2
    state = catalog.open_table(store, "manifest")
    assert len(state.files()) == 70 and len(state.row_files()) == 2 + 6
    assert ids(state) == [f"s{i}" for i in range(70)]
    old = catalog.open_table(store, "manifest", 40)
    assert len(old.row_files()) == 1 + 8 and ids(old) == [f"s{i}" for i in range(40)]
    with query.connect_files(
        {"manifest": state.row_files(), "plan": []}, None, None,
        {"manifest": state.change_files(), "plan": []},
    ) as con:  # fmt: skip
        text = "select (select count(*) from manifest), (select count(*) from hides)"
        assert con.execute(text).fetchall() == [(70, 7)]
    state.check()


@pytest.mark.parametrize("harm", ["cut", "flip", "gone", "other rows"])
def test_a_damaged_one_is_told_and_harms_nobody(store: Store, harm: str) -> None:
    victim = rolled(store)[0]
    state = catalog.open_table(store, "manifest")
    state.row_files()  # it was there then
    data = victim.read_bytes()
    if harm == "cut":
        victim.write_bytes(data[: len(data) // 2])
    elif harm == "flip":
        victim.write_bytes(data[:100] + bytes([data[100] ^ 4]) + data[101:])
    elif harm == "gone":
        victim.unlink()
    else:
        victim.write_bytes(rolled(store)[1].read_bytes())
    if harm != "other rows":
        assert ids(state) == [f"s{i}" for i in range(70)]
    sound: set[str] = set()
    for _ in range(2):
        with pytest.raises(Corrupt, match=r"_rollup/.* is not what the files hold"):
            state.check(sound)
    assert state.bad_rollups() == [f"manifest/_rollup/{victim.name}"]


def test_one_that_is_lacking_is_made_later(store: Store) -> None:
    for path in rolled(store):
        path.unlink()
    for i in range(70, 96):
        row = pa.table({"op": ["add"], "sample_id": [f"s{i}"]})
        catalog.commit(store, "manifest", lambda _, row=row: row, f"t{i}")
    assert len(rolled(store)) == 3
    catalog.open_table(store, "manifest").check()


def test_a_failure_to_make_one_fails_no_commit(store: Store, monkeypatch) -> None:
    real = Store.put

    def put(self, path, data):
        if "_rollup" in path:
            raise OSError(28, "No space left on device")
        real(self, path, data)

    monkeypatch.setattr(Store, "put", put)
    for i in range(70, 96):
        row = pa.table({"op": ["add"], "sample_id": [f"s{i}"]})
        assert catalog.commit(store, "manifest", lambda _, row=row: row, f"t{i}") == i + 1
    monkeypatch.undo()
    assert len(rolled(store)) == 2 and len(ids(catalog.open_table(store, "manifest"))) == 96
