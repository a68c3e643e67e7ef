"""Reading staging: what writers and parts there are, and what their journals say."""

import contextlib
import json
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hslake.errors import Corrupt, InvalidInput, Missing, Unavailable
from hslake.schemas import validate
from hslake.staging.folder import LOCK, is_writer_name
from hslake.staging.frames import read_frames
from hslake.staging.locks import is_locked
from hslake.staging.part import DONE, JOURNAL, SEALED, PartInfo, Reserved, attributes_digest

_GONE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


@dataclass(frozen=True)
class WriterDir:
    """One writer's folder. `alive`: its process holds the lock. `closed`: why this user may not
    look into it, and so knows nothing of it."""

    path: Path
    writer_id: str
    alive: bool
    parts: tuple[Path, ...]
    closed: str | None = None


def scan(root: Path, only: Collection[str] | None = None) -> list[WriterDir]:
    """Writers under a staging root, by name; with `only`, nothing of others than these is looked
    at. Raises Missing when the root is not there."""
    root = Path(root)
    if not root.is_dir():
        raise Missing(
            f"staging folder {root} is not there: check --staging, or make it (on /dev/shm) before "
            "the server starts"
        )
    found = []
    for path in sorted(root.iterdir()):
        if only is not None and path.name not in only:
            continue
        if not (is_writer_name(path.name) and path.is_dir()):
            continue
        with contextlib.suppress(FileNotFoundError):  # a compactor has just removed it
            try:
                found.append(read_writer(path))
            except PermissionError as error:  # another user's: no reason to see nothing of ours
                found.append(WriterDir(path, path.name, False, (), str(error)))
    return found


def read_writer(path: Path) -> WriterDir:
    """One writer's folder as it is now; parts without a journal are not parts yet, or no more.

    Raises PermissionError.
    """
    alive = is_locked(path / LOCK)
    parts = [p for p in sorted(path.glob("part-*")) if (p / JOURNAL).exists()]
    return WriterDir(path, path.name, alive, tuple(parts))


def part_attributes(path: Path) -> dict[str, Any]:
    """The part's `hslake` attribute. Raises Corrupt or InvalidInput naming the file, Unavailable
    when the machine cannot read it now."""
    where = path / "zarr.json"
    try:
        found = json.loads(where.read_text("utf-8"))["attributes"]["hslake"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as e:  # 100,000 brackets
        if isinstance(e, OSError) and not isinstance(e, _GONE):
            raise Unavailable(f"{where} cannot be read now: {e}") from e
        raise Corrupt(f"{where} is no staging part's metadata ({type(e).__name__}: {e})") from None
    validate(found, "part", str(where))
    if found.get("digest", "") not in ("", attributes_digest(found)):  # writers of before have none
        raise Corrupt(
            f"{where}: its digest is {found['digest']}, its attributes give "
            f"{attributes_digest(found)}: the file was changed"
        )
    return found


def read_part(path: Path, *, dead: bool = False) -> PartInfo:
    """Journal of one part folded to one state per reservation. `dead`: its writer is.

    A damaged frame ends the reading; what came before it is returned with `damage` set.
    """
    attributes = part_attributes(path)
    # Asked before the journal is read: a seal that comes in between must not hide its last rows.
    sealed, done = (path / SEALED).exists(), (path / DONE).exists()
    reserved: dict[tuple[str, int], Reserved] = {}
    damage = None
    try:
        for row in read_frames(path / JOURNAL, "journal", final=sealed or dead):
            _fold(reserved, row, path)
    except Corrupt as e:
        damage = str(e)
    return PartInfo(
        path,
        attributes,
        attributes["capacity"],
        sealed,
        done,
        tuple(reserved.values()),
        damage,
    )


def _fold(reserved: dict[tuple[str, int], Reserved], row: dict[str, Any], path: Path) -> None:
    key = (row["attempt"], row["incarnation"])
    if row["event"] == "reserve":
        names = ("attempt", "incarnation", "sample_id", "source", "length", "row_start", "at")
        reserved[key] = Reserved(state="open", **{n: row[n] for n in names})
    elif key not in reserved:
        raise Corrupt(f"{path / JOURNAL}: {row['event']} of {key[0]} without its reservation")
    elif row["event"] == "complete":
        lists: dict[str, Any] = {
            n: tuple(row[n]) for n in ("checksum", "rms", "absmax", "nonfinite")
        }
        reserved[key] = replace(reserved[key], state="complete", at=row["at"], **lists)
    else:
        reserved[key] = replace(reserved[key], state="abandoned", reason=row["reason"])


def read_rows(part: PartInfo, sample: Reserved) -> tuple[list[np.ndarray], np.ndarray]:
    """Maps of a complete sample: per stream [length, hidden] bits, and input_ids int32 [length].

    Raises InvalidInput when the reservation lies outside the part, Corrupt for a file that is
    missing or short, Unavailable when the machine cannot open it now.
    """
    end = sample.row_start + sample.length
    if sample.row_start < 0 or end > part.capacity:
        raise InvalidInput(f"{part.path}: rows {sample.row_start}..{end} of {part.capacity}")
    rows = slice(sample.row_start, end)
    return [stream[rows] for stream in part.maps.hidden], part.maps.input_ids[rows]
