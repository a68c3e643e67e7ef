"""`hslake serve`."""

from pathlib import Path
from typing import Annotated

import typer

from hslake.cli.common import Lake, examples
from hslake.units import parse_count


@examples(
    "hslake serve LAKE --staging /dev/shm/hslake -- --model-path MODEL --tp 8",
    "hslake serve LAKE --staging /dev/shm/hslake --max-parts 8 -- --model-path MODEL --port 30001",
)
def serve(
    lake: Lake,
    staging: Annotated[Path, typer.Option(metavar="DIR", help="Staging directory, on /dev/shm.")],
    sglang_args: Annotated[
        list[str], typer.Argument(metavar="-- ARGS...", help="Arguments of sglang.launch_server.")
    ],
    part_tokens: Annotated[
        str | None,
        typer.Option(metavar="N", help="Tokens of one staging part, at least the longest sample."),
    ] = None,
    max_parts: Annotated[
        int | None, typer.Option(min=1, help="Most staging parts of a writer.")
    ] = None,
    python: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Interpreter that has SGLang (default: this one)."),
    ] = None,
) -> None:
    """Start SGLang with the capture hook; everything after -- goes to SGLang.

    Adds what extraction needs for the SGLang version found (no radix cache, no prefill CUDA
    graphs, a fixed chunk size) and refuses what would break it. Replaces this process.
    """
    tokens = None if part_tokens is None else parse_count(part_tokens, "--part-tokens")
    import hslake_sglang.serve

    hslake_sglang.serve.serve(
        lake, staging, sglang_args, part_tokens=tokens, max_parts=max_parts, python=python
    )


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(serve)
