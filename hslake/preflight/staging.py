"""Preflight's look at staging: whose parts lie there, and the room for those still to come."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from hslake.checks import Check, failed, passed, warned
from hslake.errors import HslakeError, InvalidInput, Missing
from hslake.ids import PROBE_PREFIX
from hslake.lake import Lake
from hslake.staging import read_part, read_status, scan
from hslake.staging.check import check_no_lake, check_part
from hslake.staging.memory import part_bytes
from hslake.staging.space import RESERVE, disk_warning, free_bytes
from hslake.units import format_bytes


def check_staging(roots: Sequence[Path], lake: Lake) -> Iterator[Check]:
    """The checks of every staging folder on this machine."""
    if not roots:
        todo = "run preflight on the server's machine with --staging DIR"
        yield warned("staging", "not looked at: no --staging given", todo)
    for root in roots:
        try:
            yield from _one(root, lake)
        except (InvalidInput, Missing) as error:
            yield failed("staging", str(error), "name the --staging that `hslake serve` was given")


def _one(root: Path, lake: Lake) -> Iterator[Check]:
    check_no_lake(root)
    writers = scan(root)
    disk = disk_warning(root)
    if disk is None:
        yield passed("staging", f"{root} is in RAM")
    else:
        found, _, todo = disk.rpartition("; ")
        yield warned("staging", found, f"{todo} and start the server with it")
    foreign, waiting = [], 0
    for writer in writers:
        for path in writer.parts:
            try:
                part = read_part(path, dead=not writer.alive)
                check_part(path, part.attributes, lake.spec)
            except (HslakeError, FileNotFoundError) as error:
                if path.exists():  # else it was recycled in this moment
                    foreign.append(str(error))
                continue
            if not writer.alive and not part.done:
                waiting += sum(
                    r.state == "complete" and not r.sample_id.startswith(PROBE_PREFIX)
                    for r in part.reserved
                )
    if foreign:
        todo = "compact it into its own lake, or delete it; or use another --staging"
        more = f" (and {len(foreign) - 1} more)" if len(foreign) > 1 else ""
        yield failed("foreign parts", f"{foreign[0]}{more}", todo)
    else:
        yield passed("foreign parts", f"none in {root}")
    if waiting:
        todo = f"run `hslake compact LAKE --staging {root}` first, or they are captured again"
        yield warned("left behind", f"{waiting:,} samples of writers that have ended", todo)
    yield _ram(root, lake)


def _ram(root: Path, lake: Lake) -> Check:
    """Parts are made as they are needed: is there room for those still to come?"""
    need = 0
    for writer in read_status(root)["writers"]:
        size = writer["largest_reservation"]
        if writer["alive"] and size:
            unmade = writer["capacity_rows"] // size - len(writer["parts"])
            need += max(0, unmade) * part_bytes(lake.spec, size)
    free, where = free_bytes(root)
    text = f"{format_bytes(need)} of parts still to be made in {root}, {where} has "
    text += f"{format_bytes(free)}, of which {format_bytes(RESERVE)} stay in reserve"
    if need and free < need + RESERVE:
        todo = "lower the server's --max-parts or --part-tokens, or give the machine more RAM"
        return failed("staging space", text, todo)
    return passed("staging space", text)
