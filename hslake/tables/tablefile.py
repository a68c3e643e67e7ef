"""A table's Parquet files: rows in the table's schema, to bytes and back."""

import io
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.parquet as pq

from hslake.errors import InvalidInput
from hslake.schemas import arrow_schema


def fill(rows: pa.Table, name: str, version: int) -> pa.Table:
    """`rows` in the schema of table `name`: commit_version and committed_at set, absent columns
    null. Raises InvalidInput."""
    schema, count = arrow_schema(name), rows.num_rows
    unknown = set(rows.column_names) - set(schema.names)
    if unknown:
        raise InvalidInput(f"rows for {name} have unknown columns {sorted(unknown)}")
    now = datetime.now(UTC)
    columns = []
    for field in schema:
        if field.name == "commit_version":
            columns.append(pa.array([version] * count, field.type))
        elif field.name in rows.column_names:
            columns.append(rows[field.name].cast(field.type))
        elif field.name == "committed_at":
            columns.append(pa.array([now] * count, field.type))
        elif field.nullable:
            columns.append(pa.nulls(count, field.type))
        else:
            raise InvalidInput(f"rows for {name} lack the column {field.name}")
    return pa.table(columns, schema=schema)


def encode(data: pa.Table) -> bytes:
    """A Parquet file with page checksums; the same bytes for the same rows, however chunked."""
    out = io.BytesIO()
    pq.write_table(data.combine_chunks(), out, compression="zstd", write_page_checksum=True)
    return out.getvalue()


def decode(body: bytes, schema: pa.Schema) -> pa.Table:
    """The columns of `schema`, null where the file lacks one. Raises pa.ArrowException, OSError."""
    with pq.ParquetFile(pa.BufferReader(body), page_checksum_verification=True) as file:
        have = set(file.schema_arrow.names)
        found = file.read(columns=[n for n in schema.names if n in have])
    columns = [
        found[f.name].cast(f.type) if f.name in have else pa.nulls(found.num_rows, f.type)
        for f in schema
    ]
    return pa.table(columns, schema=schema)
