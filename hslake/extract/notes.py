"""What `extract` tells the lake's run log while it works. That the log cannot be written is said
and tried again; it never ends a run."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hslake.errors import reason
from hslake.extract.items import Items
from hslake.extract.refusals import Refusal
from hslake.runlog import Figures, RunLog
from hslake.store import Store

log = logging.getLogger("hslake.extract")

_FIRST_S, _EVERY_S = 15.0, 60.0  # soon at first: who has just begun a run looks at it
_LAST_S = 30.0  # for the last words of a run

Standing = Callable[[], tuple[Figures, Sequence[Mapping[str, Any]]]]


class RunNotes:
    """The notes of one run. `log`: for whoever has more to tell (canaries)."""

    def __init__(self, store: Store, standing: Standing) -> None:
        self.log = RunLog(store)
        self._standing = standing
        self._silent = False  # the trouble was told
        self._ticker: asyncio.Task[None] | None = None

    def begin(self, options: Mapping[str, Any]) -> None:
        """The run begins; from now on its figures are told every minute."""
        self.log.start(options, self._standing()[0])
        self._ticker = asyncio.create_task(self._tick())

    def refused(self, found: Sequence[Refusal]) -> None:
        """These samples are not to be asked for again."""
        for one in found:
            self.log.refuse(one.item.sample_id, one.item.token_hash, one.reason, one.server)

    def allowed(self, items: Items) -> None:
        """These, refused before, may be asked for again."""
        for item in items:
            self.log.allow(item.sample_id, item.token_hash)

    async def flush(self) -> None:
        """Write what was told."""
        try:
            await asyncio.to_thread(self.log.flush)
        except Exception as error:
            if not self._silent:
                self._silent = True
                log.warning("the run log cannot be written, this run goes on: %s", reason(error))
        else:
            self._silent = False

    async def end(self, outcome: str, why: str) -> None:
        """The run is over."""
        if self._ticker is not None:
            self._ticker.cancel()
        self.log.end(outcome, why, *self._standing())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_S):
                await self.flush()

    async def _tick(self) -> None:
        await self.flush()
        pause = _FIRST_S
        while True:
            await asyncio.sleep(pause)
            pause = min(_EVERY_S, 2 * pause)
            self.log.progress(*self._standing())
            await self.flush()
