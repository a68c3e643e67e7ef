"""How fast a server has been of late."""

import time
from collections import deque
from collections.abc import Callable

_WINDOW_S = 60.0
_LEAST_S = 2.0  # of looks, before there is a rate
_STEP_S = 0.5


class Pace:
    """Rate of a count that only grows, over the last minute. `clock`: seconds that only grow."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._marks: deque[tuple[float, int]] = deque()

    def tell(self, count: int) -> None:
        """It has come to `count`."""
        now = self._clock()
        if not self._marks or now - self._marks[-1][0] >= _STEP_S:
            self._marks.append((now, count))
        while len(self._marks) > 2 and now - self._marks[1][0] > _WINDOW_S:
            self._marks.popleft()

    def forget(self) -> None:
        """What was before says nothing of what comes."""
        self._marks.clear()

    def rate(self) -> float | None:
        """A second; None while that is not known."""
        if not self._marks:
            return None
        (first, before), (last, count) = self._marks[0], self._marks[-1]
        return (count - before) / (last - first) if last - first >= _LEAST_S else None
