"""What GET /hslake/status answers, checked and taken in."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from hslake.errors import InvalidInput, Missing
from hslake.schemas import validate

EVENTS_A_CALL = 5000  # at most so many events come with one status
CAPTURED, DROPPED = "captured", "dropped"
_BODY_SHOWN = 300


class ServerDown(Missing):
    """The server does not answer, or not with what an SGLang server with the hook answers."""


class NotLetIn(ServerDown):
    """The server wants a key, or another one."""


@dataclass(frozen=True, slots=True)
class Event:
    """The end of one attempt, as a writer saw it."""

    seq: int
    attempt: str
    sample_id: str
    state: str  # CAPTURED or DROPPED
    reason: str
    part: str = ""  # where a captured one lies


@dataclass(frozen=True, slots=True)
class Part:
    """One part of staging: rows in all, rows reserved, open | sealed | done."""

    name: str
    rows: int
    reserved: int
    state: str


@dataclass(frozen=True, slots=True)
class WriterStatus:
    """One hook process behind the server. Rows are tokens."""

    writer: str
    alive: bool
    armed: bool
    error: str | None
    free_rows: int
    capacity_rows: int
    largest_reservation: int
    parts: tuple[Part, ...]
    cursor: int
    last_seq: int  # the newest event that `free_rows` and `parts` know of
    events: tuple[Event, ...]
    tokens_captured: int
    bytes_captured: int
    samples_captured: int
    dropped: int
    updated_at: float
    root: str = ""  # which staging folder it is in; empty where that is not told

    def holder(self) -> Callable[[Event], bool]:
        """Tells of an event whether what it captured lies in staging.

        An event outlives its rows: once the part is done or recycled, the sample is in the lake or
        was given up by the compactor. Events newer than the writer's summary are of parts that it
        may not list yet.
        """
        there = {p.name: p.state != "done" for p in self.parts}

        def holds(event: Event) -> bool:
            new = event.seq > self.last_seq
            return event.state == CAPTURED and there.get(event.part, new)

        return holds

    def room(self, longest: int) -> int:
        """Rows that may be asked for at once, whatever order they arrive in, when no sample among
        them is longer than `longest`.

        A sample never straddles parts, so the end of each part may stay unused: with several
        parts, less than `longest` rows of each.
        """
        if not (self.alive and self.armed):
            return 0
        bins = [p.rows - p.reserved for p in self.parts if p.state == "open"]
        size, unborn = self.largest_reservation, 0  # parts that are not there yet
        if size > 0:
            unborn = max(0, self.capacity_rows // size - len(self.parts))
        if sum(bins) + size * unborn != self.free_rows:
            bins, unborn = [self.free_rows], 0  # it counts in another way: believe its total
        most = max([*bins, *([size] if unborn else [])], default=0)
        whole = sum(b - longest for b in bins if b > longest) + unborn * max(0, size - longest)
        return max(most, whole)


_PLAIN = [f.name for f in fields(WriterStatus) if f.name not in ("parts", "events", "root")]


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """The answer of GET /hslake/status. `others`: writers in the same staging folder that are not
    this server's; `roots`: staging folders of which it shows every writer there is."""

    armed: bool
    error: str | None
    lake_id: str | None
    hook_version: str | None
    engine: dict[str, Any]
    writers: tuple[WriterStatus, ...]
    raw: dict[str, Any] = field(repr=False)  # the document, without the events
    others: tuple[WriterStatus, ...] = ()
    others_more: bool = False
    roots: frozenset[str] = frozenset()

    @property
    def everyone(self) -> tuple[WriterStatus, ...]:
        """Its writers and the others."""
        return self.writers + self.others

    @property
    def largest_reservation(self) -> int:
        """The longest sample that every live writer can take, in tokens; 0 without any."""
        return min((w.largest_reservation for w in self.writers if w.alive), default=0)

    def room(self, longest: int) -> int:
        """Rows that may be asked for at once when no sample is longer than `longest`. Which writer
        gets a request is not ours to say, so the fullest one decides for all."""
        rooms = [w.room(longest) for w in self.writers if w.alive]
        return min(rooms, default=0) * len(rooms)

    @property
    def free_rows(self) -> int:
        """Rows free over all writers."""
        return sum(w.free_rows for w in self.writers)

    @property
    def capacity_rows(self) -> int:
        """Rows of staging over all writers."""
        return sum(w.capacity_rows for w in self.writers)

    def emptied(self) -> "ServerStatus":
        """The same with nothing in staging."""
        empty = (replace(w, parts=(), free_rows=w.capacity_rows) for w in self.writers)
        return replace(self, writers=tuple(empty))

    @property
    def gpu_retries(self) -> int:
        """Times that the writers' GPUs ran out of memory and freed some first."""
        found = (w.get("hook", {}).get("gpu_retries", 0) for w in self.raw["writers"])
        return int(sum(found))

    @property
    def cursors(self) -> dict[str, int]:
        """What to pass as `since` to get only newer events."""
        return {w.writer: w.cursor for w in self.everyone}

    @property
    def more(self) -> bool:
        """Whether further events wait for the next call."""
        return self.others_more or any(len(w.events) >= EVENTS_A_CALL for w in self.writers)


def parse_status(document: Any, where: str) -> ServerStatus:
    """Check and take in a status document. Raises ServerDown naming `where` when it is not one."""
    found = document.get("format") if isinstance(document, dict) else None
    if isinstance(found, int) and found > 1:
        raise ServerDown(
            f"{where}: status format {found}, this hslake reads format 1: use the same hslake here "
            "and in the server's environment"
        )
    events = _all_events(document)
    slim = document if events is None else _without_events(document)
    try:
        validate(slim, "status", where)
    except InvalidInput as error:
        raise ServerDown(
            f"{error}; found {str(document)[:_BODY_SHOWN]!r}: is something else listening there?"
        ) from error
    if events is None:
        raise ServerDown(f"{where}: an event does not read: is something else listening there?")
    return ServerStatus(
        armed=document["armed"],
        error=document["error"],
        lake_id=document["lake_id"],
        hook_version=document["hook_version"],
        engine=document["engine"],
        writers=tuple(map(_writer, document["writers"], events[: len(document["writers"])])),
        raw=slim,
        others=tuple(map(_writer, document.get("others", ()), events[len(document["writers"]) :])),
        others_more=document.get("others_more", False),
        roots=frozenset(document.get("roots", ())),
    )


def _without_events(document: Mapping[str, Any]) -> dict[str, Any]:
    kept = {k: document[k] for k in ("writers", "others") if k in document}
    return {**document, **{k: [{**w, "events": []} for w in some] for k, some in kept.items()}}


def _all_events(document: Any) -> list[tuple[Event, ...]] | None:
    """The events of each writer, the others' last; None when any is not as the schema has it.

    There are thousands of them, of which the general validator would take longer than the whole
    driver takes for its requests."""
    try:
        writers, others = document["writers"], document.get("others", [])
        lists = [w["events"] for w in (*writers, *others)]
        if all(type(some) is list for some in (writers, others, *lists)):
            return [tuple(map(_event, some)) for some in lists]
    except (TypeError, KeyError, ValueError, AttributeError):
        pass
    return None


def _event(e: Mapping[str, Any]) -> Event:
    seq, attempt, sample_id, state = e["seq"], e["attempt"], e["sample_id"], e["state"]
    reason, part = e.get("reason"), e.get("part")
    whole = type(seq) is int and seq >= 1 and state in (CAPTURED, DROPPED)
    named = type(attempt) is str and type(sample_id) is str
    told = (reason is None or type(reason) is str) and (part is None or type(part) is str)
    if not (whole and named and told):
        raise ValueError(seq)
    return Event(seq, attempt, sample_id, state, reason or "", part or "")


def _writer(w: Mapping[str, Any], events: tuple[Event, ...]) -> WriterStatus:
    parts = (Part(p["name"], p["rows"], p["reserved"], p["state"]) for p in w["parts"])
    return WriterStatus(
        **{n: w[n] for n in _PLAIN}, parts=tuple(parts), events=events, root=w.get("root", "")
    )
