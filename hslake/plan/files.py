"""Read plan files row by row: Parquet, Arrow IPC and JSONL, local or on an fsspec URL.

Rows are numbered from 1; in JSONL that is the line. What cannot be read raises InvalidInput naming
file and row.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from hslake.errors import HslakeError, InvalidInput, Missing, Unavailable, reason
from hslake.plan.checks import short
from hslake.plan.folders import PACKED, SUFFIXES, PlanFile, kind_of
from hslake.store import check_no_password, is_client_error, open_file

CHATS = ("messages", "conversations")
CONTENT = ("input_ids", "text", *CHATS)
COLUMNS = ("sample_id", "source", "split", "loss_mask", "tools", *CONTENT)
_TOKENS = ("input_ids", "loss_mask")
_BATCH_ROWS = 512
_BUFFER = 4 << 20  # bytes read at once of a Parquet column


def parse_columns(pairs: Iterable[str]) -> dict[str, str]:
    """`["input_ids=tokens", …]`, ours = theirs, as a dict. Raises InvalidInput."""
    found: dict[str, str] = {}
    for pair in pairs:
        ours, sign, theirs = pair.partition("=")
        if not sign or not theirs or ours not in COLUMNS:
            raise InvalidInput(
                f"--column: found {pair!r}, expected OURS=THEIRS with OURS one of "
                f"{', '.join(COLUMNS)}"
            )
        if ours in found:
            raise InvalidInput(f"--column: {ours!r} is given twice")
        found[ours] = theirs
    return found


def raw_rows(
    file: PlanFile | str, names: Mapping[str, str] | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(row number, values by our names) of one file; lists of tokens come as NumPy arrays or Python
    lists. `names`: our name -> the file's. Raises Missing, Unavailable or InvalidInput."""
    file = PlanFile(file) if isinstance(file, str) else file
    theirs = {ours: (names or {}).get(ours, ours) for ours in COLUMNS}
    with _open(file.url) as (handle, kind):
        if kind == "jsonl":
            yield from _jsonl_rows(handle, file.url, theirs)
            return
        try:
            number = 1
            for batch in _batches(file, handle, kind, theirs):
                for i, values in enumerate(_batch_rows(batch, file.url, number, theirs)):
                    yield number + i, values
                number += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            raise InvalidInput(
                f"{file.url}: not a readable {kind} file: {error}. Write it again, or name it "
                f"after its real format ({', '.join(SUFFIXES)})"
            ) from error


def unused_columns(file: PlanFile | str, names: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Columns of a Parquet or Arrow file, or keys of JSONL's first row, that no plan uses."""
    url = file if isinstance(file, str) else file.url
    with _open(url) as (handle, kind):
        if kind == "parquet":
            found = pq.ParquetFile(handle).schema_arrow.names
        elif kind == "arrow":
            found = _arrow_reader(handle).schema.names
        else:
            first = next(_jsonl(handle, url), None)
            found = list(first[1]) if first else []
    used = {(names or {}).get(ours, ours) for ours in COLUMNS}
    return tuple(n for n in found if n not in used)


# -- opening ------------------------------------------------------------------------------------


@contextmanager
def _open(url: str) -> Iterator[tuple[IO[bytes], str]]:
    check_no_password(url)
    kind = kind_of(url)
    if kind is None:
        raise InvalidInput(
            f"{url}: cannot tell its format from the name; expected an ending of "
            f"{', '.join(SUFFIXES)} (JSONL also compressed, as .jsonl.gz), or a folder"
            + ("; one JSON array: `jq -c '.[]' FILE > FILE.jsonl`" if url.endswith(".json") else "")
        )
    packed = url.split("?", 1)[0].endswith(PACKED)
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


# -- JSONL --------------------------------------------------------------------------------------


def _jsonl_rows(
    file: IO[bytes], url: str, theirs: Mapping[str, str]
) -> Iterator[tuple[int, dict[str, Any]]]:
    first = True
    for number, values in _jsonl(file, url):
        if first:  # later rows may lack an optional one; a name that is wrong is wrong at once
            _check_mapped(theirs, values, f"{url}: row {number}")
            first = False
        yield number, {ours: values[name] for ours, name in theirs.items() if name in values}


def _jsonl(file: IO[bytes], url: str) -> Iterator[tuple[int, dict[str, Any]]]:
    number = 0
    try:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            values = json.loads(text, object_pairs_hook=_unique)
            if not isinstance(values, dict):
                raise InvalidInput(
                    f"{url}: row {number}: found {short(values)}, expected a JSON object"
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


def _check_mapped(theirs: Mapping[str, str], have: Iterable[str], where: str) -> None:
    names = list(have)
    for ours, name in theirs.items():
        if ours != name and name not in names:
            raise InvalidInput(
                f"{where}: --column {ours}={name}: there is no {name!r}; found {', '.join(names)}"
            )


# -- Parquet and Arrow --------------------------------------------------------------------------


def _batches(
    file: PlanFile, handle: IO[bytes], kind: str, theirs: Mapping[str, str]
) -> Iterator[pa.RecordBatch]:
    if kind == "parquet":
        # Buffered ahead, all row groups of the file would be held until the last one is read.
        table = pq.ParquetFile(handle, pre_buffer=False, buffer_size=_BUFFER)
        have = table.schema_arrow.names
        _check_mapped(theirs, have, file.url)
        wanted = set(theirs.values())
        columns = [n for n in have if n in wanted]
        yield from table.iter_batches(batch_size=_BATCH_ROWS, columns=columns)
        return
    reader = _arrow_reader(handle)
    _check_mapped(theirs, reader.schema.names, file.url)
    if file.indices is not None:
        yield from _chosen(file, reader)
        return
    if isinstance(reader, pa.ipc.RecordBatchFileReader):
        batches: Any = (reader.get_batch(i) for i in range(reader.num_record_batches))
    else:
        batches = reader
    for batch in batches:
        # Flipped bits in a length or an offset would otherwise read foreign memory.
        batch.validate(full=True)
        for at in range(0, batch.num_rows, _BATCH_ROWS):
            yield batch.slice(at, _BATCH_ROWS)


def _arrow_reader(file: IO[bytes]) -> Any:
    magic = file.read(6)
    file.seek(0)
    if magic == b"ARROW1":
        return pa.ipc.open_file(file)
    return pa.ipc.open_stream(file)


def _chosen(file: PlanFile, reader: Any) -> Iterator[pa.RecordBatch]:
    """The rows that an indices mapping chooses, in its order. Raises InvalidInput."""
    url, path = str(file.indices), file.url.removeprefix("file://")
    if "://" in path:
        raise InvalidInput(
            f"{file.url}: its rows are chosen by an indices mapping ({url}), which is read of a "
            "local folder only: copy it here, or call flatten_indices() and save the dataset again"
        )
    with _open(url) as (handle, _):
        column = _arrow_reader(handle).read_all().column(0)
        indices = column.to_numpy()
    with pa.memory_map(path) as mapped:  # rows are taken from anywhere in it
        rows = _arrow_reader(mapped).read_all()
        rows.validate(full=True)
        if indices.dtype.kind not in "iu" or (
            len(indices) and not 0 <= indices.min() <= indices.max() < rows.num_rows
        ):
            raise InvalidInput(f"{url}: names rows that {file.url} does not have: damaged")
        for at in range(0, len(indices), _BATCH_ROWS):
            some = rows.take(pa.array(indices[at : at + _BATCH_ROWS]))
            yield from some.combine_chunks().to_batches()


def _batch_rows(
    batch: pa.RecordBatch, url: str, first: int, theirs: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    columns: dict[str, Any] = {}
    for ours, name in theirs.items():
        at = batch.schema.get_all_field_indices(name)
        if len(at) > 1:
            raise InvalidInput(
                f"{url}: row {first}: {name}: the file has {len(at)} columns so named"
            )
        if not at:
            continue
        column = batch.column(at[0])
        if isinstance(column, pa.DictionaryArray):
            column = column.dictionary_decode()
        if ours in _TOKENS:
            columns[ours] = int_lists(column)
        elif ours in CHATS or ours == "tools":
            columns[ours] = [_pruned(v) for v in _values(column, url, first, name)]
        else:
            columns[ours] = _values(column, url, first, name)
    for i in range(batch.num_rows):
        yield {name: values[i] for name, values in columns.items()}


def _values(column: pa.Array, url: str, first: int, name: str) -> list[Any]:
    try:
        return list(column.to_pylist())
    except (ValueError, OverflowError):  # bytes that are no UTF-8, days that no calendar has
        pass
    for i, one in enumerate(column):
        try:
            one.as_py()
        except (ValueError, OverflowError) as error:
            raise InvalidInput(
                f"{url}: row {first + i}: {name}: a value of type {column.type} does not read: "
                f"{error}"
            ) from None
    raise InvalidInput(f"{url}: row {first}: {name}: a column of {column.type} does not read")


def _pruned(value: Any) -> Any:
    """A nested value without nulls: Arrow gives each struct the keys of all others."""
    if isinstance(value, dict):
        return {k: _pruned(v) for k, v in value.items() if v is not None}
    return [_pruned(v) for v in value] if isinstance(value, list) else value


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
