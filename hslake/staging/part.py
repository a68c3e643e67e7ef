"""One part: a preallocated Zarr v3 group with raw chunks, plus its journal.

A part's chunk files are mapped and written in place. `part-<n>` names are never reused; recycling
renames the folder, so the pages stay allocated while everything that described them is new.
"""

import json
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from hslake.schemas import arrow_schema
from hslake.spec import LakeSpec
from hslake.staging.files import replacing
from hslake.staging.frames import FrameWriter
from hslake.staging.space import allocate, check_room
from hslake.zarrmeta import array_metadata

JOURNAL = "journal"
_UNBORN = "journal.new"  # until the part is one
METADATA = "zarr.json"
SEALED = "manifest.arrow"
DONE = "DONE"
READ_LOCK = "read.lock"


@dataclass(frozen=True)
class Reserved:
    """A reservation as the journal tells it. `state`: open | complete | abandoned."""

    attempt: str
    incarnation: int
    sample_id: str
    source: str
    length: int
    row_start: int
    state: str
    checksum: tuple[int, ...] = ()
    rms: tuple[float, ...] = ()
    absmax: tuple[float, ...] = ()
    nonfinite: tuple[int, ...] = ()
    reason: str | None = None
    at: Any = None


@dataclass(frozen=True)
class PartInfo:
    """What a part's files say. `damage` is set when the journal ends in a bad frame."""

    path: Path
    attributes: dict[str, Any]
    capacity: int
    sealed: bool
    done: bool
    reserved: tuple[Reserved, ...]
    damage: str | None


def bits_dtype(itemsize: int) -> np.dtype:
    """Unsigned dtype of the stored bit patterns: uint16 or uint32, little-endian."""
    return np.dtype(f"<u{itemsize}")


def _map(path: Path, size: int) -> mmap.mmap:
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        allocate(fd, size)
        return mmap.mmap(fd, size)
    finally:
        os.close(fd)


def part_bytes(spec: LakeSpec, capacity: int) -> int:
    """Bytes of staging one part of `capacity` rows takes."""
    return capacity * (spec.bytes_per_token + 4) + (1 << 20)


class Part:
    """A part being filled by the one writer that made it."""

    def __init__(
        self, path: Path, spec: LakeSpec, capacity: int, attributes: dict[str, Any]
    ) -> None:
        if not path.exists():
            check_room(path.parent, part_bytes(spec, capacity))
        path.mkdir(exist_ok=True)
        self.path, self.capacity, self.used, self.sealed = path, capacity, 0, False
        self.touched = 0.0  # when the last row was logged, on the writer's clock
        self.passed_over = False  # a sample found no room here: to be sealed when nobody fills it
        self.incarnations: dict[str, int] = {}  # attempt -> its last one here
        self.rows: list[dict[str, Any]] = []
        bits = bits_dtype(spec.itemsize)
        size = capacity * spec.hidden_size * spec.itemsize
        self._maps = [
            _map(path / f"hidden_states/c/{i}/0/0", size) for i in range(len(spec.streams))
        ]
        self.hidden = [
            np.frombuffer(m, bits).reshape(capacity, spec.hidden_size) for m in self._maps
        ]
        ids = _map(path / "input_ids/c/0", capacity * 4)
        self._maps.append(ids)
        self.input_ids = np.frombuffer(ids, "<i4")
        (path / READ_LOCK).touch()
        shape = [len(spec.streams), capacity, spec.hidden_size]
        (path / "hidden_states/zarr.json").write_text(
            json.dumps(
                array_metadata(shape, [1, *shape[1:]], spec.dtype, ["stream", "token", "hidden"])
            )
        )
        (path / "input_ids/zarr.json").write_text(
            json.dumps(array_metadata([capacity], [capacity], "int32", ["token"]))
        )
        # The journal makes the folder a part: it gets its name after everything it speaks about.
        # Metadata with neither name beside it is then a part that lost its journal.
        self._journal = FrameWriter(path / _UNBORN, "journal")
        group = {"zarr_format": 3, "node_type": "group", "attributes": {"hslake": attributes}}
        (path / METADATA).write_text(json.dumps(group))
        (path / _UNBORN).rename(path / JOURNAL)

    def journal_room(self, size: int) -> None:
        """Make sure that the journal takes `size` more bytes. Raises NoSpace."""
        self._journal.room(size)

    def log(self, row: dict[str, Any]) -> None:
        """Append one journal row."""
        full = {"reason": None, "checksum": None, "rms": None, "absmax": None, "nonfinite": None}
        full.update(row)
        self._journal.append(full)
        self.rows.append(full)

    def seal(self) -> None:
        """Write `manifest.arrow` (the journal's rows as an Arrow IPC file): no more rows come."""
        if self.sealed:
            return
        table = pa.Table.from_pylist(self.rows, schema=arrow_schema("journal"))
        with (
            replacing(self.path / SEALED) as temporary,
            pa.OSFile(str(temporary), "wb") as f,
            pa.ipc.new_file(f, table.schema) as writer,
        ):
            writer.write_table(table)
        self.sealed = True

    def close(self) -> None:
        """Drop the maps so that unlinked pages are really freed."""
        self._journal.close()
        self.hidden, self.input_ids = [], np.empty(0, "<i4")
        for m in self._maps:
            try:
                m.close()
            except BufferError:  # a caller still holds a view; its death frees the pages
                continue


def lost_journal(path: Path) -> bool:
    """Whether a dead writer's folder was a part, and its journal is gone: not one half made or half
    recycled."""
    return (path / METADATA).exists() and not any(
        (path / name).exists() for name in (JOURNAL, _UNBORN, DONE)
    )


def reset_folder(path: Path, new: Path) -> None:
    """Turn a finished part's folder into the bare pages of the next part `new`.

    It is DONE, which goes late: whatever happens in between, no reader looks into it, and it never
    looks like a part that lost its journal.
    """
    for name in (METADATA, JOURNAL, SEALED, DONE, READ_LOCK):
        (path / name).unlink(missing_ok=True)
    path.rename(new)
