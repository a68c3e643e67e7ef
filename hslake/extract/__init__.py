"""`hslake extract`: drives servers until every planned sample is captured. Resumable.

There is no state of its own to keep: what is committed stands in the manifest, what is captured and
waits for the compactor stands in staging, and everything else is asked for. What was captured by a
writer that nobody shows any more is asked for again where its staging is known to be gone; else it
may still come, and is reported as unconfirmed. Only what a server refuses for good is recorded, in
the lake's run log.
"""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hslake.errors import InvalidInput
from hslake.extract.options import ExtractOptions
from hslake.progress import ProgressMaker, Silent
from hslake.server import new_session
from hslake.server.listeners import server_at
from hslake.signals import stopping

if TYPE_CHECKING:
    from hslake.extract.report import ExtractReport

__all__ = ["ExtractOptions", "extract", "extract_async"]


def extract(
    lake_url: str,
    servers: Sequence[str],
    options: ExtractOptions = ExtractOptions(),
    *,
    progress: ProgressMaker = Silent,
) -> "ExtractReport":
    """Capture what is planned and neither committed nor waiting in staging.

    `servers`: URLs of servers started with `hslake serve`, each with the listeners of its further
    machines behind commas (`hslake.server.listeners`). Ctrl-C and SIGTERM end the call early
    with `interrupted` set; a second one ends it at once.

    Raises InvalidInput (bad SQL, another lake's server or staging), Missing (no lake, no plan, no
    staging folder, no server answers), CheckFailed (no server is ready to capture), Corrupt (the
    lake's tables do not read), Unavailable and its like (the store cannot be reached at the start,
    or not for as long as patience lasts). An incomplete run is a report, not an error.
    """

    async def main() -> "ExtractReport":
        stop = asyncio.Event()
        with stopping(stop):
            return await extract_async(lake_url, servers, options, progress=progress, stop=stop)

    return asyncio.run(main())


async def extract_async(
    lake_url: str,
    servers: Sequence[str],
    options: ExtractOptions = ExtractOptions(),
    *,
    progress: ProgressMaker = Silent,
    stop: asyncio.Event | None = None,
) -> "ExtractReport":
    """`extract` inside a running event loop. `stop`, once set, ends it early."""
    from hslake.extract.run import Run  # not above: it needs what needs this package's lists

    if not servers:
        raise InvalidInput("no server given: name at least one with --server http://HOST:PORT")
    limits = options.limits
    async with new_session() as session:
        clients = [
            server_at(
                url,
                session,
                request_timeout=limits.request_timeout,
                status_timeout=limits.status_timeout,
            )
            for url in dict.fromkeys(servers)
        ]
        return await Run(lake_url, clients, options, progress, stop or asyncio.Event()).all()
