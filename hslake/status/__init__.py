"""`hslake status`: how far a lake is, when it is done, what is slow, what somebody should do."""

from collections.abc import Sequence
from pathlib import Path

from hslake.status.observer import local_statuses
from hslake.status.report import StatusReport
from hslake.status.watcher import Watcher

__all__ = ["StatusReport", "Watcher", "local_statuses", "status"]


def status(
    lake_url: str, *, servers: Sequence[str] = (), staging: Sequence[str | Path] = ()
) -> StatusReport:
    """Coverage and storage from the lake; staging fill and health from `servers` and `staging`.

    A server that does not answer is a line of the report, not an error. Raises Missing (no lake, no
    staging folder), InvalidInput (an impossible address, staging of another lake). To look again
    and again, keep a `Watcher`.
    """
    with Watcher(lake_url, servers, staging) as watcher:
        return watcher.look()
