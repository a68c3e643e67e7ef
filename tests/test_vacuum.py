"""Vacuum gives back what no retained version needs, and nothing else, whoever works beside it."""

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

import hslake
from hslake import manifest
from hslake.compact import compact
from hslake.errors import Corrupt, Missing
from hslake.lake import Lake
from hslake.pins import pin, pins, unpin
from hslake.query import run
from hslake.tables import catalog
from hslake.torch.dataset import HiddenStateDataset
from hslake.verify import hide, verify
from hslake.versions import log, vacuum, vacuuming
from tests.lakes import MadeLake, make_lake

NOW, DAY = timedelta(0), timedelta(days=1)


@pytest.fixture
def made(tmp_path: Path) -> MadeLake:
    """Two segments; of the first both samples were hidden, and one was captured again."""
    made = make_lake(tmp_path, lengths=[30, 300])
    made.add([50])
    hide_all(made, ["A1-000000", "B3-000001"])
    made.stage(["A1-000000"])
    compact(made.url, [made.staging])
    return made


def hide_all(made: MadeLake, names: list[str]) -> None:
    lake = made.lake
    hide(lake, {(lake.location(n).segment_id, n): "damaged" for n in names})


def stored(lake: Lake) -> list[str]:
    return sorted({p.split("/")[1] for p in lake.store.list("segments")})


def check(lake: Lake, made: MadeLake, names: list[str]) -> None:
    for name in names:
        assert np.array_equal(lake.read(name).hidden_states, made.samples[name].states)


def test_hidden_segments_go_when_their_versions_have_aged(made: MadeLake) -> None:
    first = stored(made.lake)[0]
    reader, newest = hslake.open(made.url, version=2), made.lake
    young = vacuum(made.url, DAY)
    assert young.segments == () and "versions before 3 need it" in young.kept[first]
    dry = vacuum(made.url, NOW, dry_run=True)
    assert dry.segments == dry.hidden == (first,) and dry.bytes > 0 and not dry.removed
    check(reader, made, list(made.samples))
    before = run(newest, "select sum(stored_bytes) as b from segments").to_pylist()[0]["b"]
    done = vacuum(made.url, NOW)
    assert done.segments == (first,) and done.bytes == dry.bytes and done.removed
    assert first not in stored(made.lake) and len(stored(made.lake)) == 2
    check(made.lake, made, ["A1-000000", "B4-000002"])
    assert verify(made.url).damage == []
    after = run(made.url, "select sum(stored_bytes) as b from segments").to_pylist()[0]["b"]
    assert after == before - done.bytes
    growth = run(made.url, "storage_growth").to_pylist()
    assert growth[-1]["total_stored_bytes"] == after and growth[-1]["total_samples"] == 2
    # A reader of the old version, opened before: what is there reads, what is gone says so.
    check(reader, made, ["B4-000002"])
    with pytest.raises(Missing, match=r"version 2 .* not whole any more.*--retain"):
        reader.read("B3-000001")
    data = HiddenStateDataset(reader)
    with pytest.raises(Missing, match="not whole any more"):
        data[[data.sample_id(i) for i in range(3)].index("B3-000001")]
    assert vacuum(made.url, NOW).segments == ()
    assert [r["action"] for r in log(made.url, 2)] == ["vacuum", "compact"]


def test_a_pin_keeps_its_segments(made: MadeLake) -> None:
    first = stored(made.lake)[0]
    pin(made.url, "run", 1)
    pin(made.url, "later", 3)
    report = vacuum(made.url, NOW)
    assert report.segments == () and report.kept == {first: "pinned: run"}
    check(hslake.open(made.url, version="run"), made, ["A1-000000", "B3-000001"])
    unpin(made.url, "run")
    assert vacuum(made.url, NOW).segments == (first,)
    with pytest.raises(Missing, match="version 1 is not whole any more"):
        pin(made.url, "late", 1)
    assert [p.name for p in pins(made.lake)] == ["later"]


def test_retention_counts_from_the_replacement(made: MadeLake, monkeypatch) -> None:
    """A version of a month ago that was the newest until now is what readers have open."""

    class Later(datetime):
        @classmethod
        def now(cls, tz=None):  # type: ignore[override]
            return datetime.now(tz) + timedelta(days=31)

    hide_all(made, ["B4-000002"])
    second = stored(made.lake)[1]
    monkeypatch.setattr(vacuuming, "datetime", Later)
    assert len(vacuum(made.url, dry_run=True).segments) == 2
    monkeypatch.undo()
    assert second in vacuum(made.url, DAY).kept


def test_an_unreadable_pin_stops_it(made: MadeLake) -> None:
    pin(made.url, "run", 1)
    (Path(made.url) / "pins/run.json").write_text("{")
    with pytest.raises(Corrupt, match=r"pins/run\.json"):
        vacuum(made.url, NOW)
    assert len(stored(made.lake)) == 3


def test_a_pin_beside_is_seen_or_sees(made: MadeLake, monkeypatch) -> None:
    """Made between the look at the pins and the removal, it is kept; made after the look that
    counts, its maker is told."""
    first = stored(made.lake)[0]
    real = vacuuming._condemn

    def then_pin(*args):
        pin(made.url, "beside", 1)
        real(*args)

    monkeypatch.setattr(vacuuming, "_condemn", then_pin)
    report = vacuum(made.url, NOW)
    assert report.segments == () and report.kept == {first: "pinned: beside"}
    check(hslake.open(made.url, version="beside"), made, ["A1-000000", "B3-000001"])
    monkeypatch.undo()
    assert vacuum(made.url, NOW).kept == {first: "pinned: beside"}
    unpin(made.url, "beside")

    def pin_then_condemned(state, some):
        vacuum(made.url, NOW)
        return broken(catalog.open_table(made.lake.store, "manifest"), some)

    from hslake.pins import broken

    monkeypatch.setattr("hslake.pins.broken", pin_then_condemned)
    # The pin is there when that vacuum looks, so it keeps the segment; and the pin gives way.
    with pytest.raises(Missing, match="not whole"):
        pin(made.url, "second", 1)
    monkeypatch.undo()
    assert pins(made.lake) == []


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("step", ["_condemn", "remove"])
def test_killed_around_each_step(made: MadeLake, monkeypatch, step: str, before: bool) -> None:
    class Killed(BaseException):
        pass

    store, orphan = made.lake.store, "01900000-0000-7000-8000-000000000000"
    for name in ("zarr.json", "input_ids/c/0"):
        store.put(f"segments/{orphan}/{name}", b"{}")
    first = stored(made.lake)[1]
    real = getattr(vacuuming, step)

    def killed(*args, **named):
        if not before:
            real(*args, **named)
        raise Killed

    monkeypatch.setattr(vacuuming, step, killed)
    with pytest.raises(Killed):
        vacuum(made.url, NOW)
    monkeypatch.undo()
    check(made.lake, made, ["A1-000000", "B4-000002"])
    vacuum(made.url, NOW)
    assert not {first, orphan} & set(stored(made.lake)) and len(stored(made.lake)) == 2
    assert verify(made.url).damage == []


def test_killed_within_a_segment(made: MadeLake, monkeypatch) -> None:
    """Half of a segment's objects are gone: the next run takes the rest."""
    real, done = type(made.lake.store).delete, []

    def delete(self, path):
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(path)
        real(self, path)

    monkeypatch.setattr("hslake.store.Store.delete", delete)
    with pytest.raises(KeyboardInterrupt):
        vacuum(made.url, NOW)
    monkeypatch.undo()
    assert vacuum(made.url, DAY).removed  # condemned already: its age does not count
    assert len(stored(made.lake)) == 2


def test_a_live_sample_in_a_condemned_segment_is_never_removed(made: MadeLake) -> None:
    """What no commit of ours does: then the objects stay, and verify names it."""
    second = stored(made.lake)[1]
    row = vacuuming.condemn_row(second, "by hand", None)
    catalog.commit(made.lake.store, "manifest", lambda _: manifest.rows([row]), "by-hand")
    vacuum(made.url, NOW)
    check(made.lake, made, ["B4-000002"])


def test_a_committers_clock_that_is_behind(made: MadeLake) -> None:
    """A hide that seems a year old, committed after rows of now."""
    lake = made.lake
    at = lake.location("B4-000002")
    row = next(iter(manifest.add_rows(lake.manifest_table(), {"B4-000002"})))
    old = {"op": "hide", "committed_at": datetime.now(UTC) - timedelta(days=400)}
    rows = manifest.rows([{**row, **old}])
    catalog.commit(lake.store, "manifest", lambda _: rows, "hide-behind")
    assert at.segment_id in vacuum(made.url, DAY).kept


def test_two_at_once(made: MadeLake) -> None:
    store, orphan = made.lake.store, "01900000-0000-7000-8000-000000000000"
    store.put(f"segments/{orphan}/zarr.json", b"{}")
    with ThreadPoolExecutor(3) as pool:
        reports = list(pool.map(lambda _: vacuum(made.url, NOW), range(3)))
    assert {s for r in reports for s in r.segments} >= {orphan}
    assert len(stored(made.lake)) == 2 and verify(made.url).damage == []
    check(made.lake, made, ["A1-000000", "B4-000002"])
    condemned = catalog.open_table(store, "manifest").arrow(["op", "segment_id"]).to_pylist()
    names = [r["segment_id"] for r in condemned if r["op"] == "condemn"]
    assert len(names) == len(set(names)) == 2


def test_a_segment_that_its_compactor_gives_up_meanwhile(
    made: MadeLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, orphan = made.lake.store, "01900000-0000-7000-8000-000000000000"
    store.put(f"segments/{orphan}/zarr.json", b"{}")
    find = vacuuming._find

    def given_up(*args: object) -> object:
        store.delete(f"segments/{orphan}/zarr.json")
        return find(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(vacuuming, "_find", given_up)
    assert orphan in vacuum(made.url, DAY).segments
    assert orphan not in stored(made.lake) and verify(made.url).ok
