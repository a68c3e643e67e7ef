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

# The engines whose layer ids are understood; what an id means: boundaries_from_ids below.
CONVENTIONS = ("sglang", "vllm", "specforge", "hf")


def eagle3_boundaries(num_layers: int) -> tuple[int, ...]:
    """EAGLE-3's low, middle and high boundaries: 2, L // 2, L - 3."""
    found = (2, num_layers // 2, num_layers - 3)
    if not 0 < found[0] < found[1] < found[2]:
        raise InvalidInput(
            f"--capture eagle3 needs at least 7 layers, the model has {num_layers}: "
            "name the boundaries, for example --capture 1,2,3,final"
        )
    return found


def parse_capture(text: str, num_layers: int) -> tuple[str, ...]:
    """Streams named by `--capture`: `eagle3`, or boundaries and `final` separated by commas."""
    if text.strip() == "eagle3":
        return (*(str(b) for b in eagle3_boundaries(num_layers)), FINAL)
    return parse_streams([p.strip() for p in text.split(",")], num_layers, "--capture")


def stream_names(streams: Sequence[str | int] | str | int) -> tuple[str, ...]:
    """Names of the streams a caller asked for: one, or several in their order."""
    if isinstance(streams, str | int):
        streams = [streams]
    return tuple(str(s) for s in streams)


def parse_streams(items: Iterable[Any], num_layers: int, where: str) -> tuple[str, ...]:
    """Stream names sorted and unique. Raises InvalidInput for unknown ones, or none at all."""
    boundaries: set[int] = set()
    final = False
    for item in items:
        text = str(item)
        if text == FINAL:
            final = True
        # int() refuses thousands of digits with an error of its own.
        elif text.isascii() and text.isdigit() and len(text) < 10 and int(text) <= num_layers:
            boundaries.add(int(text))
        else:
            raise InvalidInput(
                f"{where}: {text[:40]!r} is no stream; expected boundaries from 0 to {num_layers} "
                "and 'final', for example 2,15,27,final, or eagle3"
            )
    if not boundaries and not final:
        raise InvalidInput(f"{where}: no stream named; expected for example eagle3")
    return (*(str(b) for b in sorted(boundaries)), *([FINAL] if final else []))


def _sglang_is_deepseek(architecture: str) -> bool:
    """DeepSeek-family text models keep the ids of their setter unless the first is 1."""
    return architecture.startswith(("Deepseek", "KimiK2"))


def _split_convention(convention: str) -> str:
    engine = convention.split("==")[0]
    if engine not in CONVENTIONS:
        raise InvalidInput(
            f"convention {convention!r}: expected one of {', '.join(CONVENTIONS)} "
            "(sglang may carry a version: sglang==0.5.23)"
        )
    return engine


def boundaries_from_ids(
    ids: Sequence[int], num_layers: int, convention: str, architecture: str = ""
) -> tuple[int, ...]:
    """Boundaries an engine selects for layer `ids`; raises InvalidInput when out of range."""
    offset = _offset(_split_convention(convention), ids, architecture)
    found = tuple(i + offset for i in ids)
    for i, b in zip(ids, found, strict=True):
        if not 0 <= b <= num_layers:
            raise InvalidInput(
                f"layer id {i} is boundary {b} in {convention}, "
                f"expected one from 0 to {num_layers}: check --convention"
            )
    return found


def _offset(engine: str, ids: Sequence[int], architecture: str) -> int:
    if engine == "sglang" and _sglang_is_deepseek(architecture):
        return 1 if ids and ids[0] == 1 else 0
    return {"sglang": 1, "specforge": 1, "vllm": 0, "hf": 0}[engine]


def draft_ids(
    streams: Sequence[str], num_layers: int, convention: str, architecture: str = ""
) -> list[int]:
    """Layer ids that make an engine's EAGLE-3 setter select the boundaries of `streams`.

    Raises InvalidInput when the engine has no ids for them.
    """
    engine = _split_convention(convention)
    boundaries = [int(s) for s in streams if s != FINAL]
    if not boundaries:
        raise InvalidInput("the lake holds no boundary, only 'final': there are no ids to print")
    if engine == "hf" and num_layers in boundaries:
        raise InvalidInput(
            f"boundary {num_layers} (before the final norm) has no id in hf: its last entry is "
            "after the norm"
        )
    if boundaries[0] == 0 and _offset(engine, (), architecture) == 1:
        raise InvalidInput(
            f"boundary 0 (the embedding) has no layer id in {convention}, whose id 0 is boundary "
            "1: a draft for it needs a lake without boundary 0"
        )
    for offset in (1, 0):
        ids = [b - offset for b in boundaries]
        if min(ids) < 0:
            continue
        if tuple(boundaries_from_ids(ids, num_layers, convention, architecture)) == tuple(
            boundaries
        ):
            return ids
    raise InvalidInput(f"boundaries {boundaries} have no layer ids in {convention}")


def capture_from_draft_config(
    path: str, convention: str, num_layers: int, architecture: str = ""
) -> tuple[str, ...]:
    """Streams (with `final`) that a draft's config names, read by an engine's convention."""
    try:
        config = json.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise InvalidInput(f"--capture-from {path}: {e}") from None
    ids = _layer_ids(config)
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise InvalidInput(
            f"--capture-from {path}: no eagle_aux_hidden_state_layer_ids in it; "
            "name the boundaries with --capture"
        )
    found = boundaries_from_ids(ids, num_layers, convention, architecture)
    return parse_streams([*found, FINAL], num_layers, path)


def _layer_ids(config: Any) -> Any:
    """What a draft's config has under the name of the ids, also one level down; else None."""
    if not isinstance(config, dict):
        return None
    name = "eagle_aux_hidden_state_layer_ids"
    return _layer_ids(config.get("eagle_config")) or config.get(name)
