"""The command line: one module per group of commands, each with `register(app)`.

A command is a thin shell over one library function; heavy modules are imported inside commands,
so that `hslake --help` answers at once.
"""

import importlib
import pkgutil
from typing import Annotated

import typer

from hslake.cli.common import Group

app = typer.Typer(
    name="hslake",
    cls=Group,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        from importlib.metadata import version

        print(f"hslake {version('hslake')}")
        raise typer.Exit


@app.callback()
def _root(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks (also: HSLAKE_DEBUG=1).")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """A data lake for LLM hidden states: capture in SGLang, store as Zarr, query with SQL, train.

    \b
    A run, in order:
      hslake create LAKE --model-config MODEL/config.json --capture eagle3
      hslake plan LAKE samples.parquet --source A1
      hslake serve LAKE --staging /dev/shm/hslake -- --model-path MODEL
      hslake compact LAKE --staging /dev/shm/hslake --watch        (beside the server)
      hslake preflight LAKE --server http://localhost:30000
      hslake extract LAKE --server http://localhost:30000
      hslake status LAKE

    Exit codes: 0 fine, 1 a check said no, 2 the call or its input is wrong.
    """


for _info in pkgutil.iter_modules(__path__):
    if _info.name != "common":
        importlib.import_module(f"{__name__}.{_info.name}").register(app)


def main() -> None:
    """Entry point of the `hslake` script."""
    app()
