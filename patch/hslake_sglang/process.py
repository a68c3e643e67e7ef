"""A server as a child process, for the demo and the tests."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from hslake.errors import CheckFailed, NoSpace
from hslake_sglang import serve as _serve

# What SGLang leaves behind: its load figures when killed, and with several ranks 25 MB always.
_LOADS = ("/dev/shm/sglang_loads_", "/dev/shm/sgl_shm_mq_")


def free_port() -> int:
    """A TCP port on this machine that nobody listens on right now.

    Below the range from which the system hands out ports, and low enough for the further ports
    that SGLang derives (some versions add 10,000).
    """
    for _ in range(200):
        port = random.randrange(15_000, 30_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise NoSpace("no free TCP port found between 15000 and 30000: end some servers")


class ServerProcess:
    """Starts a server, waits until it answers, and stops it with all its children.

    Use as a context manager, or call start, wait_ready and stop. `log` is the file that gets the
    server's output.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], log: Path, port: int) -> None:
        self.argv = list(argv)
        self.env = dict(env)
        self.log = Path(log)
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._process: subprocess.Popen[bytes] | None = None
        self._loads: set[Path] = set()  # files of _LOADS that this server's processes have mapped

    @classmethod
    def for_lake(
        cls,
        lake_url: str,
        staging: str | Path,
        sglang_args: Sequence[str],
        *,
        log: Path,
        python: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        part_tokens: int | None = None,
        max_parts: int | None = None,
        port: int | None = None,
    ) -> "ServerProcess":
        """What `hslake serve` would run, on 127.0.0.1 and a free port unless `port` is given."""
        port = port or free_port()
        command = _serve.prepare(
            lake_url,
            staging,
            [*sglang_args, "--host", "127.0.0.1", "--port", str(port)],
            part_tokens=part_tokens,
            max_parts=max_parts,
            python=python,
            env=env,
        )
        return cls(command.argv, command.env, log, port)

    def start(self) -> "ServerProcess":
        """Start the server in a process group of its own; returns at once."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as out:
            self._process = subprocess.Popen(
                self.argv,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def wait_ready(self, timeout: float = 300.0) -> "ServerProcess":
        """Wait until /health answers 200. Raises CheckFailed with the end of the log."""
        assert self._process is not None, "call start() first"
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            code = self._process.poll()
            if code is not None:
                raise CheckFailed(f"the server ended with code {code}:\n{self.log_tail()}")
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=5) as answer:
                    if answer.status == 200:
                        self._loads |= mapped_files(self._process.pid, _LOADS)
                        return self
            except (urllib.error.URLError, OSError):
                pass
            time.sleep(0.25)
        raise CheckFailed(
            f"the server did not answer {self.url}/health within {timeout:.0f} s; the end of "
            f"{self.log}:\n{self.log_tail()}"
        )

    def log_tail(self, lines: int = 40) -> str:
        """The last lines of the server's output."""
        try:
            return "\n".join(self.log.read_text("utf-8", "replace").splitlines()[-lines:])
        except OSError:
            return "(no log)"

    def alive(self) -> bool:
        """Whether the launcher still runs."""
        return self._process is not None and self._process.poll() is None

    def stop(self, grace: float = 15.0) -> None:
        """End the server and everything it started. Safe to call twice."""
        if self._process is None:
            return
        group = self._process.pid  # start_new_session made it the leader
        self._loads |= mapped_files(group, _LOADS)
        # First the launcher alone: it ends its workers in order, while a worker that ends by itself
        # would look like a crash to it.
        for end, sign, wait in (
            (os.kill, signal.SIGTERM, grace),
            (os.killpg, signal.SIGKILL, 10.0),
        ):
            try:
                end(group, sign)
            except ProcessLookupError:
                break
            deadline = time.monotonic() + wait
            while time.monotonic() < deadline and _members(group):
                time.sleep(0.1)
            if not _members(group):
                break
        self._process.wait(timeout=10)
        if not _members(group):
            while self._loads:
                self._loads.pop().unlink(missing_ok=True)
        self._process = None

    def __enter__(self) -> "ServerProcess":
        try:
            return self.start().wait_ready()
        except BaseException:
            self.stop()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def mapped_files(group: int, prefix: str | tuple[str, ...]) -> set[Path]:
    """Files with names beginning with `prefix` (or one of them) that processes of process group
    `group` have mapped."""
    found: set[Path] = set()
    for process in _members(group):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            names = [line.split(maxsplit=5)[-1] for line in (process / "maps").open()]
            found |= {Path(n.strip()) for n in names if n.startswith(prefix)}
    return found


def _members(group: int) -> list[Path]:
    """/proc folders of the processes of a group that run. Zombies do not: where nobody reaps
    orphans (many containers), they stay for ever."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                found.append(stat.parent)
    return found
