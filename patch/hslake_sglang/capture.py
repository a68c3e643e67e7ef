"""From the forward pass to staging: one Capture in each writing process. Nothing here raises.

An internal failure disarms the capture: loud in the log and in /hslake/status, while the server
goes on serving. Losing one attempt (no room, media, a wrong length) is not a failure: it is
recorded, and the driver asks again.
"""

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from hslake.checksum import fold
from hslake.errors import InvalidInput, NoSpace
from hslake.spec import LakeSpec
from hslake.staging import Reservation
from hslake_sglang.copies import Copies, Flight, Side, wait_below
from hslake_sglang.figures import Figures
from hslake_sglang.memory import FORWARDS
from hslake_sglang.split import Piece, real_rows, split_batch
from hslake_sglang.taps import Taps

log = logging.getLogger("hslake")

MAX_WAIT_S = 1.0  # of one forward: a blocked forward trips SGLang's watchdog
_POLL_S = 0.02
_PUMP_S = 0.05  # between looks at copies while no forward comes by
_TICK_S = 0.25
_LAUNCH_S = 1.0  # launching a forward takes less, or something is wrong with it
_NEXT_S = 0.05  # from the end of a forward's launch to the next one, while there is work
_AFTER_FAILURE_S = 5.0
_DRAIN_S = 5.0  # of an orderly end
_REMEMBERED = 100_000


class Capture:
    """Takes the pieces of each forward out of its tensors and into a StagingWriter.

    `writer` is a hslake.staging.StagingWriter, or None on a rank that only has to run the same
    capture as the writing one. `side`: where copies run beside the forwards, for a GPU. `upkeep`
    starts the thread that lands, recycles and seals while no forward comes by.
    """

    def __init__(
        self,
        spec: LakeSpec,
        taps: Taps,
        writer: Any,
        *,
        side: Side | None = None,
        gpu_bytes: int = 0,
        upkeep: bool = True,
    ) -> None:
        self.spec = spec
        self.taps = taps
        self.writer = writer
        self.armed = writer is not None
        self._stopped = False  # disarmed for good, or closed
        self.figures = Figures(gpu_bytes=gpu_bytes)
        self._lock = threading.Lock()  # around writer and copies: the upkeep thread uses them too
        self._side, self._copies = side, Copies(side, self._landed)
        self._finished: OrderedDict[str, None] = OrderedDict()
        self._batch: Any = None
        self._pieces: list[Piece] = []
        self._rows = 0
        self._seen = False  # whether requests of the lake have come: the server is up then
        self._deadline = 0.0  # of all waiting in this forward
        self._waited = 0.0  # seconds of it so far
        self._busy_until = 0.0  # by then the server's own thread comes by again
        self._no_space: str | None = None  # why this forward's further samples find no room
        self._lost: Counter[str] = Counter()  # attempts that this forward loses, by reason
        self._stop = threading.Event()
        if self.armed and upkeep:
            threading.Thread(target=self._keep_up, name="hslake-upkeep", daemon=True).start()

    # -- called by the hooks -----------------------------------------------------------------

    def before_forward(self, batch: Any) -> None:
        """Look at the live ForwardBatch before the model runs."""
        self.taps.held = None  # what was set aside for the states is free for them
        self._guarded(self._before_forward, batch)

    def before_logits(self, hidden: Any, aux: Any) -> None:
        """Take this forward's states; only the first call of a forward counts."""
        self._guarded(self._before_logits, hidden, aux)

    def disarm(self, reason: str) -> None:
        """Stop capturing for good and say so everywhere. The first reason stays."""
        if self._stopped:
            return
        self._stopped, self.armed = True, False
        self._forget()
        log.error("hslake: DISARMED, nothing is captured from now on: %s", reason)
        if self.writer is None:  # this rank only ran along
            return
        try:
            with self._lock:
                for flight in self._copies.forget():  # their memory is the server's again
                    self._settle(flight)
                self.writer.set_health(False, reason)
        except Exception as error:
            log_failure("the status could not be updated", error)

    def close(self) -> None:
        """Seal what is in staging (orderly end of the process). Captures nothing from then on."""
        self._stopped, self.armed = True, False
        self._stop.set()
        if self.writer is None:
            return
        # What is in flight is still written to: without its end, memory and parts stay as they are
        # for the compactor of a dead writer.
        try:
            if not wait_below(self._copies, 1, time.monotonic() + _DRAIN_S, self._pump):
                log.error("hslake: copies did not end; the compactor takes what is complete")
                return
            with self._lock:
                self.writer.close()
        except Exception as error:
            log_failure("staging is not sealed, the compactor takes it as it is", error)

    # -- inside ------------------------------------------------------------------------------

    def _guarded(self, step: Callable[..., None], *args: Any) -> None:
        if not self.armed:
            return
        began = time.monotonic()
        try:
            step(*args)
        except Exception as error:
            log_failure("the capture failed", error)
            if self.armed:
                self.disarm(f"{type(error).__name__}: {error}")
        finally:
            self.figures.forward_s += time.monotonic() - began

    def _before_forward(self, batch: Any) -> None:
        self._forget()
        if self._copies.in_flight:
            self._pump(in_forward=True)
        if not is_prefill(batch):
            return
        lengths = batch.extend_seq_lens_cpu
        self._rows = real_rows(lengths)
        if not self._rows:
            return
        self._busy_until = time.monotonic() + _LAUNCH_S
        prefixes = batch.extend_prefix_lens_cpu
        self._pieces = split_batch(batch.rids or [], lengths, prefixes, self.spec.lake8)
        self._deadline, self._waited = time.monotonic() + MAX_WAIT_S, 0.0
        self._no_space = None
        # Whosever rows these are, the capture makes the model keep their states: that is bounded.
        if self._copies.in_flight >= FORWARDS:
            began = time.monotonic()
            pump = partial(self._pump, in_forward=True)
            in_time = wait_below(self._copies, FORWARDS, self._deadline, pump)
            self._waited += time.monotonic() - began
            if not in_time:
                for piece in self._pieces:
                    self._lose(piece, "copies late: those of earlier forwards did not end in time")
                self._pieces = []
        self._batch, self._seen = batch, self._seen or bool(self._pieces)
        self.taps.listen()
        if not self.armed:  # the upkeep thread has disarmed meanwhile
            self._forget()

    def _before_logits(self, hidden: Any, aux: Any) -> None:
        batch, rows = self._batch, self._rows
        if batch is None:
            return
        try:
            # Also without pieces: warm-up traffic shows at once whether the capture works.
            streams = self.taps.collect(hidden, aux, rows)
            if getattr(batch, "aux_hidden_states_buffer", None) is not None:
                # A buffer that outlives the forward is the next one's before it is copied.
                streams = [stream.clone() for stream in streams]
            found = [(piece, self._place(piece, batch)) for piece in self._pieces]
            placed = [(piece, place) for piece, place in found if place is not None]
            if placed:
                # Journalled together with what lands next: one frame costs less than two.
                with self._lock:
                    for piece, place in placed:
                        place.issued += piece.count
                        place.part.in_flight += 1
                    self.figures.forwards += 1
                    self._copies.start(placed, streams, batch.input_ids[:rows])
        finally:
            self.figures.waited(self._waited)
            self._busy_until = time.monotonic() + _NEXT_S
            self._forget()

    def _forget(self) -> None:
        self._batch, self._pieces, self._rows = None, [], 0
        self.taps.rest()
        lost, self._lost = self._lost, Counter()  # also called by the upkeep thread, at a disarm
        for reason, count in list(lost.items()):
            log.warning("hslake: %d attempts dropped: %s", count, reason)

    def _place(self, piece: Piece, batch: Any) -> Reservation | None:
        """Where the piece's rows go; None when they are not stored."""
        if piece.rid.attempt in self._finished:
            return None  # dropped before, or complete and computed again after a retraction
        reason = unfit(piece, batch)
        reservation = None
        if reason is None:
            reservation, reason = self._reservation(piece)
        if reservation is None:
            self._lose(piece, reason or "no reservation")
        return reservation

    def _landed(self, flight: Flight) -> None:
        """All rows of a flight are in staging: journal them. The caller holds the lock."""
        assert flight.digests is not None
        self.figures.copied(time.monotonic() - flight.started)
        self._settle(flight)
        rows = [(p.row, p.count, p.position) for p, _ in flight.pieces]
        sums = fold(flight.digests.numpy(), rows, self.spec.hidden_size)
        for (piece, place), found in zip(flight.pieces, sums, strict=True):
            if self.writer.get(piece.rid.attempt) is not place:
                continue  # given up or started again meanwhile
            checksums, stats = [c for c, _ in found], [s for _, s in found]
            if self.writer.wrote(place, piece.position, piece.count, checksums, stats):
                self._remember(piece.rid.attempt)
        self.writer.flush()

    def _settle(self, flight: Flight) -> None:
        for _, place in flight.pieces:
            place.part.in_flight -= 1

    def _pump(self, *, in_forward: bool = False) -> None:
        with self._lock:
            self._copies.pump(in_forward=in_forward)

    def _reservation(self, piece: Piece) -> tuple[Reservation | None, str | None]:
        """(reservation, None), or (None, why this attempt cannot be stored)."""
        if piece.position:
            with self._lock:
                found = self.writer.get(piece.rid.attempt)
            if found is None:
                return None, f"out of order: rows from {piece.position} on without their beginning"
            if found.issued != piece.position:
                late = f"rows from {piece.position} on after {found.issued} rows"
                return None, f"out of order: {late}"
            return found, None
        if self._no_space:  # nothing changes that within this forward
            return None, self._no_space
        while True:
            try:
                with self._lock:
                    place: Reservation = self.writer.begin(piece.rid)
                return place, None
            except InvalidInput as error:
                return None, f"refused: {error}"
            except NoSpace as error:
                began = time.monotonic()
                if began >= self._deadline:
                    self._no_space = f"no space: {error}"
                    return None, self._no_space
            time.sleep(_POLL_S)
            with self._lock:
                self._tick()
            self._waited += time.monotonic() - began

    def _lose(self, piece: Piece, reason: str) -> None:
        self._remember(piece.rid.attempt)
        self._lost[reason] += 1
        with self._lock:
            opened = self.writer.get(piece.rid.attempt)
            if opened is not None:
                self.writer.abandon(opened, reason)
            else:
                self.writer.drop(piece.rid, reason)

    def _remember(self, attempt: str) -> None:
        self._finished[attempt] = None
        if len(self._finished) > _REMEMBERED:
            self._finished.popitem(last=False)

    def _tick(self) -> None:
        """Housekeeping; the caller holds the lock."""
        self.writer.set_figures(self.figures.rows(self._copies.in_flight))
        self.writer.tick()

    def _keep_up(self) -> None:
        if self._side is not None:
            self._side.enter()
        ticked = time.monotonic()
        while not self._stop.wait(self._pause()):
            try:
                if self._copies.in_flight and not self._busy():
                    self._pump()
                if time.monotonic() - ticked < _TICK_S:
                    continue
                ticked = time.monotonic()
                if self._side is not None:
                    self.figures.gpu_retries = self._side.retries()
                with self._lock:
                    self._tick()  # also when disarmed: what is in staging must get out
                    path = self.writer.wanted_part() if self.armed and self._seen else None
                if path is not None:
                    self._make_part(path)
            except Exception as error:
                if self.armed:
                    log_failure("the upkeep failed", error)
                    self.disarm(f"upkeep: {type(error).__name__}: {error}")
                self._stop.wait(_AFTER_FAILURE_S)  # what is in staging must still get out

    def _busy(self) -> bool:
        """Whether the server's own thread launches a forward or is about to, and lands copies
        itself: what Python does beside it, it has to wait for, again and again."""
        return time.monotonic() < self._busy_until

    def _pause(self) -> float:
        """Seconds that the upkeep thread sleeps."""
        return min(_TICK_S, max(_PUMP_S, self._busy_until - time.monotonic()))

    def _make_part(self, path: Path) -> None:
        """Without the lock: allocating and page-locking gigabytes takes seconds."""
        try:
            part = self.writer.make_part(path)
        except (NoSpace, OSError) as error:
            with self._lock:
                self.writer.refuse_part(str(error))
            return
        with self._lock:
            self.writer.add_part(part)


def log_failure(what: str, error: Exception) -> None:
    """In one line what the machine is to blame for, with the call stack what may be our mistake."""
    stack = not isinstance(error, OSError)
    log.error("hslake: %s: %s: %s", what, type(error).__name__, error, exc_info=stack)


def is_prefill(batch: Any) -> bool:
    """Whether this ForwardBatch computes prompt rows (is_extend() would also mean draft verify)."""
    mode = getattr(batch.forward_mode, "name", "")
    return mode in ("EXTEND", "MIXED") and batch.extend_seq_lens_cpu is not None


def unfit(piece: Piece, batch: Any) -> str | None:
    """Why this request's rows must not enter the lake, or None."""
    if piece.overflows:
        return f"wrong length: more than the {piece.rid.length} tokens of the request id"
    for name, what in (("mm_inputs", "media"), ("lora_ids", "a LoRA adapter")):
        values = getattr(batch, name, None)
        if values and values[piece.index] is not None:
            return f"not its tokens: the request carries {what}"
    if batch.input_ids is None or getattr(batch, "input_embeds", None) is not None:
        return "not its tokens: the request carries embeddings instead"
    return None
