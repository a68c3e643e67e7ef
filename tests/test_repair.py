"""What a power cut leaves is told, put aside and captured again; a healthy lake is not touched."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import hslake
from hslake.compact import compact
from hslake.errors import Conflict, Corrupt
from hslake.extract.worklist import worklist
from hslake.pins import pin, read_pins, unpin
from hslake.staging.locks import try_lock
from hslake.tables import catalog, deltalog
from hslake.verify import verify
from hslake.versions import log, repair
from tests.lakes import MadeLake, make_lake


@pytest.fixture
def made(tmp_path: Path) -> MadeLake:
    made = make_lake(tmp_path, lengths=[30, 300])
    made.add([50])
    return made


def entry(made: MadeLake, version: int, table: str = "manifest") -> Path:
    return Path(made.url) / f"{table}/_delta_log/{version:020d}.json"


def tree(url: str) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(Path(url).rglob("*")) if p.is_file()}


def capture_again(made: MadeLake) -> list[str]:
    """What extract would do."""
    names = [i.sample_id for i in worklist(made.lake).missing]
    if names:
        made.stage(names)
        compact(made.url, [made.staging])
    for name, truth in made.samples.items():
        assert np.array_equal(made.lake.read(name).hidden_states, truth.states)
    assert verify(made.url).damage == []
    return sorted(names)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:300])


def cut_lines(path: Path) -> None:
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])


def zeros(path: Path) -> None:
    path.write_bytes(b"\0" * path.stat().st_size)


def test_a_healthy_lake_is_not_touched(made: MadeLake) -> None:
    before = tree(made.url)
    for dry in (True, False):
        report = repair(made.url, dry)
        assert report.findings == [] and report.ok and not report.moved
    assert tree(made.url) == before


@pytest.mark.parametrize("tear", [empty, truncate, cut_lines, zeros])
def test_a_torn_newest_entry(made: MadeLake, tear: Callable[[Path], None]) -> None:
    torn = entry(made, 2)
    (data,) = (Path(made.url) / "manifest").glob(f"part-{2:020d}-*")
    tear(torn)
    with pytest.raises(Corrupt, match="hslake repair LAKE --dry-run"):
        hslake.open(made.url)
    before = tree(made.url)
    dry = repair(made.url, dry_run=True)
    assert tree(made.url) == before
    (found,) = dry.findings
    assert str(torn) in found.what and "captures its samples again" in found.action
    assert "B4-000002" in found.lost and dry.ok
    report = repair(made.url)
    assert report.findings == dry.findings and report.ok and report.aside is not None
    # Aside, not deleted, byte for byte.
    for path in (torn, data):
        kept = Path(report.aside) / path.relative_to(made.url)
        assert kept.read_bytes() == before[str(path)]
    assert capture_again(made) == ["B4-000002"]
    assert log(made.url)[0]["action"] == "compact"
    assert repair(made.url).findings == []


def test_a_torn_entry_of_the_plan(made: MadeLake, tmp_path: Path) -> None:
    zeros(entry(made, 2, "plan"))
    with pytest.raises(Corrupt):
        hslake.open(made.url)
    report = repair(made.url)
    assert "plan its files again" in report.findings[0].action and report.ok
    from hslake.plan import plan_files

    assert plan_files(made.url, [tmp_path / "plan-3.parquet"]).added == 1
    assert capture_again(made) == []


def test_a_pin_of_the_lost_commit_is_told(made: MadeLake) -> None:
    pin(made.url, "run", 2)
    empty(entry(made, 2))
    repair(made.url)
    good, problems = read_pins(made.lake)
    assert good == [] and "another commit took the number" in problems[0]


def test_an_entry_that_later_ones_stand_on(made: MadeLake) -> None:
    """Nothing but a copy helps, and nothing is touched."""
    whole = entry(made, 1).read_bytes()
    entry(made, 1).unlink()
    with pytest.raises(Corrupt, match=r"00001\.json is missing"):
        hslake.open(made.url)
    before = tree(made.url)
    report = repair(made.url)
    assert not report.ok and "restore it from a copy" in report.findings[0].what
    assert tree(made.url) == before
    entry(made, 1).write_bytes(whole)
    assert repair(made.url).ok and capture_again(made) == []


def test_lost_entries_wait_for_a_copy_or_a_word(made: MadeLake) -> None:
    pin(made.url, "run", 2)
    whole = entry(made, 2).read_bytes()
    entry(made, 2).unlink()
    before = tree(made.url)
    report = repair(made.url)
    assert report.ok and "left alone" in report.findings[0].action
    assert "restore them from a copy" in report.findings[0].action and tree(made.url) == before
    entry(made, 2).write_bytes(whole)
    assert capture_again(made) == []
    entry(made, 2).unlink()
    given_up = repair(made.url, give_up=True)
    assert len(given_up.moved) == 1 and "B4-000002" in given_up.findings[0].lost
    assert made.lake.version == 2 and log(made.url)[0]["action"] == "repair"
    unpin(made.url, "run")
    assert capture_again(made) == ["B4-000002"]


def test_a_stray_of_a_race_goes_aside(made: MadeLake) -> None:
    folder = Path(made.url) / "manifest"
    stray = folder / f"part-{1:020d}-{'a' * 32}.parquet"
    stray.write_bytes(b"not even Parquet")
    assert len(verify(made.url).warnings) == 1
    report = repair(made.url)
    assert report.moved == [f"manifest/{stray.name}"] and not stray.exists()
    assert verify(made.url).warnings == []


@pytest.mark.parametrize("damage", [empty, zeros, truncate, "ahead"])
def test_a_torn_checkpoint(made: MadeLake, damage) -> None:
    from deltalake import DeltaTable

    DeltaTable(f"{made.url}/manifest").create_checkpoint()
    folder = entry(made, 2).parent
    checkpoint = folder / f"{2:020d}.checkpoint.parquet"
    if damage == "ahead":
        entry(made, 2).unlink()
        with pytest.raises(Corrupt, match="checkpoint of version 2, the entries end at 1"):
            hslake.open(made.url)
    else:
        damage(checkpoint)
        with pytest.raises(Corrupt, match="hslake repair"):
            hslake.open(made.url)
    report = repair(made.url)
    assert sorted(p.rpartition("/")[2] for p in report.moved) == [checkpoint.name, deltalog.HINT]
    if damage == "ahead":
        assert hslake.open(made.url).version == 1
    else:
        assert capture_again(made) == []


def test_a_torn_hint(made: MadeLake) -> None:
    from deltalake import DeltaTable

    DeltaTable(f"{made.url}/manifest").create_checkpoint()
    zeros(entry(made, 2).parent / deltalog.HINT)
    report = repair(made.url)
    assert [p.rpartition("/")[2] for p in report.moved] == [deltalog.HINT]
    assert capture_again(made) == []


def test_one_repair_at_a_time(made: MadeLake) -> None:
    empty(entry(made, 2))
    folder = Path(made.url) / ".repair"
    folder.mkdir()
    lock = try_lock(folder / "lock", create=True)
    assert lock is not None
    with pytest.raises(Conflict, match="another repair"):
        repair(made.url)
    lock.release()
    assert repair(made.url).ok


def test_a_commit_beside_loses_or_stands(made: MadeLake, monkeypatch) -> None:
    """Somebody has written the data file of the version that repair takes: never is a file moved
    that the log then names."""
    entry(made, 2).unlink()
    store = made.lake.store
    real, gate, go = catalog._append, threading.Event(), threading.Event()

    def slow(*args):
        if threading.current_thread() is not threading.main_thread():
            gate.set()
            assert go.wait(60)
        real(*args)

    monkeypatch.setattr(catalog, "_append", slow)
    row = pa.table({"op": ["condemn"], "segment_id": ["nobody"]})
    done: list[int] = []
    thread = threading.Thread(
        target=lambda: done.append(catalog.commit(store, "manifest", lambda _: row, "slow"))
    )
    thread.start()
    assert gate.wait(60)
    report = repair(made.url, give_up=True)
    go.set()
    thread.join()
    assert len(report.moved) == 2 and done == [3]
    named = catalog.open_table(store, "manifest").files()
    assert len(named) == 3 and all(os.path.exists(p) for p in named)  # noqa: PTH110
    assert capture_again(made) == ["B4-000002"]


def test_what_was_whole_after_all_goes_back(made: MadeLake) -> None:
    from hslake.versions import repairing

    path = f"manifest/_delta_log/{2:020d}.json"
    with pytest.raises(Conflict, match="was put back"):
        repairing._move(made.lake.store, path, ".repair/now")
    assert capture_again(made) == []
