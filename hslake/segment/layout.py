"""Where things lie in a segment: keys, shapes and the Zarr metadata documents.

Everything follows from the spec, so a reader needs no metadata of the segment.
"""

import json
import os
import time
import uuid
from dataclasses import dataclass
from typing import Any

import numpy as np

from hslake.errors import InvalidInput
from hslake.segment.codec import CRC_BYTES, INDEX_CODECS, TOKEN_CODECS, codec_metadata
from hslake.spec import LakeSpec
from hslake.zarrmeta import array_metadata

HIDDEN = "hidden_states"
TOKEN_DTYPES: dict[str, np.dtype] = {"input_ids": np.dtype("<i4"), "loss_mask": np.dtype("u1")}
INVENTORY = "inventory.json"
GROUP_METADATA = "zarr.json"


def new_segment_id() -> str:
    """A fresh UUIDv7 (RFC 9562): sorts by creation time in milliseconds."""
    random = int.from_bytes(os.urandom(10), "big")
    value = (time.time_ns() // 1_000_000 & (1 << 48) - 1) << 80
    value |= 0x7 << 76 | (random >> 68 & 0xFFF) << 64 | 0b10 << 62 | random & (1 << 62) - 1
    return str(uuid.UUID(int=value))


def is_segment_id(name: str) -> bool:
    """Whether `new_segment_id` may have made this name: a UUIDv7 in its usual form."""
    try:
        found = uuid.UUID(name)
    except ValueError:
        return False
    return str(found) == name and found.version == 7


def segment_prefix(segment_id: str) -> str:
    """Folder of a segment below the lake, with a trailing slash."""
    return f"segments/{segment_id}/"


def padded(tokens: int, chunk: int) -> int:
    """`tokens` rounded up to whole chunks."""
    return -(-tokens // chunk) * chunk


@dataclass(frozen=True)
class Grid:
    """The shards of one array along its token axis.

    `streams` is 0 for a token array (one dimension). A shard holds `shard` tokens of every stream
    in inner chunks of `chunk` tokens of one stream.
    """

    array: str
    streams: int
    chunk: int
    shard: int

    @property
    def chunks(self) -> int:
        """Inner chunks of one stream in one shard."""
        return self.shard // self.chunk

    @property
    def index_shape(self) -> tuple[int, int]:
        """(streams, chunks) of a shard's index."""
        return (max(self.streams, 1), self.chunks)

    @property
    def index_bytes(self) -> int:
        """Bytes of a shard's index with its crc32c."""
        streams, chunks = self.index_shape
        return 16 * streams * chunks + CRC_BYTES

    def key(self, shard: int) -> str:
        """Key of shard number `shard` below the segment."""
        return f"{self.array}/c/0/{shard}/0" if self.streams else f"{self.array}/c/{shard}"


def hidden_grid(spec: LakeSpec) -> Grid:
    """The grid of `hidden_states`. Raises InvalidInput when shards do not hold whole chunks."""
    g = spec.geometry
    if g.shard_tokens % g.chunk_tokens:
        raise InvalidInput(
            f"geometry: shards of {g.shard_tokens} tokens, expected a multiple of the chunk's "
            f"{g.chunk_tokens}"
        )
    return Grid(HIDDEN, len(spec.streams), g.chunk_tokens, g.shard_tokens)


def token_grid(spec: LakeSpec, array: str) -> Grid:
    """The grid of `input_ids` or `loss_mask`: one shard holds the most a segment may hold."""
    g = spec.geometry
    return Grid(array, 0, g.chunk_tokens, padded(g.segment_tokens, g.chunk_tokens))


def _document(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


def _array(
    shape: list[int],
    shard: list[int],
    chunk: list[int],
    dtype: str,
    codecs: list[dict[str, Any]],
    names: list[str],
    attributes: dict[str, Any],
) -> bytes:
    sharding = {
        "chunk_shape": chunk,
        "codecs": codecs,
        "index_codecs": INDEX_CODECS,
        "index_location": "end",
    }
    outer = [{"name": "sharding_indexed", "configuration": sharding}]
    return _document(
        array_metadata(shape, shard, dtype, names, codecs=outer, attributes=attributes)
    )


def metadata_documents(spec: LakeSpec, segment_id: str, tokens: int) -> dict[str, bytes]:
    """The `zarr.json` of the group and its arrays, by key below the segment.

    `tokens` is the length of the token axis, a multiple of the chunk.
    """
    attributes = {
        "hslake": {
            "format_version": spec.format_version,
            "lake_id": spec.lake_id,
            "segment_id": segment_id,
        }
    }
    group = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
    grid, hidden = hidden_grid(spec), spec.hidden_size
    documents = {
        GROUP_METADATA: _document(group),
        f"{HIDDEN}/zarr.json": _array(
            [grid.streams, tokens, hidden],
            [grid.streams, grid.shard, hidden],
            [1, grid.chunk, hidden],
            spec.dtype,
            codec_metadata(spec),
            ["stream", "token", "hidden"],
            {"streams": list(spec.streams)},
        ),
    }
    for name, dtype in TOKEN_DTYPES.items():
        g = token_grid(spec, name)
        documents[f"{name}/zarr.json"] = _array(
            [tokens], [g.shard], [g.chunk], dtype.name, TOKEN_CODECS, ["token"], {}
        )
    return documents
