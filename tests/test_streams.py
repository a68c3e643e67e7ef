"""Boundaries and other engines' layer ids: known values, and there and back again."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hslake.errors import InvalidInput
from hslake.streams import (
    boundaries_from_ids,
    capture_from_draft_config,
    draft_ids,
    eagle3_boundaries,
    parse_capture,
    parse_streams,
)


def test_eagle3_is_low_middle_high() -> None:
    assert eagle3_boundaries(61) == (2, 30, 58)  # Kimi-K2.5
    assert parse_capture("eagle3", 30) == ("2", "15", "27", "final")
    with pytest.raises(InvalidInput, match="at least 7 layers"):
        eagle3_boundaries(6)


@pytest.mark.parametrize(
    ("convention", "architecture", "ids", "boundaries"),
    [
        ("sglang==0.5.23", "LlamaForCausalLM", [2, 30, 58], (3, 31, 59)),
        ("specforge", "LlamaForCausalLM", [2, 30, 58], (3, 31, 59)),
        ("vllm", "LlamaForCausalLM", [2, 30, 58], (2, 30, 58)),
        ("hf", "LlamaForCausalLM", [2, 30, 58], (2, 30, 58)),
        # DeepSeek's setter keeps the ids, unless the first one is 1.
        ("sglang", "DeepseekV3ForCausalLM", [2, 30, 58], (2, 30, 58)),
        ("sglang", "KimiK25ForConditionalGeneration", [2, 30, 58], (2, 30, 58)),
        ("sglang", "DeepseekV3ForCausalLM", [1, 29, 57], (2, 30, 58)),
    ],
)
def test_what_ids_mean(
    convention: str, architecture: str, ids: list[int], boundaries: tuple[int, ...]
) -> None:
    assert boundaries_from_ids(ids, 61, convention, architecture) == boundaries
    back = draft_ids([*map(str, boundaries), "final"], 61, convention, architecture)
    assert boundaries_from_ids(back, 61, convention, architecture) == boundaries


@given(
    st.sets(st.integers(0, 61), min_size=1),
    st.sampled_from(["sglang==0.5.23", "vllm", "specforge", "hf"]),
    st.sampled_from(["LlamaForCausalLM", "DeepseekV3ForCausalLM"]),
)
def test_printed_ids_select_the_same_boundaries_or_are_refused(
    chosen: set[int], convention: str, architecture: str
) -> None:
    boundaries = tuple(sorted(chosen))
    try:
        ids = draft_ids([str(b) for b in boundaries], 61, convention, architecture)
    except InvalidInput:
        return
    assert min(ids) >= 0
    assert boundaries_from_ids(ids, 61, convention, architecture) == boundaries


@pytest.mark.parametrize(
    ("streams", "convention", "message"),
    [
        (("0", "30", "final"), "sglang==0.5.23", "boundary 0 .* has no layer id in sglang"),
        (("0", "final"), "specforge", "boundary 0"),
        (("30", "61", "final"), "hf", "boundary 61 .* has no id in hf"),
        (("final",), "vllm", "holds no boundary"),
        (("2", "final"), "trtllm", "expected one of sglang, vllm"),
    ],
)
def test_what_an_engine_cannot_express(
    streams: tuple[str, ...], convention: str, message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        draft_ids(streams, 61, convention)


def test_capture_from_a_drafts_config(tmp_path: Path) -> None:
    path = tmp_path / "draft.json"
    path.write_text(json.dumps({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 14, 26]}}))
    found = capture_from_draft_config(str(path), "sglang==0.5.23", 30)
    assert found == ("2", "15", "27", "final")
    path.write_text(json.dumps({"eagle_aux_hidden_state_layer_ids": [1, 14, 30]}))
    with pytest.raises(InvalidInput, match="layer id 30 is boundary 31"):
        capture_from_draft_config(str(path), "sglang==0.5.23", 30)
    path.write_text("{}")
    with pytest.raises(InvalidInput, match="no eagle_aux_hidden_state_layer_ids"):
        capture_from_draft_config(str(path), "vllm", 30)


def test_lists_in_any_order_and_with_repeats_are_the_same_streams() -> None:
    assert parse_streams(["4", "final", "0", "2", "4", "final"], 4, "x") == ("0", "2", "4", "final")
