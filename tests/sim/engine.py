"""The part of a simulated server that computes: a scheduler on a thread of its own, a model that is
a table, and the real hook behind it, which blocks its forwards as it would SGLang's."""

import contextlib
import logging
import os
import queue
import random
import signal
import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hslake_sglang.capture import Capture

from hslake.ids import RequestId, new_attempt
from hslake.spec import LakeSpec
from tests.sim.scheduler import Entry, Request, Scheduler
from tests.sim.states import rows_of
from tests.sim.trouble import Trouble

log = logging.getLogger("sim")

ABORTED, DONE = "aborted", "done"
_IDLE_S = 0.05


class TableTaps:
    """In place of hslake_sglang.taps.Taps: the streams come as they are."""

    held: Any = None

    def listen(self) -> None: ...

    def rest(self) -> None: ...

    def collect(self, hidden: list[torch.Tensor], aux: None, rows: int) -> list[torch.Tensor]:
        return hidden


@dataclass(frozen=True)
class Pace:
    """How long forwards take: `rate` tokens/s (0: as fast as it goes) and `overhead_s`, both times
    1 to 1 + `jitter`."""

    rate: float = 0.0
    overhead_s: float = 0.0
    jitter: float = 0.0

    def seconds(self, rows: int, rng: random.Random) -> float:
        """Of a forward of `rows` tokens."""
        alone = self.overhead_s + (rows / self.rate if self.rate else 0.0)
        return alone * (1 + self.jitter * rng.random())


@dataclass(eq=False)
class Ask:
    """A request, what befalls it, and who waits for its end (ABORTED or DONE)."""

    request: Request
    fate: str = "ok"
    end: Future[str] = field(default_factory=Future)


class Engine:
    """Use `start`, `submit`, `abort`, `stop`; the rest is its thread's."""

    def __init__(
        self,
        spec: LakeSpec,
        capture: Capture,
        *,
        chunk: int,
        kv: int,
        mixed: bool,
        pace: Pace,
        trouble: Trouble,
        traffic: float,
        seed: int,
    ) -> None:
        self.spec, self.capture = spec, capture
        self.pace, self.trouble, self.traffic = pace, trouble, traffic
        self._rng = random.Random(seed)
        self._scheduler = Scheduler(self._forward, chunk=chunk, mixed=mixed, kv=kv)
        self._asks: dict[str, Ask] = {}
        self._inbox: queue.SimpleQueue[Ask | str | None] = queue.SimpleQueue()
        self._stopped = False
        self._next_visitor = 0.0
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, ask: Ask) -> None:
        """Ends at once, aborted, when its id is in use."""
        self._inbox.put(ask)

    def abort(self, rid: str) -> None:
        """Forget a request, wherever it is."""
        self._inbox.put(rid)

    def stop(self) -> None:
        """Abort everything after the forward that is under way."""
        self._inbox.put(None)
        self._thread.join(30)

    # -- the scheduler's thread ----------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopped:
                self._take_in()
                if self._scheduler.alive and not self._stopped:
                    self._step()
        except Exception:
            log.exception("the scheduler died")
            os.kill(os.getpid(), signal.SIGKILL)  # as SGLang ends itself then
        for ask in self._asks.values():
            ask.end.set_result(ABORTED)

    def _take_in(self) -> None:
        wait = not self._scheduler.alive
        with contextlib.suppress(queue.Empty):
            while True:
                found = self._inbox.get(timeout=_IDLE_S) if wait else self._inbox.get_nowait()
                wait = False
                if found is None:
                    self._stopped = True
                elif isinstance(found, str):
                    self._forget(found)
                elif self._scheduler.submit(found.request):
                    self._asks[found.request.rid] = found
                else:
                    found.end.set_result(ABORTED)
        self._visit()

    def _forget(self, rid: str) -> None:
        alive = self._scheduler.alive
        for index, request in enumerate(alive):
            if request.rid == rid:
                self._scheduler.abort(index)
                self._end(rid, ABORTED)
                return

    def _visit(self) -> None:
        """Other people's requests, and another lake's."""
        now = time.monotonic()
        if not self.traffic or now < self._next_visitor:
            return
        self._next_visitor = now + self._rng.expovariate(self.traffic)
        ids = [self._rng.randrange(30_000) for _ in range(self._rng.randint(1, 300))]
        foreign = RequestId("ffffffff", new_attempt(), len(ids), "A1", "foreign").encode()
        rid = self._rng.choice([uuid.uuid4().hex, foreign])
        self.submit(Ask(Request(rid, ids, self._rng.randint(1, 32))))

    def _step(self) -> None:
        prefill = self._scheduler.chunked or self._scheduler.waiting
        befell = self.trouble.of_forward(self._rng) if prefill else ()
        if "freeze" in befell:
            time.sleep(self.trouble.freeze_s)
        if "disarm" in befell:
            self.capture.disarm("simulated failure inside the hook")
        if "retract" in befell:
            self._scheduler.retract(self._rng.randrange(1 << 30))
        for rid in [r for r, ask in self._asks.items() if ask.fate == "abort"]:
            if self._rng.random() < 0.5:  # before, between or behind its chunks
                self._forget(rid)
        began = time.monotonic()
        self._rows, self._crashing = 0, "crash" in befell
        self._scheduler.step()
        left = began + self.pace.seconds(self._rows, self._rng) - time.monotonic()
        if left > 0:
            time.sleep(left)
        for request in self._scheduler.ended:
            self._end(request.rid, DONE)
        self._scheduler.ended.clear()

    def _end(self, rid: str, how: str) -> None:
        ask = self._asks.pop(rid, None)
        if ask is not None:
            ask.end.set_result(ABORTED if ask.fate == "abort" else how)

    def _forward(self, entries: Sequence[Entry], mode: str) -> None:
        """One forward pass, with the hook around it."""
        fates = [self._asks[e[0]].fate for e in entries]
        rows = [e[3] for e in entries]
        self._rows = sum(rows)
        ids = np.concatenate([np.asarray(t[at : at + n], np.int32) for _, t, at, n in entries])
        batch = SimpleNamespace(
            forward_mode=SimpleNamespace(name=mode),
            rids=[
                uuid.uuid4().hex if fate == "silent" else e[0]
                for e, fate in zip(entries, fates, strict=True)
            ],
            extend_prefix_lens_cpu=[e[2] for e in entries],
            extend_seq_lens_cpu=None if mode == "DECODE" else rows,
            input_ids=torch.from_numpy(ids),
            mm_inputs=[object() if fate == "drop" else None for fate in fates],
        )
        self.capture.before_forward(batch)
        if self._crashing:  # by then the hook has reserved nothing of it yet, or all of the earlier
            os.kill(os.getpid(), signal.SIGKILL)
        if mode != "DECODE":
            starts = np.repeat([at - row for at, row in _offsets(entries)], rows)
            bits = rows_of(self.spec, ids, np.arange(len(ids)) + starts)
            streams = [torch.from_numpy(b.view(np.int16)).view(torch.bfloat16) for b in bits]
            self.capture.before_logits(streams, None)


def _offsets(entries: Sequence[Entry]) -> list[tuple[int, int]]:
    """(prefix, first row of the forward) of each entry."""
    found, row = [], 0
    for _, _, at, n in entries:
        found.append((at, row))
        row += n
    return found
