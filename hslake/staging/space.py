"""Room in the RAM-backed staging: asked before it is taken, because the kernel's answer is fatal.

Under a memory cgroup `posix_fallocate` on tmpfs ends in SIGKILL, not ENOSPC, so both `statvfs` and
the cgroup's headroom (v1 and v2) are looked at first.
"""

import contextlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from hslake.errors import NoSpace
from hslake.staging.locks import try_lock

RESERVE = 64 << 20  # left by parts, for what must still be written when no part fits any more
SMALL_RESERVE = 8 << 20  # left by journals and events
_ROOM = ".room"  # locked while parts are allocated
_ALONE_S = 60.0
_V1_LIMIT = "memory.limit_in_bytes"
_V1 = ("total_inactive_file", "total_active_file", "total_dirty", "total_writeback")
_V2 = ("inactive_file", "active_file", "file_dirty", "file_writeback")
_IN_RAM = ("tmpfs", "ramfs", "hugetlbfs")


def allocate(fd: int, size: int) -> None:
    """`posix_fallocate` the first `size` bytes of `fd`; ENOSPC becomes NoSpace."""
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as e:
        raise NoSpace(f"staging: {size:,} bytes could not be allocated ({e})") from e


@contextlib.contextmanager
def alone(root: Path) -> Iterator[None]:
    """Keep other processes from taking room under the staging folder `root` meanwhile.

    Raises NoSpace when another one does so for a minute.
    """
    end = time.monotonic() + _ALONE_S
    while True:
        try:
            lock = try_lock(root / _ROOM, create=True)
        except PermissionError:  # another user's: what it guards is a matter of a moment
            yield
            return
        if lock is not None:
            break
        if time.monotonic() > end:
            raise NoSpace(
                f"staging {root}: another process has been taking room there for {_ALONE_S:.0f} s: "
                "look what holds it up"
            )
        time.sleep(0.01)
    try:
        yield
    finally:
        (root / _ROOM).unlink(missing_ok=True)  # who waits for this one makes another
        lock.release()


def cgroup_headroom(
    proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Bytes left under the tightest memory limit above this process, or None without a limit.

    Clean pages of files count as left: the kernel drops them when room is asked for, and a server
    that has read hundreds of gigabytes of weights has filled its cgroup with them.
    """
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return None
    left: list[int] = []
    limits: tuple[str, ...]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limits, used = root, ("memory.max", "memory.high"), "memory.current"
        elif "memory" in controllers.split(","):
            base, limits, used = root / "memory", (_V1_LIMIT,), "memory.usage_in_bytes"
        else:
            continue
        folder = base / path.lstrip("/")
        for at in (folder, *folder.parents):
            for limit in limits:
                # No such file, or the word "max": no limit here.
                with contextlib.suppress(OSError, ValueError):
                    rest = int((at / limit).read_text()) - int((at / used).read_text())
                    left.append(rest + _clean_file_bytes(at))
            if at == base:
                break
    return min(left) if left else None


def _clean_file_bytes(cgroup: Path) -> int:
    """Bytes of file pages that a memory cgroup, v1 or v2, may drop at once; those of tmpfs are none
    of them."""
    counts: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError):
        for line in (cgroup / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            counts[name] = int(value)
    names = _V1 if _V1[0] in counts else _V2
    inactive, active, dirty, writeback = (counts.get(name, 0) for name in names)
    return max(0, inactive + active - dirty - writeback)


def free_bytes(folder: Path) -> tuple[int, str]:
    """Bytes left for `folder`, and what leaves no more: its filesystem or the memory cgroup."""
    fs = os.statvfs(folder)
    rooms = [(fs.f_bavail * fs.f_frsize, "the filesystem")]
    headroom = cgroup_headroom()
    if headroom is not None:
        rooms.append((max(0, headroom), "the memory cgroup"))
    return min(rooms)


def check_room(folder: Path, size: int, *, reserve: int = RESERVE) -> None:
    """Raise NoSpace unless `size` more bytes and `reserve` fit the filesystem and the memory
    cgroup."""
    room, what = free_bytes(folder)
    if room < size + reserve:
        raise NoSpace(
            f"staging {folder}: {what} has {room:,} bytes left, {size:,} are needed and "
            f"{reserve:,} stay in reserve: start the compactor, or lower the staging quota"
        )


def filesystem(folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str | None:
    """Type of the filesystem that holds `folder`, such as tmpfs or ext4; None if nobody says."""
    path = folder.resolve()
    best: tuple[int, str] | None = None
    with contextlib.suppress(OSError):
        for line in mounts.read_text("utf-8", "replace").splitlines():
            before, _, after = line.partition(" - ")
            point = Path(re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), before.split()[4]))
            # The last of equals is mounted over the others.
            if path.is_relative_to(point) and (best is None or len(point.parts) >= best[0]):
                best = len(point.parts), after.split()[0]
    return best[1] if best else None


def disk_warning(folder: Path) -> str | None:
    """What to tell about a staging folder that is not in RAM; None when it is, or nobody knows."""
    kind = filesystem(folder)
    if kind is None or kind in _IN_RAM:
        return None
    return (
        f"staging {folder} is on {kind}, not in RAM: every state is written to that disk once more "
        "and capture is as slow as it is; name a folder on /dev/shm"
    )
