"""The Zarr v3 metadata document of an array with a regular grid."""

from collections.abc import Mapping, Sequence
from typing import Any

RAW_CODECS: list[dict[str, Any]] = [{"name": "bytes", "configuration": {"endian": "little"}}]


def array_metadata(
    shape: Sequence[int],
    chunk: Sequence[int],
    dtype: str,
    names: Sequence[str],
    *,
    codecs: Sequence[Mapping[str, Any]] = RAW_CODECS,
    attributes: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Contents of `zarr.json`: default keys with '/', fill value 0, raw little-endian chunks unless
    `codecs` says otherwise; `names` are the dimensions'."""
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0 if "int" in dtype else 0.0,
        "codecs": list(codecs),
        "attributes": dict(attributes or {}),
        "dimension_names": list(names),
    }
