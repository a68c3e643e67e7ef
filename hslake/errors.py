"""Errors, grouped by what the caller should do about them.

Every message says what was found, what was expected and what to do.
"""


class HslakeError(Exception):
    """Base of every error hslake raises on purpose. The CLI exits with `exit_code`."""

    exit_code = 2


class InvalidInput(HslakeError):
    """The caller's input is wrong: fix it and call again."""


class Conflict(HslakeError):
    """Somebody else changed the same thing: reload and retry."""


class Missing(HslakeError):
    """Something that was named is not there."""


class Corrupt(HslakeError):
    """Stored data does not read back as what was written."""

    exit_code = 1


class NoSpace(HslakeError):
    """No room now: free some, or wait and try again."""


class CheckFailed(HslakeError):
    """A check ran and the answer is no."""

    exit_code = 1
