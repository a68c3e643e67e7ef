"""The way of one forward's rows into staging: digests, then copies straight into the Zarr chunks.

On CUDA both run on a stream of their own beside the next forward, into page-locked memory; whoever
calls `pump` launches them and takes in what has landed. No thread of ours launches work while the
server does: each of its calls would take Python's lock from the thread that feeds the GPU, which
costs more than the work itself. On a CPU everything is done when `start` returns.
"""

import contextlib
import time
from collections import deque
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

_POLL_S = 0.002


class Side(Protocol):
    """Where copies run beside the server's own work."""

    def enter(self) -> None:
        """Called once in every thread but the server's own."""

    def mark(self) -> Any:
        """What the caller has launched so far."""

    def done(self, mark: Any) -> bool:
        """Whether all of that has happened. Raises what the device raises."""

    def run(self, mark: Any, launch: Callable[[], None]) -> Any:
        """Have `launch` work on what was there at `mark`; returns the mark behind it."""

    def retries(self) -> int:
        """How often PyTorch ran out of the device's memory and had to give back what it kept."""


class CudaSide:
    """A stream beside the server's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def enter(self) -> None:
        """See Side."""
        torch.cuda.set_device(self._device)  # else its calls would open GPU 0 as well

    def mark(self) -> Any:
        """See Side."""
        mark = torch.cuda.Event()
        mark.record(torch.cuda.current_stream(self._device))
        return mark

    def done(self, mark: Any) -> bool:
        """See Side."""
        return bool(mark.query())

    def run(self, mark: Any, launch: Callable[[], None]) -> Any:
        """See Side."""
        landed = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(mark)
            launch()
            landed.record(self._stream)
        return landed

    def retries(self) -> int:
        """See Side."""
        found = torch.cuda.memory_stats_as_nested_dict(self._device)
        return int(found.get("num_alloc_retries", 0))


@dataclass(eq=False)
class Flight:
    """The rows of one forward on their way. `streams` [rows, hidden] and `ids` [rows] are kept
    until they are copied; `digests` is int64 [stream, 4, row] on the host."""

    pieces: list[tuple[Piece, Reservation]]
    streams: list[torch.Tensor]
    ids: torch.Tensor
    mark: Any = None  # behind the forward
    landed: Any = None  # behind the copies, once they are launched
    started: float = 0.0
    digests: torch.Tensor | None = None


class Copies:
    """Copies forwards and hands them to `land` when all of their rows are in place, in order.

    Not thread-safe: one caller at a time.
    """

    def __init__(self, side: Side | None, land: Callable[[Flight], None]) -> None:
        self._side, self._land = side, land
        self._flights: deque[Flight] = deque()
        self._broken: list[Flight] = []  # launched in part: held for ever, as something may copy it

    @property
    def in_flight(self) -> int:
        """Forwards that are not copied yet."""
        return len(self._flights)

    def start(
        self,
        pieces: list[tuple[Piece, Reservation]],
        streams: Sequence[torch.Tensor],
        input_ids: torch.Tensor,
    ) -> None:
        """Take the rows of `pieces` out of `streams` and `input_ids`, which the forward that was
        launched last computes. The streams must not be written to any more."""
        # The server's buffer of ids may be the next batch's soon.
        flight = Flight(pieces, list(streams), input_ids.to(torch.int32, copy=True))
        if self._side is None:
            _launch(flight)
            self._land(flight)
        else:
            flight.mark = self._side.mark()
            self._flights.append(flight)

    def forget(self) -> list[Flight]:
        """Let go of forwards whose copies are not launched yet; returns them."""
        waiting = [f for f in self._flights if f.landed is None]
        self._flights = deque(f for f in self._flights if f.landed is not None)
        return waiting

    def pump(self, *, in_forward: bool) -> None:
        """Launch the copies of computed forwards, and land what has arrived.

        `in_forward`: called by the server's own thread ahead of the next forward. By then it has
        launched the last one's answer, and copies line up behind that: in front they would hold
        it up. Otherwise only forwards that have been computed are looked at.
        """
        side = self._side
        while self._flights and side is not None:
            flight = self._flights[0]
            if flight.landed is None and not in_forward and not side.done(flight.mark):
                return
            for each in list(self._flights) if in_forward else [flight]:
                if each.landed is None:
                    mark = side.mark() if in_forward else each.mark
                    try:
                        each.landed = side.run(mark, partial(_launch, each))
                    except BaseException:
                        self._flights.remove(each)
                        self._broken.append(each)
                        raise
            if not side.done(flight.landed):
                return
            self._flights.popleft()
            flight.streams.clear()  # only now may their memory be anybody else's
            self._land(flight)


def wait_below(copies: Copies, limit: int, deadline: float, pump: Callable[[], None]) -> bool:
    """Pump until fewer than `limit` forwards are in flight. False: not by `deadline` (seconds of
    time.monotonic)."""
    pump()
    while copies.in_flight >= limit:
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
        pump()
    return True


def _launch(flight: Flight) -> None:
    flight.started = time.monotonic()
    shape = (len(flight.streams), 4, len(flight.streams[0]))
    digests = torch.empty(shape, dtype=torch.int64, device=flight.streams[0].device)
    for stream, out in zip(flight.streams, digests, strict=True):
        row_digests(stream, out)
    if digests.is_cuda:
        flight.digests = torch.empty(digests.shape, dtype=digests.dtype, pin_memory=True)
        flight.digests.copy_(digests, non_blocking=True)
    else:
        flight.digests = digests
    for row, count, place, position in runs(flight.pieces):
        memory = place.part.memory
        first = place.row_start + position
        rows, target = slice(row, row + count), slice(first, first + count)
        for stream, hidden in zip(flight.streams, memory.hidden, strict=True):
            copy_bits(stream[rows], hidden[target])
        ids = torch.from_numpy(memory.input_ids[target])
        ids.copy_(flight.ids[rows], non_blocking=True)


def runs(
    pieces: Sequence[tuple[Piece, Reservation]],
) -> list[tuple[int, int, Reservation, int]]:
    """(row of the forward, count, reservation, position in it) of rows that can be copied at once:
    pieces that lie side by side both in the forward and in one part are one."""
    found: list[tuple[int, int, Reservation, int]] = []
    for piece, place in pieces:
        if found:
            row, count, first, position = found[-1]
            end = first.row_start + position + count
            beside = piece.row == row + count and place.row_start + piece.position == end
            if beside and place.part is first.part:
                found[-1] = (row, count + piece.count, first, position)
                continue
        found.append((piece.row, piece.count, place, piece.position))
    return found


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
            # Or the error is raised at whatever this thread, or the server's, launches next.
            with contextlib.suppress(RuntimeError), torch.cuda.device(device):
                torch.zeros(1, device=device)
            raise NoSpace(
                f"{size:,} bytes of staging cannot be page-locked (CUDA error {code}): lower "
                "--part-tokens, or let the server's container lock that much memory"
            )

        def unlock() -> None:
            with torch.cuda.device(device):
                torch.cuda.cudart().cudaHostUnregister(address)

        return unlock

    return lock
