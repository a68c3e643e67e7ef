"""What every command shares: errors to exit codes, JSON, tables, parsing of options.

Exit codes: 0 fine, 1 a check said no or data is damaged, 2 the call was wrong, 3 a bug in hslake,
130 interrupted.
"""

import dataclasses
import inspect
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from typer.core import TyperGroup

from hslake.errors import HslakeError, InvalidInput, without_secrets

DEBUG = "HSLAKE_DEBUG"
BUG, INTERRUPTED = 3, 130

# The order of a run, which is the order of the help.
ORDER = (
    "create", "plan", "serve", "capture-hf", "preflight", "tune", "extract", "compact", "status",
    "query", "verify", "audit", "log", "pin", "vacuum", "repair", "delete", "gc-staging",
    "draft-config", "demo",
)  # fmt: skip

Lake = Annotated[
    str, typer.Argument(metavar="LAKE", help="Directory or URL of the lake, e.g. s3://bucket/k25.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done; change nothing.")]


class Group(TyperGroup):
    """Turns errors into messages and exit codes, for every command."""

    # ctx is the context class of Typer's click, which is not public in every version
    def list_commands(self, ctx: Any) -> list[str]:
        """Commands in the order of ORDER, others after them."""
        names = super().list_commands(ctx)
        return sorted(names, key=lambda n: ORDER.index(n) if n in ORDER else len(ORDER))

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Raises typer.Exit with the exit code of what went wrong."""
        try:
            return super().invoke(ctx)
        except HslakeError as error:
            if debug(ctx):
                raise
            _print_error(str(error))
            raise typer.Exit(error.exit_code) from error
        except KeyboardInterrupt as error:
            _print_error("interrupted; nothing is half done, run the same command to continue")
            raise typer.Exit(INTERRUPTED) from error
        except BrokenPipeError as error:
            # The reader (head, less) has gone: nothing to tell it, also not at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from error
        except Exception as error:
            if _is_cli(error):
                _hint_repeat(error)
                raise
            if debug(ctx):
                raise
            if isinstance(error, OSError):  # the machine's answer, not a bug of ours
                _print_error(_os_error(error))
                raise typer.Exit(InvalidInput.exit_code) from error
            _print_bug(error)
            raise typer.Exit(BUG) from error
        except BaseException as error:
            # A Rust library that panicked raises this; uncaught, Python would exit with 1, which
            # is what a check says no with.
            if type(error).__name__ != "PanicException" or debug(ctx):
                raise
            _print_bug(error)
            raise typer.Exit(BUG) from error


def _print_bug(error: BaseException) -> None:
    _print_error(
        f"a bug in hslake: {type(error).__name__}: {error}\n"
        "Run again as `hslake --debug ...` for the traceback, and report it"
    )


def debug(ctx: typer.Context) -> bool:
    """Whether tracebacks are wanted: --debug or HSLAKE_DEBUG."""
    root = ctx.find_root()
    return bool(root.params.get("debug")) or os.environ.get(DEBUG, "") not in ("", "0")


def _os_error(error: OSError) -> str:
    names = [str(n) for n in (error.filename, error.filename2) if n is not None]
    what = error.strerror or str(error) or type(error).__name__
    return f"{' and '.join(names)}: {what}" if names else what


def _is_cli(error: Exception) -> bool:
    """Errors that the command line library handles itself (usage, exit, abort)."""
    # Newer Typers carry a click of their own: take the base class from what Typer exports.
    usage = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")
    return isinstance(error, (usage, typer.Exit, typer.Abort))


def _hint_repeat(error: Any) -> None:
    """Say that an option is repeated to somebody who gave it two values at once."""
    message, ctx = getattr(error, "message", ""), getattr(error, "ctx", None)
    if ctx is None or "unexpected extra argument" not in message:
        return
    options = [p.opts[0] for p in ctx.command.params if getattr(p, "multiple", False)]
    if options:
        first = f"{options[0]} A {options[0]} B"
        error.message = f"{message.rstrip('.')}. Several values: repeat the option, as in {first}"


def _print_error(message: str) -> None:
    print(without_secrets(f"error: {message}"), file=sys.stderr)


def note(message: str) -> None:
    """Something worth knowing that is not the result: to standard error."""
    print(message, file=sys.stderr)


# -- output -------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: no NaN, no bytes, times in ISO 8601."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, bytes):
        return value.hex()
    return str(value)


def print_json(value: Any) -> None:
    """Print a report as one JSON document."""
    print(json.dumps(plain(value), indent=2, ensure_ascii=False))


def print_pairs(rows: Iterable[tuple[str, str]], title: str = "") -> None:
    """Print aligned `name  value` lines."""
    pairs = list(rows)
    width = max((len(k) for k, _ in pairs), default=0)
    if title:
        print(title)
    for key, value in pairs:
        print(f"  {key:<{width}}  {value}")


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[Any]], file: TextIO | None = None
) -> None:
    """Print rows under their columns; numbers to the right. Plain text, for people and pipes."""
    texts = [[cell(v) for v in row] for row in rows]
    numeric = [
        bool(rows) and all(isinstance(r[i], int | float | Decimal | None) for r in rows)
        for i in range(len(columns))
    ]
    widths = [max(len(c), *(len(t[i]) for t in texts), 1) for i, c in enumerate(columns)]

    def line(cells: Sequence[str]) -> str:
        parts = [
            c.rjust(w) if right else c.ljust(w)
            for c, w, right in zip(cells, widths, numeric, strict=True)
        ]
        return "  ".join(parts).rstrip()

    print(line(columns), file=file)
    print("  ".join("-" * w for w in widths), file=file)
    for t in texts:
        print(line(t), file=file)


def cell(value: Any, limit: int = 60) -> str:
    """One value of a table: short, on one line, control characters escaped."""
    if value is None:
        return ""
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%d %H:%M:%S")
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list) and len(value) > 8:
        value = f"[{', '.join(map(str, value[:8]))}, … {len(value)} values]"
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(value))
    return text if len(text) <= limit else text[: limit - 1] + "…"


# -- options ------------------------------------------------------------------------------------


def parse_params(pairs: Iterable[str]) -> dict[str, str]:
    """`["k=v", …]` as a dict. Raises InvalidInput."""
    found: dict[str, str] = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not sign or not key:
            raise InvalidInput(f"--param: found {pair!r}, expected name=value")
        if key in found:
            raise InvalidInput(f"--param: {key!r} is given twice")
        found[key] = value
    return found


def check_parent(path: Path, option: str) -> None:
    """Raise InvalidInput unless the directory that `path` goes into exists."""
    if not path.parent.is_dir():
        raise InvalidInput(f"{option} {path}: the directory {path.parent} does not exist")


def examples(*lines: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Append an Examples section to a command's docstring, which is its help."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        # \b: the help formatter leaves the paragraph's lines alone.
        body = "\n".join(f"  {line}" for line in lines)
        command.__doc__ = f"{inspect.cleandoc(command.__doc__ or '')}\n\n\b\nExamples:\n{body}\n"
        return command

    return add
