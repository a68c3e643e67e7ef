"""Streams come from the right places, and a wrong one is noticed in the same forward."""

from typing import Any

import pytest
import torch
from hslake_sglang.taps import Taps, find_logits_processors, logits_inputs, text_model, unpack_aux
from torch import nn

from hslake.errors import InvalidInput
from tests.patch.toy import HIDDEN, LAYERS, Toy, make_spec

ALL = ("0", "1", "2", "3", "4", "final")
IDS = [3, 1, 4, 1, 5]


def run(model: nn.Module, taps: Taps, pad: int = 0) -> list[torch.Tensor]:
    got: dict[str, Any] = {}

    def before(module: Any, args: tuple, kwargs: dict) -> None:
        got["streams"] = taps.collect(*logits_inputs(args, kwargs), len(IDS))

    (processor,) = find_logits_processors(model)
    handle = processor.register_forward_pre_hook(before, with_kwargs=True)
    taps.listen()
    model(torch.tensor(IDS), pad)
    taps.rest()
    handle.remove()
    return got["streams"]


@pytest.mark.parametrize("streams", [ALL, ("0", "final"), ("1", "3"), ("4", "final"), ("final",)])
@pytest.mark.parametrize("pad", [0, 3])
def test_every_stream_is_what_its_name_says(streams: tuple[str, ...], pad: int) -> None:
    model = Toy()
    truth = model.truth(IDS)
    for name, tensor in zip(streams, run(model, Taps(model, make_spec(streams)), pad), strict=True):
        torch.testing.assert_close(tensor, truth[name], rtol=1e-6, atol=1e-6)
        others = [b for b in ALL if b != name]
        assert all(not torch.allclose(tensor, truth[b], atol=1e-3) for b in others)


def test_the_flag_stays_off_when_no_layer_is_asked_for() -> None:
    model = Toy()
    Taps(model, make_spec(("0", "4", "final")))
    assert model.capture_aux_hidden_states is False and model.model.layers_to_capture == []


def test_nothing_is_kept_while_not_listening() -> None:
    model = Toy()
    taps = Taps(model, make_spec(ALL))
    model(torch.tensor(IDS))
    assert taps._first is None and taps._pre_norm is None


def test_a_missing_boundary_is_an_error() -> None:
    model = Toy()
    taps = Taps(model, make_spec(("1", "3", "final")))
    model.model.layers_to_capture = [1]  # what an engine does with a boundary it does not have
    with pytest.raises(InvalidInput, match="captured 1 boundaries, expected 2"):
        run(model, taps)


def test_wrong_dtype_rows_and_width() -> None:
    model = Toy(torch.bfloat16)
    with pytest.raises(InvalidInput, match="--dtype float32"):
        run(model, Taps(model, make_spec(("final",))))
    taps = Taps(Toy(), make_spec(("final",)))
    with pytest.raises(InvalidInput, match="at least 6 rows"):
        taps.collect(torch.zeros(5, HIDDEN), None, 6)
    with pytest.raises(InvalidInput, match="shape"):
        taps.collect(torch.zeros(5, HIDDEN - 1), None, 5)
    with pytest.raises(InvalidInput, match="delivered nothing"):
        taps.collect(None, None, 5)


def test_packed_states_are_taken_apart_in_order() -> None:
    parts = [torch.full((3, HIDDEN), float(i)) for i in range(3)]
    for got, part in zip(unpack_aux(torch.cat(parts, dim=1), HIDDEN), parts, strict=True):
        assert torch.equal(got, part)
    assert unpack_aux(None, HIDDEN) == []
    with pytest.raises(InvalidInput):
        unpack_aux(torch.zeros(3, HIDDEN + 1), HIDDEN)


def test_another_models_depth_is_refused() -> None:
    with pytest.raises(InvalidInput, match=f"{LAYERS} layers"):
        Taps(Toy(), make_spec(("1", "final"), num_layers=61))


def test_multimodal_wrappers_are_opened() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.language_model = Toy()

    wrapper = Wrapper()
    assert text_model(wrapper) is wrapper.language_model
    with pytest.raises(InvalidInput, match="Linear"):
        text_model(nn.Linear(1, 1))


class InnerHalf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers_to_capture: list[int] = []
        self.layers = nn.ModuleList(nn.Identity() for _ in range(LAYERS))
        self.norm = nn.Identity()


class InheritsTheInnerHalf(nn.Module):
    """As MiMo, Qwen2VL, JetNemotron and GlmImage in 0.5.23: it would hand a tuple to the logits
    processor."""

    def __init__(self) -> None:
        super().__init__()
        self.model = InnerHalf()


def test_an_outer_model_that_does_not_take_the_states_is_refused() -> None:
    with pytest.raises(InvalidInput, match="capture"):
        Taps(InheritsTheInnerHalf(), make_spec(("2", "final")))
