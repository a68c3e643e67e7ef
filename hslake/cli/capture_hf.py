"""`hslake capture-hf`."""

from pathlib import Path
from typing import Annotated

import typer

from hslake.cli.common import Json, Lake, examples, print_json
from hslake.errors import InvalidInput
from hslake.units import format_bytes, format_count, parse_count


@examples(
    "hslake capture-hf LAKE MODEL --staging /dev/shm/hslake",
    "hslake capture-hf LAKE MODEL --staging /dev/shm/hslake --device cuda --limit 100",
    "hslake capture-hf LAKE MODEL --staging /dev/shm/hslake --where \"source = 'A1'\"",
)
def capture_hf(
    lake: Lake,
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Hugging Face model folder.")],
    staging: Annotated[Path, typer.Option(metavar="DIR", help="Staging directory.")],
    where: Annotated[
        str | None, typer.Option(metavar="SQL", help="Condition over the view plan.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Most samples to capture.")] = None,
    device: Annotated[str, typer.Option(help="Torch device, e.g. cpu, cuda.")] = "cpu",
    part_tokens: Annotated[
        str | None, typer.Option(metavar="N", help="Tokens of one staging part.")
    ] = None,
    max_parts: Annotated[int | None, typer.Option(min=1, help="Most staging parts.")] = None,
    wait: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0.0, help="How long to wait when staging is full."),
    ] = 60.0,
    json: Json = False,
) -> None:
    """Capture planned samples with Hugging Face. Resumable.

    The same states as the server's hook, for machines without a server.
    """
    tokens = None if part_tokens is None else parse_count(part_tokens, "--part-tokens")
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise InvalidInput(
            f"capture-hf needs torch and transformers: pip install 'hslake[hf]' ({error})"
        ) from error
    import hslake.torch.capture_hf
    from hslake.progress import Progress

    report = hslake.torch.capture_hf.capture_hf(
        lake,
        model,
        staging,
        where=where,
        limit=limit,
        device=device,
        part_tokens=tokens,
        max_parts=max_parts,
        wait_s=wait,
        progress=Progress,
    )
    if json:
        print_json(report)
        return
    print(
        f"captured {report.captured} of {report.planned} planned samples "
        f"({report.committed} in the lake, {report.staged} in staging before): "
        f"{format_count(report.tokens)} tokens, {format_bytes(report.bytes)} in "
        f"{report.seconds:.1f} s"
    )
    if report.captured or report.staged:
        print(f"next: hslake compact {lake} --staging {staging}")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("capture-hf")(capture_hf)
