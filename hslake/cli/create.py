"""`hslake create`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from hslake.cli.common import Json, Lake, examples, note, print_json, print_pairs
from hslake.errors import InvalidInput
from hslake.units import format_bytes, format_count, parse_bytes, parse_count


class Codec(StrEnum):
    """How states are compressed; all are lossless."""

    standard = "standard"
    bf16plane = "bf16plane"
    none = "none"


class Dtype(StrEnum):
    """The server's residual dtype."""

    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


@examples(
    "hslake create LAKE --model-config MODEL/config.json --capture eagle3",
    "hslake create s3://bucket/k25 --model-config config.json --capture 2,30,58,final \\",
    "    --estimate-tokens 87.8M --estimate-bytes 3.5TB",
    "hslake create LAKE --model-config MODEL/config.json --capture-from draft.json \\",
    "    --convention sglang==0.5.23",
    "hslake create LAKE --hidden-size 7168 --num-layers 61 --capture eagle3",
)
def create(
    lake: Lake,
    model_config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The model's config.json; weights beside it are read."),
    ] = None,
    hidden_size: Annotated[
        int | None, typer.Option(min=1, help="Instead of --model-config, with --num-layers.")
    ] = None,
    num_layers: Annotated[
        int | None, typer.Option(min=1, help="Instead of --model-config, with --hidden-size.")
    ] = None,
    capture: Annotated[
        str | None,
        typer.Option(metavar="STREAMS", help="Boundaries and final (2,15,27,final), or eagle3."),
    ] = None,
    capture_from: Annotated[
        Path | None,
        typer.Option(metavar="DRAFT.json", help="A draft's config whose layer ids to capture."),
    ] = None,
    convention: Annotated[
        str | None,
        typer.Option(
            metavar="ENGINE",
            help="Whose layer ids --capture-from holds: sglang==X.Y.Z, vllm, specforge or hf.",
        ),
    ] = None,
    dtype: Annotated[
        Dtype | None, typer.Option(help="The server's residual dtype (default: the config's).")
    ] = None,
    codec: Annotated[Codec, typer.Option(help="Compression.")] = Codec.standard,
    estimate_tokens: Annotated[
        str | None, typer.Option(metavar="N", help="Tokens expected, e.g. 87.8M, for audit.")
    ] = None,
    estimate_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Bytes on disk expected, e.g. 3.5TB.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="The model's name (default: that of its folder).")
    ] = None,
    json: Json = False,
) -> None:
    """Make a lake for one model and one set of streams.

    A boundary b is the residual stream after decoder layer b-1 (0: the embedding); final is the
    final norm's output. eagle3 is 2, L//2, L-3 and final. There is no default: engines disagree
    on what layer ids mean.
    """
    if (capture is None) == (capture_from is None):
        raise InvalidInput(
            "expected one of --capture (for example --capture eagle3) and --capture-from DRAFT.json"
        )
    if (capture_from is None) != (convention is None):
        raise InvalidInput(
            "--capture-from and --convention go together: layer ids mean different boundaries in "
            "different engines"
        )
    if model_config is None and (hidden_size is None or num_layers is None):
        raise InvalidInput("expected --model-config FILE, or both --hidden-size and --num-layers")
    tokens = None if estimate_tokens is None else parse_count(estimate_tokens, "--estimate-tokens")
    size = None if estimate_bytes is None else parse_bytes(estimate_bytes, "--estimate-bytes")
    import hslake

    streams = None
    if capture_from is not None and convention is not None:
        streams = _streams(capture_from, convention, model_config, num_layers)
    made = hslake.create(
        lake,
        capture=capture,
        streams=streams,
        model_config=model_config,
        hidden_size=hidden_size,
        num_layers=num_layers,
        dtype=None if dtype is None else dtype.value,
        codec=codec.value,
        estimate_tokens=tokens,
        estimate_bytes=size,
        name=name,
    )
    spec = made.spec
    if json:
        print_json({"lake": made.url, **spec.__dict__})
        return
    expected = [f"{format_count(spec.estimate.tokens)} tokens"] if spec.estimate.tokens else []
    expected += [f"{format_bytes(spec.estimate.bytes)} on disk"] if spec.estimate.bytes else []
    print_pairs(
        [
            ("model", spec.model.name or "unnamed"),
            ("layers", f"{spec.num_layers} of hidden size {spec.hidden_size}"),
            ("streams", ", ".join(spec.streams)),
            ("stored as", f"{spec.dtype}, codec {spec.codec}"),
            ("a token", f"{format_bytes(spec.bytes_per_token)} raw"),
            ("expected", ", ".join(expected) or "no estimate"),
        ],
        f"created {made.url}",
    )
    if "final" not in spec.streams:
        note("without `final` there is no target for a draft to learn from (--capture …,final)")
    print(f"next: hslake plan {lake} FILE... --source NAME")


def _streams(
    draft: Path, convention: str, model_config: Path | None, num_layers: int | None
) -> tuple[str, ...]:
    from hslake import modelinfo
    from hslake.streams import capture_from_draft_config

    layers, architecture = num_layers, ""
    if model_config is not None:
        model, _ = modelinfo.read_model(modelinfo.config_path(model_config), None)
        layers, architecture = model.num_layers, model.architecture
    assert layers is not None
    return capture_from_draft_config(str(draft), convention, layers, architecture)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(create)
