"""A server whose writers are on several machines: it shows those of its own, `hslake compact
--listen` on each other machine shows the rest. To a driver they are one server."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from hslake.server import Server, ServerDown, ServerStatus


def server_at(text: str, session: aiohttp.ClientSession, **timeouts: float) -> Server:
    """The server at `URL`, or at `URL,LISTENER,…` with the listeners of its other machines.

    Raises InvalidInput for an impossible address.
    """
    url, *others = text.split(",")
    if not others:
        return Server(url, session, **timeouts)
    return _Spread(url, [Server(o, session, **timeouts) for o in others], session, **timeouts)


class _Spread(Server):
    """A server and its listeners. It is down when one of them is: nobody would acknowledge what
    the writers there capture."""

    def __init__(
        self, url: str, others: Sequence[Server], session: aiohttp.ClientSession, **timeouts: float
    ) -> None:
        super().__init__(url, session, **timeouts)
        self._others = others

    async def status(
        self, since: Mapping[str, int] | None = None, *, others: bool = False
    ) -> ServerStatus:
        """The status of all together."""
        told = await asyncio.gather(
            super().status(since, others=others), *(o.status(since) for o in self._others)
        )
        return merged(told, [self.url, *(o.url for o in self._others)])


def merged(told: Sequence[ServerStatus], urls: Sequence[str]) -> ServerStatus:
    """Several statuses as one, the server's own first. Raises ServerDown when they are of several
    lakes."""
    lakes = {s.lake_id for s in told if s.lake_id is not None}
    if len(lakes) > 1:
        raise ServerDown(f"{', '.join(urls)} are of several lakes: {', '.join(sorted(lakes))}")
    writers: dict[str, Any] = {}
    raw: dict[str, Any] = {}
    for status in told:
        for writer, document in zip(status.writers, status.raw["writers"], strict=True):
            writers.setdefault(writer.writer, writer)
            raw.setdefault(writer.writer, document)
    # The server's own may have no writer at all, and so not be armed by itself.
    parts = [(u, s) for u, s in zip(urls, told, strict=True) if s.writers or s.error]
    errors = [f"{u}: {s.error}" for u, s in parts if s.error]
    first = next((s for s in told if s.writers), told[0])
    return ServerStatus(
        armed=bool(parts) and all(s.armed for _, s in parts),
        error="; ".join(errors) or None,
        lake_id=next(iter(lakes), None),
        hook_version=first.hook_version,
        engine=first.engine,
        writers=tuple(writers.values()),
        raw={**told[0].raw, "writers": list(raw.values())},
        others=tuple(w for status in told for w in status.others if w.writer not in writers),
        others_more=any(status.others_more for status in told),
        roots=frozenset().union(*(status.roots for status in told)),
    )
