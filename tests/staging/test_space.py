"""The room under a memory limit, as cgroups v1 and v2 tell of it."""

from pathlib import Path

import pytest

from hslake.staging.space import cgroup_headroom

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
