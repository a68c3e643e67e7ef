"""The way of one forward's rows into staging: digests, then copies straight into the Zarr chunks.

On CUDA both run on a stream of their own beside the next forward, into page-locked memory, and a
thread waits for their end. On a CPU everything is done when `start` returns.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from hslake.errors import NoSpace
from hslake.staging import Reservation
from hslake.torch_checksum import row_digests
from hslake_sglang.split import Piece

log = logging.getLogger("hslake")

IN_FLIGHT = 2  # forwards whose tensors may be held at a time, the running one included
_POLL_S = 0.005
_AFTER_YOU_S = 0.005


class Side(Protocol):
    """Where copies run beside the server's own work."""

    def mark(self) -> Any:
        """Remember what the caller has launched so far: a forward that is still to compute."""

    def enter(self) -> None:
        """Called once in the thread that copies."""

    def copy(self, mark: Any, launch: Callable[[], None]) -> None:
        """In that thread: have `launch` work on what was there at `mark`, and wait for its end.
        Raises what the device raises."""


class CudaSide:
    """A stream beside the server's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def mark(self) -> Any:
        """See Side."""
        # Blocking: the waiting thread must not spin beside the scheduler.
        mark = torch.cuda.Event(blocking=True)
        mark.record(torch.cuda.current_stream(self._device))
        return mark

    def enter(self) -> None:
        """See Side."""
        torch.cuda.set_device(self._device)

    def copy(self, mark: Any, launch: Callable[[], None]) -> None:
        """See Side."""
        mark.synchronize()
        # The forward's own answer is next on its way to the host, behind whatever is copied now.
        time.sleep(_AFTER_YOU_S)
        landed = torch.cuda.Event(blocking=True)
        with torch.cuda.stream(self._stream):
            launch()
            landed.record()
        landed.synchronize()


@dataclass
class Flight:
    """The rows of one forward on their way; `digests` is int64 [stream, 4, row] on the host."""

    pieces: list[tuple[Piece, Reservation]]
    started: float = 0.0  # when the forward had been computed
    digests: torch.Tensor | None = None


class Copies:
    """Starts the copies of forwards and tells of their end, in order.

    `land(flight)` is called when all of a flight's rows are in place; with a `side` in a thread,
    where `fail` is called when that or the device failed. Only one thread may call `start`.
    """

    def __init__(
        self,
        side: Side | None,
        land: Callable[[Flight], None],
        fail: Callable[[Exception], None],
    ) -> None:
        self._side, self._land, self._fail = side, land, fail
        self.in_flight = 0  # changed under the lock
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[tuple[Flight, Any, list[torch.Tensor]]]
        self._queue = queue.SimpleQueue()
        if side is not None:
            threading.Thread(target=self._copy_forever, name="hslake-copies", daemon=True).start()

    def turn(self, deadline: float) -> bool:
        """Wait until the next forward's tensors may be held too. False: not by `deadline`."""
        return self._below(IN_FLIGHT, deadline)

    def drain(self, deadline: float) -> bool:
        """Wait until nothing is in flight. False: not by `deadline` (time.monotonic seconds)."""
        return self._below(1, deadline)

    def _below(self, limit: int, deadline: float) -> bool:
        while self.in_flight >= limit:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def start(
        self,
        pieces: list[tuple[Piece, Reservation]],
        streams: Sequence[torch.Tensor],
        input_ids: torch.Tensor,
    ) -> None:
        """Take the rows of `pieces` out of `streams` [rows, hidden] and `input_ids` [rows].

        The tensors must not be written to any more; they are kept until they are copied.
        """
        flight = Flight(pieces)
        # On the server's own stream: its buffer of ids may be the next batch's soon.
        ids = input_ids.to(torch.int32, copy=True)
        if self._side is None:
            self._launch(flight, streams, ids)
            self._land(flight)
            return
        with self._lock:
            self.in_flight += 1
        self._queue.put((flight, self._side.mark(), [*streams, ids]))

    def _launch(self, flight: Flight, streams: Sequence[torch.Tensor], ids: torch.Tensor) -> None:
        flight.started = time.monotonic()
        digests = torch.stack([row_digests(stream) for stream in streams])
        if digests.is_cuda:
            flight.digests = torch.empty(digests.shape, dtype=digests.dtype, pin_memory=True)
            flight.digests.copy_(digests, non_blocking=True)
        else:
            flight.digests = digests
        for piece, reservation in flight.pieces:
            rows = slice(piece.row, piece.row + piece.count)
            views = reservation.rows(piece.position, piece.count)
            for stream, view in zip(streams, views.hidden, strict=True):
                copy_bits(stream[rows], view)
            torch.from_numpy(views.input_ids).copy_(ids[rows], non_blocking=True)

    def _copy_forever(self) -> None:
        assert self._side is not None
        self._side.enter()
        while True:
            flight, mark, held = self._queue.get()
            try:
                self._side.copy(mark, partial(self._launch, flight, held[:-1], held[-1]))
                held.clear()  # only now may their memory be anybody else's
                self._land(flight)
            except Exception as error:
                log.exception("hslake: a copy into staging failed")
                self._fail(error)
            finally:
                held.clear()
                with self._lock:
                    self.in_flight -= 1


def copy_bits(tensor: torch.Tensor, view: np.ndarray) -> None:
    """Copy rows [n, hidden] bit for bit into `view` (uint16 or uint32 of the same width)."""
    wide = view.dtype.itemsize == 4
    target = torch.from_numpy(view.view(np.int32 if wide else np.int16))
    bits = tensor.view(torch.int32 if wide else torch.int16)
    # Rows that lie apart (one stream of packed states) are laid out on the device first.
    target.copy_(bits.contiguous() if bits.is_cuda else bits, non_blocking=True)


def warm_up(device: torch.device, dtype: torch.dtype, hidden_size: int) -> None:
    """Compile the digest kernel now: in a forward pass it would stop the server for seconds."""
    if device.type != "cuda":
        return
    with torch.cuda.device(device):
        packed = torch.zeros((2, 4 * hidden_size), dtype=dtype, device=device)
        # Compiled anew for every alignment of the first row.
        for tensor in (packed[:, :hidden_size].contiguous(), *packed.split(hidden_size, dim=1)):
            row_digests(tensor)
        torch.cuda.synchronize()


def page_lock(device: torch.device) -> Callable[[int, int], Callable[[], None]] | None:
    """hslake.staging.memory.PageLock for a CUDA device, None for a CPU."""
    if device.type != "cuda":
        return None

    def lock(address: int, size: int) -> Callable[[], None]:
        with torch.cuda.device(device):
            code = int(torch.cuda.cudart().cudaHostRegister(address, size, 0))
        if code:
            raise NoSpace(
                f"{size:,} bytes of staging cannot be page-locked (CUDA error {code}): lower "
                "--part-tokens, or let the server's container lock that much memory"
            )

        def unlock() -> None:
            torch.cuda.cudart().cudaHostUnregister(address)

        return unlock

    return lock
