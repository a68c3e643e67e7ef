"""When what waits in staging is stored: never a commit for every part, never a server that waits.

Decided from staging alone, without a look into the lake. What waits is gathered until a segment is
full, until the oldest sample has waited for `max_age_s`, or until its live writer is short of rows
or has fallen silent.
"""

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from pathlib import Path

from hslake.compact.sources import Source, Sources
from hslake.ids import PROBE_PREFIX
from hslake.picks import Key, key_of
from hslake.staging.folder import STATUS
from hslake.staging.part import Reserved


class Due(Enum):
    """What is to be taken now."""

    NOTHING = "nothing"
    FULL = "full"  # whole segments; the rest waits on
    FINAL = "final"  # all that waits in parts to which no row can come: it frees them
    ALL = "all"  # everything that is complete


@dataclass
class Waiting:
    """What waits for its commit: remembers since when, and what needs no commit.

    `clock`: Unix time, as in the journals. `known`: samples that the lake has, or does not want.
    """

    max_age_s: float
    clock: Callable[[], float] = time.time
    known: set[Key] = field(default_factory=set)
    _first_seen: dict[Key, float] = field(default_factory=dict)

    def rows(self, source: Source, under_way: Iterable[Key] = ()) -> list[Reserved]:
        """Complete samples of a part that may still have to be stored."""
        done = self.known.union(under_way)
        return [
            r
            for r in source.info.reserved
            if r.state == "complete" and not is_probe(r) and key_of(source.info, r) not in done
        ]

    def prune(self, paths: set[Path]) -> None:
        """Forget what was said of parts that are gone."""
        self.known = {k for k in self.known if k[0] in paths}
        self._first_seen = {k: t for k, t in self._first_seen.items() if k[0] in paths}

    def since(self, source: Source) -> float:
        """When the part's first sample was complete; 0 for none."""
        times = [r.at.timestamp() for r in source.info.reserved if isinstance(r.at, datetime)]
        return min(times, default=0.0)

    def age(self, source: Source, row: Reserved) -> float:
        """Seconds for which a sample has waited. A clock that was set back starts it anew."""
        now = self.clock()
        key = key_of(source.info, row)
        seen = self._first_seen.setdefault(key, now)
        if seen > now:
            seen = self._first_seen[key] = now
        made = row.at.timestamp() if isinstance(row.at, datetime) else now
        return max(now - seen, now - made)


def due(sources: Sources, waiting: Waiting, under_way: Iterable[Key], limit: int) -> Due:
    """What to take now of all that is held and can be read. `limit`: tokens of a segment."""
    found = [(s, waiting.rows(s, under_way)) for s in sources.readable()]
    rows = [(s, r) for s, some in found for r in some]
    if any(waiting.age(s, r) >= waiting.max_age_s for s, r in rows):
        return Due.ALL
    final = [(s, some) for s, some in found if s.final and some]
    if any(sources.dead(s) for s, _ in final):
        return Due.FINAL
    writers = {s.writer for s, _ in final}
    if any(is_silent(sources, folder) or is_short(folder) for folder in writers):
        return Due.FINAL
    # Whole parts: rows of one that is still filling free nothing.
    if sum(r.length for _, some in final for r in some) >= limit:
        return Due.FULL
    return Due.NOTHING


def settled(sources: Sources, waiting: Waiting) -> list[Source]:
    """Parts to which no row can come and in which nothing waits: they can be let go."""
    return [s for s in sources.readable() if s.final and not s.judged and not waiting.rows(s)]


def is_silent(sources: Sources, folder: Path) -> bool:
    """Whether nothing more is on its way from a live writer: it has sealed all that it has begun,
    which it does when nothing came for some seconds. At the end of a run nobody waits for more."""
    return not any(
        s.writer == folder and not s.final and s.info.reserved for s in sources.parts.values()
    )


def is_short(folder: Path) -> bool:
    """Whether a live writer has half of its rows or fewer left: the other half is filled while this
    one is stored. Also when nobody can tell, and when nothing more will come."""
    try:
        status = json.loads((folder / STATUS).read_bytes())
        return not status["armed"] or 2 * status["free_rows"] <= status["capacity_rows"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return True


def is_probe(row: Reserved) -> bool:
    """Whether it is a probe of preflight, which nobody wants."""
    return row.sample_id.startswith(PROBE_PREFIX)


def backlog(sources: Sources, waiting: Waiting) -> tuple[int, int]:
    """(samples, rows) that are complete and not in the lake yet, as far as was seen."""
    rows: Sequence[Reserved] = [
        r for s in sources.parts.values() if not s.freed for r in waiting.rows(s)
    ]
    return len(rows), sum(r.length for r in rows)
