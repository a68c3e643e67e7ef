"""The lake beside the servers: its compactor, and the check of everything that a run sent.

`reap` removes the files of segments that were verified. That is a step of this benchmark only: a
machine with a small disk could not hold all runs. The manifest keeps naming them, so the lake must
be thrown away afterwards.
"""

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hslake
from hslake.segment.layout import segment_prefix
from hslake.verify import verify

CLI = (sys.executable, "-c", "from hslake.cli import main; main()")
_SECONDS = 0.25


@dataclass
class Found:
    """What became of the samples of one run. Tokens are those of the manifest's rows."""

    samples: int = 0
    tokens: int = 0
    lost: int = 0
    duplicated: int = 0
    foreign: int = 0
    verified_samples: int = 0
    verified_tokens: int = 0
    damage: list[str] = field(default_factory=list)
    drain_s: float = 0.0
    verify_s: float = 0.0


class LakeSide:
    """One lake, its staging, a compactor beside it, and processes that verify. With `pausing` the
    compactor stands still while a run is timed, which tells what it costs the server."""

    def __init__(self, lake: str, staging: Path, log: Path, *, pausing: bool = False) -> None:
        self.lake, self.staging, self.log, self.pausing = lake, staging, log, pausing
        self.compactor: subprocess.Popen[bytes] | None = None
        # Spawned: a fork would inherit the connections of this process.
        context = multiprocessing.get_context("spawn")
        workers = max(1, min(12, (os.cpu_count() or 1) - 2))
        self._pool = ProcessPoolExecutor(workers, mp_context=context)

    def start_compactor(self) -> None:
        """`hslake compact LAKE --staging DIR --watch`, as a user runs it."""
        argv = [*CLI, "compact", self.lake, "--staging", str(self.staging), "--watch"]
        with self.log.open("ab") as out:
            self.compactor = subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT)

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Around a timed run."""
        pausing = self.compactor if self.pausing else None
        if pausing is not None:
            pausing.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            if pausing is not None:
                pausing.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """End the compactor in order, and the verifying processes."""
        if self.compactor is not None:
            self.compactor.terminate()
            try:
                self.compactor.wait(10)
            except subprocess.TimeoutExpired:
                self.compactor.kill()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def problem(self) -> str | None:
        """Why the compactor does not run, or None."""
        if self.compactor is None or self.compactor.poll() is None:
            return None
        tail = self.log.read_text("utf-8", "replace")[-2000:]
        return f"the compactor ended with code {self.compactor.returncode}: {tail}"

    def count(self, sources: Sequence[str]) -> int:
        """Live rows of the manifest of `sources`."""
        return int(self._rows("count(*) as n", sources)[0]["n"])

    def _rows(self, what: str, sources: Sequence[str]) -> list[dict[str, Any]]:
        names = ", ".join(f"'{s}'" for s in sources)
        found = hslake.open(self.lake).sql(f"select {what} from samples where source in ({names})")
        return list(found.to_arrow_table().to_pylist())

    def drain(self, sources: Sequence[str], expected: int, limit: float) -> float:
        """Wait until the compactor has committed `expected` samples; returns the seconds."""
        start = time.monotonic()
        while self.count(sources) < expected and time.monotonic() - start < limit:
            if self.problem():
                break
            time.sleep(_SECONDS)
        return time.monotonic() - start

    def check(self, sources: Sequence[str], sent: Sequence[str]) -> Found:
        """Compare the manifest with what was sent, verify all of it in full, remove its files."""
        rows = self._rows("sample_id, segment_id, length", sources)
        wanted, names = set(sent), [r["sample_id"] for r in rows]
        found = Found(len(names), sum(r["length"] for r in rows))
        found.lost = len(wanted - set(names))
        found.duplicated = len(names) - len(set(names))
        found.foreign = len(set(names) - wanted)
        start = time.monotonic()
        segments = {r["segment_id"] for r in rows}
        for samples, tokens, damage in self._pool.map(
            verify_segment, [(self.lake, one) for one in sorted(segments)]
        ):
            found.verified_samples += samples
            found.verified_tokens += tokens
            found.damage += damage
        found.verify_s = time.monotonic() - start
        self.reap(segments)
        return found

    def reap(self, segments: Iterable[str]) -> None:
        """Remove the files of segments that were verified (see the module)."""
        for one in segments:
            shutil.rmtree(Path(self.lake) / segment_prefix(one), ignore_errors=True)

    def submit(self, segment: str) -> Any:
        """Verify one segment in the background: a future of `verify_segment`'s answer."""
        return self._pool.submit(verify_segment, (self.lake, segment))


def verify_segment(job: tuple[str, str]) -> tuple[int, int, list[str]]:
    """(samples, tokens, damage) of `hslake verify --level full` over one segment."""
    lake, segment = job
    report = verify(lake, "full", where=f"segment_id = '{segment}'")
    return report.samples, report.tokens, [f"{d.segment_id}: {d.what}" for d in report.damage]


def status(url: str, since: str = "") -> dict[str, Any]:
    """GET /hslake/status, with the events after `since`."""
    query = f"?since={since}" if since else ""
    with urllib.request.urlopen(f"{url}/hslake/status{query}", timeout=30) as answer:
        document: dict[str, Any] = json.loads(answer.read())
        return document


def totals(document: dict[str, Any]) -> dict[str, int]:
    """Figures of a status document, summed over its writers."""
    names = ("samples_captured", "tokens_captured", "dropped", "free_rows", "capacity_rows")
    sums = {n: sum(int(w[n]) for w in document["writers"]) for n in names}
    return sums | {"parts": sum(len(w["parts"]) for w in document["writers"])}
