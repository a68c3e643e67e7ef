"""Streams, boundaries, and other people's layer ids.

A boundary `b` is a point between decoder layers: 0 is the embedding output, `b` the residual stream
after layer `b - 1` (the input of layer `b`), `num_layers` after the last layer, before the final
norm. hslake stores boundaries only and converts layer ids here, at its edges.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hslake.errors import InvalidInput

FINAL = "final"

# What id `i` means, as an offset: boundary = i + offset. From the engines' sources, mid 2026.
#   sglang     `layers_to_capture` of the text model
#   sglang-eagle3  `set_eagle3_layers_to_capture` / a draft config's eagle_aux_hidden_state_layer_ids
#                  (Llama and newer DeepSeek store id + 1; DeepSeek keeps ids unless the first is 1)
_OFFSETS = {
    "sglang": 1,
    "sglang-deepseek": None,
    "vllm": 0,
    "specforge": 1,
    "hf": 0,
}
CONVENTIONS = ("sglang", "vllm", "specforge", "hf")


def eagle3_boundaries(num_layers: int) -> tuple[int, ...]:
    """EAGLE-3's low, middle and high boundaries: 2, L // 2, L - 3."""
    found = (2, num_layers // 2, num_layers - 3)
    if not 0 < found[0] < found[1] < found[2]:
        raise InvalidInput(
            f"--capture eagle3 needs at least 8 layers, the model has {num_layers}: "
            "name the boundaries, for example --capture 1,2,3,final"
        )
    return found


def parse_capture(text: str, num_layers: int) -> tuple[str, ...]:
    """Streams named by `--capture`: `eagle3`, or boundaries and `final` separated by commas."""
    if text.strip() == "eagle3":
        return (*(str(b) for b in eagle3_boundaries(num_layers)), FINAL)
    return parse_streams([p.strip() for p in text.split(",")], num_layers, "--capture")


def parse_streams(items: Iterable[Any], num_layers: int, where: str) -> tuple[str, ...]:
    """Sort and check stream names. Raises InvalidInput for unknown, repeated or absent ones."""
    boundaries: list[int] = []
    final = False
    for item in items:
        text = str(item)
        if text == FINAL:
            if final:
                raise InvalidInput(f"{where}: 'final' is named twice")
            final = True
        elif text.isascii() and text.isdigit() and int(text) <= num_layers:
            boundaries.append(int(text))
        else:
            raise InvalidInput(
                f"{where}: {text!r} is no stream; expected boundaries from 0 to {num_layers} "
                "and 'final', for example 2,15,27,final, or eagle3"
            )
    if len(set(boundaries)) != len(boundaries):
        raise InvalidInput(f"{where}: a boundary is named twice in {sorted(boundaries)}")
    if not boundaries and not final:
        raise InvalidInput(f"{where}: no stream named; expected for example eagle3")
    return (*(str(b) for b in sorted(boundaries)), *([FINAL] if final else []))
