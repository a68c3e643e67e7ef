"""What the servers and staging folders of an extraction say, and whether they can work."""

import asyncio
import contextlib
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hslake.errors import CheckFailed, InvalidInput, Missing
from hslake.extract.slot import unfit
from hslake.extract.worklist import of_lake
from hslake.server import Server, ServerDown, ServerStatus, whole_status
from hslake.status import local_statuses

_PAUSE_MAX_S = 60.0
_LATER_S = 300.0  # after so long without an error, one is a new trouble


@dataclass(frozen=True)
class FirstLook:
    """`ready`: the servers that can capture, with their status; `statuses`: of these and all others
    that answer, and of staging on this machine, with this lake's writers only."""

    ready: list[tuple[Server, ServerStatus]]
    statuses: list[ServerStatus]


async def first_look(
    servers: Sequence[Server], roots: Iterable[str | Path], lake_id: str
) -> FirstLook:
    """Every server's status; an error now rather than a long wait for what cannot work.

    Raises InvalidInput (another lake's server), Missing (none answers), CheckFailed (none is
    ready).
    """
    found = await asyncio.gather(*(whole_status(s, held_only=True) for s in servers))
    answers: list[ServerStatus] = []
    ready: list[tuple[Server, ServerStatus]] = []
    problems: list[str] = []
    for server, status in zip(servers, found, strict=True):
        if isinstance(status, ServerDown):
            problems.append(str(status))
            continue
        answers.append(status)  # also of one that captures no more: its staging holds samples
        problem = unfit(status, lake_id)
        if problem is None:
            ready.append((server, status))
            continue
        problem = f"{server.url}: {problem}"
        if status.lake_id not in (None, lake_id):
            raise InvalidInput(problem)
        problems.append(problem)
    if ready:
        local = await asyncio.to_thread(_local, roots)
        return FirstLook(ready, of_lake([*answers, *local], lake_id))
    hint = "start one with `hslake serve LAKE --staging DIR -- …`"
    if all(isinstance(s, ServerDown) for s in found):
        raise Missing(f"no server answers, {hint}: " + "; ".join(problems))
    raise CheckFailed("no server is ready to capture: " + "; ".join(problems))


async def all_statuses(
    servers: Sequence[Server], roots: Iterable[str | Path], lake_id: str
) -> list[ServerStatus]:
    """Status of all servers that answer, and of staging on this machine: of this lake's writers."""
    found = await asyncio.gather(*(whole_status(s, held_only=True) for s in servers))
    answers = [s for s in found if isinstance(s, ServerStatus)]
    return of_lake([*answers, *await asyncio.to_thread(_local, roots)], lake_id)


def _local(roots: Iterable[str | Path]) -> list[ServerStatus]:
    found: list[ServerStatus] = []
    for root in roots:
        with contextlib.suppress(Missing):  # it was there at the start: deleted since
            found += local_statuses(Path(root))
    return found


class Trouble:
    """Errors that may mend by themselves, and how long they have been met."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._first = self._last = -math.inf
        self._tries = 0

    def met(self, error: Exception) -> float:
        """Seconds to wait before the next try. Raises `error` when patience is over."""
        now = time.monotonic()
        if now - self._last > _LATER_S:
            self._first, self._tries = now, 0
        if now - self._first > self._patience:
            raise error
        self._last, self._tries = now, self._tries + 1
        return min(_PAUSE_MAX_S, 2.0 ** min(self._tries, 10) / 4)
