"""Other people's traffic beside the samples, and waiting for what happens in staging."""

import random
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from hslake.ids import RequestId, new_attempt
from hslake.staging import Reserved, read_part, scan
from tests.e2e import client

_FOREIGN_IDS: tuple[Callable[[], str | None], ...] = (
    lambda: None,
    lambda: uuid.uuid4().hex,
    lambda: f"hslake.somebody.else.{uuid.uuid4().hex}",
    # Another lake's sample: right in form, not ours to take.
    lambda: RequestId("ffffffff", new_attempt(), 9, "A1", "foreign").encode(),
)


class Traffic:
    """Generates and asks /health_generate in a thread, all through the `with` block.

    `failures` holds what a client would have complained about; `served` the times (monotonic)
    of answers, `healthy` counts good health checks.
    """

    def __init__(
        self,
        url: str,
        *,
        vocab: int = 45_000,
        longest: int = 60,
        new_tokens: int = 24,
        pause: float = 0.0,
    ) -> None:
        self.url, self.pause = url, pause
        self.served: list[float] = []
        self.healthy = 0
        self.failures: list[str] = []
        self._shape = (vocab, longest, new_tokens)
        self._random = random.Random(1)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="traffic")

    def _run(self) -> None:
        turn = 0
        while not self._stop.is_set():
            turn += 1
            try:
                if turn % 5 == 0:
                    found = client.code(self.url + "/health_generate")
                    assert found == 200, f"/health_generate answered {found}"
                    self.healthy += 1
                else:
                    self._generate(_FOREIGN_IDS[turn % len(_FOREIGN_IDS)]())
                    self.served.append(time.monotonic())
            except Exception as error:
                self.failures.append(f"{type(error).__name__}: {error}")
            self._stop.wait(self.pause)

    def _generate(self, rid: str | None) -> None:
        vocab, longest, new_tokens = self._shape
        ids = [self._random.randrange(20, vocab) for _ in range(self._random.randint(1, longest))]
        count = self._random.randint(1, new_tokens)
        answer = client.generate(self.url, ids, count, **({"rid": rid} if rid else {}))
        assert len(answer["output_ids"]) == count, f"asked {count} tokens: {answer}"

    def __enter__(self) -> "Traffic":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join(timeout=120)


def journal(staging: Path, attempt: str) -> list[Reserved]:
    """What the parts in staging say of an attempt: one entry an incarnation, in order."""
    parts = [read_part(path) for writer in scan(staging) for path in writer.parts]
    found = [r for part in parts for r in part.reserved if r.attempt == attempt]
    return sorted(found, key=lambda r: r.incarnation)


def wait_for(what: str, look: Callable[[], Any], timeout: float = 60.0) -> Any:
    """The first true value of `look()`; fails naming `what` when none comes."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        found = look()
        if found:
            return found
        time.sleep(0.005)
    raise AssertionError(f"{what}: did not happen within {timeout:.0f} s")


def wait_open(staging: Path, rid: RequestId) -> None:
    """Until the first rows of `rid` are in staging, and not all of them."""
    found = wait_for(f"rows of {rid.sample_id}", lambda: journal(staging, rid.attempt))
    assert found[-1].state == "open", f"{rid.sample_id} was too short to be caught in the middle"


def events(url: str) -> list[dict[str, Any]]:
    """Every event of every writer behind a server."""
    status = client.get(url + "/hslake/status")
    return [event for writer in status["writers"] for event in writer["events"]]
