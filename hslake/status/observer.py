"""What servers and staging folders tell, looked at again and again: a look costs what is new."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp

from hslake.errors import HslakeError
from hslake.ids import PROBE_PREFIX
from hslake.rates import Meter
from hslake.server import (
    CAPTURED,
    Event,
    Server,
    ServerStatus,
    WriterStatus,
    new_session,
    parse_status,
)
from hslake.server.listeners import server_at
from hslake.staging import StatusReader

_RATE_S = 60.0  # over which the rate of a server is taken


@dataclass(frozen=True)
class Told:
    """What one server (`local` false) or staging folder told last. `status`: None before it told
    anything; `error`: why it did not tell now; `seen_at`: Unix time of `status`.

    The status has the events of samples that lie in staging; `probes`: writer -> probes among its
    captured samples; `rate`: tokens captured a second of late, None before the second look.
    """

    where: str
    local: bool
    status: ServerStatus | None
    error: str | None
    seen_at: float
    probes: dict[str, int]
    rate: float | None

    @property
    def now(self) -> ServerStatus | None:
        """The status, unless it is an old one."""
        return None if self.error else self.status


class _Source:
    """One server or folder, and the events it told so far that still matter."""

    def __init__(self, where: str, ask: Any, *, local: bool) -> None:
        self.where, self.local, self._ask = where, local, ask
        self.told = Told(where, local, None, "not asked yet", 0.0, {}, None)
        self._held: dict[str, list[Event]] = {}
        self._probes: Counter[str] = Counter()
        self._cursors: dict[str, int] = {}
        self._tokens: dict[str, int] = {}
        self._meter = Meter()

    async def look(self) -> None:
        try:
            status = await self._ask(self._cursors, others=True)
            self._take(status)
            while status.more:
                status = await self._ask(self._cursors, others=True)
                self._take(status)
        except (HslakeError, OSError) as error:
            self.told = replace(self.told, error=str(error))
            return
        writers = tuple(replace(w, events=self._keep(w)) for w in status.writers)
        others = tuple(replace(w, events=self._keep(w)) for w in status.others)
        for gone in self._held.keys() - {w.writer for w in (*writers, *others)}:
            del self._held[gone]
        # Of all writers that were ever seen here: a process that was started anew begins at 0.
        self._tokens |= {w.writer: w.tokens_captured for w in writers}
        self._meter.add(time.monotonic(), sum(self._tokens.values()))
        self.told = Told(
            self.where,
            self.local,
            replace(status, writers=writers, others=others),
            None,
            time.time(),
            dict(self._probes),
            self._meter.rate(_RATE_S),
        )

    def _take(self, status: ServerStatus) -> None:
        for writer in status.everyone:
            captured = [e for e in writer.events if e.state == CAPTURED]
            self._held.setdefault(writer.writer, []).extend(captured)
            self._probes[writer.writer] += sum(map(is_probe, captured))
        self._cursors |= status.cursors

    def _keep(self, writer: WriterStatus) -> tuple[Event, ...]:
        """Events of samples that lie in staging: those of others are over for good."""
        kept = tuple(filter(writer.holder(), self._held.get(writer.writer, [])))
        self._held[writer.writer] = list(kept)
        return kept


class Observer:
    """Asks all of them at once. A context manager: its connections stay open between looks."""

    def __init__(
        self, servers: Sequence[str], staging: Sequence[str | Path], *, timeout_s: float = 10.0
    ) -> None:
        self._runner = asyncio.Runner()
        self._session: aiohttp.ClientSession | None = None
        self._sources: list[_Source] = []
        try:
            self._runner.run(self._open(servers, timeout_s))
        except BaseException:
            self.close()
            raise
        for root in dict.fromkeys(map(Path, staging)):
            reader = _Folder(root)
            self._sources.append(_Source(str(root), reader.status, local=True))

    async def _open(self, servers: Sequence[str], timeout_s: float) -> None:
        self._session = new_session()
        for url in dict.fromkeys(servers):
            server: Server = server_at(url, self._session, status_timeout=timeout_s)
            self._sources.append(_Source(server.url, server.status, local=False))

    def look(self) -> list[Told]:
        """Ask everybody. One that does not answer keeps what it told before, with the error."""
        if self._sources:
            self._runner.run(self._look())
        return [source.told for source in self._sources]

    async def _look(self) -> None:
        await asyncio.gather(*(source.look() for source in self._sources))

    def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            self._runner.run(self._session.close())
        self._runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _Folder:
    """A staging folder, asked as a server is."""

    def __init__(self, root: Path) -> None:
        self._root, self._reader = root, StatusReader(root)

    async def status(self, since: dict[str, int], *, others: bool) -> ServerStatus:
        found = await asyncio.to_thread(self._reader.read, since)
        return parse_status(found, str(self._root))


def is_probe(event: Event) -> bool:
    """Whether the event is of a captured probe of preflight."""
    return event.state == CAPTURED and event.sample_id.startswith(PROBE_PREFIX)


def local_statuses(root: Path) -> list[ServerStatus]:
    """What a staging folder on this machine tells: one status for each page of events."""
    reader = StatusReader(root)
    found: list[ServerStatus] = []
    while not found or found[-1].more:
        since = found[-1].cursors if found else None
        found.append(parse_status(reader.read(since), str(root)))
    return found
