"""What goes wrong and may mend by itself: told once, left alone for a while, tried again.

Each trouble has a key (a staging root, a writer, a part, the lake). While a key rests nothing that
it names is touched; everything else goes on.
"""

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from hslake.errors import HslakeError, reason

log = logging.getLogger("hslake.compact")

FIRST_S, LONGEST_S = 1.0, 60.0  # between two tries, before the jitter of a quarter


@dataclass
class _Trouble:
    message: str
    tries: int
    until: float


class Troubles:
    """The troubles there are now. `clock`: seconds that only grow."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._now: dict[str, _Trouble] = {}
        self.met_count = 0
        self.last: str | None = None  # the newest one, with its time, mended or not

    def met(self, key: str | Path, error: BaseException | str) -> None:
        """Something went wrong at `key`: it rests, longer each time."""
        message = error if isinstance(error, str) else told(error)
        self.met_count += 1
        self.last = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC: {message}"
        old = self._now.get(str(key))
        tries = old.tries + 1 if old else 1
        wait = min(LONGEST_S, FIRST_S * 2 ** min(tries - 1, 10)) * random.uniform(0.75, 1.25)
        if old is None or old.message != message:
            log.warning("%s; tried again until it works", message)
        self._now[str(key)] = _Trouble(message, tries, self._clock() + wait)

    def mended(self, key: str | Path) -> None:
        """`key` works (again)."""
        old = self._now.pop(str(key), None)
        if old is not None:
            log.warning("works again after %d tries: %s", old.tries, old.message)

    def forget(self, gone: Callable[[str], bool]) -> None:
        """Drop the troubles of keys that are not there any more."""
        for key in [k for k in self._now if gone(k)]:
            del self._now[key]

    def rests(self, key: str | Path) -> bool:
        """Whether `key` is to be left alone for now."""
        found = self._now.get(str(key))
        return found is not None and self._clock() < found.until

    def there(self, key: str | Path) -> bool:
        """Whether `key` is in trouble, resting or not."""
        return str(key) in self._now

    def rest_s(self, key: str | Path) -> float:
        """Seconds for which `key` is still to be left alone."""
        found = self._now.get(str(key))
        return 0.0 if found is None else max(0.0, found.until - self._clock())

    def messages(self) -> list[str]:
        """One line for each."""
        return [t.message for t in list(self._now.values())]


def told(error: BaseException) -> str:
    """An error in a line: ours speak for themselves, others by kind and message."""
    return str(error) if isinstance(error, HslakeError) else reason(error)
