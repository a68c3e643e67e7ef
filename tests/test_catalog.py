"""The compare-and-swap: races, repeats, lost answers, torn logs."""

import json
import multiprocessing
import threading
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from hslake.errors import Conflict, Corrupt, InvalidInput, Missing, Unavailable
from hslake.store import Store, open_store
from hslake.tables import catalog, deltalog, tablefile

SAMPLES = 8


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = open_store(tmp_path / "a lake #1")  # a space and '#' are quoted in Delta's URLs
    catalog.create_table(store, "manifest")
    return store


def rows(*ids: str) -> pa.Table:
    return pa.table({"op": ["add"] * len(ids), "sample_id": list(ids)})


def ids(state: catalog.TableState) -> list[str]:
    return sorted(state.arrow(["sample_id"])["sample_id"].to_pylist())


def log_entry(store: Store, version: int) -> Path:
    return store.local(f"manifest/_delta_log/{version:020d}.json")


def _insert_absent(url: str, worker: int) -> None:
    store = open_store(url)
    for i in range(SAMPLES):

        def build(state: catalog.TableState, name: str = f"s{i}") -> pa.Table | None:
            return None if name in ids(state) else rows(name)

        catalog.commit(store, "manifest", build, f"txn-{worker}-{i}")


def _check_race(store: Store) -> None:
    state = catalog.open_table(store, "manifest")
    assert ids(state) == sorted(f"s{i}" for i in range(SAMPLES))
    assert state.version == SAMPLES
    versions = state.arrow(["commit_version"])["commit_version"].to_pylist()
    assert sorted(versions) == list(range(1, SAMPLES + 1))
    # Losers take their files away again.
    assert len(list(store.local("manifest").glob("*.parquet"))) == SAMPLES


def test_race_of_threads(store: Store) -> None:
    errors: list[BaseException] = []

    def work(k: int) -> None:
        try:
            _insert_absent(store.url(), k)
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors
    _check_race(store)


def test_race_of_processes(store: Store) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_insert_absent, args=(store.url(), k)) for k in range(4)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert [w.exitcode for w in workers] == [0] * 4
    _check_race(store)


def test_rows_carry_their_version(store: Store) -> None:
    assert catalog.commit(store, "manifest", lambda _: rows("a"), "t1") == 1
    assert catalog.commit(store, "manifest", lambda _: rows("b", "c"), "t2") == 2
    table = catalog.open_table(store, "manifest").arrow()
    found = {r["sample_id"]: r["commit_version"] for r in table.to_pylist()}
    assert found == {"a": 1, "b": 2, "c": 2}
    assert table["committed_at"].null_count == 0
    assert table["checksum"].null_count == 3


def test_same_transaction_twice_is_once(store: Store) -> None:
    assert catalog.commit(store, "manifest", lambda _: rows("a"), "t") == 1
    assert catalog.commit(store, "manifest", lambda _: rows("b"), "other") == 2
    assert catalog.commit(store, "manifest", lambda _: rows("a"), "t") == 1
    assert ids(catalog.open_table(store, "manifest")) == ["a", "b"]


def test_transactions_survive_a_checkpoint(store: Store) -> None:
    for i in range(102):  # Delta's checkpoint interval is 100
        catalog.commit(store, "manifest", lambda _, i=i: rows(f"s{i}"), f"t{i}")
    assert list(store.local("manifest/_delta_log").glob("*.checkpoint.parquet"))
    assert catalog.commit(store, "manifest", lambda _: rows("again"), "t5") == 6
    assert len(ids(catalog.open_table(store, "manifest"))) == 102
    assert ids(catalog.open_table(store, "manifest", 3)) == ["s0", "s1", "s2"]


def test_lost_answer_is_a_success(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = catalog._append, []

    def lossy(*args: object) -> None:
        calls.append(1)
        real(*args)  # type: ignore[arg-type]
        raise OSError("connection reset")

    monkeypatch.setattr(catalog, "_append", lossy)
    assert catalog.commit(store, "manifest", lambda _: rows("a"), "t") == 1
    assert len(calls) == 1
    assert ids(catalog.open_table(store, "manifest")) == ["a"]


def test_lost_answer_and_then_another_writer(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    real = catalog._append

    def lossy(*args: object) -> None:
        real(*args)  # type: ignore[arg-type]
        monkeypatch.setattr(catalog, "_append", real)
        catalog.commit(store, "manifest", lambda _: rows("b"), "other")
        raise OSError("connection reset")

    monkeypatch.setattr(catalog, "_append", lossy)
    assert catalog.commit(store, "manifest", lambda _: rows("a"), "t") == 1
    assert ids(catalog.open_table(store, "manifest")) == ["a", "b"]


def test_failure_is_retried_then_raised(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = catalog._append, []

    def fails_twice(*args: object) -> None:
        calls.append(1)
        if len(calls) < 3:
            raise OSError("timeout")
        real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(catalog, "_append", fails_twice)
    assert catalog.commit(store, "manifest", lambda _: rows("a"), "t") == 1

    def fails(*args: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(catalog, "_append", fails)
    with pytest.raises(Unavailable, match=r"manifest: .*nothing was committed: .*no route"):
        catalog.commit(store, "manifest", lambda _: rows("b"), "t2")
    assert ids(catalog.open_table(store, "manifest")) == ["a"]


def test_stale_append_is_refused(store: Store) -> None:
    stale = catalog.open_table(store, "manifest")
    catalog.commit(store, "manifest", lambda _: rows("a"), "t")
    table = tablefile.fill(rows("b"), "manifest", 1)
    data = tablefile.encode(table)
    store.put("manifest/late.parquet", data)
    with pytest.raises(Exception, match=r"(?i)commit|version|exist"):
        add = catalog._add_action("late.parquet", len(data), table)
        catalog._append(stale, [add], catalog.Transaction("late", 1))
    assert ids(catalog.open_table(store, "manifest")) == ["a"]


def test_files_with_hides_are_known_from_the_log(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:  # as an older hslake, or another client, commits
        patch.setattr(catalog.pc, "min_max", lambda column: pa.scalar({"min": None, "max": None}))
        catalog.commit(store, "manifest", lambda _: rows("a"), "t0")
    for i in range(1, 12):  # past a checkpoint, which keeps the statistics too
        table = rows(f"s{i}")
        if i % 5 == 0:
            hide = table.set_column(0, "op", pa.array(["hide"]))
            table = pa.concat_tables([table, hide])
        catalog.commit(store, "manifest", lambda _, t=table: t, f"t{i}")
    state = catalog.open_table(store, "manifest")
    found = [int(Path(f).name.split("-")[1]) for f in state.change_files()]
    assert found == [1, 6, 11]
    assert set(state.change_files()) <= set(state.files())


def test_build_may_abort_or_do_nothing(store: Store) -> None:
    def abort(_: catalog.TableState) -> pa.Table | None:
        raise Conflict("condemned")

    with pytest.raises(Conflict, match="condemned"):
        catalog.commit(store, "manifest", abort, "t")
    assert catalog.commit(store, "manifest", lambda _: None, "t") == 0
    with pytest.raises(InvalidInput, match="colour"):
        catalog.commit(store, "manifest", lambda _: pa.table({"colour": ["red"]}), "t")
    assert catalog.open_table(store, "manifest").version == 0


@pytest.mark.parametrize("damage", ["empty", "half", "line", "empty before"])
def test_torn_log_is_corrupt(store: Store, damage: str) -> None:
    for name in ("a", "b"):
        catalog.commit(store, "manifest", lambda _, name=name: rows(name), name)
    path = log_entry(store, 1 if damage == "empty before" else 2)
    data = path.read_bytes()
    kept = {
        "empty": b"",
        "empty before": b"",
        "half": data[: len(data) // 2],
        "line": data.splitlines()[0],
    }[damage]
    path.write_bytes(kept)
    with pytest.raises(Corrupt, match=path.name):
        catalog.open_table(store, "manifest")
    with pytest.raises(Corrupt):
        catalog.commit(store, "manifest", lambda _: rows("c"), "c")


def test_missing_log_entry_is_corrupt(store: Store) -> None:
    for name in ("a", "b", "c"):
        catalog.commit(store, "manifest", lambda _, name=name: rows(name), name)
    log_entry(store, 2).unlink()
    with pytest.raises(Corrupt):
        catalog.open_table(store, "manifest")


def test_damaged_data_file_is_corrupt(store: Store) -> None:
    catalog.commit(store, "manifest", lambda _: rows("a"), "a")
    state = catalog.open_table(store, "manifest")
    Path(state.files()[0]).write_bytes(b"")
    with pytest.raises(Corrupt, match="cannot be read"):
        state.arrow()


def test_foreign_protocol_is_refused(store: Store) -> None:
    path = log_entry(store, 0)
    text = path.read_text("utf-8")
    assert '"minWriterVersion":2' in text
    path.write_text(text.replace('"minWriterVersion":2', '"minWriterVersion":3'), "utf-8")
    with pytest.raises(InvalidInput, match="protocol"):
        catalog.open_table(store, "manifest")


def test_settings_keep_old_versions(store: Store) -> None:
    actions = [json.loads(x) for x in log_entry(store, 0).read_text("utf-8").splitlines()]
    found = next(a["metaData"]["configuration"] for a in actions if "metaData" in a)
    assert found == catalog.CONFIGURATION


def test_versions(store: Store, tmp_path: Path) -> None:
    catalog.commit(store, "manifest", lambda _: rows("a"), "a")
    assert catalog.open_table(store, "manifest", 0).files() == []
    with pytest.raises(Missing):
        catalog.open_table(store, "manifest", 9)
    with pytest.raises(Missing):
        catalog.open_table(open_store(tmp_path / "nothing"), "manifest")
    with pytest.raises(InvalidInput, match="rows"):
        catalog.create_table(store, "manifest")


def test_an_entry_stands_on_durable_ones_only(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another writer may have made the newest entry and not synced it yet: a power cut must not
    tear one that a reported commit stands on."""
    catalog.commit(store, "manifest", lambda _: rows("a"), "t1")
    events: list[tuple[str, bool]] = []
    real = deltalog.sync_file

    def sync(path: Path) -> None:
        events.append((path.name, log_entry(store, 2).exists()))
        real(path)

    monkeypatch.setattr(deltalog, "sync_file", sync)
    catalog.commit(store, "manifest", lambda _: rows("b"), "t2")
    assert events[0] == (f"{1:020d}.json", False)
    assert (f"{2:020d}.json", True) in events


def test_what_a_version_needs_of_the_log_is_looked_at(store: Store) -> None:
    for i in range(5):
        catalog.commit(store, "manifest", lambda _, i=i: rows(f"s{i}"), f"t{i}")
    DeltaTable(store.url("manifest")).create_checkpoint()
    catalog.commit(store, "manifest", lambda _: rows("s5"), "t5")
    whole = log_entry(store, 3).read_bytes()
    log_entry(store, 3).write_bytes(b"")
    # A checkpoint stands in for it, but not for versions before.
    assert len(ids(catalog.open_table(store, "manifest"))) == 6
    with pytest.raises(Corrupt, match=r"00003\.json is empty"):
        catalog.open_table(store, "manifest", 4)
    log_entry(store, 3).unlink()
    with pytest.raises(Corrupt, match=r"00003\.json is missing"):
        catalog.open_table(store, "manifest", 4)
    assert [v for v, _ in deltalog.problems(store, "manifest")] == [3]
    assert ids(catalog.open_table(store, "manifest", 2)) == ["s0", "s1"]
    log_entry(store, 3).write_bytes(whole)
    assert len(ids(catalog.open_table(store, "manifest", 4))) == 4
