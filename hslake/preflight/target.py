"""Preflight's look at the lake: its model, its plan, its store and the room there."""

import shutil
from collections.abc import Iterator

from hslake import query
from hslake.checks import Check, failed, passed, warned
from hslake.errors import HslakeError
from hslake.extract.worklist import Worklist
from hslake.lake import Lake
from hslake.units import format_bytes

_SPARE = 1.1  # of the forecast


def check_lake(lake: Lake) -> Iterator[Check]:
    """What the lake holds, and whether it knows its model."""
    spec = lake.spec
    streams = ", ".join(spec.streams)
    yield passed("lake", f"{lake.url}: streams {streams}, hidden {spec.hidden_size}, {spec.dtype}")
    if not any(spec.model.fingerprint.values()):
        todo = "make sure yourself that the server runs the right weights (or create with them)"
        yield warned("fingerprint", "the lake has none: any model of this shape would pass", todo)
    else:
        known = ", ".join(k for k, v in spec.model.fingerprint.items() if v)
        found = (
            f"of the model's {known}; a hook arms only if the folder that its server loaded agrees"
        )
        if spec.model.fingerprint.get("weights"):
            yield passed("fingerprint", found)
        else:
            todo = "make sure yourself that the server runs the right weights (or create with them)"
            yield warned("fingerprint", f"{found}: any weights for it would pass", todo)


def check_plan(lake_url: str, listing: Worklist) -> Check:
    """Whether something is planned and left to capture."""
    if not listing.planned:
        todo = f"register samples: hslake plan {lake_url} FILE --source NAME"
        return failed("plan", "nothing is planned", todo)
    tokens = sum(i.length for i in listing.missing)
    if not listing.missing:
        todo = "nothing needs to be extracted"
        return warned("plan", f"all {listing.planned:,} samples are committed", todo)
    left = f"{len(listing.missing):,} of {listing.planned:,} samples to capture, {tokens:,} tokens"
    return passed("plan", left)


def check_target(lake: Lake) -> Check:
    """Whether the store takes an object, and refuses a second one of the same key."""
    try:
        lake.store.check_put_new()
    except (HslakeError, OSError) as error:
        todo = "give write access to the lake, on a store with conditional put"
        return failed("target", f"{type(error).__name__}: {error}", todo)
    return passed("target", "writable; a second conditional put of one key is refused")


def bytes_left(lake: Lake, ratio: float | None = None) -> tuple[int, str]:
    """(bytes that the rest of the plan will take, what the ratio is based on).

    `ratio`, measured on states from this run's server, stands in for the typical one while the
    lake has no data of its own.
    """
    forecast = query.run(lake, "forecast").to_pylist()[0]
    basis = str(forecast["basis"])
    if ratio is not None and basis == "typical":
        forecast = query.run(lake, "forecast", {"ratio": ratio}).to_pylist()[0]
        basis = "the burst's"
    need = max(0, forecast["forecast_stored_bytes"] - forecast["stored_bytes"])
    return need, f"{basis} ratio {forecast['ratio']:.3f}"


def check_free_space(lake: Lake, ratio: float | None = None) -> Check:
    """Whether the store has room for the rest of the plan (`ratio`: see `bytes_left`)."""
    name = "disk space"
    need, basis = bytes_left(lake, ratio)
    text = f"{format_bytes(need)} still to write ({basis})"
    if not lake.store.is_local:
        return passed(name, f"{text}; an object store's limits are not known here")
    free = shutil.disk_usage(lake.store.root).free
    text += f", {format_bytes(free)} free"
    todo = "free space, move the lake, or plan less"
    if free < need:
        return failed(name, text, todo)
    if free < need * _SPARE:
        return warned(name, f"{text}: little to spare", todo)
    return passed(name, text)
