"""Named versions of the manifest: one small file a pin, made once and never moved.

A version is a number, and the number of a commit that the log has lost is given again. So a pin
also names the Parquet file that its commit added, which no other commit ever has.

A pin and a vacuum beside it need no lock: a pin is written before its maker looks whether the
manifest condemns what the version needs, and a vacuum condemns before it looks at the pins. So at
least one of the two sees the other and gives way.
"""

import json
import re
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from hslake import manifest
from hslake.errors import Conflict, Corrupt, InvalidInput, Missing
from hslake.schemas import parse_json, validate
from hslake.spec import read_spec
from hslake.store import Store, open_store
from hslake.tables import catalog

if TYPE_CHECKING:
    from hslake.lake import Lake

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_REMOVED = "removed/"  # below pins/: names that were given once


@dataclass(frozen=True)
class Pin:
    """A name for a manifest version; pinned versions are kept whatever their age.

    `commit`: the file that the version's commit added; None in version 0 and in older pins.
    """

    name: str
    version: int
    pinned_at: str
    commit: str | None = None


def pins(lake: "Lake") -> list[Pin]:
    """All pins of a lake, by name. Raises Corrupt: a pin that is not read is not kept either."""
    found, problems = read_pins(lake)
    if problems:
        raise Corrupt("\n".join(problems))
    return found


def read_pins(lake: "Lake") -> tuple[list[Pin], list[str]]:
    """The good pins by name, and what is wrong with the others, one line each."""
    return _all(lake.store)


def _all(store: Store) -> tuple[list[Pin], list[str]]:
    paths = [p for p in store.list("pins") if p.endswith(".json") and p.count("/") == 1]
    if not paths:
        return [], []
    newest = catalog.open_table(store, "manifest")  # after the pins: it has all they name
    commits = newest.commit_files()
    found, problems = [], []
    for path in paths:
        try:
            found.append(_checked(store, _read(store, path), path, newest.version, commits))
        except Corrupt as error:
            problems.append(str(error))
        except Missing:
            continue  # removed meanwhile
    return found, problems


def _read(store: Store, path: str) -> Pin:
    where = store.url(path)
    try:
        data = parse_json(store.read(path), where)
        validate(data, "pin", where)
    except InvalidInput as error:
        raise Corrupt(
            f"{error}; restore the file from a copy, or remove it and pin again"
        ) from None
    pin = Pin(**data)
    if path.rpartition("/")[2] != f"{pin.name}.json":
        raise Corrupt(f"{where} holds the pin {pin.name!r}: it was renamed, name it back")
    return pin


def _checked(store: Store, pin: Pin, path: str, newest: int, commits: dict[int, str]) -> Pin:
    """The pin, if the log has the version that it names. Raises Corrupt."""
    where = store.url(path)
    if pin.version > newest:
        raise Corrupt(
            f"{where} names version {pin.version}, the lake has 0 to {newest}: the "
            "manifest's log has lost entries, restore them from a copy before anything commits "
            f"(or `hslake pin LAKE {pin.name} --remove`)"
        )
    if pin.commit is not None and commits.get(pin.version) != pin.commit:
        raise Corrupt(
            f"{where} names version {pin.version} as {pin.commit}, which the manifest's log does "
            "not have: it lost entries and another commit took the number; restore the log from a "
            f"copy, or `hslake pin LAKE {pin.name} --remove`"
        )
    return pin


def _path(name: str) -> str:
    return f"pins/{name}.json"


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise InvalidInput(f"pin {name!r}: expected letters, digits, '.', '_' or '-', at most 64")
    if name.isdigit():
        raise InvalidInput(f"pin {name!r}: a number is a version; expected a letter in the name")


def version_of(store: Store, name: str) -> int:
    """The manifest version that pin `name` names. Raises Missing, Corrupt or InvalidInput."""
    if not _NAME.fullmatch(name):
        raise InvalidInput(f"version: found {name!r}, expected a number from 0 or a pin's name")
    try:
        found = _read(store, _path(name))
    except Missing:
        have = ", ".join(p.name for p in _all(store)[0][:10]) or "none"
        raise Missing(f"{store.url()} has no pin {name!r}; its pins: {have}") from None
    newest = catalog.open_table(store, "manifest")
    return _checked(store, found, _path(name), newest.version, newest.commit_files()).version


def pin(lake_url: str, name: str, version: int | None = None) -> Pin:
    """Name a version (default: the newest). A name, once given, is never moved.

    Raises InvalidInput for a bad or taken name, Missing for a version that does not exist or of
    which a vacuum has removed segments, Corrupt when there is a pin of the name that does not read.
    """
    _check_name(name)
    store = open_store(lake_url)
    read_spec(store.url())
    newest = catalog.open_table(store, "manifest")
    if version is not None and not 0 <= version <= newest.version:
        raise Missing(f"version {version}: the lake has versions 0 to {newest.version}")
    wanted = newest.version if version is None else version
    commits = newest.commit_files()
    found = Pin(name, wanted, _now(), commits.get(wanted))
    for folder in ("", _REMOVED):
        try:
            taken = _read(store, f"pins/{folder}{name}.json")
        except Missing:
            continue
        if not folder:
            _checked(store, taken, _path(name), newest.version, commits)
        if (taken.version, taken.commit or found.commit) != (wanted, found.commit):
            what = "named" if folder else "names"
            raise InvalidInput(
                f"pin {name!r} {what} version {taken.version} already: use a new name"
            )
        if not folder:
            return taken
    try:
        store.put_new(_path(name), json.dumps(asdict(found)).encode())
    except Conflict:
        raise Conflict(f"pin {name!r} was made by somebody else just now: look at it") from None
    gone = broken(catalog.open_table(store, "manifest"), [found])
    if gone:
        store.delete(_path(name))
        raise Missing(
            f"version {wanted} is not whole any more: a vacuum or delete has removed "
            f"{len(gone)} of its segments ({min(gone)}, …); pin a newer one"
        )
    return found


def unpin(lake_url: str, name: str) -> Pin | None:
    """Remove a pin: its version is kept no longer than others. The name stays given: it may name
    the same version again, and no other. Returns None for a pin that did not read.

    Raises Missing when there is no such pin.
    """
    store = open_store(lake_url)
    try:
        found = _read(store, _path(name))
    except Corrupt:
        store.delete(_path(name))
        return None
    except Missing:
        raise Missing(f"{store.url()} has no pin {name!r}: see `hslake pin LAKE --list`") from None
    # First: after a crash in between, both are there and the pin counts.
    store.put(f"pins/{_REMOVED}{name}.json", json.dumps(asdict(found)).encode())
    store.delete(_path(name))
    return found


def broken(newest: catalog.TableState, some: list[Pin]) -> dict[str, list[str]]:
    """Condemned segments that a pinned version shows samples of -> names of those pins."""
    found: dict[str, list[str]] = {}
    for span in manifest.spans(newest).values():
        if span.condemned:
            names = [p.name for p in some if span.shows(p.version)]
            if names:
                found[span.segment_id] = names
    return found


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
