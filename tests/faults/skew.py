"""A process whose clock is wrong."""

import datetime as datetimes
import sys
import time
from typing import Any


def set_clock(ahead_s: float) -> None:
    """Put this process's clock ahead (or back) by `ahead_s`, as far as hslake looks at it."""
    seconds, nanoseconds = time.time, time.time_ns
    time.time = lambda: seconds() + ahead_s
    time.time_ns = lambda: nanoseconds() + int(ahead_s * 1e9)
    real = datetimes.datetime

    class Skewed(real):  # type: ignore[misc, valid-type]
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return real.now(tz) + datetimes.timedelta(seconds=ahead_s)

    for name, module in list(sys.modules.items()):
        if name.startswith("hslake") and getattr(module, "datetime", None) is real:
            module.datetime = Skewed  # type: ignore[attr-defined]
