"""What Hugging Face says the hidden states are, and how far stored ones are from it.

The truth is Hugging Face in float64: of two float32 results nobody could say which one is off.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

States = dict[str, np.ndarray]  # stream -> float64 [token, hidden]


def reference_states(
    model_dir: Path, dtype: torch.dtype, prompts: Mapping[str, list[int]]
) -> dict[str, States]:
    """Every boundary and `final` of every prompt, from output_hidden_states, one at a time."""
    # The grouped kernel of mixture-of-experts layers knows no float64.
    loaded = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=dtype, experts_implementation="eager"
    )
    model = loaded.eval()
    layers = model.config.num_hidden_layers
    pre_norm: list[torch.Tensor] = []
    # Hugging Face gives the last state after the norm only.
    model.model.norm.register_forward_pre_hook(lambda module, args: pre_norm.append(args[0]))
    found = {}
    for name, ids in prompts.items():
        pre_norm.clear()
        with torch.no_grad():
            states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        assert len(states) == layers + 1 and len(pre_norm) == 1
        streams = {str(b): states[b] for b in range(layers)}
        streams |= {str(layers): pre_norm[0], "final": states[layers]}
        found[name] = {k: v[0].double().numpy() for k, v in streams.items()}
    return found


def row_errors(got: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Relative error |got - expected| / |expected| of every row."""
    assert got.shape == expected.shape, f"found {got.shape}, expected {expected.shape}"
    distance = np.linalg.norm(got - expected, axis=1)
    return distance / np.linalg.norm(expected, axis=1)


def assert_same_states(got: np.ndarray, expected: np.ndarray, tolerance: float, what: str) -> None:
    """Every row within `tolerance`; says which row is worst otherwise."""
    errors = row_errors(got, expected)
    worst = int(errors.argmax())
    assert errors[worst] <= tolerance, (
        f"{what}: row {worst} of {len(errors)} is {errors[worst]:.2e} off, allowed {tolerance:.0e}"
    )
