"""One part: a preallocated Zarr v3 group with raw chunks, plus its journal.

A part's chunk files are mapped and written in place. `part-<n>` names are never reused; recycling
renames the folder, so the pages stay allocated while everything that described them is new.
"""

import hashlib
import json
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from hslake.errors import Corrupt, Unavailable
from hslake.schemas import arrow_schema
from hslake.spec import DTYPES, LakeSpec
from hslake.staging.frames import FrameWriter
from hslake.staging.memory import PartMemory, bits_dtype, chunk_files
from hslake.staging.space import SMALL_RESERVE, allocate, check_room
from hslake.zarrmeta import array_metadata

JOURNAL = "journal"
_UNBORN = "journal.new"  # until the part is one
METADATA = "zarr.json"
SEALED = "manifest.arrow"
_UNSEALED = "manifest.arrow.new"
_SEAL_BYTES = 1 << 18
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
class PartMaps:
    """Read-only: `hidden` one array [capacity, hidden] of bits a stream, `input_ids` int32."""

    hidden: list[np.ndarray]
    input_ids: np.ndarray


def _mapped(path: Path, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    try:
        return np.memmap(path, dtype, "r", shape=shape)
    except (FileNotFoundError, ValueError) as error:
        raise Corrupt(f"{path}: {error}") from None
    except OSError as error:  # no descriptor, no memory, no right: nothing is wrong with the file
        raise Unavailable(f"{path} cannot be opened now: {error}") from error


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

    @cached_property
    def maps(self) -> PartMaps:
        """The part's chunks, mapped once: every map costs a descriptor. Raises Corrupt for a file
        that is missing or short, Unavailable when the machine cannot open it now."""
        a = self.attributes
        bits, shape = bits_dtype(DTYPES[a["dtype"]]), (self.capacity, a["hidden_size"])
        hidden, ids = chunk_files(self.path, len(a["streams"]))
        return PartMaps(
            [_mapped(file, bits, shape) for file in hidden],
            _mapped(ids, np.dtype("<i4"), (self.capacity,)),
        )


class Part:
    """A part being filled by the one writer that made it."""

    def __init__(
        self, path: Path, spec: LakeSpec, memory: PartMemory, attributes: dict[str, Any]
    ) -> None:
        """A part of `memory`'s rows in its folder `path`. Raises NoSpace; the memory stays open."""
        self.path, self.memory = path, memory
        self.capacity = len(memory.input_ids)
        self.used = 0
        self.sealed_at: float | None = None  # Unix time
        self.touched = 0.0  # when the last row was logged, on the writer's clock
        self.seal_failed = False  # for want of room
        self.passed_over = False  # a sample found no room here: to be sealed when nobody fills it
        self.open = 0  # reservations that are neither complete nor abandoned
        self.in_flight = 0  # copies on their way into its rows, also of reservations given up
        self.incarnations: dict[str, int] = {}  # attempt -> its last one here
        self.rows: list[dict[str, Any]] = []
        self._unwritten: list[dict[str, Any]] = []
        (path / READ_LOCK).touch()
        shape = [len(spec.streams), self.capacity, spec.hidden_size]
        (path / "hidden_states/zarr.json").write_text(
            json.dumps(
                array_metadata(shape, [1, *shape[1:]], spec.dtype, ["stream", "token", "hidden"])
            )
        )
        ids = array_metadata([self.capacity], [self.capacity], "int32", ["token"])
        (path / "input_ids/zarr.json").write_text(json.dumps(ids))
        # The journal makes the folder a part: it gets its name after everything it speaks about.
        # Metadata with neither name beside it is then a part that lost its journal.
        self._journal = FrameWriter(path / _UNBORN, "journal")
        try:
            # When staging is full its parts must still get out: room for that is taken now.
            with (path / _UNSEALED).open("wb") as f:
                allocate(f.fileno(), _SEAL_BYTES)
            told = {**attributes, "digest": attributes_digest(attributes)}
            group = {"zarr_format": 3, "node_type": "group", "attributes": {"hslake": told}}
            (path / METADATA).write_text(json.dumps(group))
            (path / _UNBORN).rename(path / JOURNAL)
        except BaseException:
            self._journal.close()  # or its pages stay, unlinked, as long as the process
            raise

    @property
    def sealed(self) -> bool:
        """Whether no more rows come."""
        return self.sealed_at is not None

    @property
    def filling(self) -> bool:
        """Whether rows may still come to what was reserved here."""
        return self.open > 0

    def journal_room(self, size: int) -> None:
        """Make sure that the journal takes `size` more bytes. Raises NoSpace."""
        self._journal.room(size)

    def log(self, row: dict[str, Any]) -> None:
        """Add one journal row, to be written by `flush`."""
        full = {"reason": None, "checksum": None, "rms": None, "absmax": None, "nonfinite": None}
        full.update(row)
        self._unwritten.append(full)

    def flush(self) -> None:
        """Write what was logged, in one frame."""
        if self._unwritten:
            self._journal.append(*self._unwritten)
            self.rows += self._unwritten
            self._unwritten = []

    def seal(self) -> None:
        """Write `manifest.arrow` (the journal's rows as an Arrow IPC file): no more rows come.
        Raises NoSpace or OSError when it cannot be written; the part stays open then."""
        if self.sealed:
            return
        self.flush()
        table = pa.Table.from_pylist(self.rows, schema=arrow_schema("journal"))
        buffer = pa.BufferOutputStream()
        with pa.ipc.new_file(buffer, table.schema) as writer:
            writer.write_table(table)
        data = buffer.getvalue()
        if len(data) > _SEAL_BYTES:
            check_room(self.path, len(data), reserve=SMALL_RESERVE)
        with (self.path / _UNSEALED).open("r+b") as f:
            f.write(data)
            f.truncate()
        (self.path / _UNSEALED).rename(self.path / SEALED)
        self.sealed_at = time.time()

    def let_go(self) -> PartMemory:
        """End the part but for its memory, which is the next part's."""
        self._journal.close()
        return self.memory

    def close(self) -> None:
        """End the part and its memory."""
        self.let_go().close()


def attributes_digest(attributes: dict[str, Any]) -> str:
    """SHA-256 (hex) over a part's attributes but `digest`, as JSON with sorted keys: a flipped bit
    in them may still be valid JSON, and would be committed as how the samples were captured."""
    told = {k: v for k, v in attributes.items() if k != "digest"}
    text = json.dumps(told, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


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
    for name in (METADATA, JOURNAL, SEALED, _UNSEALED, DONE, READ_LOCK):
        (path / name).unlink(missing_ok=True)
    path.rename(new)
