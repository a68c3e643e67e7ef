"""From what the burst measured to what the run will do: the slowest of three sets the pace."""

from dataclasses import dataclass

SERVER, STAGING, COMPACTOR = "server", "staging", "compactor"
# From sealing a part to its rows being free again, beside the work itself: the compactor's look
# (every second), a manifest commit, the writer's tick.
TURNAROUND_S = 2.0


@dataclass(frozen=True)
class Quota:
    """Staging behind the servers, in rows: parts and their size, and what is on its way."""

    parts: int
    part_rows: int
    in_flight: int


def staging_rate(quota: Quota, server: float, compactor: float) -> float:
    """Tokens a second that staging can pass on, were the server never slower.

    Rows are in use from their request to the recycling of their part. What is being filled, at
    least a part, cannot be compacted; the rest goes round: compacted in (rows / compactor) and
    recycled in TURNAROUND_S. With nothing beside what is being filled, filling and compacting take
    turns.
    """
    rest = quota.parts * quota.part_rows - max(quota.part_rows, quota.in_flight)
    if rest >= quota.part_rows:
        return rest / (rest / compactor + TURNAROUND_S)
    rows = quota.parts * quota.part_rows
    return rows / (rows / server + rows / compactor + TURNAROUND_S)


def slowest(server: float, staging: float | None, compactor: float | None) -> tuple[str, float]:
    """(which of them, its rate). Staging is only to blame when the compactor is fast enough."""
    if compactor is not None and compactor < server:
        return COMPACTOR, compactor
    if staging is not None and staging < server:
        return STAGING, staging
    return SERVER, server


def span(seconds: float) -> str:
    """ "2 d 3 h", "3 h 05 min", "12 min", "40 s"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min"
