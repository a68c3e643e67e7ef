"""What is wrong around the samples: the tables' logs, stray files of theirs, the model's files."""

from hslake import catalog
from hslake.lake import Lake
from hslake.verify.report import Damage


def strays(table: catalog.TableState) -> list[str]:
    """A writer that died before its commit leaves the same trace as a log that lost its newest
    entry, whose number the next commit then takes: so it is no damage, but worth a look."""
    return [
        f"{table.store.url(table.name)}/{name}: no entry of the log names it. Either its writer "
        "lost a race, died before its commit or is at it now, and all is well; or the log lost its "
        "newest entries: if what the file holds was reported as committed, restore them from a "
        "copy before anything else commits"
        for name in table.strays()
    ]


def log_differs(table: catalog.TableState) -> list[str]:
    return []


def model_differs(lake: Lake) -> list[Damage]:
    return []
