"""What the errors of machines and libraries mean to a caller of hslake.

Whatever a retry may mend is Unavailable, NoSpace or Conflict, and nothing else is. Never Missing or
Corrupt: what merely cannot be read now must not be taken for damage.
"""

import errno
import os
import re

from hslake.errors import HslakeError, Missing, NoSpace, Unavailable, reason, without_secrets

_FULL = (errno.ENOSPC, errno.EDQUOT)
# Codes of stores that are full: RGW and others, MinIO, any (RFC 4918).
_FULL_STORE = re.compile(r"QuotaExceeded|StorageFull|InsufficientStorage|status code: 507")
_NO_BUCKET = re.compile(r"NoSuchBucket|bucket does not exist", re.IGNORECASE)
_CODE = re.compile(r"<Code>(\w+)</Code>")
# What the clients, delta-rs's among them, say of a store that failed, not of what it holds; other
# libraries (DuckDB, Delta's kernel) pass it on inside messages of their own.
_FAILED = re.compile(
    r"(?:Generic (?:S3|GCS|MicrosoftAzure|HTTP) error|The operation lacked the necessary privileges"
    r"|error sending request|operation timed out)[^\n]*"
)


class NoBucket(Missing):
    """Not only the object, but all that could hold it is missing."""


def refusal(where: str, error: BaseException) -> HslakeError | None:
    """What the machine's refusal is to a caller of hslake; None when `error` is none."""
    named = re.search(r"\(os error (\d+)\)", str(error))  # deltalake's, which carry no errno
    code = error.errno if isinstance(error, OSError) else None
    code = code or (int(named[1]) if named else None)
    if code in (None, errno.ENOENT, errno.ENOTDIR):
        return None
    what = f"{where}: {os.strerror(code)}"
    if code in _FULL:
        return NoSpace(f"{what}: make room there and run it again")
    if code == errno.EFBIG:
        return NoSpace(f"{what}: raise this process's limit of file sizes (ulimit -f)")
    return Unavailable(
        f"{what}: this user must be able to read and write there: look at owner, permissions, "
        "mount and limits, then run it again"
    )


def remote_failure(where: str, error: BaseException) -> HslakeError | None:
    """NoSpace or Unavailable when an S3 client's failure stands somewhere in `error`'s message."""
    return remote(where, error) if _FAILED.search(str(error)) else None


def is_client_error(error: BaseException) -> bool:
    """Whether S3's client raised it: it has kinds of its own, which are no OSError."""
    return type(error).__module__.startswith("obstore.")


def names_no_bucket(error: BaseException) -> bool:
    """Whether the store said that the bucket does not exist."""
    return bool(_NO_BUCKET.search(str(error)))


def no_bucket(root: str) -> NoBucket:
    """The error of a bucket that nobody made."""
    return NoBucket(f"{root}: its bucket does not exist: make it first")


def remote(where: str, error: BaseException) -> HslakeError:
    """NoSpace or Unavailable for whatever a store's client raised."""
    said = what_it_said(error)
    if _FULL_STORE.search(str(error)):
        return NoSpace(f"{where}: the store is full ({said}): make room or raise the quota there")
    check = "the bucket, the credentials and AWS_ENDPOINT_URL"
    if "://" in where and not where.startswith(("s3://", "s3a://")):
        check = "the address and the credentials, and that it can be written to (http cannot)"
    return Unavailable(
        f"{where}: the store cannot be reached or refuses ({said}): check {check}, then try again"
    )


def what_it_said(error: BaseException) -> str:
    """One line on a client's error: its message without the page of details, and the S3 code."""
    inner = _FAILED.search(str(error))
    line = without_secrets(inner[0]) if inner else reason(error)
    line = line.partition("<?xml")[0].rstrip(" :-")
    code = _CODE.search(str(error))
    return f"{line}: {code[1]}" if code and code[1] not in line else line
