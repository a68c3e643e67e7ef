"""What must not harm the server, on one server in turn: a full tmpfs, a compactor that hangs and is
killed while it holds locks, and a writer's folder that somebody deletes."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hslake
from examples.sglang_cpu import cpu_server, tiny_deepseek
from hslake.compact import compact
from hslake.ids import RequestId, new_attempt
from hslake.staging import scan
from hslake.staging.folder import COMPACT_LOCK
from hslake.staging.locks import is_locked
from hslake.verify import verify
from tests.e2e import client
from tests.e2e.conftest import Stage, capture_all, set_stage
from tests.e2e.traffic import Traffic, events, wait_for

PART, PARTS = 256, 3
TMPFS = 128 << 20  # three parts of 3 MiB, the 64 MiB that the writer leaves alone, and some more
LENGTH = 150
# A1 is asked for while the tmpfs is full, B3 while no compactor works.
SAMPLES = {f"{source}-{i:02d}": LENGTH + i for source in ("A1", "B3") for i in range(8)}


@pytest.fixture(scope="module")
def samples() -> dict[str, list[int]]:
    rng = np.random.default_rng(2)
    return {k: rng.integers(2, tiny_deepseek.VOCAB, n).tolist() for k, n in SAMPLES.items()}


@pytest.fixture(scope="module")
def tmpfs(ram: Path) -> Iterator[Path]:
    """A staging folder on a filesystem of its own, which may be filled without harm to others."""
    folder = ram / "tmpfs"
    folder.mkdir()
    argv = ["mount", "-t", "tmpfs", "-o", f"size={TMPFS}", "tmpfs", str(folder)]
    out = subprocess.run(argv, capture_output=True, text=True)
    if out.returncode:
        pytest.skip(f"cannot mount a tmpfs ({out.stderr.strip()}): run as root, or `unshare -Urm`")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


class Sender:
    """Sends samples straight to the server, whatever the credits say."""

    def __init__(self, stage: Stage, samples: dict[str, list[int]]) -> None:
        self.stage, self.samples = stage, samples
        self.lake8 = hslake.open(stage.lake).spec.lake8

    def send(self, name: str) -> str:
        ids = self.samples[name]
        rid = RequestId(self.lake8, new_attempt(), len(ids), name[:2], name)
        client.generate(self.stage.url, ids, rid=rid.encode())
        return rid.attempt

    def all(self, source: str) -> Counter[str]:
        """Send every sample of `source`; how its attempts ended: "captured", "no space", …"""
        names = [n for n in self.samples if n.startswith(source)]
        with ThreadPoolExecutor(4) as pool:
            sent = set(pool.map(self.send, names))

        def ended() -> list[dict[str, Any]]:
            return [e for e in events(self.stage.url) if e["attempt"] in sent]

        found = wait_for("an end of every attempt", lambda: len(ended()) == len(sent) and ended())
        return Counter((e["reason"] or e["state"]).split(":")[0] for e in found)


def fill(folder: Path) -> Path:
    """A file that takes every free byte of `folder`'s filesystem."""
    path = folder / "somebody-elses-file"
    with path.open("wb", buffering=0) as out:
        for size in (1 << 20, 1 << 12):
            try:
                while True:
                    out.write(b"\1" * size)
            except OSError:
                continue
    return path


def ask(stage: Stage, source: str) -> Any:
    return capture_all(stage, where=f"source = '{source}'", requests=4, patience=120)


def full_tmpfs(stage: Stage, sender: Sender) -> None:
    facts = stage.facts
    filler = fill(stage.staging)
    facts["free bytes"] = shutil.disk_usage(stage.staging).free
    facts["full, no compactor"] = sender.all("A1")
    time.sleep(1.0)  # the status is refreshed at least every half second
    status = client.get(stage.url + "/hslake/status")
    facts["credits when full"] = status["writers"][0]["free_rows"]
    with compactor(stage):
        facts["full, compactor"] = sender.all("A1")
        facts["status when full"] = client.get(stage.url + "/hslake/status")
        facts["healthy when full"] = client.code(stage.url + "/health_generate")
        filler.unlink()
        facts["after full"] = ask(stage, "A1")


@contextlib.contextmanager
def compactor(stage: Stage) -> Iterator[None]:
    """`compact --watch` all through the block."""
    stop = threading.Event()
    more: dict[str, Any] = {"watch": True, "stop": stop.is_set, "interval_s": 0.2}
    with ThreadPoolExecutor(1) as pool:
        watcher = pool.submit(compact, stage.lake, [stage.staging], **more)
        try:
            yield
        finally:
            stop.set()
        watcher.result(60)


def dead_compactor(stage: Stage, sender: Sender) -> None:
    """The compactor hangs while it holds its locks; staging runs full; then it is killed."""
    facts = stage.facts
    compact(stage.lake, [stage.staging])
    sender.send("B3-00")
    (writer,) = scan(stage.staging)
    lock = writer.path / COMPACT_LOCK
    argv = [stage.lake, "--staging", str(stage.staging), "--watch", "--interval", "0.01"]
    run = "import sys; from hslake.cli import main; sys.argv[0] = 'hslake'; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", run, "compact", *argv], stderr=subprocess.DEVNULL
    )
    try:

        def stopped_with_lock() -> bool:
            assert process.poll() is None, "the compactor ended by itself"
            if is_locked(lock):
                os.kill(process.pid, signal.SIGSTOP)
                if is_locked(lock):
                    return True
                os.kill(process.pid, signal.SIGCONT)
            return False

        wait_for("the compactor holds its lock", stopped_with_lock, timeout=120)
        facts["hung compactor"] = sender.all("B3")
        facts["healthy with hung"] = client.code(stage.url + "/health_generate")
    finally:
        process.kill()
        process.wait()
    facts["dead compactor"] = sender.all("B3")
    facts["lock after the kill"] = is_locked(lock)
    with compactor(stage):
        facts["after dead"] = ask(stage, "B3")


def deleted_folder(stage: Stage, sender: Sender) -> None:
    """An internal failure that nothing can mend: there is no folder to write to any more."""
    facts = stage.facts
    compact(stage.lake, [stage.staging])
    (writer,) = scan(stage.staging)
    shutil.rmtree(writer.path)

    def disarmed() -> bool:
        sender.send("B3-01")
        return "hslake: DISARMED" in stage.server.log.read_text("utf-8", "replace")

    with contextlib.suppress(AssertionError):
        facts["disarmed"] = wait_for("the hook says so in the log", disarmed, timeout=30)
    facts["status after delete"] = client.get(stage.url + "/hslake/status")
    facts["metrics after delete"] = client.text(stage.url + "/hslake/metrics")
    facts["healthy after delete"] = client.code(stage.url + "/health_generate")
    facts["served after delete"] = sender.send("B3-01")


@pytest.fixture(scope="module")
def stage(
    ram: Path, tmpfs: Path, sglang_python: Path, deepseek: Path, samples: dict[str, list[int]]
) -> Iterator[Stage]:
    made = set_stage(
        ram / "trouble",
        sglang_python,
        deepseek,
        samples,
        capture="eagle3",
        dtype="float32",
        args=["--skip-tokenizer-init"],
        env=cpu_server.env(2, deepseek=True),
        chunk=64,
        part_tokens=PART,
        max_parts=PARTS,
        staging=tmpfs,
    )
    with made.server:
        with Traffic(made.url, vocab=tiny_deepseek.VOCAB, pause=0.2) as traffic:
            sender = Sender(made, samples)
            full_tmpfs(made, sender)
            dead_compactor(made, sender)
            compact(made.lake, [made.staging])
            deleted_folder(made, sender)
        made.facts["traffic"] = traffic
        made.facts["alive"] = made.server.alive()
    yield made


def test_a_full_tmpfs_costs_drops_and_nothing_else(stage: Stage) -> None:
    facts = stage.facts
    assert facts["free bytes"] == 0
    for when in ("full, no compactor", "full, compactor"):
        assert set(facts[when]) <= {"captured", "no space"}
    assert facts["full, no compactor"]["no space"] > 0, "there was room: this proves nothing"
    assert facts["status when full"]["armed"] is True
    assert facts["healthy when full"] == 200
    assert facts["after full"].complete


def test_a_full_tmpfs_refuses_credits(stage: Stage) -> None:
    assert stage.facts["credits when full"] < LENGTH, "the driver is told that there is room"


def test_a_dead_compactor_costs_drops_and_nothing_else(stage: Stage) -> None:
    facts = stage.facts
    for when in ("hung compactor", "dead compactor"):
        assert set(facts[when]) <= {"captured", "no space"}
    assert facts["hung compactor"]["no space"] > 0
    assert set(facts["dead compactor"]) == {"no space"}
    assert facts["lock after the kill"] is False
    assert facts["healthy with hung"] == 200
    assert facts["after dead"].complete


def test_everything_arrived_once(stage: Stage, samples: dict[str, list[int]]) -> None:
    lake = hslake.open(stage.lake)
    names = [r[0] for r in lake.sql("select sample_id from samples").fetchall()]
    assert sorted(names) == sorted(samples)
    assert verify(stage.lake, level="full").ok


def test_a_deleted_folder_disarms_loudly(stage: Stage) -> None:
    status = stage.facts["status after delete"]
    assert status["armed"] is False and "missing from staging" in status["error"]
    assert "\nhslake_armed 0.0\n" in stage.facts["metrics after delete"]
    assert stage.facts["healthy after delete"] == 200
    assert stage.facts["served after delete"]
    assert stage.facts.get("disarmed"), "nothing in the log, and it goes on as if it captured"


def test_nobody_else_noticed(stage: Stage) -> None:
    traffic = stage.facts["traffic"]
    assert traffic.failures == [] and traffic.served and traffic.healthy
    assert stage.facts["alive"]
