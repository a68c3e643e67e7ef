"""Map-style dataset over the samples of a lake.

One manifest query says which samples there are and where; payload is read when asked for, straight
from the segment, with no listing and no per-segment metadata.
"""

import os
from collections.abc import Sequence
from os import PathLike
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import Dataset

from hslake import query
from hslake.absence import why_gone
from hslake.errors import Corrupt, InvalidInput
from hslake.lake import Lake, open_lake
from hslake.segment.read import SegmentReader
from hslake.streams import FINAL, stream_names
from hslake.torch.collate import TORCH_DTYPES, Batch, Shape, Slot, bits, huge

LATEST = "latest-per-epoch"
_COLUMNS = "sample_id, source, split, length, segment_id, token_start, segment_tokens"


class HiddenStateDataset(Dataset[dict[str, Any]]):
    """The samples of `lake` (a Lake or its URL) that `where` and `split` select.

    `where`: SQL over the view `samples`, e.g. "source <> 'B7' and length <= 4096"; `split`: value
    of the column of that name, InvalidInput when no sample has it; `streams`: some of the lake's
    streams (default: all); `version`: the manifest version to read (default: the one `lake` is open
    at), or "latest-per-epoch": the newest now, and again whenever a loader starts an epoch.

    `dataset[i]` is a dict: sample_id str; input_ids, loss_mask [L] int64; hidden_state [L, n * H]
    (the n boundaries side by side, ascending) and target [L, H] (stream `final`) in the lake's
    dtype, each present when its streams are selected. Values are as stored: NaN stays NaN, nothing
    is shifted. A damaged sample raises Corrupt, a segment that is gone Missing.

    Pickles as the sample table and the lake's address, so spawned DataLoader workers can have it;
    each opens the store on first use. A forked process may not: clients of object stores hang
    there.
    """

    def __init__(
        self,
        lake: Lake | str | PathLike[str],
        where: str | None = None,
        streams: Sequence[str | int] | None = None,
        split: str | None = None,
        version: int | str | None = None,
    ) -> None:
        self.follows_latest = version == LATEST
        if not (self.follows_latest or version is None or type(version) is int):
            raise InvalidInput(f"version: found {version!r}, expected a number or {LATEST!r}")
        pinned = version if isinstance(version, int) else None
        if not isinstance(lake, Lake):
            lake = open_lake(lake, pinned)
        elif self.follows_latest:
            lake = lake.refresh()
        elif pinned is not None and lake.version != pinned:
            lake = open_lake(lake.url, pinned)
        self.where, self.split = where, split
        self.url, self.spec = lake.url, lake.spec
        self.streams = _select_streams(self.spec.streams, streams)
        self._store = lake.store
        self._open()
        self._load(lake)

    def _load(self, lake: Lake) -> None:
        """Query the manifest once; keep the sample table in a compact Arrow form."""
        terms = [f"({self.where}\n)"] if self.where else []
        terms += ["split = $split"] if self.split is not None else []
        condition = f" where {' and '.join(terms)}" if terms else ""
        text = f"select {_COLUMNS} from samples{condition} order by sample_id"
        params = {"split": self.split} if self.split is not None else None
        try:
            refs = query.execute(lake.connect(), text, params)
        except InvalidInput as error:
            raise InvalidInput(f"{self.describe()}: {error}") from error
        for name in ("source", "split", "segment_id"):
            at = refs.schema.get_field_index(name)
            refs = refs.set_column(at, name, refs[name].dictionary_encode())
        if not len(refs) and self.split is not None:
            self._check_split(lake)
        self.version: int = lake.version
        self.refs: pa.Table = refs.combine_chunks()
        self.lengths: np.ndarray = refs["length"].to_numpy().astype(np.int64)

    def _check_split(self, lake: Lake) -> None:
        """Raise InvalidInput for a split that is not there: a slip ("valid") trains on nothing."""
        # One that follows the lake may wait for samples that are only planned.
        view = "plan" if self.follows_latest else "samples"
        found = query.execute(lake.connect(), f"select distinct split from {view} order by split")
        splits = found["split"].to_pylist()
        if self.split not in splits:
            names = ", ".join(map(repr, splits)) or "none: nothing is there yet"
            raise InvalidInput(f"{self.describe()}: no such split; there are {names}")

    def refresh(self, version: int | None = None) -> None:
        """Select again at `version` (default: the newest)."""
        self._load(open_lake(self.url, version))

    def describe(self) -> str:
        """What this dataset selects, for messages."""
        parts = [f"where={self.where!r}"] if self.where else []
        parts += [f"split={self.split!r}"] if self.split is not None else []
        return f"dataset over {self.url}" + (f" ({', '.join(parts)})" if parts else "")

    def sample_id(self, index: int) -> str:
        """Id of sample `index`."""
        return self.refs["sample_id"][int(index)].as_py()

    def segment_id(self, index: int) -> str:
        """Segment that holds sample `index`."""
        return self.refs["segment_id"][int(index)].as_py()

    def shape(self, layout: str = "padded", multiple: int = 1, pin_memory: bool = False) -> Shape:
        """Shape of batches of these streams."""
        hidden, boundaries = self.spec.hidden_size, [s for s in self.streams if s != FINAL]
        return Shape(
            layout=layout,
            state_width=len(boundaries) * hidden,
            target_width=hidden if FINAL in self.streams else 0,
            dtype=TORCH_DTYPES[self.spec.dtype],
            multiple=multiple,
            pin_memory=pin_memory,
        )

    def __len__(self) -> int:
        return len(self.refs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        index %= len(self)
        length, shape = int(self.lengths[index]), self.shape()
        item: dict[str, Any] = {"sample_id": self.sample_id(index)}
        item["input_ids"] = torch.empty(1, length, dtype=torch.int64)
        item["loss_mask"] = torch.empty(1, length, dtype=torch.int64)
        for name, width in shape.wide.items():
            item[name] = huge((1, length, width), shape.dtype)
        try:
            self.read_into(index, item, (0, slice(0, length)))
        except Corrupt as error:
            raise error.of(item["sample_id"]) from error
        return {k: v[0] if isinstance(v, torch.Tensor) else v for k, v in item.items()}

    def read_into(self, index: int, batch: Batch, slot: Slot) -> None:
        """Decode sample `index` into its rows of `batch`. Safe from several threads."""
        if os.getpid() != self._pid:
            raise InvalidInput(
                "this dataset was opened in another process and came here by fork, where store "
                "clients hang: use DataLoader(..., multiprocessing_context='spawn'), or "
                "HiddenStateLoader, which reads in threads"
            )
        row = self.refs.slice(index, 1).to_pylist()[0]
        where = (row["segment_id"], row["token_start"], row["length"])
        # The rows of one token lie side by side, [L, n * H]: each chunk is decoded to its place.
        out: list[np.ndarray] = []
        if any(stream != FINAL for stream in self.streams):
            wide = bits(batch["hidden_state"])[slot]
            out += np.split(wide, wide.shape[1] // self.spec.hidden_size, axis=1)
        if FINAL in self.streams:
            out.append(bits(batch["target"])[slot])
        try:
            self._reader.rows_into(out, *where, self.streams)
            ids, mask = self._reader.tokens(*where, row["segment_tokens"])
        except Corrupt as error:  # a segment that was removed is not damaged
            raise why_gone(self._store, self.version, row["segment_id"]) or error from error
        batch["input_ids"].numpy()[slot] = ids
        batch["loss_mask"].numpy()[slot] = mask

    def _open(self) -> None:
        self._reader = SegmentReader(self._store, self.spec)
        self._pid = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_reader", "_pid")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()


def _select_streams(have: tuple[str, ...], want: Any) -> tuple[str, ...]:
    if want is None:
        return tuple(have)
    wanted = list(stream_names(want))
    unknown = [stream for stream in wanted if stream not in have]
    if unknown or not wanted:
        raise InvalidInput(
            f"streams: found {wanted}, but the lake holds {list(have)}: choose one or more of these"
        )
    return tuple(stream for stream in have if stream in wanted)
