"""Names of a table's Parquet files: `part-<version>-<uuid>-<digest>.parquet`.

The uuid makes a name its own whatever the content: the loser of a race removes its file. The digest
is the first half of the content's SHA-256: Parquet's page checksums say nothing of the footer, and
DuckDB looks at neither. Tables of before have files without one.
"""

import hashlib
import re
import uuid

_NAME = re.compile(r"part-(\d{20})-[0-9a-f]{32}(?:-([0-9a-f]{32}))?\.parquet")


def new_name(version: int, body: bytes) -> str:
    """A name for the file `body` of the commit of `version`."""
    return f"part-{version:020d}-{uuid.uuid4().hex}-{digest(body)}.parquet"


def digest(body: bytes) -> str:
    """What a name says of its content."""
    return hashlib.sha256(body).hexdigest()[:32]


def version_of(name: str) -> int | None:
    """The version whose commit added the file; None when it is no file of a commit."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else None


def digest_of(name: str) -> str | None:
    """The digest in a name; None when it has none."""
    found = _NAME.fullmatch(name)
    return found[2] if found else None


def differs(name: str, body: bytes) -> str | None:
    """How a file's content differs from what its name says; None when it does not, or says
    nothing."""
    told = digest_of(name)
    if told is None or told == digest(body):
        return None
    return f"its SHA-256 begins with {digest(body)}, its name says {told}"
