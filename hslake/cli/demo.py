"""`hslake demo`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from hslake.cli.common import Json, examples, print_json


class Engine(StrEnum):
    """What captures the states."""

    sglang = "sglang"
    hf = "hf"


@examples(
    "make demo",
    "hslake demo .demo --server-python .venv-sglang/bin/python",
    "hslake demo --engine hf --model MODEL",
)
def demo(
    directory: Annotated[
        Path, typer.Argument(metavar="[DIR]", help="Folder of the demo; each run gets its own.")
    ] = Path(".demo"),
    engine: Annotated[Engine, typer.Option(help="What captures the states.")] = Engine.sglang,
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Model folder (default: DIR/model).")
    ] = None,
    server_python: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Interpreter that has SGLang and hslake.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="About so many samples, for a quick look.")
    ] = None,
    train_seconds: Annotated[
        float | None, typer.Option(min=1, help="How long to train the draft head.")
    ] = None,
    json: Json = False,
) -> None:
    """Run the whole pipeline on this machine.

    Creates a lake, plans real text, captures it from a real server (or Hugging Face), compacts,
    verifies, queries, audits, and trains a small EAGLE-3 draft head on what it stored.
    """
    from rich.console import Console

    import hslake.demo

    seconds = hslake.demo.TRAIN_SECONDS if train_seconds is None else train_seconds
    report = hslake.demo.run_demo(
        directory,
        engine=engine.value,
        model=model,
        server_python=server_python,
        train_seconds=seconds,
        limit=limit,
        console=Console(stderr=json),
    )
    if json:
        print_json(report)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(demo)
