"""The lake's spec (`hslake.json`): one model, one set of streams, one dtype, one geometry."""

import dataclasses
import hashlib
import json
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from hslake.errors import InvalidInput, Missing
from hslake.fingerprint import check_fingerprint, model_fingerprint
from hslake.schemas import parse_json, validate
from hslake.store import NoBucket, open_store
from hslake.streams import FINAL, parse_streams

__all__ = [
    "LakeSpec",
    "check_fingerprint",
    "make_spec",
    "model_fingerprint",
    "read_spec",
]

FORMAT_VERSION = 1
SPEC_FILE = "hslake.json"
CODECS = ("standard", "bf16plane", "none")
DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4}

CHUNK_TOKENS = 256
# A shard of the design's reference model: 4 streams x 8,192 tokens x 7,168 x 2 bytes.
_SHARD_BYTES = 4 * 8192 * 7168 * 2
_SHARDS_PER_SEGMENT = 8
_MAX_SHARD_TOKENS = 65_536


@dataclass(frozen=True)
class ModelInfo:
    """What is known of the model; `fingerprint` maps `config` and `weights` to SHA-256 or None,
    `final_norm` the keys below model/final_norm to theirs (None: no norm, or an older lake)."""

    name: str
    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int | None
    fingerprint: dict[str, str | None]
    final_norm: dict[str, str] | None = None


@dataclass(frozen=True)
class Geometry:
    """Sizes in tokens: inner chunk, shard, and the most a segment holds (one sample may exceed)."""

    chunk_tokens: int
    shard_tokens: int
    segment_tokens: int


@dataclass(frozen=True)
class Estimate:
    """What the lake was expected to hold and take: tokens, stored bytes."""

    tokens: int | None = None
    bytes: int | None = None


@dataclass(frozen=True)
class LakeSpec:
    """The immutable description of one lake."""

    format_version: int
    lake_id: str
    created_at: str
    model: ModelInfo
    streams: tuple[str, ...]
    dtype: str
    codec: str
    geometry: Geometry
    estimate: Estimate

    @property
    def hidden_size(self) -> int:
        return self.model.hidden_size

    @property
    def num_layers(self) -> int:
        return self.model.num_layers

    @property
    def itemsize(self) -> int:
        """Bytes of one value."""
        return DTYPES[self.dtype]

    @property
    def bytes_per_token(self) -> int:
        """Raw bytes of one token over all streams."""
        return len(self.streams) * self.hidden_size * self.itemsize

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The captured boundaries, ascending (without `final`)."""
        return tuple(int(s) for s in self.streams if s != FINAL)

    @property
    def has_final(self) -> bool:
        return FINAL in self.streams

    @property
    def lake8(self) -> str:
        """First 8 hex digits of the lake id, carried by request ids."""
        return self.lake_id[:8]

    def to_json(self) -> str:
        """The text of `hslake.json`."""
        fields = dataclasses.asdict(self)
        return json.dumps({**fields, "digest": _digest(fields)}, indent=1) + "\n"

    @staticmethod
    def from_json(text: str | bytes, where: str = SPEC_FILE) -> "LakeSpec":
        """Parse and check a spec; raises InvalidInput naming `where` and the field."""
        data = parse_json(text, where)
        version = data.get("format_version") if isinstance(data, dict) else None
        if isinstance(version, int) and version > FORMAT_VERSION:
            raise InvalidInput(
                f"{where} has format version {version}; this hslake reads up to "
                f"{FORMAT_VERSION}: upgrade hslake"
            )
        validate(data, "hslake", where)
        digest = data.pop("digest", None)
        model = ModelInfo(**data["model"])
        streams = parse_streams(data["streams"], model.num_layers, where)
        if list(streams) != data["streams"]:  # they are the axis of every array: never reordered
            raise InvalidInput(
                f"{where}: streams: found {data['streams']}, expected boundaries ascending and "
                f"then 'final', {list(streams)}: the file was changed, restore it"
            )
        # Lakes of before there was a digest open without.
        if digest is not None and digest != _digest(data):
            raise InvalidInput(
                f"{where}: digest: found {digest}, its fields give {_digest(data)}: the file was "
                "changed; every sample was stored as it said before: restore it from a copy"
            )
        return LakeSpec(
            **{
                **data,
                "model": model,
                "streams": streams,
                "geometry": Geometry(**data["geometry"]),
                "estimate": Estimate(**data["estimate"]),
            }
        )


def _digest(fields: dict[str, Any]) -> str:
    """SHA-256 over the canonical JSON of a spec's fields: a flipped bit may still be valid JSON."""
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def make_geometry(streams: int, hidden_size: int, itemsize: int) -> Geometry:
    """Shards of about 470 MB and segments of eight; narrower models get more tokens, capped."""
    tokens = _SHARD_BYTES // (streams * hidden_size * itemsize) // CHUNK_TOKENS * CHUNK_TOKENS
    shard = min(max(tokens, CHUNK_TOKENS), _MAX_SHARD_TOKENS)
    return Geometry(CHUNK_TOKENS, shard, shard * _SHARDS_PER_SEGMENT)


def make_spec(
    model: ModelInfo,
    streams: tuple[str, ...],
    *,
    dtype: str = "bfloat16",
    codec: str = "standard",
    estimate: Estimate | None = None,
) -> LakeSpec:
    """A new spec with a fresh lake id. Raises InvalidInput for an unknown dtype or codec."""
    if dtype not in DTYPES:
        raise InvalidInput(f"dtype {dtype!r}: expected one of {', '.join(DTYPES)}")
    if codec not in CODECS:
        raise InvalidInput(f"codec {codec!r}: expected one of {', '.join(CODECS)}")
    if codec == "bf16plane" and dtype != "bfloat16":
        raise InvalidInput(
            f"codec bf16plane stores bfloat16 only, the lake is {dtype}: use --codec standard"
        )
    spec = LakeSpec(
        FORMAT_VERSION,
        uuid.uuid4().hex,
        datetime.now(UTC).isoformat(timespec="seconds"),
        model,
        streams,
        dtype,
        codec,
        make_geometry(len(streams), model.hidden_size, DTYPES[dtype]),
        estimate or Estimate(),
    )
    return LakeSpec.from_json(spec.to_json(), "the new spec")


def read_spec(url: str) -> LakeSpec:
    """Read `<url>/hslake.json` of a local folder or fsspec URL.

    Raises Missing when there is none, InvalidInput when it does not parse, Unavailable.
    """
    store = open_store(url)
    try:
        text = store.read(SPEC_FILE)
    except NoBucket:
        raise
    except Missing:
        raise Missing(
            f"no lake at {url}: {SPEC_FILE} is not there; `hslake create` makes one"
        ) from None
    return LakeSpec.from_json(text, store.url(SPEC_FILE))
