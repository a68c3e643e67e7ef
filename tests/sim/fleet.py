"""Processes of a simulated run: hslake's own commands and simulated servers, each with a log."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_HSLAKE = "import sys; from hslake.cli import main; sys.exit(main())"


def hslake(*args: object) -> list[str]:
    """The command line of `hslake ARGS`, of this checkout."""
    return [sys.executable, "-c", _HSLAKE, *map(str, args)]


def sim_server(*args: object) -> list[str]:
    """The command line of a simulated server."""
    return [sys.executable, "-m", "tests.sim.server", *map(str, args)]


def environment() -> dict[str, str]:
    """For children: they import this checkout."""
    paths = [str(ROOT), str(ROOT / "patch"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "NO_COLOR": "1"}


@dataclass(eq=False)
class Process:
    """A command that may be started again and again. `log` gets all output, `codes` the exit codes
    of its ends."""

    name: str
    argv: Sequence[str]
    log: Path
    codes: list[int] = field(default_factory=list)
    child: "subprocess.Popen[bytes] | None" = None
    began: float = 0.0

    @property
    def alive(self) -> bool:
        """Whether it runs; takes in its end otherwise."""
        if self.child is None:
            return False
        code = self.child.poll()
        if code is None:
            return True
        self.codes.append(code)
        self.child = None
        return False

    def start(self) -> "Process":
        """Start it, unless it runs."""
        if not self.alive:
            with self.log.open("ab") as out:
                self.child = subprocess.Popen(
                    self.argv,
                    cwd=ROOT,
                    env=environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                )
            self.began = time.monotonic()
        return self

    def send(self, sign: int) -> bool:
        """Whether it ran and got the signal."""
        if not self.alive or self.child is None:
            return False
        self.child.send_signal(sign)
        return True

    def wait(self, timeout: float) -> int | None:
        """Its exit code; None when it runs for longer."""
        if self.child is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.child.wait(timeout)
        return None if self.alive else (self.codes or [0])[-1]

    def kill(self) -> None:
        """SIGKILL, and wait."""
        if self.send(signal.SIGKILL):
            self.send(signal.SIGCONT)
            self.wait(30)

    def rss(self) -> int | None:
        """Bytes of RAM that it takes now."""
        with contextlib.suppress(OSError, AttributeError, StopIteration):
            assert self.child is not None
            lines = Path(f"/proc/{self.child.pid}/status").read_text().splitlines()
            line = next(x for x in lines if x.startswith("VmRSS"))
            return int(line.split()[1]) * 1024
        return None

    def tail(self, lines: int = 15) -> str:
        """The end of its log."""
        with contextlib.suppress(OSError):
            return "\n".join(self.log.read_text("utf-8", "replace").splitlines()[-lines:])
        return ""


def empty(folder: Path) -> None:
    """What a reboot makes of a folder in RAM."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
