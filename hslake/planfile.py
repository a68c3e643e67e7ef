"""Read plan files row by row: Parquet, Arrow IPC and JSONL, local or on an fsspec URL.

Every row is checked here; a bad one raises InvalidInput naming file, row and field. Rows are
numbered from 1; in JSONL that is the line.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hslake.errors import HslakeError, InvalidInput, Missing, Unavailable, reason
from hslake.store import check_no_password, is_client_error, open_file

CHATS = ("messages", "conversations")
_CONTENT = ("input_ids", "text", *CHATS)  # a row has one of them
COLUMNS = ("sample_id", "source", "split", "loss_mask", *_CONTENT)
SUFFIXES = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".ipc": "arrow",
    ".feather": "arrow",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
}
_INT32_MAX = 2**31 - 1
_BATCH_ROWS = 512

# (column "text" or one of CHATS, its value, where) -> (input_ids, loss_mask)
Tokenize = Callable[[str, Any, str], tuple[list[int], list[int]]]


@dataclass(frozen=True)
class PlanRow:
    """One checked row. `input_ids` int32 [length], `loss_mask` uint8 [length] of 0 and 1;
    `sample_id`, `source` and `split` are as found, None when absent. `where` is for messages."""

    where: str
    sample_id: object
    source: object
    split: object
    input_ids: np.ndarray
    loss_mask: np.ndarray


def read_rows(
    url: str, vocab_size: int | None = None, tokenize: Tokenize | None = None
) -> Iterator[PlanRow]:
    """The rows of one file. Raises Missing or InvalidInput."""
    for number, values in raw_rows(url):
        yield _row(f"{url}: row {number}", values, vocab_size, tokenize)


def unused_columns(url: str) -> tuple[str, ...]:
    """Columns of a Parquet or Arrow file, or keys of JSONL's first row, that no plan uses."""
    with _open(url) as (file, kind):
        if kind == "parquet":
            names = pq.ParquetFile(file).schema_arrow.names
        elif kind == "arrow":
            names = _arrow_reader(file).schema.names
        else:
            first = next(_jsonl(file, url), None)
            names = list(first[1]) if first else []
    return tuple(n for n in names if n not in COLUMNS)


# -- formats ------------------------------------------------------------------------------------


def raw_rows(url: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """(row number, values) of one file; lists of tokens come as NumPy arrays or Python lists."""
    with _open(url) as (file, kind):
        if kind == "jsonl":
            yield from _jsonl(file, url)
            return
        try:
            number = 1
            for batch in _parquet(file) if kind == "parquet" else _arrow(file):
                for i, values in enumerate(_batch_rows(batch, f"{url}: row", number)):
                    yield number + i, values
                number += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            raise InvalidInput(
                f"{url}: not a readable {kind} file: {error}. Write it again, or name it after "
                f"its real format ({', '.join(SUFFIXES)})"
            ) from error


@contextmanager
def _open(url: str) -> Iterator[tuple[IO[bytes], str]]:
    check_no_password(url)
    path = PurePosixPath(url.split("?", 1)[0])
    packed = path.suffix in (".gz", ".zst", ".bz2", ".xz")
    kind = SUFFIXES.get(PurePosixPath(path.stem).suffix if packed else path.suffix.lower())
    if kind is None or (packed and kind != "jsonl"):
        raise InvalidInput(
            f"{url}: cannot tell its format from the name; expected an ending of "
            f"{', '.join(SUFFIXES)} (JSONL also compressed, as .jsonl.gz)"
        )
    try:
        opened = open_file(url, "infer" if packed else None)
        handle = opened.open()
    except FileNotFoundError as error:
        # Over HTTP, fsspec says so of every failure and keeps the real one as the cause.
        cause = error.__cause__
        if url.startswith("http") and not isinstance(cause, FileNotFoundError | None):
            raise Unavailable(_refused(url, cause)) from error
        raise Missing(f"{url}: there is no such file") from None
    except IsADirectoryError:
        raise InvalidInput(f"{url}: is a directory; name the files in it") from None
    except HslakeError:
        raise
    except (OSError, ValueError, ImportError) as error:
        raise InvalidInput(f"{url}: cannot be opened: {reason(error)}") from error
    except Exception as error:  # of a store's client
        raise Unavailable(_refused(url, error)) from error
    try:
        with handle as file:
            yield file, kind
    except Exception as error:
        if not is_client_error(error):
            raise
        raise Unavailable(_refused(url, error)) from error


def _refused(url: str, error: BaseException) -> str:
    return (
        f"{url}: cannot be reached or refuses ({reason(error)}): check the address and the "
        "credentials in the environment, then try again"
    )


def _jsonl(file: IO[bytes], url: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    number = 0
    try:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            values = json.loads(text, object_pairs_hook=_unique)
            if not isinstance(values, dict):
                raise InvalidInput(
                    f"{url}: row {number}: found {_short(values)}, expected a JSON object"
                )
            yield number, values
    except (ValueError, RecursionError) as error:  # also bad UTF-8 and numbers of 5,000 digits
        raise InvalidInput(f"{url}: row {number}: not a line of JSON: {error}") from error
    except (EOFError, OSError) as error:
        raise InvalidInput(f"{url}: cannot be read after row {number}: {error}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of a key given twice, Python would silently keep the last value."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(k for i, (k, _) in enumerate(pairs) if k in (other for other, _ in pairs[:i]))
        raise ValueError(f"the key {twice!r} is there twice")
    return found


def _parquet(file: IO[bytes]) -> Iterator[pa.RecordBatch]:
    table = pq.ParquetFile(file)
    columns = [n for n in table.schema_arrow.names if n in COLUMNS]
    yield from table.iter_batches(batch_size=_BATCH_ROWS, columns=columns)


def _arrow_reader(file: IO[bytes]) -> Any:
    magic = file.read(6)
    file.seek(0)
    if magic == b"ARROW1":
        return pa.ipc.open_file(file)
    return pa.ipc.open_stream(file)


def _arrow(file: IO[bytes]) -> Iterator[pa.RecordBatch]:
    reader = _arrow_reader(file)
    if isinstance(reader, pa.ipc.RecordBatchFileReader):
        batches: Any = (reader.get_batch(i) for i in range(reader.num_record_batches))
    else:
        batches = reader
    for batch in batches:
        # Flipped bits in a length or an offset would otherwise read foreign memory.
        batch.validate(full=True)
        for at in range(0, batch.num_rows, _BATCH_ROWS):
            yield batch.slice(at, _BATCH_ROWS)


def _batch_rows(batch: pa.RecordBatch, where: str, first: int) -> Iterator[dict[str, Any]]:
    columns: dict[str, Any] = {}
    for name in COLUMNS:
        at = batch.schema.get_all_field_indices(name)
        if len(at) > 1:
            raise InvalidInput(f"{where} {first}: {name}: the file has {len(at)} columns so named")
        if not at:
            continue
        column = batch.column(at[0])
        if isinstance(column, pa.DictionaryArray):
            column = column.dictionary_decode()
        tokens = name in ("input_ids", "loss_mask")
        columns[name] = int_lists(column) if tokens else column.to_pylist()
    for i in range(batch.num_rows):
        yield {name: values[i] for name, values in columns.items()}


def int_lists(column: pa.Array) -> list[Any]:
    """Each row as a NumPy array of integers, or as a Python value when it is anything else."""
    kind = column.type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not is_list or not pa.types.is_integer(kind.value_type):
        return column.to_pylist()
    if column.values.null_count:
        return column.to_pylist()
    values, ends = column.values.to_numpy(zero_copy_only=False), column.offsets.to_numpy()
    valid = column.is_valid().to_pylist()
    return [values[ends[i] : ends[i + 1]] if ok else None for i, ok in enumerate(valid)]


# -- checks -------------------------------------------------------------------------------------


def _row(
    where: str, values: Mapping[str, Any], vocab_size: int | None, tokenize: Tokenize | None
) -> PlanRow:
    found = [name for name in _CONTENT if values.get(name) is not None]
    if not found:
        raise InvalidInput(
            f"{where}: input_ids: missing; expected a list of token ids (or, with --tokenizer, "
            "`text`, `messages` or `conversations`)"
        )
    mask = values.get("loss_mask")
    if found[0] == "input_ids":
        ids = values["input_ids"]
    else:
        if len(found) > 1:
            raise InvalidInput(f"{where}: {found[1]}: there is `{found[0]}` too, expected only one")
        if tokenize is None:
            raise InvalidInput(
                f"{where}: {found[0]}: text needs a tokenizer: give --tokenizer DIR, the model's "
                "own, or a column input_ids"
            )
        if mask is not None:
            raise InvalidInput(
                f"{where}: loss_mask: does not go with `{found[0]}`, whose tokens are not known "
                "yet; give input_ids, or leave the mask out"
            )
        ids, mask = tokenize(found[0], values[found[0]], f"{where}: {found[0]}")
    tokens = check_tokens(ids, vocab_size, f"{where}: input_ids")
    flags = check_mask(mask, len(tokens), f"{where}: loss_mask")
    return PlanRow(
        where, values.get("sample_id"), values.get("source"), values.get("split"), tokens, flags
    )


def check_tokens(ids: Any, vocab_size: int | None, where: str) -> np.ndarray:
    """`ids` as int32 [length]. Raises InvalidInput naming the first token that is none."""
    array = _integers(ids, where, "token ids")
    if not len(array):
        raise InvalidInput(f"{where}: is empty, expected at least one token")
    limit = _INT32_MAX if vocab_size is None else vocab_size - 1
    bad = np.flatnonzero((array < 0) | (array > limit))
    if len(bad):
        at, value = int(bad[0]), int(array[bad[0]])
        of = f"the model's vocabulary has {vocab_size} entries" if vocab_size else "ids are int32"
        raise InvalidInput(f"{where}: token {at} is {value}, expected 0 to {limit}: {of}")
    return array.astype(np.int32)


def check_mask(mask: Any, length: int, where: str) -> np.ndarray:
    """`mask` as uint8 [length] (all ones when None). Raises InvalidInput."""
    if mask is None:
        return np.ones(length, np.uint8)
    if isinstance(mask, list) and all(type(v) is bool for v in mask):
        mask = [int(v) for v in mask]  # a column of type list<bool> says the same
    array = _integers(mask, where, "values of 0 and 1")
    if len(array) != length:
        raise InvalidInput(
            f"{where}: has {len(array)} values for {length} tokens, expected one for each"
        )
    bad = np.flatnonzero((array != 0) & (array != 1))
    if len(bad):
        raise InvalidInput(f"{where}: value {bad[0]} is {array[bad[0]]}, expected 0 or 1")
    return array.astype(np.uint8)


def _integers(values: Any, where: str, what: str) -> np.ndarray:
    """`values` as an integer array; bools, floats, text and nulls are not integers."""
    if isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in "iu":
        return values
    if isinstance(values, np.ndarray):
        values = values.tolist()
    if not isinstance(values, list | tuple):
        raise InvalidInput(f"{where}: found {_short(values)}, expected a list of {what}")
    for at, value in enumerate(values):
        if type(value) is not int:
            raise InvalidInput(
                f"{where}: item {at} is {_short(value)} ({type(value).__name__}), expected a "
                f"list of whole numbers: {what}"
            )
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError:
        at = next(i for i, v in enumerate(values) if not -(2**63) <= v < 2**63)
        raise InvalidInput(
            f"{where}: item {at} is {_short(values[at])}, which does not fit in int32: {what}"
        ) from None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
