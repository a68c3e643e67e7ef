"""Where each stream of a forward pass comes from, and the check that it is what it claims to be."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from hslake.errors import InvalidInput
from hslake.spec import FINAL, LakeSpec

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def text_model(model: nn.Module) -> nn.Module:
    """The causal language model inside SGLang's `model` (multimodal wrappers are opened).

    Raises InvalidInput when none is found that captures (flag and `.model.layers_to_capture`).
    """
    seen: Any = model
    for _ in range(4):
        # With the flag it also takes the states apart; some models only inherit the inner half.
        inner_half = hasattr(getattr(seen, "model", None), "layers_to_capture")
        if inner_half and hasattr(seen, "capture_aux_hidden_states"):
            return seen
        inner = getattr(seen, "language_model", None)
        if not isinstance(inner, nn.Module):
            break
        seen = inner
    raise InvalidInput(
        f"{type(model).__name__} has no auxiliary capture (no text model with "
        "`model.layers_to_capture` inside): this SGLang cannot capture from it"
    )


class Taps:
    """Sets the model's own capture to explicit boundaries and collects one forward's streams.

    Boundaries 1 … num_layers-1 come from the model's auxiliary capture, in layer order; boundary 0
    is the input of the first layer, boundary num_layers the residual that the final norm returns,
    `final` the logits processor's input.
    """

    def __init__(self, model: nn.Module, spec: LakeSpec) -> None:
        self.spec = spec
        self.dtype = DTYPES[spec.dtype]
        self.last = spec.num_layers
        self.aux = [b for b in spec.boundaries if 0 < b < self.last]
        self.held: torch.Tensor | None = None  # memory set aside until the first forward
        self.listening = False  # only forwards that may hold samples pay for boundaries 0 and last
        self._first: torch.Tensor | None = None
        self._pre_norm: torch.Tensor | None = None
        self._set_capture(model)

    def _set_capture(self, model: nn.Module) -> None:
        outer: Any = text_model(model)
        inner = outer.model
        layers = len(inner.layers)
        if layers != self.last:
            raise InvalidInput(
                f"the served model has {layers} layers, the lake was made for {self.last}: "
                "serve the lake's model"
            )
        # The flag makes the model unpack (hidden, aux): with nothing to capture it must stay off.
        if self.aux:
            # Never through set_eagle3_layers_to_capture: it moves the ids by one in some models.
            inner.layers_to_capture = list(self.aux)
            outer.capture_aux_hidden_states = True
        if 0 in self.spec.boundaries:
            inner.layers[0].register_forward_pre_hook(self._on_first_layer, with_kwargs=True)
        if self.last in self.spec.boundaries:
            inner.norm.register_forward_hook(self._on_final_norm, with_kwargs=True)

    def _on_first_layer(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if not self.listening:
            return
        found = [x for x in (*args, *kwargs.values()) if self._is_hidden(x)]
        # Later layers may add into this tensor in place.
        self._first = found[0].clone() if found else None

    def _on_final_norm(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        if not self.listening:
            return
        if isinstance(output, tuple) and len(output) > 1:
            self._pre_norm = output[1]
        elif args:
            self._pre_norm = args[0]

    def _is_hidden(self, value: Any) -> bool:
        return (
            isinstance(value, torch.Tensor)
            and value.dim() == 2
            and value.is_floating_point()
            and value.shape[1] == self.spec.hidden_size
        )

    def listen(self) -> None:
        """Start a forward: boundaries 0 and num_layers are kept from here on."""
        self._first = self._pre_norm = self.held = None
        self.listening = True

    def rest(self) -> None:
        """End of a forward: let its tensors go."""
        self._first = self._pre_norm = None
        self.listening = False

    def collect(self, hidden: Any, aux: Any, rows: int) -> list[torch.Tensor]:
        """The streams of this forward in the lake's order, each [rows, hidden_size].

        Raises InvalidInput naming the stream that is missing or has the wrong shape or dtype.
        """
        width = self.spec.hidden_size
        parts = unpack_aux(aux, width)
        if len(parts) != len(self.aux):
            raise InvalidInput(
                f"SGLang captured {len(parts)} boundaries, expected {len(self.aux)} "
                f"({self.aux}): this model or version cannot capture one of them"
            )
        found: dict[str, Any] = {str(b): t for b, t in zip(self.aux, parts, strict=True)}
        found["0"], found[str(self.last)], found[FINAL] = self._first, self._pre_norm, hidden
        return [self._checked(name, found.get(name), rows) for name in self.spec.streams]

    def _checked(self, name: str, tensor: Any, rows: int) -> torch.Tensor:
        what = f"stream {name}"
        if not isinstance(tensor, torch.Tensor):
            raise InvalidInput(f"{what}: SGLang delivered nothing in this forward")
        shape = tuple(tensor.shape)
        if len(shape) != 2 or shape[1] != self.spec.hidden_size or shape[0] < rows:
            raise InvalidInput(
                f"{what}: found shape {shape}, expected at least {rows} rows of "
                f"{self.spec.hidden_size}"
            )
        if tensor.dtype != self.dtype:
            raise InvalidInput(
                f"{what}: the server computes {tensor.dtype}, the lake stores {self.spec.dtype} "
                f"and never casts: serve with --dtype {self.spec.dtype}"
            )
        return tensor[:rows]


def unpack_aux(aux: Any, width: int) -> Sequence[torch.Tensor]:
    """SGLang's auxiliary states as a list of [tokens, width]: a list, one packed tensor
    [tokens, k * width], or None."""
    if aux is None:
        return []
    if isinstance(aux, torch.Tensor):
        if aux.dim() != 2 or aux.shape[1] % width:
            raise InvalidInput(
                f"packed auxiliary states have shape {tuple(aux.shape)}, expected a multiple of "
                f"{width} columns"
            )
        return list(aux.split(width, dim=1))
    return list(aux)


def find_logits_processors(model: nn.Module) -> list[nn.Module]:
    """Every logits processor inside `model`, by class name (its module moved between versions)."""
    return [m for m in model.modules() if type(m).__name__ == "LogitsProcessor"]


def logits_inputs(args: tuple, kwargs: dict) -> tuple[Any, Any]:
    """(final hidden states, auxiliary states or None) of a logits processor call."""
    get: Callable[[int, str], Any] = lambda i, name: (  # noqa: E731
        args[i] if len(args) > i else kwargs.get(name)
    )
    return get(1, "hidden_states"), get(4, "aux_hidden_states")
