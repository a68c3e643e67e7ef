"""Millions of tokens through a small staging quota, driven by the real `hslake extract`.

Beside it run the compactor, a reaper that verifies every new segment in full and then removes its
files (a step of this benchmark only), and a sampler of GPU and host memory.
"""

import json
import signal
import subprocess
import time
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from threading import Thread
from typing import Any

from hslake_sglang.process import ServerProcess

import hslake
from benchmarks.hook import lakeside
from benchmarks.hook.lakeside import CLI, Found, LakeSide
from benchmarks.hook.machine import Memory, flatness
from benchmarks.hook.measure import Clock
from benchmarks.hook.servers import group_of
from benchmarks.hook.settings import Settings

Row = dict[str, Any]
SERIES = ("gpu", "server_anon", "server_shm", "compactor_anon", "extract_anon")
SERIES += ("dev_shm", "available", "staging", "lake")
_LINE_S = 20.0


class Reaper:
    """Verifies segments as they are committed, and removes their files."""

    def __init__(self, side: LakeSide) -> None:
        self.side = side
        self.lake = hslake.open(side.lake)
        self.pending: dict[str, Future[Any]] = {}
        self.seen: set[str] = set()
        self.found = Found()

    def step(self) -> None:
        """One look at the manifest and at what has been verified meanwhile."""
        self.lake = self.lake.refresh()
        rows = self.lake.sql("select distinct segment_id from samples").fetchall()
        for (segment,) in rows:
            if segment not in self.seen:
                self.seen.add(segment)
                self.pending[segment] = self.side.submit(segment)
        for segment, future in list(self.pending.items()):
            if not future.done():
                continue
            del self.pending[segment]
            samples, tokens, damage = future.result()
            self.found.verified_samples += samples
            self.found.verified_tokens += tokens
            self.found.damage += damage
            self.side.reap([segment])

    def compare(self, captured: set[str]) -> Found:
        """The manifest against the samples that the hook acknowledged."""
        rows = self.lake.sql("select sample_id, length from samples").fetchall()
        names = [name for name, _ in rows]
        self.found.samples, self.found.tokens = len(names), sum(n for _, n in rows)
        self.found.duplicated = len(names) - len(set(names))
        self.found.lost = len(captured - set(names))
        self.found.foreign = len(set(names) - captured)
        return self.found


def endurance(
    s: Settings, server: ServerProcess, side: LakeSide, clock: Clock, session: str, log: Path
) -> Row:
    """Run until the plan is covered or time is short; the row for the result file."""
    argv = [*CLI, "extract", side.lake, "--server", server.url, "--json"]
    argv += ["--concurrency", str(max(s.concurrency))]
    folders = {"staging": side.staging, "lake": Path(side.lake)}
    reaper, start, line = Reaper(side), time.monotonic(), time.monotonic()
    ended = "the whole plan is captured"
    with log.open("wb") as errors:
        driver = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=errors)
        processes = {"extract_anon": driver.pid}
        if side.compactor is not None:
            processes["compactor_anon"] = side.compactor.pid
        memory = Memory(group_of(server), folders, processes, every=1.0 if s.smoke else 5.0)
        while driver.poll() is None:
            reaper.step()
            if time.monotonic() - line > _LINE_S:
                line = time.monotonic()
                _tell(server, reaper, memory, line - start)
            if clock.left() < 30 or side.problem() or not server.alive():
                ended = side.problem() or "time was over" if server.alive() else "server died"
                driver.send_signal(signal.SIGINT)
                break
            time.sleep(0.5)
        try:
            text = driver.communicate(timeout=max(5.0, clock.left()))[0]
        except subprocess.TimeoutExpired:
            driver.kill()
            text = driver.communicate()[0]
    seconds = time.monotonic() - start
    try:
        report = json.loads(text)
    except ValueError:
        report = {}
        ended += f"; extract gave no report: {log.read_text('utf-8', 'replace')[-1000:]}"
    samples = memory.stop()
    captured = _captured(server)
    # An interrupted driver leaves requests half done, whose part would stay open for a minute more.
    stopper = Thread(target=server.stop, args=(5.0,))
    if driver.returncode:
        stopper.start()
    reaper.step()
    wait = time.monotonic()
    while clock.left() > 0 and (reaper.found.verified_samples < len(captured) or reaper.pending):
        if side.problem():
            break
        time.sleep(0.25)
        reaper.step()
    if driver.returncode:
        stopper.join()
    found = reaper.compare(captured)
    found.drain_s = time.monotonic() - wait
    tokens = int(report.get("captured_tokens", found.tokens))
    return {
        "session": session,
        "config": s.config,
        "captured_tokens": tokens,
        "captured": len(captured),
        "seconds": seconds,
        "rate": tokens / float(report.get("seconds", seconds)),
        "ended": ended,
        "dropped": report.get("dropped"),
        "retried": report.get("retried"),
        "message": report.get("message"),
        "staging_bytes": s.staging_bytes,
        "found": asdict(found),
        "flatness": {name: flatness(samples, name, 2.0 if s.smoke else 60.0) for name in SERIES},
        "samples": samples,
    }


def _captured(server: ServerProcess) -> set[str]:
    """Samples that the hook says it captured."""
    names: set[str] = set()
    since = ""
    while True:
        document = lakeside.status(server.url, since)
        events = [e for w in document["writers"] for e in w["events"]]
        if not events:
            return names
        names |= {e["sample_id"] for e in events if e["state"] == "captured"}
        since = ",".join(f"{w['writer']}:{w['cursor']}" for w in document["writers"])


def _tell(server: ServerProcess, reaper: Reaper, memory: Memory, seconds: float) -> None:
    now, last = lakeside.totals(lakeside.status(server.url)), memory.samples[-1]
    done = reaper.found.verified_tokens
    print(
        f"  {seconds:4.0f} s: {now['tokens_captured']:,} tokens captured, {done:,} verified, "
        f"{now['free_rows']:,} rows free, {now['dropped']} dropped, "
        + ", ".join(f"{k} {v / 2**30:.2f}" for k, v in last.items() if k != "t")
        + " GiB",
        flush=True,
    )
