"""Sizes, counts and times as people write them: 3.5TB, 512GiB, 87.8M, 3 h 05 min."""

import re

from hslake.errors import InvalidInput

_BYTES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40, "pi": 2**50}
_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}
_NUMBER = re.compile(r"\s*([0-9][0-9_,]*(?:\.[0-9]+)?)\s*([a-z]*)\s*")


def parse_bytes(text: str, what: str) -> int:
    """Bytes in "3.5TB", "512 GiB", "1000000". Decimal prefixes unless written with an i."""
    number, unit = _split(text, what, "a size such as 3.5TB or 512GiB")
    prefix = unit.removesuffix("b") if unit != "b" else ""
    factor = {**_BYTES, **_BINARY}.get(prefix)
    if factor is None:
        raise InvalidInput(f"{what}: found {text!r}, expected a size such as 3.5TB or 512GiB")
    return round(number * factor)


def parse_count(text: str, what: str) -> int:
    """A count in "87.8M", "100k", "1_000_000"."""
    number, unit = _split(text, what, "a number such as 87.8M or 100000")
    if unit not in _COUNTS:
        raise InvalidInput(f"{what}: found {text!r}, expected a number such as 87.8M or 100000")
    return round(number * _COUNTS[unit])


def _split(text: str, what: str, expected: str) -> tuple[float, str]:
    match = _NUMBER.fullmatch(text.lower())
    if not match:
        raise InvalidInput(f"{what}: found {text!r}, expected {expected}")
    return float(match[1].replace("_", "").replace(",", "")), match[2]


def format_bytes(count: int | float) -> str:
    """ "3.50 TB": decimal prefixes, three digits."""
    for factor, unit in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(count) >= factor:
            return f"{count / factor:.2f} {unit}"
    return f"{count:.0f} B"


def format_count(count: int) -> str:
    """ "87,800,000"."""
    return f"{count:,}"


def format_span(seconds: float) -> str:
    """ "2 d 3 h", "3 h 05 min", "12 min", "40 s"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min"
