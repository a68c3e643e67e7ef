"""The room under a memory limit, as cgroups v1 and v2 tell of it."""

import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from hslake.errors import NoSpace
from hslake.staging import space
from hslake.staging.space import alone, cgroup_headroom
from tests.staging.test_writer import spec, writer

GIB = 1 << 30


def a_cgroup(folder: Path, files: dict[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name).write_text(f"{value}\n")


def test_pages_of_files_that_were_read_are_room(tmp_path: Path) -> None:
    proc = tmp_path / "cgroup"
    proc.write_text("0::/pod/server\n")
    stat = f"anon {GIB}\ninactive_file {5 * GIB}\nactive_file {2 * GIB}\nshmem {GIB}\n"
    stat += f"file_dirty {GIB}\nfile_writeback {GIB}"
    a_cgroup(tmp_path / "pod", {"memory.max": 10 * GIB, "memory.current": 9 * GIB})
    a_cgroup(tmp_path / "pod/server", {"memory.max": "max", "memory.current": 9 * GIB})
    assert cgroup_headroom(proc, tmp_path) == GIB
    a_cgroup(tmp_path / "pod", {"memory.stat": stat})
    assert cgroup_headroom(proc, tmp_path) == 6 * GIB


def test_a_soft_limit_counts_as_well(tmp_path: Path) -> None:
    proc = tmp_path / "cgroup"
    proc.write_text("0::/pod\n")
    a_cgroup(tmp_path / "pod", {"memory.max": "max", "memory.high": 5, "memory.current": 2})
    assert cgroup_headroom(proc, tmp_path) == 3


def test_the_tightest_limit_counts_with_its_own_pages(tmp_path: Path) -> None:
    proc = tmp_path / "cgroup"
    proc.write_text("7:cpu:/x\n4:memory:/pod/server\n")
    limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
    clean = f"inactive_file 0\ntotal_inactive_file {3 * GIB}\ntotal_active_file 0\ntotal_dirty 0"
    a_cgroup(tmp_path / "memory/pod", {limit: 8 * GIB, used: 8 * GIB, "memory.stat": clean})
    a_cgroup(tmp_path / "memory/pod/server", {limit: 4 * GIB, used: 2 * GIB})
    assert cgroup_headroom(proc, tmp_path) == 2 * GIB


@pytest.mark.parametrize("text", ["", "0::/none\n"])
def test_without_a_limit_there_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "cgroup").write_text(text)
    assert cgroup_headroom(tmp_path / "cgroup", tmp_path) is None


def hold(root: Path, pipe: Connection) -> None:
    with alone(root):
        pipe.send("held")
        pipe.recv()


def test_room_is_taken_by_one_process_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks of a server make their parts at once: each would take what all see to be free,
    and under a memory cgroup the kernel's answer is SIGKILL."""
    here, there = multiprocessing.Pipe()
    other = multiprocessing.get_context("spawn").Process(target=hold, args=(tmp_path, there))
    other.start()
    assert here.recv() == "held"
    monkeypatch.setattr(space, "_ALONE_S", 0.2)
    with pytest.raises(NoSpace, match="another process"):
        writer(tmp_path, spec())
    here.send("over")
    other.join()
    writer(tmp_path, spec()).close()
