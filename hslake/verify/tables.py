"""What is wrong around the samples: the tables' logs, stray files of theirs, the model's files."""

import hashlib

from hslake.errors import Missing
from hslake.lake import FINAL_NORM, Lake
from hslake.tables import catalog
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


def model_differs(lake: Lake) -> list[Damage]:
    """Objects of the final norm that are not those that the spec names."""
    found = []
    for key, want in (lake.spec.model.final_norm or {}).items():
        path = f"{FINAL_NORM}/{key}"
        where = lake.store.url(path)
        try:
            have = hashlib.sha256(lake.store.read(path)).hexdigest()
        except Missing:
            found.append(Damage("", f"{where} is missing: restore it from a copy", (), path))
            continue
        if have != want:
            what = f"{where} has SHA-256 {have}, the spec says {want}: restore it from a copy"
            found.append(Damage("", what, (), path))
    return found
