"""A writer in memory that keeps the contract of StagingWriter and can be told to fail."""

from types import SimpleNamespace

import numpy as np

from hslake.checksum import RowStats, to_int64
from hslake.errors import InvalidInput, NoSpace
from hslake.ids import RequestId
from hslake.spec import LakeSpec


class Slot:
    """A Reservation: rows of one attempt."""

    def __init__(self, rid: RequestId, spec: LakeSpec) -> None:
        lanes = np.uint32 if spec.dtype == "float32" else np.uint16
        self.rid, self.length, self.filled, self.issued = rid, rid.length, 0, 0
        self.hidden = np.zeros((len(spec.streams), rid.length, spec.model.hidden_size), lanes)
        self.input_ids = np.full(rid.length, -1, np.int32)
        memory = SimpleNamespace(hidden=list(self.hidden), input_ids=self.input_ids)
        self.part, self.row_start = SimpleNamespace(in_flight=0, memory=memory), 0
        self.sums = [0] * len(spec.streams)
        self.stats = [RowStats()] * len(spec.streams)

    def checksums(self) -> list[int]:
        return [to_int64(s) for s in self.sums]


class RecordingWriter:
    """`full` begin() calls raise NoSpace first; `broken` makes the next write fail."""

    def __init__(self, spec: LakeSpec, *, full: int = 0, longest: int = 1000) -> None:
        self.spec, self.full, self.longest = spec, full, longest
        self.broken: Exception | None = None
        self.open: dict[str, Slot] = {}
        self.done: dict[str, Slot] = {}
        self.dropped: dict[str, str] = {}
        self.health: tuple[bool, str | None] = (True, None)
        self.ticks = 0

    def begin(self, rid: RequestId) -> Slot:
        if rid.length > self.longest:
            raise InvalidInput(f"{rid.length} tokens do not fit a part of {self.longest}")
        if self.full:
            self.full -= 1
            raise NoSpace("staging is full")
        self.open[rid.attempt] = Slot(rid, self.spec)
        return self.open[rid.attempt]

    def get(self, attempt: str) -> Slot | None:
        return self.open.get(attempt)

    def wrote(self, slot: Slot, position: int, n: int, sums: list[int], stats: list) -> bool:
        if self.broken:
            raise self.broken
        assert position == slot.filled and self.open[slot.rid.attempt] is slot
        slot.filled += n
        slot.sums = [a + b for a, b in zip(slot.sums, sums, strict=True)]
        slot.stats = [a.merge(b) for a, b in zip(slot.stats, stats, strict=True)]
        if slot.filled < slot.length:
            return False
        self.done[slot.rid.attempt] = self.open.pop(slot.rid.attempt)
        return True

    def abandon(self, slot: Slot, reason: str) -> None:
        self.open.pop(slot.rid.attempt)
        self.dropped[slot.rid.attempt] = reason

    def drop(self, rid: RequestId, reason: str) -> None:
        self.dropped[rid.attempt] = reason

    def set_figures(self, figures: dict[str, float]) -> None:
        self.figures = figures

    def flush(self) -> None:
        pass

    def tick(self) -> None:
        self.ticks += 1

    def set_health(self, armed: bool, error: str | None) -> None:
        self.health = (armed, error)

    def close(self) -> None:
        pass
