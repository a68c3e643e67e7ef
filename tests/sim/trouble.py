"""What befalls a simulated server's requests and forwards, by chance."""

import random
from dataclasses import dataclass, fields

from hslake.errors import InvalidInput

REFUSED = "refused-"
"""Samples with ids that begin so are answered HTTP 400 whenever they are asked for."""


@dataclass(frozen=True)
class Trouble:
    """Chances (0 to 1), but for the seconds at the end.

    Of a request: `error` HTTP 500 before anything happened; `late_error` captured, then HTTP 500;
    `refuse` HTTP 400, which a driver that meets it twice takes to be for good; `abort` ended by the
    server in the middle, HTTP 200; `broken` captured, then the connection breaks; `silent`
    answered, the hook never saw it; `drop` the hook gives it up; `late` answered `late_s` after it
    was computed. Of a prefill: `retract` some request starts again at its first token; `freeze` the
    scheduler stands still for `freeze_s`; `crash` the process is gone before the forward is over;
    `disarm` the hook fails inside and captures no more.
    """

    error: float = 0.0
    late_error: float = 0.0
    refuse: float = 0.0
    abort: float = 0.0
    broken: float = 0.0
    silent: float = 0.0
    drop: float = 0.0
    late: float = 0.0
    retract: float = 0.0
    freeze: float = 0.0
    crash: float = 0.0
    disarm: float = 0.0
    late_s: float = 0.5
    freeze_s: float = 2.0

    def of_request(self, rng: random.Random) -> str:
        """The name of what befalls a request; "ok" mostly."""
        left = rng.random()
        for name in _REQUEST:
            left -= getattr(self, name)
            if left < 0:
                return name
        return "ok"

    def of_forward(self, rng: random.Random) -> frozenset[str]:
        """Names of what befalls a forward."""
        return frozenset(name for name in _FORWARD if rng.random() < getattr(self, name))


_REQUEST = ("error", "late_error", "refuse", "abort", "broken", "silent", "drop", "late")
_FORWARD = ("retract", "freeze", "crash", "disarm")


def parse_trouble(text: str) -> Trouble:
    """`error=0.01,freeze=0.001,freeze_s=3`. Raises InvalidInput."""
    names = {f.name for f in fields(Trouble)}
    found: dict[str, float] = {}
    for item in filter(None, text.split(",")):
        name, _, value = item.partition("=")
        if name not in names:
            raise InvalidInput(f"trouble {name!r}: expected one of {', '.join(sorted(names))}")
        try:
            found[name] = float(value)
        except ValueError:
            raise InvalidInput(f"trouble {item!r}: expected NAME=NUMBER") from None
    return Trouble(**found)
