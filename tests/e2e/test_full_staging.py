"""Staging full for longer than SGLang's watchdog waits, with nobody to empty it.

The wait is the subject: it has to be longer than the default watchdog's 300 s. `make e2e` runs this
file in a process of its own beside the others. HSLAKE_FULL_SECONDS makes it shorter while working
on it.
"""

import os
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
from hslake.compact import compact
from hslake.extract import ExtractOptions, extract
from hslake.extract.drive import Limits
from hslake.ids import RequestId, new_attempt, token_hash
from hslake.verify import verify
from tests.e2e import client
from tests.e2e.conftest import Stage, set_stage
from tests.e2e.traffic import Traffic, events, wait_for

SECONDS = float(os.environ.get("HSLAKE_FULL_SECONDS", "400"))
EVERY = 2.0  # seconds between hslake requests that find no room; each holds a forward up for one
PART, PARTS = 256, 2
FILL = {f"fill-{i}": PART for i in range(PARTS)}  # whole parts: not one row is left
REST = {f"rest-{i:02d}": n for i, n in enumerate((1, 40, 64, 65, 100, 7, 33, 120, 90, 250, 15, 60))}


@pytest.fixture(scope="module")
def samples() -> dict[str, list[int]]:
    rng = np.random.default_rng(11)
    return {k: rng.integers(20, 45_000, n).tolist() for k, n in {**FILL, **REST}.items()}


def send(stage: Stage, samples: dict[str, list[int]], name: str, lake8: str) -> str:
    """One capture request straight to the server, whatever the credits say; its attempt id."""
    ids = samples[name]
    rid = RequestId(lake8, new_attempt(), len(ids), "A1", name)
    answer = client.generate(stage.url, ids, rid=rid.encode())
    assert len(answer["output_ids"]) == 1
    return rid.attempt


def besiege(stage: Stage, samples: dict[str, list[int]], lake8: str) -> dict[str, Any]:
    """Send what cannot be stored for SECONDS; what the server said all the while."""
    sent: list[str] = []
    free: Counter[int] = Counter()
    health: Counter[int] = Counter()
    begin, turn = time.monotonic(), 0
    with ThreadPoolExecutor(8) as pool:
        asked = []
        while time.monotonic() < begin + SECONDS:
            turn += 1
            name = list(REST)[turn % len(REST)]
            asked.append(pool.submit(send, stage, samples, name, lake8))
            health[client.code(stage.url + "/health_generate")] += 1
            status = client.get(stage.url + "/hslake/status")
            free.update(w["free_rows"] for w in status["writers"])
            time.sleep(EVERY)
        sent = [f.result(120) for f in asked]
    return {
        "sent": sent,
        "free": free,
        "health": health,
        "siege": (begin, begin + SECONDS),
        "alive": stage.server.alive(),
    }


@pytest.fixture(scope="module")
def stage(
    ram: Path, sglang_python: Path, model_dir: Path, samples: dict[str, list[int]]
) -> Iterator[Stage]:
    made = set_stage(
        ram / "full",
        sglang_python,
        model_dir,
        samples,
        capture="final",  # the final norm's output and nothing else
        dtype="float32",
        chunk=64,
        part_tokens=PART,
        max_parts=PARTS,
    )
    facts, stop = made.facts, threading.Event()
    lake8 = hslake.open(made.lake).spec.lake8

    def free_rows() -> int:
        return client.get(made.url + "/hslake/status")["writers"][0]["free_rows"]

    with made.server, ThreadPoolExecutor(2) as pool:
        facts["filled"] = [send(made, samples, name, lake8) for name in FILL]
        wait_for("no free row", lambda: free_rows() == 0)
        with Traffic(made.url, pause=1.0) as traffic:
            facts |= besiege(made, samples, lake8)
            facts["besieged"] = events(made.url)
            # An extract that comes now waits for the compactor, which comes a moment later.
            options = ExtractOptions(limits=Limits(requests=6, patience=120))
            driver = pool.submit(extract, made.lake, [made.url], options)
            time.sleep(3)
            facts["waited"] = not driver.done() and free_rows() == 0
            watcher = pool.submit(
                compact, made.lake, [made.staging], watch=True, stop=stop.is_set, interval_s=0.5
            )
            try:
                facts["extract"] = driver.result()
            finally:
                stop.set()
        facts["traffic"], facts["events"] = traffic, events(made.url)
        facts["status"] = client.get(made.url + "/hslake/status")
        facts["alive at the end"] = made.server.alive()
        facts["compact"] = watcher.result(60)
    facts["log"] = made.server.log.read_text("utf-8", "replace")
    facts["last compact"] = compact(made.lake, [made.staging])
    yield made


def test_the_default_watchdog_was_on(stage: Stage) -> None:
    assert "'watchdog_timeout': 300" in stage.facts["log"]
    assert "Watchdog timeout" not in stage.facts["log"]


def test_the_server_lived_and_was_healthy_all_the_time(stage: Stage) -> None:
    assert stage.facts["alive"] and stage.facts["alive at the end"]
    assert set(stage.facts["health"]) == {200} and stage.facts["health"][200] >= SECONDS / 20
    assert stage.facts["status"]["armed"] is True and stage.facts["status"]["error"] is None


def test_everybody_else_was_served_all_the_time(stage: Stage) -> None:
    traffic = stage.facts["traffic"]
    assert traffic.failures == []
    begin, end = stage.facts["siege"]
    slices = max(1, int(SECONDS / 40))
    served = {int(slices * (t - begin) / (end - begin)) for t in traffic.served if begin <= t < end}
    assert served == set(range(slices)), "nobody was served for 40 s"


def test_there_were_no_credits_and_every_attempt_was_recorded_as_dropped(stage: Stage) -> None:
    assert set(stage.facts["free"]) == {0}
    ended = {e["attempt"]: e for e in stage.facts["besieged"]}
    assert {ended[a]["state"] for a in stage.facts["filled"]} == {"captured"}
    sent = stage.facts["sent"]
    assert len(sent) >= SECONDS / 20
    assert {ended[a]["state"] for a in sent} == {"dropped"}
    assert all(ended[a]["reason"].startswith("no space") for a in sent)
    assert len(ended) == len(sent) + len(FILL)
    assert stage.facts["status"]["writers"][0]["dropped"] >= len(sent)


def test_everything_is_captured_once_a_compactor_comes(
    stage: Stage, samples: dict[str, list[int]]
) -> None:
    assert stage.facts["waited"], "extract ended or found credits before there were any"
    assert stage.facts["extract"].complete
    lake = hslake.open(stage.lake)
    assert lake.spec.streams == ("final",)
    rows = lake.sql("select sample_id, token_hash from samples").fetchall()
    assert sorted(rows) == sorted((k, token_hash(v)) for k, v in samples.items())
    assert verify(stage.lake, level="full").ok


def test_nothing_twice(stage: Stage, samples: dict[str, list[int]]) -> None:
    captured = Counter(e["sample_id"] for e in stage.facts["events"] if e["state"] == "captured")
    assert captured == Counter(dict.fromkeys(samples, 1))
    assert stage.facts["compact"].duplicates == stage.facts["last compact"].duplicates == 0
