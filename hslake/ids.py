"""Names of things that travel: sample ids, request ids, attempts, token hashes."""

import base64
import binascii
import hashlib
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hslake.errors import InvalidInput

MAX_ID_BYTES = 200
MAX_SOURCE_BYTES = 40
MAX_REQUEST_ID = 400
PROBE_PREFIX = "__hslake_probe__"

_ATTEMPT = re.compile(r"[0-9a-z]{4,32}")
_LAKE8 = re.compile(r"[0-9a-f]{8}")
# Ids show up in tables, logs, shells and file names: whatever could end a line, a string or a path,
# or cannot be seen (zero width, writing direction), is refused. Listed, not asked of Python's
# Unicode tables: client and server may have different ones and must agree.
_BAD = re.compile(
    r"""[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff/\\"'`]|^\.{1,2}$"""
)


def check_sample_id(sample_id: object, where: str = "sample_id") -> str:
    """Return `sample_id` if it may name a sample; raise InvalidInput otherwise."""
    return _check_name(sample_id, where, MAX_ID_BYTES)


def check_source(source: object, where: str = "source") -> str:
    """Return `source` if it may name a dataset; raise InvalidInput otherwise."""
    return _check_name(source, where, MAX_SOURCE_BYTES)


def _check_name(value: object, where: str, limit: int) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidInput(f"{where}: found {value!r}, expected a non-empty string")
    try:
        size = len(value.encode("utf-8"))
    except UnicodeEncodeError:
        raise InvalidInput(f"{where}: {value!r} is not valid Unicode text") from None
    if size > limit:
        raise InvalidInput(f"{where}: {value[:40]!r}… has {size} bytes, expected at most {limit}")
    bad = _BAD.search(value)
    if bad or value != value.strip():
        what = repr(bad.group()) if bad else "white space at an end"
        raise InvalidInput(
            f"{where}: {value!r} contains {what}; slashes, quotes, control and invisible "
            "characters, white space at the ends, '.' and '..' are not allowed: rename it"
        )
    return value


def token_hash(ids: Sequence[int] | np.ndarray) -> str:
    """First 16 bytes of SHA-256 over the ids as little-endian int32, in hex."""
    return hashlib.sha256(np.asarray(ids, dtype="<i4").tobytes()).digest()[:16].hex()


def new_attempt() -> str:
    """A fresh attempt id: 12 hex digits, unique for the life of a lake in practice."""
    return secrets.token_hex(6)


def _b64(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode("utf-8")).decode("ascii").rstrip("=")


def _unb64(text: str) -> str:
    raw = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    return raw.decode("utf-8")


@dataclass(frozen=True)
class RequestId:
    """What a capture request's `rid` carries: enough to reserve rows without asking anybody."""

    lake8: str
    attempt: str
    length: int
    source: str
    sample_id: str

    def encode(self) -> str:
        """`hslake.<lake8>.<attempt>.<length>.<b64url source>.<b64url sample_id>`."""
        parts = (
            self.lake8,
            self.attempt,
            str(self.length),
            _b64(self.source),
            _b64(self.sample_id),
        )
        return "hslake." + ".".join(parts)


def parse_request_id(rid: object) -> RequestId | None:
    """The RequestId in `rid`, or None when the request is not hslake's. Never raises."""
    if not isinstance(rid, str) or not rid.startswith("hslake.") or len(rid) > MAX_REQUEST_ID:
        return None
    parts = rid.split(".")
    if len(parts) != 6:
        return None
    _, lake8, attempt, length, source, sample_id = parts
    if not (_LAKE8.fullmatch(lake8) and _ATTEMPT.fullmatch(attempt)):
        return None
    if not re.fullmatch(r"[1-9][0-9]{0,8}", length):
        return None
    try:
        found = RequestId(lake8, attempt, int(length), _unb64(source), _unb64(sample_id))
        check_sample_id(found.sample_id)
        check_source(found.source)
    except (binascii.Error, UnicodeDecodeError, InvalidInput):
        return None
    return found if found.encode() == rid else None
