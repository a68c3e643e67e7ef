"""From the forward pass to staging: one Capture in each writing process. Nothing here raises.

An internal failure disarms the capture: loud in the log and in /hslake/status, while the server
goes on serving. Losing one attempt (no room, media, a wrong length) is not a failure: it is
recorded, and the driver asks again.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from hslake.checksum import MASK64, RowStats
from hslake.errors import InvalidInput, NoSpace
from hslake.spec import LakeSpec
from hslake.torch_checksum import row_stats_tensor, rows_checksum_tensor
from hslake_sglang.split import Piece, real_rows, split_batch
from hslake_sglang.taps import Taps

log = logging.getLogger("hslake")

MAX_WAIT_S = 1.0  # of one forward: a blocked forward trips SGLang's watchdog
_POLL_S = 0.02
_TICK_S = 0.25
_REMEMBERED = 100_000


class Capture:
    """Takes the pieces of each forward out of its tensors and into a StagingWriter.

    `writer` is a hslake.staging.StagingWriter, or None on a rank that only has to run the same
    capture as the writing one. `idle_ticks` starts the thread that recycles parts between forwards.
    """

    def __init__(self, spec: LakeSpec, taps: Taps, writer: Any, *, idle_ticks: bool = True) -> None:
        self.spec = spec
        self.taps = taps
        self.writer = writer
        self.armed = writer is not None
        self._lock = threading.Lock()  # the writer is also ticked by the idle thread
        self._finished: OrderedDict[str, None] = OrderedDict()
        self._batch: Any = None
        self._pieces: list[Piece] = []
        self._rows = 0
        self._stop = threading.Event()
        if self.armed and idle_ticks:
            threading.Thread(target=self._tick_forever, name="hslake-tick", daemon=True).start()

    # -- called by the hooks -----------------------------------------------------------------

    def before_forward(self, batch: Any) -> None:
        """Look at the live ForwardBatch before the model runs."""
        self._guarded(self._before_forward, batch)

    def before_logits(self, hidden: Any, aux: Any) -> None:
        """Take this forward's states; only the first call of a forward counts."""
        self._guarded(self._before_logits, hidden, aux)

    def disarm(self, reason: str) -> None:
        """Stop capturing for good and say so everywhere."""
        self.armed = False
        self._forget()
        log.error("hslake: DISARMED, nothing is captured from now on: %s", reason)
        try:
            with self._lock:
                self.writer.set_health(False, reason)
        except Exception:
            log.exception("hslake: the status could not be updated")

    def close(self) -> None:
        """Seal what is in staging (orderly end of the process). Captures nothing from then on."""
        self.armed = False
        self._stop.set()
        if self.writer is None:
            return
        try:
            with self._lock:
                self.writer.close()
        except Exception:
            log.exception("hslake: staging could not be sealed; the compactor takes it as it is")

    # -- inside ------------------------------------------------------------------------------

    def _guarded(self, step: Callable[..., None], *args: Any) -> None:
        if not self.armed:
            return
        try:
            step(*args)
        except Exception as error:
            log.exception("hslake: the capture failed")
            self.disarm(f"{type(error).__name__}: {error}")

    def _before_forward(self, batch: Any) -> None:
        self._forget()
        if not is_prefill(batch):
            return
        lengths = batch.extend_seq_lens_cpu
        self._rows = real_rows(lengths)
        if not self._rows:
            return
        prefixes = batch.extend_prefix_lens_cpu
        self._pieces = split_batch(batch.rids or [], lengths, prefixes, self.spec.lake8)
        self._batch = batch
        self.taps.listen()

    def _before_logits(self, hidden: Any, aux: Any) -> None:
        batch, pieces, rows = self._batch, self._pieces, self._rows
        if batch is None:
            return
        try:
            # Also without pieces: warm-up traffic shows at once whether the capture works.
            streams = self.taps.collect(hidden, aux, rows)
            deadline = time.monotonic() + MAX_WAIT_S
            for piece in pieces:
                self._store(piece, batch, streams, deadline)
            with self._lock:
                self.writer.tick()
        finally:
            self._forget()

    def _forget(self) -> None:
        self._batch, self._pieces, self._rows = None, [], 0
        self.taps.rest()

    def _store(
        self, piece: Piece, batch: Any, streams: Sequence[torch.Tensor], deadline: float
    ) -> None:
        if piece.rid.attempt in self._finished:
            return  # dropped before, or complete and computed again after a retraction
        reason = unfit(piece, batch)
        reservation = None
        if reason is None:
            reservation, reason = self._reservation(piece, deadline)
        if reservation is None:
            self._lose(piece, reason or "no reservation")
            return
        rows = slice(piece.row, piece.row + piece.count)
        # The device may be faster than the host: all launches first, one wait for the sums.
        mine = [stream[rows] for stream in streams]
        sums = torch.stack([rows_checksum_tensor(t, piece.position) for t in mine])
        stats = torch.stack([row_stats_tensor(t) for t in mine])
        views = reservation.rows(piece.position, piece.count)
        for tensor, view in zip(mine, views.hidden, strict=True):
            copy_bits(tensor, view)
        ids = torch.from_numpy(views.input_ids)
        ids.copy_(batch.input_ids[rows])
        checksums = [int(s) & MASK64 for s in sums.tolist()]
        size = piece.count * self.spec.hidden_size
        row_stats = [RowStats(s, peak, int(bad), size) for s, peak, bad in stats.tolist()]
        with self._lock:
            done = self.writer.wrote(reservation, piece.position, piece.count, checksums, row_stats)
        if done:
            self._remember(piece.rid.attempt)

    def _reservation(self, piece: Piece, deadline: float) -> tuple[Any, str | None]:
        """(reservation, None), or (None, why this attempt cannot be stored)."""
        if piece.position:
            with self._lock:
                found = self.writer.get(piece.rid.attempt)
            if found is None:
                return None, f"rows from position {piece.position} came without their beginning"
            if found.filled != piece.position:
                return None, (f"rows from position {piece.position} came after {found.filled} rows")
            return found, None
        while True:
            try:
                with self._lock:
                    return self.writer.begin(piece.rid), None
            except InvalidInput as error:
                return None, str(error)
            except NoSpace as error:
                if time.monotonic() >= deadline:
                    return None, f"no space: {error}"
            time.sleep(_POLL_S)
            with self._lock:
                self.writer.tick()

    def _lose(self, piece: Piece, reason: str) -> None:
        self._remember(piece.rid.attempt)
        log.warning("hslake: attempt %s dropped: %s", piece.rid.attempt, reason)
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

    def _tick_forever(self) -> None:
        while not self._stop.wait(_TICK_S):
            try:
                with self._lock:
                    self.writer.tick()  # also when disarmed: what is in staging must get out
            except Exception as error:
                if not self.armed:
                    return
                log.exception("hslake: housekeeping of staging failed")
                self.disarm(f"housekeeping of staging: {type(error).__name__}: {error}")


def is_prefill(batch: Any) -> bool:
    """Whether this ForwardBatch computes prompt rows (is_extend() would also mean draft verify)."""
    mode = getattr(batch.forward_mode, "name", "")
    return mode in ("EXTEND", "MIXED") and batch.extend_seq_lens_cpu is not None


def unfit(piece: Piece, batch: Any) -> str | None:
    """Why this request's rows must not enter the lake, or None."""
    if piece.overflows:
        return (
            f"the prompt has more than the {piece.rid.length} tokens that its request id promises"
        )
    for name, what in (("mm_inputs", "media"), ("lora_ids", "a LoRA adapter")):
        values = getattr(batch, name, None)
        if values and values[piece.index] is not None:
            return f"the request carries {what}: the states are not those of its tokens alone"
    if batch.input_ids is None or getattr(batch, "input_embeds", None) is not None:
        return "the request carries embeddings instead of tokens"
    return None


def copy_bits(tensor: torch.Tensor, view: np.ndarray) -> None:
    """Copy rows [n, hidden] bit for bit into `view` (uint16 or uint32 of the same width)."""
    signed = np.int16 if view.dtype.itemsize == 2 else np.int32
    target = torch.from_numpy(view.view(signed))
    target.copy_(tensor.view(torch.int16 if signed is np.int16 else torch.int32))
