"""What the numbers were measured on, and samples of its memory."""

import contextlib
import os
import platform
import shutil
import subprocess
import threading
import time
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

_VISIBLE = os.environ.get("CUDA_VISIBLE_DEVICES")
_QUERY = ("nvidia-smi", "--format=csv,noheader,nounits", *(("-i", _VISIBLE) if _VISIBLE else ()))
_VERSIONS = """
import json, importlib.metadata as m, platform
def v(n):
    try: return m.version(n)
    except m.PackageNotFoundError: return None
import torch
print(json.dumps({"python": platform.python_version(), "torch": torch.__version__,
  "cuda": torch.version.cuda, **{n: v(n) for n in ("sglang", "sglang-kernel", "triton")}}))
"""


def _ask(*argv: str, env: dict[str, str] | None = None) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=120, env=env)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"({error})"
    return done.stdout.strip()


def facts(sglang_python: Path) -> dict[str, Any]:
    """Machine and versions, as far as they can be found out."""
    gpus = _ask(*_QUERY, "--query-gpu=name,driver_version,memory.total,clocks.max.sm")
    cpu = ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    return {
        "gpus": gpus.splitlines() if not gpus.startswith("(") else [],
        "cpu": cpu or platform.machine(),
        "cpus": os.cpu_count(),
        "kernel": platform.release(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "shm_bytes": shutil.disk_usage("/dev/shm").total,
        "server": _ask(str(sglang_python), "-c", _VERSIONS).splitlines()[-1:],
        "versions": {n: _version(n) for n in ("zarr", "deltalake", "duckdb", "numpy", "pyarrow")},
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def split_cores() -> tuple[set[int], set[int]]:
    """(cores of the servers, cores of all else): halves of eight or more, else all for both."""
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    return (set(cores[:half]), set(cores[half:])) if half >= 4 else (set(cores), set(cores))


def pin(processes: Iterable[Path], cores: set[int]) -> None:
    """Keep all threads of `processes` (/proc/PID) on every second of eight or more `cores`: a
    virtual machine may number the two halves of a core one after the other, and a thread that
    shares a core runs at little more than half of its speed."""
    ours = set(sorted(cores)[::2]) if len(cores) >= 8 else cores
    for process in processes:
        for thread in process.glob("task/*"):
            with contextlib.suppress(OSError):  # it has ended
                os.sched_setaffinity(int(thread.name), ours)


def write_speed(folder: Path, size: int = 1 << 30) -> float:
    """Bytes a second of one file written and synced in `folder`; the file is removed."""
    file, block = folder / "write-speed", np.random.default_rng(1).bytes(16 << 20)
    start = time.monotonic()
    try:
        with file.open("wb") as f:
            for _ in range(max(1, size // len(block))):
                f.write(block)
            f.flush()
            os.fsync(f.fileno())
    finally:
        file.unlink(missing_ok=True)
    return size / (time.monotonic() - start)


class Memory:
    """Samples GPU and host memory every `every` seconds in a thread, until `stop`.

    `group`: process group of a server; `folders`: name -> a folder whose bytes are counted;
    `processes`: name -> one more process whose anonymous memory is.
    """

    def __init__(
        self,
        group: int,
        folders: dict[str, Path],
        processes: dict[str, int],
        every: float = 5.0,
    ) -> None:
        self.group, self.folders, self.every = group, folders, every
        self.processes = processes
        self.samples: list[dict[str, float]] = []
        self._over = threading.Event()
        self._start = time.monotonic()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> list[dict[str, float]]:
        """End and return the samples: bytes, and `t` in seconds."""
        self._over.set()
        self._thread.join(30)
        return self.samples

    def _run(self) -> None:
        while True:
            self.samples.append(self._sample())
            if self._over.wait(self.every):
                return

    def _sample(self) -> dict[str, float]:
        found: dict[str, float] = {"t": round(time.monotonic() - self._start, 1)}
        used = _ask(*_QUERY, "--query-gpu=memory.used").split()
        if used and all(u.isdigit() for u in used):
            found["gpu"] = sum(map(int, used)) * float(1 << 20)
        found |= _host()
        anon, shared = _group_memory(self.group)
        found |= {"server_anon": anon, "server_shm": shared}
        for name, process in self.processes.items():
            found[name] = _anonymous(Path(f"/proc/{process}"))
        found["dev_shm"] = float(shutil.disk_usage("/dev/shm").used)
        found |= {name: _folder_bytes(folder) for name, folder in self.folders.items()}
        return found


def _host() -> dict[str, float]:
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return {"available": float(fields["MemAvailable"].split()[0]) * 1024}


def _group_memory(group: int) -> tuple[float, float]:
    """(anonymous, shared-memory) resident bytes of a process group: of all, and of the one with
    the most, as they map the same pages."""
    anon, shared = 0.0, 0.0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[2]) != group:
                continue
            of = _status(stat.parent)
        except (OSError, ValueError, IndexError):
            continue
        anon += of.get("RssAnon", 0.0)
        shared = max(shared, of.get("RssShmem", 0.0))
    return anon, shared


def _anonymous(process: Path) -> float:
    try:
        return _status(process).get("RssAnon", 0.0)
    except OSError:  # it has ended
        return 0.0


def _status(process: Path) -> dict[str, float]:
    """Memory of a process by the names of /proc/PID/status, in bytes."""
    lines = (process / "status").read_text().splitlines()
    sizes = (line.removesuffix(" kB").split(":") for line in lines if line.endswith(" kB"))
    return {name: float(value) * 1024 for name, value in sizes}


def _folder_bytes(folder: Path) -> float:
    total = 0.0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(path) / name).stat().st_blocks * 512
            except OSError:
                continue
    return total


def flatness(samples: list[dict[str, float]], name: str, after: float = 60.0) -> dict[str, Any]:
    """How flat a series is after the first `after` seconds: bytes, and bytes a minute (slope of a
    straight line through it)."""
    points = [(s["t"], s[name]) for s in samples if name in s and s["t"] >= after]
    if len(points) < 3:
        return {"points": len(points)}
    t, y = np.array(points).T
    slope = float(np.polyfit(t / 60, y, 1)[0])
    return {
        "points": len(points),
        "min": float(y.min()),
        "max": float(y.max()),
        "range": float(y.max() - y.min()),
        "slope_per_minute": slope,
    }
