"""What the dump hook does to its staging writer, without a server: forwards of several requests'
chunks, journalled when their rows are in place, and upkeep beside them."""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hslake import checksum
from hslake.errors import InvalidInput, NoSpace
from hslake.ids import RequestId
from hslake.spec import LakeSpec
from hslake.staging import Reservation, StagingWriter
from tests.faults.world import ids_of, states_of

ENGINE = {"engine": "fake", "engine_version": "0", "hook_version": "0", "chunk_size": "64"}


@dataclass(eq=False)
class Request:
    """A request in prefill, `done` rows of it computed."""

    rid: RequestId
    done: int = 0
    place: Reservation | None = None


class Hook:
    """A writer under `root` and the requests it is to capture. `settings` are StagingWriter's."""

    def __init__(
        self,
        root: Path,
        spec: LakeSpec,
        *,
        step: Callable[[str], None] = lambda what: None,
        chunk: int = 64,
        settings: Mapping[str, Any],
    ) -> None:
        options = {"part_tokens": 1024, "max_parts": 2, "engine": ENGINE, "buffered": True}
        self.writer = StagingWriter(
            root, spec, fingerprint=spec.model.fingerprint, **{**options, **settings}
        )
        self.spec, self.chunk, self._step = spec, chunk, step
        self.requests: deque[Request] = deque()
        self._lock = threading.Lock()

    def submit(self, rid: RequestId) -> None:
        self.requests.append(Request(rid))

    def forward(self) -> None:
        """One prefill batch: `chunk` rows, of as many requests as they reach."""
        with self._lock:
            room = self.chunk
            pieces: list[tuple[Request, int, int]] = []
            for request in list(self.requests):
                if not room:
                    break
                # Half of what is left at most: several requests are always half done.
                n = min(request.rid.length - request.done, max(1, room // 2))
                room -= n
                if self._place(request):
                    pieces.append((request, request.done, n))
            self.writer.flush()
            for request, at, n in pieces:
                self._copy(request, at, n)
            for request, at, n in pieces:
                self._landed(request, at, n)
            self.writer.flush()
            self.writer.tick()
            self.requests.rotate(-1)

    def _place(self, request: Request) -> bool:
        if request.done:
            if self.writer.get(request.rid.attempt) is request.place:
                return True
            self._forget(request)  # aged meanwhile
            return False
        try:
            request.place = self.writer.begin(request.rid)
            return True
        except (NoSpace, InvalidInput) as error:
            what = "no space" if isinstance(error, NoSpace) else "refused"
            self.writer.drop(request.rid, f"{what}: {error}")
            self._forget(request)
            return False

    def _copy(self, request: Request, at: int, n: int) -> None:
        place = request.place
        assert place is not None
        place.part.in_flight += 1
        rows = place.rows(at, n)
        states = states_of(self.spec, request.rid.sample_id)[:, at : at + n]
        for view, part in zip(rows.hidden, states, strict=True):
            self._step("rows, none of them")
            half = n // 2
            view[:half] = part[:half]
            self._step("rows, half of them")
            view[half:] = part[half:]
        self._step("token ids")
        rows.input_ids[...] = ids_of(request.rid.sample_id)[at : at + n]
        self._step("rows in place")

    def _landed(self, request: Request, at: int, n: int) -> None:
        place = request.place
        assert place is not None
        place.part.in_flight -= 1
        states = states_of(self.spec, request.rid.sample_id)[:, at : at + n]
        parts = [np.ascontiguousarray(s) for s in states]
        sums = [checksum.rows_checksum(p, at) for p in parts]
        stats = [checksum.row_stats(checksum.to_float32(p, self.spec.dtype)) for p in parts]
        request.done += n
        if self.writer.wrote(place, at, n, sums, stats):
            self._forget(request)

    def _forget(self, request: Request) -> None:
        if request in self.requests:
            self.requests.remove(request)

    def retract(self, index: int) -> None:
        """A request loses what was computed of it, and begins again from position 0."""
        if self.requests:
            self.requests[index % len(self.requests)].done = 0

    def abort(self, index: int) -> None:
        """A request is never heard of again."""
        if self.requests:
            del self.requests[index % len(self.requests)]

    def upkeep(self) -> None:
        """What the hook's own thread does beside forwards."""
        with self._lock:
            self.writer.tick()
            path = self.writer.wanted_part()
        if path is None:
            return
        try:
            part = self.writer.make_part(path)
        except (NoSpace, OSError) as error:
            with self._lock:
                self.writer.refuse_part(str(error))
            return
        with self._lock:
            self.writer.add_part(part)

    def die(self) -> None:
        """What is left when the process of this writer is killed. (Its memory goes with it.)"""
        self.writer._lock.release()

    def finish(self) -> None:
        """Serve all requests, then end in order."""
        while self.requests:
            self.forward()
        self.writer.close()


def capture(hook: Hook, rid: RequestId) -> None:
    """Capture one request to its end."""
    hook.submit(rid)
    while hook.requests:
        hook.forward()


def serve(hook: Hook, poll: Callable[[], RequestId | None], retract: Callable[[], bool]) -> None:
    """Serve what `poll` gives, for ever, with the upkeep on a thread of its own."""

    def upkeep() -> None:
        while True:
            time.sleep(0.02)
            hook.upkeep()

    threading.Thread(target=upkeep, daemon=True).start()
    while True:
        rid = poll()
        if rid is not None:
            hook.submit(rid)
        if hook.requests:
            if retract():
                hook.retract(0)
            hook.forward()
