"""Removal of condemned segments: the last step of vacuum and delete, and the same one again after
a crash.

A segment is condemned by a commit before any of its objects goes. From then on no commit can name
it (`manifest.refuse_condemned`), so what is found condemned may be removed by
anybody, in any order.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from hslake import manifest
from hslake.lake import Lake
from hslake.pins import broken, pins
from hslake.progress import Bar
from hslake.segment.write import remove_segment
from hslake.tables import catalog


@dataclass
class Removed:
    """Segments that are gone now, and why others were kept."""

    segments: list[str] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)


def remove(
    lake: Lake, wanted: Collection[str], *, break_pins: bool = False, progress: Bar | None = None
) -> Removed:
    """Remove the objects of those of the `wanted` segments that the newest manifest condemns.

    One that a pin needs is kept unless `break_pins`; the pins are read after the manifest, so
    that a pin which was made before the condemnation is seen (`hslake.pins`). Raises Corrupt when
    a pin does not read.
    """
    found = Removed()
    state = catalog.open_table(lake.store, "manifest")
    spans = manifest.spans(state)
    pinned = {} if break_pins else broken(state, pins(lake))
    for segment in sorted(wanted):
        span = spans.get(segment)
        if span is None or not span.condemned:
            found.kept[segment] = "a commit or a pin that came in between needs it"
        elif span.first is not None and span.end is None:
            found.kept[segment] = "it is condemned and has live samples: the manifest is damaged"
        elif segment in pinned:
            found.kept[segment] = f"pinned: {', '.join(pinned[segment])}"
        else:
            remove_segment(lake.store, segment)
            found.segments.append(segment)
            if progress is not None:
                progress.advance(1)
    return found
