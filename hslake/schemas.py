"""Table and file formats, loaded from the top-level `schemas/` folder (the single source).

Tables are JSON with a list of fields (name, type, nullable, doc); JSON files are described by
JSON Schema. Both are packaged with the wheel and found beside the package in an editable install.
"""

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pyarrow as pa

from hslake.errors import InvalidInput

_TYPES: dict[str, pa.DataType] = {
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "list<int32>": pa.list_(pa.int32()),
    "list<int64>": pa.list_(pa.int64()),
    "list<float>": pa.list_(pa.float32()),
}
# To JSON Schema 4.0 is an integer, and 10**30 is one that comes out of fast parsers as a float. NaN
# is a number to Python's parser, and within any bounds.
_Validator = jsonschema.validators.extend(
    jsonschema.Draft202012Validator,
    type_checker=jsonschema.Draft202012Validator.TYPE_CHECKER.redefine_many(
        {
            "integer": lambda _, value: _is_integer(value),
            "number": lambda _, value: _is_number(value),
        }
    ),
)
_validators: dict[tuple[str, str], Any] = {}  # by schema and definition


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_integer(value) or (isinstance(value, float) and math.isfinite(value))


def data_dir(name: str) -> Path:
    """Folder of packaged data (`schemas` or `queries`), in a wheel or an editable install."""
    package = Path(__file__).resolve().parent
    for folder in (package / f"_{name}", package.parent / name):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"the folder {name!r} is missing from this hslake installation")


@cache
def load(name: str) -> dict[str, Any]:
    """The parsed JSON of `schemas/<name>.json`."""
    return json.loads((data_dir("schemas") / f"{name}.json").read_text("utf-8"))


@cache
def arrow_schema(name: str) -> pa.Schema:
    """Arrow schema of a table: `manifest`, `plan` or `journal`."""
    fields = load(name)["fields"]
    return pa.schema(
        [pa.field(f["name"], _TYPES[f["type"]], nullable=f.get("nullable", True)) for f in fields]
    )


def parse_json(text: str | bytes, where: str) -> Any:
    """The JSON document in `text`. Raises InvalidInput naming `where`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # also bad UTF-8 and 100,000 brackets
        raise InvalidInput(f"{where} is not JSON ({error}): damaged, or another file") from None


def validate(document: Any, name: str, where: str, definition: str = "") -> None:
    """Check a parsed JSON document against `schemas/<name>.json`, or a definition in it.

    Raises InvalidInput naming `where` and the field that does not fit.
    """
    found = load(name)
    key = name, definition
    if key not in _validators:  # making one takes longer than most documents
        schema = {"$ref": f"#/$defs/{definition}", "$defs": found["$defs"]} if definition else found
        _validators[key] = _Validator(schema)
    validator = _validators[key]
    error = next(iter(sorted(validator.iter_errors(document), key=lambda e: list(e.path))), None)
    if error is not None:
        field = "/".join(str(p) for p in error.absolute_path) or "the top level"
        raise InvalidInput(
            f"{where}: {field}: {error.message} (expected as in schemas/{name}.json)"
        )
