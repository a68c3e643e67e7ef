"""The staging writer: one reservation per sample, filled by position, journalled when in place."""

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hslake.checksum import RowStats, to_int64
from hslake.errors import InvalidInput, NoSpace
from hslake.ids import RequestId
from hslake.spec import LakeSpec
from hslake.staging.drops import KINDS, OTHER, kind_of
from hslake.staging.files import is_full, replace_text
from hslake.staging.folder import EVENTS, STATUS, make_writer
from hslake.staging.frames import FrameWriter
from hslake.staging.memory import PageLock
from hslake.staging.part import Part
from hslake.staging.parts import Parts
from hslake.staging.reservation import Reservation

_STATUS_EVERY_S = 0.2
_SPARE = 1 << 18  # bytes of journal and events, at least, for the ends of what has begun
_ROW = 2048  # bytes of one row of them, at most, with a few streams

log = logging.getLogger("hslake.staging")


class StagingWriter:
    """Fills parts under `<root>/<writer uuid>/` and holds that folder's lock while it lives.

    Not thread-safe: one caller at a time, but for `make_part`, which is for a thread of its own
    when parts are to be made `ahead` of need. `page_lock` is called with address and size of every
    map. `buffered`: what is to be journalled is written by `flush` or the next `tick`, in one go.
    Raises NoSpace at start when no part fits.
    """

    def __init__(
        self,
        root: Path,
        spec: LakeSpec,
        *,
        part_tokens: int,
        max_parts: int,
        fingerprint: dict[str, str | None],
        engine: dict[str, str],
        clock: Callable[[], float] = time.time,
        max_age_s: float = 3600.0,
        idle_s: float = 5.0,
        silent_s: float = 60.0,
        page_lock: PageLock | None = None,
        ahead: bool = False,
        buffered: bool = False,
    ) -> None:
        if part_tokens < 1 or max_parts < 1:
            raise InvalidInput("part_tokens and max_parts must be at least 1")
        self.folder, self._lock = make_writer(Path(root))
        self.writer_id = self.folder.name
        self.spec = spec
        self._clock, self._max_age_s, self._silent_s = clock, max_age_s, silent_s
        self._engine = dict(engine)
        attributes: dict[str, Any] = {
            "format": 1,
            "lake_id": spec.lake_id,
            "fingerprint": fingerprint,
            "streams": list(spec.streams),
            "dtype": spec.dtype,
            "hidden_size": spec.hidden_size,
            "capacity": part_tokens,
            "engine": dict(engine),
        }
        self._open: dict[str, Reservation] = {}
        self._buffered = buffered
        self._unwritten: list[dict[str, Any]] = []  # events
        self._events = FrameWriter(self.folder / EVENTS, "events")
        self._cursor = 0
        self._counts = {"samples_captured": 0, "tokens_captured": 0, "dropped": 0}
        self._dropped = dict.fromkeys((*KINDS, OTHER), 0)
        self._figures: dict[str, float] = {}
        self._health: tuple[bool, str | None] = (True, None)
        self._status_at, self._status_due, self._status_failed = 0.0, False, False
        self._closed = False
        self._parts = Parts(
            self.folder,
            spec,
            capacity=part_tokens,
            limit=max_parts,
            attributes=attributes,
            clock=clock,
            idle_s=idle_s,
            page_lock=page_lock,
            ahead=ahead,
        )
        self._write_status(force=True)

    # -- rows -------------------------------------------------------------------------------

    def free_rows(self) -> int:
        """Rows that new reservations could get now."""
        return self._parts.free_rows()

    def largest_reservation(self) -> int:
        """The longest sample this writer can ever take."""
        return self._parts.capacity

    def get(self, attempt: str) -> Reservation | None:
        """The open reservation of an attempt."""
        return self._open.get(attempt)

    def begin(self, rid: RequestId) -> Reservation:
        """Reserve `rid.length` rows. Raises NoSpace when there is no room now, InvalidInput for a
        foreign lake or a sample longer than a part. An open incarnation is abandoned first."""
        if rid.lake8 != self.spec.lake8:
            raise InvalidInput(
                f"attempt {rid.attempt} is of lake {rid.lake8}, this writer "
                f"serves {self.spec.lake8}"
            )
        if rid.length > self._parts.capacity:
            raise InvalidInput(
                f"sample {rid.sample_id!r} has {rid.length} tokens, a part holds "
                f"{self._parts.capacity}: raise --part-tokens"
            )
        old = self._open.get(rid.attempt)
        if old is not None:
            self.abandon(old, "superseded")
        part = self._parts.room(rid.length)
        # Counted while a part tells of the attempt: within a part no two may be the same.
        told = (p.incarnations.get(rid.attempt, -1) for p in self._parts.all)
        incarnation = 1 + max(told, default=-1)
        # What is begun can be ended: its rows and events must not fail for room later.
        part.journal_room(self._spare())
        self._events.room(self._spare())
        n = len(self.spec.streams)
        found = Reservation(
            rid, part, part.used, incarnation, self._clock(), 0, 0, [0] * n, [RowStats()] * n
        )
        self._log(found, "reserve")
        part.used += rid.length
        part.open += 1
        self._open[rid.attempt] = found
        part.incarnations[rid.attempt] = incarnation
        return found

    def wrote(
        self,
        reservation: Reservation,
        position: int,
        n: int,
        checksums: Sequence[int],
        stats: Sequence[RowStats],
    ) -> bool:
        """Rows [position, position + n) are in place; partial sums and statistics per stream.

        Returns True when the sample is complete and journalled. Raises InvalidInput, after
        abandoning the reservation, when the rows do not continue where the last ended.
        """
        attempt = reservation.rid.attempt
        if self._open.get(attempt) is not reservation:
            raise InvalidInput(f"attempt {attempt} is not open any more")
        if position != reservation.filled or n < 1 or position + n > reservation.length:
            self.abandon(reservation, "out of order")
            raise InvalidInput(
                f"attempt {attempt}: rows {position}..{position + n} came, {reservation.filled} of "
                f"{reservation.length} are in place; the attempt is dropped"
            )
        reservation.filled += n
        reservation.touched = self._clock()
        reservation.sums = [a + b for a, b in zip(reservation.sums, checksums, strict=True)]
        reservation.stats = [a.merge(b) for a, b in zip(reservation.stats, stats, strict=True)]
        if reservation.filled < reservation.length:
            return False
        self._log(
            reservation,
            "complete",
            checksum=[to_int64(s) for s in reservation.sums],
            rms=[s.rms() for s in reservation.stats],
            absmax=[s.absmax for s in reservation.stats],
            nonfinite=[s.nonfinite for s in reservation.stats],
        )
        del self._open[attempt]
        reservation.part.open -= 1
        self._counts["samples_captured"] += 1
        self._counts["tokens_captured"] += reservation.length
        self._event(reservation.rid, "captured", part=reservation.part.path.name)
        return True

    def abandon(self, reservation: Reservation, reason: str) -> None:
        """Give up an open reservation; its rows are free once the part is recycled."""
        if self._open.pop(reservation.rid.attempt, None) is not None:
            reservation.part.open -= 1
            self._log(reservation, "abandon", reason=reason)
            if reason != "superseded":
                self.drop(reservation.rid, reason)

    def drop(self, rid: RequestId, reason: str) -> None:
        """Record that an attempt is lost, so that the driver asks again at once (without room for
        that it asks when it has waited for long enough). `reason`: as in hslake.staging.drops."""
        self._counts["dropped"] += 1
        self._dropped[kind_of(reason)] += 1
        try:
            self._events.room(self._spare())  # what is still open must be able to end
        except NoSpace as error:
            log.warning("attempt %s is dropped without an event: %s", rid.attempt, error)
            self._write_status()
            return
        self._event(rid, "dropped", reason=reason)

    # -- upkeep -----------------------------------------------------------------------------

    def flush(self) -> None:
        """Write the journal rows and then the events that are still in memory."""
        for part in self._parts.all:
            part.flush()
        if self._unwritten:
            waiting = self._unwritten
            # Gone at once: written twice, all later ones would be misplaced.
            self._events.append_each(list(waiting), lambda: waiting.pop(0))
            if self._buffered:  # whoever writes so has little time: the next tick does it
                self._status_due = True
            else:
                self._write_status()

    def tick(self) -> None:
        """Recycle finished parts, seal those that are to go, give up attempts that went silent,
        refresh `status.json`."""
        if self._closed:
            return
        self.flush()
        now = self._clock()
        for reservation in list(self._open.values()):
            reservation.touched = min(reservation.touched, now)  # a clock that was put back
            silent, part = now - reservation.touched, reservation.part
            # It must not hold back for long what others have completed in its part.
            in_the_way = silent > self._silent_s and (part.passed_over or self._parts.idle(part))
            if in_the_way or silent > self._max_age_s:
                self.abandon(reservation, "aged")
        self.flush()
        changed = [self._parts.recycle(), self._parts.seal_due()]
        self._write_status(force=self._status_due or any(changed))

    def wanted_part(self) -> Path | None:
        """The part that is to be made in the background now, if there is one."""
        return self._parts.wanted()

    def make_part(self, path: Path) -> Part:
        """Make the wanted part. The one method that may run beside others. Raises NoSpace."""
        return self._parts.make(path)

    def add_part(self, part: Part) -> None:
        """Take in a part that `make_part` made."""
        if self._closed:
            part.close()
        else:
            self._parts.add(part)

    def refuse_part(self, reason: str) -> None:
        """`make_part` failed; until a later one does not, its rows are promised to nobody."""
        self._parts.refuse(reason)
        self._write_status(force=True)

    def set_figures(self, figures: Mapping[str, float]) -> None:
        """Figures of the capture that fills this writer (`hook` in schemas/status.json)."""
        self._figures = dict(figures)

    def set_health(self, armed: bool, error: str | None) -> None:
        """State shown in the status: whether capture is armed, and why not. Unarmed, nothing more
        comes, so all parts are sealed."""
        self._health = (armed, error)
        try:
            if not armed:
                self._finish("stopped: the capture ended early")
        finally:
            self._write_status(force=True)

    def close(self) -> None:
        """Abandon what is open, seal all parts, release the lock. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            self._finish("stopped: the server ended")
            self._write_status(force=True)
            self._parts.close()
            self._events.close()
        finally:
            self._lock.release()  # the compactor takes what is complete, sealed or not

    # -- inside -----------------------------------------------------------------------------

    def _spare(self) -> int:
        """Bytes that the rows still to be written may take, in a journal or in the events."""
        rows = 2 + len(self._open) + len(self._unwritten)
        return max(_SPARE, rows * (_ROW + 64 * len(self.spec.streams)))

    def _finish(self, reason: str) -> None:
        for reservation in list(self._open.values()):
            self.abandon(reservation, reason)
        try:
            self.flush()
        finally:
            self._parts.seal_all()

    def _log(self, reservation: Reservation, event: str, **more: Any) -> None:
        rid = reservation.rid
        reservation.part.touched = self._clock()
        reservation.part.log(
            {
                "event": event,
                "attempt": rid.attempt,
                "incarnation": reservation.incarnation,
                "sample_id": rid.sample_id,
                "source": rid.source,
                "length": rid.length,
                "row_start": reservation.row_start,
                "at": datetime.now(UTC),
                **more,
            }
        )
        if not self._buffered:
            reservation.part.flush()

    def _event(
        self, rid: RequestId, state: str, *, reason: str | None = None, part: str | None = None
    ) -> None:
        self._cursor += 1
        self._unwritten.append(
            {
                "seq": self._cursor,
                "attempt": rid.attempt,
                "sample_id": rid.sample_id,
                "state": state,
                "reason": reason,
                "part": part,
            }
        )
        if not self._buffered:
            self.flush()

    def _write_status(self, force: bool = False) -> None:
        """Now, or at the next tick when the last time is too short ago: the events file is what
        counts, and thousands of events a second must not each rewrite this."""
        now = self._clock()
        self._status_due = not force and 0 <= now - self._status_at < _STATUS_EVERY_S
        if self._status_due:
            return
        self._status_at = now
        status = {
            "writer": self.writer_id,
            "armed": self._health[0] and not self._closed,
            "error": self._health[1],
            "lake_id": self.spec.lake_id,
            "engine": self._engine,
            "free_rows": 0 if self._closed else self.free_rows(),
            "capacity_rows": self._parts.capacity_rows,
            "largest_reservation": self._parts.capacity,
            "parts": list(self._parts.states()),
            "last_seq": self._cursor - len(self._unwritten),
            **self._counts,
            "dropped_by": self._dropped,
            "bytes_captured": self._counts["tokens_captured"] * self.spec.bytes_per_token,
            **({"hook": self._figures} if self._figures else {}),
            "updated_at": now,
        }
        try:
            replace_text(self.folder / STATUS, json.dumps(status))
            self._status_failed = False
        except OSError as error:
            if not is_full(error):
                raise
            # Somebody else filled staging: the events are what counts.
            if not self._status_failed:
                log.warning("%s is written at a later tick: %s", self.folder / STATUS, error)
            self._status_due = self._status_failed = True
