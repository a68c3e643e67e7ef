"""Named versions of the manifest: one small file a pin, made once and never moved.

A version is a number, and the number of a commit that the log has lost is given again. So a pin
also names the Parquet file that its commit added, which no other commit ever has.
"""

import json
import re
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from hslake import catalog
from hslake.errors import Corrupt, InvalidInput, Missing
from hslake.lake import Lake, open_lake
from hslake.schemas import parse_json, validate

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class Pin:
    """A name for a manifest version; pinned versions are kept whatever their age.

    `commit`: the file that the version's commit added; None in version 0 and in older pins.
    """

    name: str
    version: int
    pinned_at: str
    commit: str | None = None


def pins(lake: Lake) -> list[Pin]:
    """All pins of a lake, by name. Raises Corrupt: a pin that is not read is not kept either."""
    found, problems = read_pins(lake)
    if problems:
        raise Corrupt("\n".join(problems))
    return found


def read_pins(lake: Lake) -> tuple[list[Pin], list[str]]:
    """The good pins by name, and what is wrong with the others, one line each."""
    paths = [p for p in lake.store.list("pins") if p.endswith(".json")]
    if not paths:
        return [], []
    newest = catalog.open_table(lake.store, "manifest")  # after the pins: it has all they name
    found, problems = [], []
    for path in paths:
        try:
            found.append(_read(lake, path, newest))
        except Corrupt as error:
            problems.append(str(error))
    return found, problems


def _read(lake: Lake, path: str, newest: catalog.TableState) -> Pin:
    where = lake.store.url(path)
    try:
        data = parse_json(lake.store.read(path), where)
        validate(data, "pin", where)
    except InvalidInput as error:
        raise Corrupt(
            f"{error}; restore the file from a copy, or remove it and pin again"
        ) from None
    pin = Pin(**data)
    if path != _path(pin.name):
        raise Corrupt(f"{where} holds the pin {pin.name!r}: it was renamed, name it back")
    if pin.version > newest.version:
        raise Corrupt(
            f"{where} names version {pin.version}, the lake has 0 to {newest.version}: the "
            "manifest's log has lost entries, restore them from a copy before anything commits"
        )
    if pin.commit is not None and newest.commit_file(pin.version) != pin.commit:
        raise Corrupt(
            f"{where} names version {pin.version} as {pin.commit}, which the manifest's log does "
            "not have: it lost entries and another commit took the number; restore the log from a "
            "copy, or remove the pin"
        )
    return pin


def _path(name: str) -> str:
    return f"pins/{name}.json"


def pin(lake_url: str, name: str, version: int | None = None) -> Pin:
    """Name a version (default: the newest). A name, once given, is never moved.

    Raises InvalidInput for a bad or taken name, Missing for a version that does not exist, Corrupt
    when there is a pin of the name that does not read.
    """
    if not _NAME.fullmatch(name):
        raise InvalidInput(f"pin {name!r}: expected letters, digits, '.', '_' or '-', at most 64")
    lake = open_lake(lake_url)
    if version is not None and not 0 <= version <= lake.version:
        raise Missing(f"version {version}: the lake has versions 0 to {lake.version}")
    wanted = lake.version if version is None else version
    if lake.store.exists(_path(name)):
        taken = _read(lake, _path(name), lake.manifest_table())
        if taken.version == wanted:
            return taken
        raise InvalidInput(f"pin {name!r} names version {taken.version} already: use a new name")
    at = datetime.now(UTC).isoformat(timespec="seconds")
    found = Pin(name, wanted, at, lake.manifest_table().commit_file(wanted))
    lake.store.put_new(_path(name), json.dumps(asdict(found)).encode())
    return found
