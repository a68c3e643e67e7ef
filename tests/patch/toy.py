"""A model with the parts of SGLang's that the hook touches, and batches to run it on."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from hslake.spec import Estimate, Geometry, LakeSpec, ModelInfo

LAYERS, HIDDEN, VOCAB = 4, 8, 50


def make_spec(streams: tuple[str, ...], dtype: str = "float32", **model: Any) -> LakeSpec:
    info = {
        "name": "toy",
        "architecture": "Toy",
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "fingerprint": {"config": None, "weights": None},
        **model,
    }
    return LakeSpec(
        format_version=1,
        lake_id="0123abcd" * 4,
        created_at="2026-11-30T00:00:00Z",
        model=ModelInfo(**info),
        streams=streams,
        dtype=dtype,
        codec="standard",
        geometry=Geometry(chunk_tokens=256, shard_tokens=512, segment_tokens=1024),
        estimate=Estimate(tokens=None, bytes=None),
    )


class Layer(nn.Module):
    """Adds its input into the residual in place, as SGLang's fused kernels do."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, positions: Any, hidden: torch.Tensor, residual: Any) -> tuple:
        if residual is None:
            residual = hidden
        else:
            residual.add_(hidden)
        return torch.sin(residual * (self.number + 1)), residual


class Norm(nn.Module):
    def forward(self, hidden: torch.Tensor, residual: torch.Tensor) -> tuple:
        residual = residual + hidden
        return residual / (residual.float().norm(dim=-1, keepdim=True) + 1).to(
            hidden.dtype
        ), residual


class LogitsProcessor(nn.Module):
    def forward(self, ids: Any, hidden: Any, head: Any, batch: Any, aux: Any = None) -> Any:
        return hidden.sum()


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer(i) for i in range(LAYERS))
        self.norm = Norm()
        self.layers_to_capture: list[int] = []

    def forward(self, ids: torch.Tensor) -> Any:
        hidden, residual, aux = self.embed_tokens(ids), None, []
        for i, layer in enumerate(self.layers):
            if i in self.layers_to_capture:
                aux.append(hidden.clone() if residual is None else hidden + residual)
            hidden, residual = layer(None, hidden, residual)
        hidden, _ = self.norm(hidden, residual)
        return (hidden, aux) if aux else hidden


class Toy(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Inner()
        self.logits_processor = LogitsProcessor()
        self.capture_aux_hidden_states = False
        self.to(dtype)

    @torch.no_grad()
    def forward(self, ids: torch.Tensor, pad: int = 0) -> Any:
        """Runs `ids` with `pad` more rows of padding behind them."""
        hidden = self.model(torch.cat([ids, ids.new_zeros(pad)]))
        aux = None
        if self.capture_aux_hidden_states:
            hidden, aux = hidden
        return self.logits_processor(ids, hidden, None, None, aux)

    @torch.no_grad()
    def truth(self, ids: list[int]) -> dict[str, torch.Tensor]:
        """Every stream of a prompt, computed without the capture. Rows do not depend on others."""
        stream = self.model.embed_tokens(torch.tensor(ids)).clone()
        found = {"0": stream}
        for i in range(LAYERS):
            stream = stream + torch.sin(stream * (i + 1))
            found[str(i + 1)] = stream
        norm = (stream.float().norm(dim=-1, keepdim=True) + 1).to(stream.dtype)
        return {**found, "final": stream / norm}


def make_batch(requests: list[tuple[str, list[int], int, int]], mode: str = "EXTEND") -> Any:
    """A ForwardBatch of (rid, prompt, prefix, rows) requests."""
    ids = [t for _, prompt, start, n in requests for t in prompt[start : start + n]]
    return SimpleNamespace(
        forward_mode=SimpleNamespace(name=mode),
        rids=[r[0] for r in requests],
        extend_prefix_lens_cpu=[r[2] for r in requests],
        extend_seq_lens_cpu=[r[3] for r in requests],
        input_ids=torch.tensor(ids, dtype=torch.int64),
        input_embeds=None,
        mm_inputs=None,
        lora_ids=None,
    )
