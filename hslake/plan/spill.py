"""Prepared samples on disk until it is decided which of them are new: memory does not grow with the
plan.

What decisions need (ids, hashes, lengths) goes to Parquet files, tokens and masks to Arrow files of
bounded size, both numbered by `n`, the order of the samples.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from hslake.ids import token_hash

FILE_TOKENS = 4 << 20  # of one data file: what is held at once
FILE_ROWS = 1 << 16

HEAD = pa.schema(
    [
        ("n", pa.int64()),
        ("file", pa.int32()),
        ("row", pa.int64()),
        ("given", pa.bool_()),
        ("sample_id", pa.string()),
        ("legacy_id", pa.string()),
        ("origin", pa.string()),
        ("first", pa.int64()),
        ("past", pa.int64()),
        ("source", pa.string()),
        ("split", pa.string()),
        ("by_hash", pa.string()),
        ("length", pa.int64()),
        ("supervised", pa.int64()),
        ("token_hash", pa.string()),
        ("mask_hash", pa.string()),
        ("prompt_hash", pa.string()),
        ("content_hash", pa.string()),
        ("tokenizer_hash", pa.string()),
        ("template_hash", pa.string()),
        ("reason", pa.string()),
    ]
)
_TOKENS = pa.schema(
    [("n", pa.int64()), ("input_ids", pa.list_(pa.int32())), ("loss_mask", pa.list_(pa.uint8()))]
)


@dataclass(frozen=True, slots=True)
class Head:
    """What is decided by. `given`: the id came with the row; `legacy_id`: the id that an older
    hslake gave to this text; `origin`, `first`, `past`: of a piece, the whole sample and the tokens
    [first, past) of it; `split`: as the row says, `by_hash` what its prompt's hash says; `reason`:
    why it is rejected, None when it is not."""

    file: int
    row: int
    given: bool
    sample_id: str
    legacy_id: str | None
    origin: str | None
    first: int
    past: int
    source: str
    split: str | None
    by_hash: str
    length: int
    supervised: int
    token_hash: str | None
    mask_hash: str | None
    prompt_hash: str | None
    content_hash: str | None
    tokenizer_hash: str | None
    template_hash: str | None
    reason: str | None = None


def mask_hash(mask: np.ndarray) -> str:
    """First 16 bytes of SHA-256 over the mask, a byte a token, in hex."""
    return hashlib.sha256(np.ascontiguousarray(mask, np.uint8).tobytes()).digest()[:16].hex()


def prompt_hash(ids: np.ndarray, mask: np.ndarray) -> str:
    """Token hash of what precedes the first supervised token; of all when there is nothing, or
    nothing is supervised: two texts without a prompt have none in common."""
    at = int(np.argmax(mask)) if len(mask) and mask.any() else 0
    return token_hash(ids[:at] if at else ids)


class Spill:
    """Samples on their way to the plan, in `folder`, which is the caller's to remove."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._heads: list[Head] = []
        self._ids: list[np.ndarray] = []
        self._masks: list[np.ndarray] = []
        self._numbers: list[int] = []
        self._tokens = 0
        self._count = 0  # heads so far
        self._files: list[tuple[int, int, Path]] = []  # first and last n, file
        self._head_files: list[str] = []
        self._notes: IO[str] | None = None

    def add(self, head: Head, ids: np.ndarray, mask: np.ndarray) -> None:
        """One sample: `ids` int32 and `mask` uint8, [length]."""
        self._numbers.append(self._count)
        self._ids.append(ids)
        self._masks.append(mask)
        self._tokens += len(ids)
        self._head(head)
        if self._tokens >= FILE_TOKENS or len(self._numbers) >= FILE_ROWS:
            self.flush()

    def reject(self, head: Head) -> None:
        """One sample that is not to be planned, for `head.reason`."""
        self._head(head)

    def _head(self, head: Head) -> None:
        self._heads.append(head)
        self._count += 1
        if len(self._heads) >= FILE_ROWS:
            self._flush_heads()

    def flush(self) -> None:
        """Write down what is held."""
        self._flush_heads()
        if not self._numbers:
            return
        offsets = pa.array(np.cumsum([0, *map(len, self._ids)]), pa.int32())
        ids = pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(self._ids), pa.int32()))
        masks = pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(self._masks), pa.uint8()))
        table = pa.table([pa.array(self._numbers, pa.int64()), ids, masks], schema=_TOKENS)
        path = self._folder / f"tokens-{len(self._files):06d}.arrow"
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        with pa.OSFile(str(path), "wb") as file:
            with pa.ipc.new_file(file, _TOKENS, options=options) as out:
                out.write_table(table)
        self._files.append((self._numbers[0], self._numbers[-1], path))
        self._numbers, self._ids, self._masks, self._tokens = [], [], [], 0

    def _flush_heads(self) -> None:
        if not self._heads:
            return
        first = self._count - len(self._heads)
        columns: list[Any] = [pa.array(range(first, self._count), pa.int64())]
        columns += [
            pa.array([getattr(h, f.name) for h in self._heads], HEAD.field(f.name).type)
            for f in fields(Head)
        ]
        path = self._folder / f"heads-{len(self._head_files):06d}.parquet"
        pq.write_table(pa.table(columns, schema=HEAD), path, compression="lz4")
        self._head_files.append(str(path))
        self._heads = []

    def heads(self) -> ds.Dataset | pa.Table:
        """All heads, for DuckDB."""
        if not self._head_files:
            return HEAD.empty_table()
        return ds.dataset(self._head_files, schema=HEAD)

    def tokens(self) -> Iterator[tuple[int, int, Path]]:
        """(first n, last n, file) of the tokens."""
        yield from self._files

    # -- notes ------------------------------------------------------------------------------

    def note(self, **what: Any) -> None:
        """One thing that somebody may want to look at, for `--report`."""
        if self._notes is None:
            self._notes = (self._folder / "notes.jsonl").open("w", encoding="utf-8")
        self._notes.write(json.dumps(what, ensure_ascii=True) + "\n")

    def write_notes(self, file: Path, more: Sequence[dict[str, Any]] = ()) -> None:
        """Put all notes, and `more`, into `file`, a JSON object a line."""
        for each in more:
            self.note(**each)
        if self._notes is not None:
            self._notes.close()
        self._notes = None
        with file.open("w", encoding="utf-8") as out:
            source = self._folder / "notes.jsonl"
            if source.exists():
                with source.open(encoding="utf-8") as lines:
                    for line in lines:
                        out.write(line)


def read_tokens(path: Path) -> pa.Table:
    """`n`, `input_ids` and `loss_mask` of one file of tokens."""
    with pa.OSFile(str(path), "rb") as file:
        return pa.ipc.open_file(file).read_all()
