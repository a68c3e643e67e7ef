"""Room in the RAM-backed staging: asked before it is taken, because the kernel's answer is fatal.

Under a memory cgroup `posix_fallocate` on tmpfs ends in SIGKILL, not ENOSPC, so both `statvfs` and
the cgroup's headroom (v1 and v2) are looked at first.
"""

import contextlib
import os
from pathlib import Path

from hslake.errors import NoSpace

_RESERVE = 64 << 20  # left by parts, for what must still be written when no part fits any more
SMALL_RESERVE = 8 << 20  # left by journals and events


def allocate(fd: int, size: int) -> None:
    """`posix_fallocate` the first `size` bytes of `fd`; ENOSPC becomes NoSpace."""
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as e:
        raise NoSpace(f"staging: {size:,} bytes could not be allocated ({e})") from e


def cgroup_headroom(
    proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Bytes left under the tightest memory limit above this process, or None without a limit."""
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return None
    left: list[int] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, used = root, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit, used = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        folder = base / path.lstrip("/")
        for at in (folder, *folder.parents):
            # No such file, or the word "max": no limit here.
            with contextlib.suppress(OSError, ValueError):
                left.append(int((at / limit).read_text()) - int((at / used).read_text()))
            if at == base:
                break
    return min(left) if left else None


def check_room(folder: Path, size: int, *, reserve: int = _RESERVE) -> None:
    """Raise NoSpace unless `size` more bytes and `reserve` fit the filesystem and the memory
    cgroup."""
    fs = os.statvfs(folder)
    free = fs.f_bavail * fs.f_frsize
    headroom = cgroup_headroom()
    for what, room in (("the filesystem", free), ("the memory cgroup", headroom)):
        if room is not None and room < size + reserve:
            raise NoSpace(
                f"staging {folder}: {what} has {room:,} bytes left, {size:,} are needed and "
                f"{reserve:,} stay in reserve: start the compactor, or lower the staging quota"
            )
