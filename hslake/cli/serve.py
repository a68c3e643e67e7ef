"""`hslake serve`."""

from pathlib import Path
from typing import Annotated

import typer

from hslake.cli.common import Lake, examples
from hslake.units import parse_count


@examples(
    "hslake serve LAKE --staging /dev/shm/hslake -- --model-path MODEL --tp 8",
    "hslake serve LAKE --staging /dev/shm/hslake --max-parts 8 -- --model-path MODEL --port 30001",
    "hslake serve LAKE --staging /dev/shm/hslake --python ../sglang/bin/python -- --config s.yaml",
)
def serve(
    lake: Lake,
    staging: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            help="Staging directory; it must exist, on /dev/shm. `hslake compact` gets the same.",
        ),
    ],
    sglang_args: Annotated[
        list[str],
        typer.Argument(metavar="-- ARGS...", help="Arguments of SGLang, as `sglang serve` has."),
    ],
    part_tokens: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="Tokens of one staging part, at least the longest sample (default: 32768, or "
            "what half of the free space gives).",
        ),
    ] = None,
    max_parts: Annotated[
        int | None,
        typer.Option(
            min=1, help="Most staging parts of a writer; there is one per DP rank (default: 4)."
        ),
    ] = None,
    python: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Interpreter that has SGLang and hslake (default: the one that runs hslake).",
        ),
    ] = None,
) -> None:
    """Start SGLang with the capture hook; everything after -- goes to SGLang.

    Adds what extraction needs for the SGLang version found: the lake's dtype, no radix cache, no
    prefill CUDA graphs, a fixed chunk size, and a --mem-fraction-static lowered by what the
    capture takes. Refuses, before weights load and with the reason, what would break it:
    pipeline and context parallelism, speculative decoding, two-batch overlap, LoRA, and others;
    an SGLang or a model that cannot capture; a model that is not the lake's. SGLang then takes
    this process over: end it with Ctrl-C.

    The server answers GET /hslake/status (what `hslake extract` reads) and GET /hslake/metrics
    (Prometheus). Run `hslake preflight` against it before a long extraction.
    """
    tokens = None if part_tokens is None else parse_count(part_tokens, "--part-tokens")
    import hslake_sglang.serve

    hslake_sglang.serve.serve(
        lake, staging, sglang_args, part_tokens=tokens, max_parts=max_parts, python=python
    )


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(serve)
