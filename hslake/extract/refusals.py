"""Which refusals are the samples' own fault, to be recorded in the lake for good.

What depends on how a server was started (its context length, the size of staging's parts, a proxy's
limit of body sizes) is never recorded: another server may take the sample. Nor are refusals that
are no exception: servers that refuse one request in ten have a trouble of their own, and so do
those that take most samples when asked once more.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from hslake.extract.items import Item

_CAPTURED_EACH = 10  # samples that were captured for each that was refused

EARLIER = "refused in an earlier run"
HINT = "--retry-refused asks for it again"
RECORDED = f"recorded: later runs leave it out, {HINT}"


@dataclass(frozen=True)
class Refusal:
    """A server has refused a sample, twice. `lasting`: for a reason that lies in the request."""

    item: Item
    reason: str
    server: str
    lasting: bool


def to_record(
    found: Sequence[Refusal], captured: int, forgiven: int, refused_before: Collection[str]
) -> list[Refusal]:
    """Those of a run's refusals to be recorded, when it has `captured` so many samples, `forgiven`
    of them refused at first; `refused_before`: samples that were recorded in an earlier run, and
    allowed again."""
    lasting = [one for one in found if one.lasting]
    again = [one for one in lasting if one.item.sample_id in refused_before]
    fresh = [one for one in lasting if one.item.sample_id not in refused_before]
    theirs = captured >= _CAPTURED_EACH * len(fresh) and forgiven < len(fresh)
    return again + (fresh if theirs else [])
