"""One line of a go / no-go report."""

from dataclasses import dataclass

PASS, WARN, FAIL = "pass", "warn", "fail"


@dataclass(frozen=True)
class Check:
    """`result`: pass | warn | fail; `found`: what is the case; `todo`: what to do, unless it
    passed; `where`: the server it is about, if it is about one."""

    name: str
    result: str
    found: str
    todo: str = ""
    where: str = ""


def passed(name: str, found: str) -> Check:
    """All is well."""
    return Check(name, PASS, found)


def warned(name: str, found: str, todo: str) -> Check:
    """It may go wrong, or could not be looked at."""
    return Check(name, WARN, found, todo)


def failed(name: str, found: str, todo: str) -> Check:
    """It will go wrong."""
    return Check(name, FAIL, found, todo)
