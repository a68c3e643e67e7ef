"""The folders of server runs: who removes them, and that none of a living server goes."""

import multiprocessing
import os
import signal
import time
import uuid
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from hslake.staging.folder import remove_remains
from hslake.staging.runs import RUNS, begin_run, end_run, remove_dead_runs
from tests.staging.test_writer import spec, writer


def serve(root: Path, pipe: Connection) -> None:
    """A server's first process: ends in order when it is told so."""
    lock = begin_run(root, "run1")
    (root / RUNS / "run1" / "error-1.json").write_text('{"error": "x"}')
    pipe.send("up")
    pipe.recv()
    end_run(lock)


def folders(root: Path) -> list[str]:
    return sorted(p.name for p in (root / RUNS).iterdir())


@pytest.mark.parametrize("end", ["in order", "killed"])
def test_a_runs_folder_goes_with_its_server(tmp_path: Path, end: str) -> None:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(tmp_path, there))
    process.start()
    assert here.recv() == "up"
    remove_remains(tmp_path)  # what every compactor calls
    assert folders(tmp_path) == ["run1"]
    if end == "killed":
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
    else:
        here.send("end")
    process.join(60)
    assert folders(tmp_path) == (["run1"] if end == "killed" else [])
    remove_remains(tmp_path)
    assert folders(tmp_path) == []


def test_one_process_does_not_take_its_own_run_for_dead(tmp_path: Path) -> None:
    lock = begin_run(tmp_path, "run1")
    remove_dead_runs(tmp_path)
    assert folders(tmp_path) == ["run1"]
    end_run(lock)
    assert folders(tmp_path) == []


def test_folders_without_a_lock(tmp_path: Path) -> None:
    """Of servers before there was one, and half born: only old ones, and only without a writer."""
    made = writer(tmp_path, spec())
    told = {"old": "gone", "living": made.writer_id, "young": "gone"}
    for name, writer_id in told.items():
        folder = tmp_path / RUNS / name
        folder.mkdir(parents=True)
        (folder / f"{writer_id}.json").write_text(f'{{"writer": "{writer_id}"}}')
    (tmp_path / RUNS / ".half.new").mkdir()
    for name in ("old", "living", ".half.new"):
        os.utime(tmp_path / RUNS / name, (time.time() - 3600,) * 2)
    remove_dead_runs(tmp_path)
    assert folders(tmp_path) == ["living", "young"]
    made.close()
    remove_dead_runs(tmp_path)
    assert folders(tmp_path) == ["young"]


def test_no_staging_is_no_trouble(tmp_path: Path) -> None:
    remove_dead_runs(tmp_path / "nowhere")
    with pytest.raises(OSError, match="file"):
        (tmp_path / "file").write_text("")
        begin_run(tmp_path / "file", "run")


def test_folders_of_others_stay(tmp_path: Path) -> None:
    """Staging may be /dev/shm itself."""
    long_ago = time.time() - 3600
    theirs = [tmp_path / ".backup.gone", tmp_path / ".data.new", tmp_path / ".1-2-3-4-5.gone"]
    ours = [tmp_path / f".{uuid.uuid4()}.{end}" for end in ("gone", "new")]
    for folder in (*theirs, *ours):
        folder.mkdir()
        os.utime(folder, (long_ago, long_ago))
    remove_remains(tmp_path)
    assert all(folder.exists() for folder in theirs)
    assert not any(folder.exists() for folder in ours)
