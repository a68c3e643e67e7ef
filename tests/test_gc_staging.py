"""What dead writers left goes; what lives, what is another's, and what still counts stays."""

import multiprocessing
import os
import time
from datetime import timedelta
from pathlib import Path

import pytest

from hslake.compact import compact
from hslake.gcstaging import gc_staging
from hslake.staging.locks import try_lock
from hslake.staging.part import DONE
from tests.lakes import MadeLake, make_lake


@pytest.fixture
def made(tmp_path: Path) -> MadeLake:
    return make_lake(tmp_path, lengths=[30])


def states(made: MadeLake, **how) -> dict[str, str]:
    report = gc_staging([made.staging], **how)
    return {Path(f.path).name: f.state for f in report.folders}


def test_complete_samples_are_kept_without_force(made: MadeLake) -> None:
    made.stage(made.plan([10, 20]))
    (folder,) = made.staging.iterdir()
    report = gc_staging([made.staging])
    (found,) = report.folders
    assert (found.state, found.samples, found.tokens) == ("kept", 2, 30)
    assert found.lake_id == made.lake.spec.lake_id and found.bytes > 0 and "compact" in found.why
    assert folder.is_dir()
    assert compact(made.url, [made.staging]).samples == 2  # nothing was harmed
    made.stage(made.plan([10]))
    assert list(states(made, force=True, dry_run=True).values()) == ["removable"]
    assert list(states(made, force=True).values()) == ["removed"]
    assert list(made.staging.iterdir()) == []


def test_what_its_lake_has_committed_holds_nothing_back(made: MadeLake, tmp_path: Path) -> None:
    """A compactor died between its commit and the removal."""
    made.stage(made.plan([10]))
    (folder,) = made.staging.iterdir()
    kept = tmp_path / "kept"
    os.rename(folder, kept)  # noqa: PTH104
    os.rename(kept, folder)  # noqa: PTH104
    import shutil

    shutil.copytree(folder, kept)
    compact(made.url, [made.staging])
    shutil.copytree(kept, folder)
    other = make_lake(tmp_path / "other", 1)
    assert list(states(made).values()) == ["kept"]
    assert list(states(made, lake_url=other.url).values()) == ["kept"]
    assert list(states(made, lake_url=made.url).values()) == ["removed"]


def test_nothing_complete_is_left(made: MadeLake) -> None:
    made.stage(made.plan([10]))
    (part,) = made.staging.glob("*/part-*")
    (part / DONE).touch()
    assert list(states(made, older=timedelta(hours=1)).values()) == ["kept"]
    assert list(states(made).values()) == ["removed"]


def _live(url: str, staging: str, go, end) -> None:
    made = MadeLake(url, Path(staging), lambda *_: None)  # type: ignore[arg-type, return-value]
    writer = made.writer(16)
    go.set()
    end.wait(120)
    writer.close()


def test_live_writers_and_busy_compactors(made: MadeLake) -> None:
    context = multiprocessing.get_context("spawn")
    go, end = context.Event(), context.Event()
    process = context.Process(target=_live, args=(made.url, str(made.staging), go, end))
    process.start()
    assert go.wait(120)
    assert list(states(made, force=True).values()) == ["live"]
    process.kill()
    process.join()
    (folder,) = made.staging.iterdir()
    lock = try_lock(folder / "compact.lock")
    assert lock is not None
    assert list(states(made, force=True).values()) == ["busy"]
    lock.release()
    (folder / "lock").rename(folder / "away")
    assert list(states(made, force=True).values()) == ["kept"]
    (folder / "away").rename(folder / "lock")
    assert list(states(made).values()) == ["removed"]


def test_others_files_are_left_alone(made: MadeLake) -> None:
    old = time.time() - 3600
    mine = [
        made.staging / ".0b9e7a5e-6f4e-4c7e-9d59-3a1c5b1b7c11.gone",
        made.staging / ".0b9e7a5e-6f4e-4c7e-9d59-3a1c5b1b7c12.new",
    ]
    others = [
        made.staging / n for n in ("notes", ".hook/run-1", ".cache.new", "damaged", ".x.gone")
    ]
    young = made.staging / ".0b9e7a5e-6f4e-4c7e-9d59-3a1c5b1b7c13.new"
    for path in (*mine, *others, young):
        path.mkdir(parents=True)
        (path / "file").write_text("x")
        if path != young:
            os.utime(path, (old, old))
    assert set(states(made, dry_run=True, force=True).values()) == {"removable"}
    found = states(made, force=True)
    assert set(found) == {p.name for p in mine} and set(found.values()) == {"removed"}
    assert not any(p.exists() for p in mine) and all(
        (p / "file").exists() for p in (*others, young)
    )


def test_probes_of_preflight_hold_nothing_back(made: MadeLake, monkeypatch) -> None:
    (name,) = made.plan([10])
    monkeypatch.setattr("hslake.gcstaging.PROBE_PREFIX", name[:2])
    made.stage([name])
    assert list(states(made).values()) == ["removed"]


def test_a_part_that_does_not_read_is_kept(made: MadeLake) -> None:
    made.stage(made.plan([10]))
    (meta,) = made.staging.glob("*/part-*/zarr.json")
    meta.write_bytes(b"{")
    (found,) = gc_staging([made.staging]).folders
    assert found.state == "kept" and "what it holds is not known" in found.why
    assert list(states(made, force=True).values()) == ["removed"]
