"""The longest sample that a server takes: what a part of its staging and a prompt may hold."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hslake.extract.items import Item
from hslake.server import Server, ServerStatus, context_limit

_ASK_S = 5.0  # for what a server says of itself, before work begins
_NAMED = 5  # samples that are too long, by name


@dataclass(frozen=True)
class Reach:
    """The longest sample that a server takes, in tokens, and what to say of longer ones."""

    tokens: int
    why: str


def reach_of(status: ServerStatus, limit: int | None) -> Reach:
    """What a server takes with this status, and `limit` of `context_limit`."""
    rows = status.largest_reservation
    if limit is None or rows <= limit:
        why = f"longer than a staging part ({rows:,} tokens): start the server with larger parts"
        return Reach(rows, why)
    why = f"longer than the server takes ({limit:,} tokens): raise its context length or its KV "
    return Reach(limit, f"{why}cache, or plan shorter samples")


async def ask_reach(
    ready: Sequence[tuple[Server, ServerStatus]], stop: asyncio.Event
) -> dict[str, Reach]:
    """What each of these servers takes, by URL, without those that do not say it soon or before
    `stop` is set."""
    infos: asyncio.Future[list[Any]] = asyncio.gather(
        *(server.info() for server, _ in ready), return_exceptions=True
    )
    stopped: asyncio.Future[Any] = asyncio.create_task(stop.wait())
    both = {infos, stopped}
    try:
        done, _ = await asyncio.wait(both, timeout=_ASK_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in both:
            one.cancel()
        await asyncio.gather(*both, return_exceptions=True)
    if infos not in done:
        return {}
    return {
        server.url: reach_of(status, context_limit(info))
        for (server, status), info in zip(ready, infos.result(), strict=True)
        if isinstance(info, dict)
    }


def name_long(long: Sequence[Item], best: Reach) -> str:
    """That no server can take these samples, and why; empty when there are none."""
    some = ", ".join(f"{i.sample_id!r} ({i.length:,} tokens)" for i in long[:_NAMED])
    more = f" and {len(long) - _NAMED:,} more" if len(long) > _NAMED else ""
    return f"never asked for: {some}{more}: {best.why}" if long else ""
