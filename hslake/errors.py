"""Errors, grouped by what the caller should do about them.

Every message says what was found, what was expected and what to do.
"""

import os
import re

# Values that must never be printed, wherever a library puts them into a message.
_SECRETS = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
# Up to the last @: keys of AWS hold slashes, where a URL parser sees the start of the path.
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<user>(?:(?!://)\S)+)@")


class HslakeError(Exception):
    """Base of every error hslake raises on purpose. The CLI exits with `exit_code`."""

    exit_code = 2


class InvalidInput(HslakeError):
    """The caller's input is wrong: fix it and call again."""


class Conflict(HslakeError):
    """Somebody else changed the same thing: reload and retry."""


class Missing(HslakeError):
    """Something that was named is not there."""


class Unavailable(HslakeError):
    """A store cannot be reached or refuses: look at its address and access, and try again."""


class Corrupt(HslakeError):
    """Stored data does not read back as what was written.

    Where it is known: `segment_id`, `object` (key below the segment), `stream` and `sample_id`;
    the message says them too.
    """

    exit_code = 1
    segment_id = ""
    object = ""
    stream = ""
    sample_id = ""

    def of(self, sample_id: str) -> "Corrupt":
        """The same of a sample whose name is known."""
        found = Corrupt(f"sample {sample_id!r}: {self}")
        found.__dict__ |= {**self.__dict__, "sample_id": sample_id}
        return found


class NoSpace(HslakeError):
    """No room now: free some, or wait and try again."""


class CheckFailed(HslakeError):
    """A check ran and the answer is no."""

    exit_code = 1


def without_secrets(text: str) -> str:
    """`text` without the keys of the environment and without what precedes the @ of a URL."""
    for name in _SECRETS:
        if os.environ.get(name):
            text = text.replace(os.environ[name], f"${name}")
    return _URL.sub(lambda m: m[0] if _is_path(m) else f"{m['scheme']}://***@", text)


def has_password(url: str) -> bool:
    """Whether a user with a password or key stands in `url`."""
    return any(":" in m["user"] and not _is_path(m) for m in _URL.finditer(url))


def _is_path(match: re.Match[str]) -> bool:
    """Whether the @ belongs to a path, as in s3://bucket/a@b or http://host:80/a@b."""
    host, slash, _ = match["user"].partition("/")
    port = match["scheme"] in ("http", "https") and re.fullmatch(r"[^:]*:\d+", host)
    return bool(slash) and "@" not in host and (":" not in host or bool(port))


def reason(error: BaseException) -> str:
    """One line on a library's error: its kind and message, without secrets and colours."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip().splitlines() or [""]
    return without_secrets(f"{type(error).__name__}: {lines[0].strip()}")
