"""Deletion: what was selected is gone from plan, lake and storage; everything else stays, bit for
bit, whatever is interrupted and whoever works beside it."""

from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

import hslake
from hslake import manifest
from hslake.compact import compact
from hslake.errors import CheckFailed, Corrupt, InvalidInput, Missing
from hslake.extract.worklist import worklist
from hslake.lake import Lake
from hslake.pins import pin, pins
from hslake.plan import plan_files
from hslake.query import run
from hslake.tables import catalog
from hslake.verify import verify
from hslake.versions import delete, log, vacuum
from hslake.versions.deletion import DeleteReport
from tests.lakes import MadeLake, damage_sample, make_lake


def stored(lake: Lake) -> set[str]:
    return {p.split("/")[1] for p in lake.store.list("segments")}


def check(made: MadeLake, gone: set[str]) -> None:
    """Everything but `gone` reads as it went in; nothing of `gone` is left."""
    lake = made.lake
    names = run(lake, "select sample_id from samples")["sample_id"].to_pylist()
    assert sorted(names) == sorted(made.samples.keys() - gone)
    for name in names:
        sample, truth = lake.read(name), made.samples[name]
        assert np.array_equal(sample.hidden_states, truth.states)
        assert sample.input_ids.tolist() == truth.input_ids
        assert sample.loss_mask.tolist() == truth.loss_mask
    planned = run(lake, "select sample_id from plan")["sample_id"].to_pylist()
    assert not gone & set(planned)
    assert verify(made.url).damage == [] and not worklist(lake).missing
    assert all(r["failures"] == 0 for r in run(lake, "integrity").to_pylist())
    growth = run(lake, "storage_growth").to_pylist()[-1]
    on_disk = sum(lake.store.size(p) for p in lake.store.list("segments"))
    assert (growth["total_samples"], growth["total_stored_bytes"]) == (len(names), on_disk)
    # Its bytes are in no segment that is left.
    state = lake.manifest_table()
    holding = {r["segment_id"] for r in manifest.add_rows(state, gone)}
    assert not holding & stored(lake)


@pytest.fixture
def made(tmp_path: Path) -> MadeLake:
    made = make_lake(tmp_path, lengths=[30, 300, 20, 40])
    made.add([50, 60])
    return made


def test_a_sample_of_a_shared_segment(made: MadeLake) -> None:
    victim, other = list(made.samples)[:2]
    before = made.lake
    old = manifest.add_rows(before.manifest_table(), {other})[0]
    where = f"sample_id = '{victim}'"
    dry = delete(made.url, where, dry_run=True)
    assert (dry.samples, dry.live, dry.planned, dry.segments, dry.moved) == (1, 1, 1, 1, 3)
    assert dry.versions == (1, 2) and dry.tokens == 30 and dry.sample_ids == [victim]
    assert made.lake.version == before.version
    done = delete(made.url, where, reason="request 42")
    assert len(done.removed) == 1 and not done.kept
    check(made, {victim})
    # Provenance moved with the others.
    lake = made.lake
    new = [r for r in manifest.add_rows(lake.manifest_table(), {other}) if r != old]
    assert len(new) == 1 and new[0]["segment_id"] != old["segment_id"]
    same = ("attempt", "writer", "captured_at", "checksum", "rms", "engine", "token_hash")
    assert all(new[0][c] == old[c] for c in same)
    with pytest.raises(Missing, match=r"was deleted \(.*request 42\)"):
        lake.read(victim)
    # An old version can be queried, and says what is gone.
    then = hslake.open(made.url, version=before.version)
    assert run(then, "select 1 from samples").num_rows == 6
    for name in (victim, other):
        with pytest.raises(Missing, match="not whole any more: its segment"):
            then.read(name)
    assert np.array_equal(then.read("B4-000005").hidden_states, made.samples["B4-000005"].states)
    assert [r["action"] for r in log(made.url)] == ["delete", "delete", "compact", "compact"]


def test_all_of_a_segment_and_by_columns_of_the_plan(made: MadeLake) -> None:
    ids = made.samples["A1-000000"].input_ids
    delete(made.url, f"list_contains(input_ids, {ids[0]}) and length = 30")
    check(made, {"A1-000000"})
    delete(made.url, "committed_at is not null and segment_tokens < 600")
    check(made, {"A1-000000", "B3-000004", "B4-000005"})
    with pytest.raises(InvalidInput, match="selects no sample"):
        delete(made.url, "source = 'C9'")
    for bad in (" ", "sauce = 1", "1 = 1) or (2 = 2; drop table x"):
        with pytest.raises(InvalidInput):
            delete(made.url, bad)


def test_what_is_planned_only_is_not_captured_any_more(made: MadeLake, tmp_path: Path) -> None:
    (name,) = made.plan([70])
    made.stage([name])
    report = delete(made.url, f"sample_id = '{name}'")
    assert (report.live, report.planned, report.segments) == (0, 1, 0)
    assert compact(made.url, [made.staging]).abandoned == {"not in the plan": 1}
    check(made, {name})
    files = [tmp_path / "plan-7.parquet"]
    again = plan_files(made.url, files)
    assert (again.added, again.deleted) == (0, 1)
    check(made, {name})
    assert plan_files(made.url, files, again=True).added == 1
    made.stage([name])
    assert compact(made.url, [made.staging]).samples == 1
    check(made, set())


def test_a_compactor_that_read_the_plan_before(made: MadeLake, monkeypatch) -> None:
    """It commits after the deletion, and neither brings the sample back nor keeps its bytes."""
    from hslake.compact.line import finish

    names = made.plan([70, 80, 90])
    made.stage(names)
    written: list[str] = []

    def then_delete(filled, paranoid):
        info = finish(filled, paranoid)
        if not written:
            delete(made.url, f"sample_id = '{names[1]}'")
        written.append(info.segment_id)
        return info

    monkeypatch.setattr("hslake.compact.line.finish", then_delete)
    report = compact(made.url, [made.staging])
    assert report.samples == 2 and report.abandoned == {"deleted": 1} and len(written) == 2
    assert written[0] not in stored(made.lake)
    check(made, {names[1]})


def test_pins_are_named_and_kept(made: MadeLake) -> None:
    pin(made.url, "first", 1)
    pin(made.url, "empty", 0)
    where = "sample_id = 'A1-000000'"
    with pytest.raises(CheckFailed, match="first; nothing was deleted"):
        delete(made.url, where)
    check(made, set())
    assert delete(made.url, where, dry_run=True).pins == ["first"]
    assert delete(made.url, "sample_id = 'B3-000004'", dry_run=True).pins == []
    delete(made.url, where, break_pins=True)
    check(made, {"A1-000000"})
    assert [p.name for p in pins(made.lake)] == ["empty", "first"]
    with pytest.raises(Missing, match="not whole any more"):
        hslake.open(made.url, version="first").read("B3-000001")
    with pytest.raises(Missing, match="version 1 is not whole any more"):
        pin(made.url, "late", 1)
    assert len(pins(made.lake)) == 2


def test_hidden_copies_go_too_and_live_ones_that_do_not_match_stay(made: MadeLake) -> None:
    """A quarantined sample that was captured again: its old copy alone can be selected."""
    damage_sample(made.lake, "A1-000000")
    assert verify(made.url, quarantine=True).quarantined == 1
    old = manifest.add_rows(made.lake.manifest_table(), {"A1-000000"})[0]["segment_id"]
    made.stage(["A1-000000"])
    compact(made.url, [made.staging])
    report = delete(made.url, f"segment_id = '{old}' and sample_id = 'A1-000000'")
    assert (report.samples, report.moved) == (0, 3)
    assert old not in stored(made.lake)
    check(made, set())
    # By id all copies go.
    delete(made.url, "sample_id = 'A1-000000'")
    check(made, {"A1-000000"})


def test_a_damaged_neighbour_stops_it_and_is_not_lost(made: MadeLake) -> None:
    damage_sample(made.lake, "B3-000001")
    where = "sample_id = 'A1-000000'"
    with pytest.raises(Corrupt, match="a sample that stays is damaged"):
        delete(made.url, where)
    assert run(made.url, "select 1 from samples").num_rows == 5
    assert verify(made.url, quarantine=True).quarantined == 1
    delete(made.url, where)
    made.stage(["B3-000001"])
    compact(made.url, [made.staging])
    check(made, {"A1-000000"})


STEPS = ("_tombstone", "_hide", "_rewrite", "_commit", "remove")


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("before", [True, False])
def test_killed_around_each_step(
    made: MadeLake, monkeypatch: pytest.MonkeyPatch, step: str, before: bool
) -> None:
    """After any step nothing that was not selected is lost, and the same call completes it."""
    from hslake.versions import deletion

    class Killed(BaseException):
        pass

    real = getattr(deletion, step)

    def killed(*args, **named):
        if not before:
            real(*args, **named)
        raise Killed

    gone = {"A1-000000", "B3-000004", "B4-000005"}
    where = "sample_id in ('A1-000000', 'B3-000004', 'B4-000005')"
    monkeypatch.setattr(deletion, step, killed)
    with pytest.raises(Killed):
        delete(made.url, where)
    monkeypatch.undo()
    lake = made.lake
    for name in made.samples.keys() - gone:
        assert np.array_equal(lake.read(name).hidden_states, made.samples[name].states)
    assert verify(made.url).damage == []
    delete(made.url, where)
    # A segment that was written and not committed is an orphan like others.
    vacuum(made.url, timedelta(0))
    check(made, gone)
    version = made.lake.version
    done: DeleteReport = delete(made.url, where)
    assert (done.live, done.planned, done.segments, done.removed) == (0, 0, 0, [])
    assert made.lake.version == version


def test_a_vacuum_beside_takes_the_new_segment(made: MadeLake, monkeypatch) -> None:
    from hslake.versions import deletion

    real, taken = deletion._rewrite, []

    def then_vacuum(*args):
        info = real(*args)
        if not taken:
            import time

            time.sleep(0.002)  # older than 0 s
            taken.extend(vacuum(made.url, timedelta(0)).segments)
        return info

    monkeypatch.setattr(deletion, "_rewrite", then_vacuum)
    delete(made.url, "sample_id = 'A1-000000'")
    assert len(taken) == 1
    check(made, {"A1-000000"})


def test_a_quarantine_beside_stays(made: MadeLake, monkeypatch) -> None:
    from hslake.verify import hide
    from hslake.versions import deletion

    real = deletion._rewrite

    def then_hide(lake, segment, rows):
        info = real(lake, segment, rows)
        hide(made.lake, {(segment, "B3-000001"): "seen damaged"})
        return info

    monkeypatch.setattr(deletion, "_rewrite", then_hide)
    delete(made.url, "sample_id = 'A1-000000'")
    missing = [i.sample_id for i in worklist(made.lake).missing]
    assert missing == ["B3-000001"]
    made.stage(missing)
    compact(made.url, [made.staging])
    check(made, {"A1-000000"})


def test_rows_of_the_manifest_say_what_happened(made: MadeLake) -> None:
    delete(made.url, "sample_id = 'A1-000000'", reason="request")
    rows = catalog.open_table(made.lake.store, "manifest").arrow().to_pylist()
    marks = [r for r in rows if r["op"] == "delete"]
    assert [(r["sample_id"], r["segment_id"], r["reason"]) for r in marks] == [
        ("A1-000000", None, "request")
    ]
    moved = [r for r in rows if r["op"] == "hide" and r["sample_id"] != "A1-000000"]
    assert len(moved) == 3 and all(r["reason"].startswith("moved to segment") for r in moved)
    assert len({r["commit_version"] for r in moved}) == 1
