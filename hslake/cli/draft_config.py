"""`hslake draft-config`."""

from typing import Annotated

import typer

from hslake.cli.common import Json, Lake, examples, print_json


@examples(
    "hslake draft-config LAKE --convention vllm",
    "hslake draft-config LAKE --convention sglang==0.5.23 --json",
)
def draft_config(
    lake: Lake,
    convention: Annotated[
        str,
        typer.Option(
            metavar="ENGINE", help="sglang==X.Y.Z, vllm, specforge or hf: whose ids to print."
        ),
    ],
    json: Json = False,
) -> None:
    """Print layer ids for the engine that will serve the draft.

    Engines disagree on what layer id i means, so a lake holds boundaries. The printed ids make that
    engine select this lake's boundaries: put them into the draft model's config. Fails when an
    engine cannot express them.
    """
    from hslake.spec import read_spec
    from hslake.streams import draft_ids

    spec = read_spec(lake)
    ids = draft_ids(spec.streams, spec.num_layers, convention, spec.model.architecture)
    if json:
        print_json(
            {
                "convention": convention,
                "eagle_aux_hidden_state_layer_ids": ids,
                "boundaries": list(spec.boundaries),
                "num_layers": spec.num_layers,
            }
        )
    else:
        print(", ".join(map(str, ids)))


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("draft-config")(draft_config)
