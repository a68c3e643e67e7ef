"""The Zarr v3 extension data type `bfloat16` for zarr-python, which ships none.

Native dtype uint16: the exact bits, so nothing is rounded and no -0.0 chunk is taken for a fill
value. TensorStore and zarrs read the same arrays under the same name.

For `zarr.open_group` nobody needs to import this module: zarr-python does, through the entry points
of an installed hslake (see `Buffer`). Before `zarr.open_array`, import it where zarr is older than
3.4.1. Importing it registers the data type.
"""

from typing import Any, ClassVar, Self

import numpy as np
import zarr.buffer.cpu
from zarr.dtype import UInt16, data_type_registry

try:
    from zarr.errors import DataTypeValidationError  # type: ignore[attr-defined]
except ImportError:  # zarr before 3.3
    from zarr.dtype import DataTypeValidationError  # type: ignore[attr-defined, no-redef]


class BFloat16(UInt16):
    """bfloat16 values as their uint16 bit patterns (name `bfloat16`, no configuration)."""

    _zarr_v3_name: ClassVar[str] = "bfloat16"  # type: ignore[assignment]
    __slots__ = ()

    @classmethod
    def from_native_dtype(cls, dtype: Any) -> Self:
        """Refuse: a plain uint16 array stays `uint16` unless `bfloat16` is asked for by name."""
        raise DataTypeValidationError(f"{dtype} does not name bfloat16; ask for it by name")

    @classmethod
    def _from_json_v2(cls, data: Any) -> Self:
        raise DataTypeValidationError("bfloat16 exists in Zarr v3 only")

    @classmethod
    def _from_json_v3(cls, data: Any) -> Self:
        if data == cls._zarr_v3_name:
            return cls()
        raise DataTypeValidationError(f"found {data!r}, expected 'bfloat16'")

    def to_json(self, zarr_format: int) -> Any:  # type: ignore[override]
        """The metadata name of the type, `"bfloat16"`."""
        if zarr_format != 3:
            raise ValueError("bfloat16 exists in Zarr v3 only")
        return self._zarr_v3_name

    def from_json_scalar(self, data: Any, *, zarr_format: int) -> np.uint16:  # type: ignore[override]
        """Fill value: a JSON number (the float value) or `"0x…"` (the bit pattern)."""
        if isinstance(data, str):
            special = {"NaN": 0x7FC0, "Infinity": 0x7F80, "-Infinity": 0xFF80}
            return np.uint16(special[data] if data in special else int(data, 16))
        return np.uint16(np.float32(data).view(np.uint32) >> np.uint32(16))

    def to_json_scalar(self, data: Any, *, zarr_format: int) -> Any:  # type: ignore[override]
        """Fill value as a JSON number where it is finite, otherwise as hex bits."""
        bits = int(data)
        value = float(np.uint32(bits << 16).view(np.float32))
        return value if np.isfinite(value) and bits != 0x8000 else f"0x{bits:04x}"


data_type_registry.register(BFloat16._zarr_v3_name, BFloat16)


class Buffer(zarr.buffer.cpu.Buffer):
    """zarr's buffer, unchanged, which nobody selects: it is here for its entry point.

    zarr-python before 3.4.1 collects the entry points of `zarr.data_type` but never loads them.
    Those of `zarr.buffer` every version loads before it reads a group's metadata, and with this
    class the module, which registers the data type. From 3.4.1 on the entry point of
    `zarr.data_type` is enough.
    """
