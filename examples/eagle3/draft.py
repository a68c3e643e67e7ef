"""An EAGLE-3 draft head in plain PyTorch: small, but the real architecture.

Three hidden states of the target (low, middle, high boundary) are fused by `fc` (3H -> H). One
decoder layer whose attention reads [norm(embedding of the next token) ; norm(hidden)], 2H wide,
turns them into the state that the target's own LM head reads. The target's embedding and LM head
are frozen; the head may be restricted to a draft vocabulary of frequent tokens.

Parameter names are those of the published EAGLE-3 checkpoints (`fc`, `midlayer.*`, `norm`,
`lm_head`, `d2t`, `t2d`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class DraftConfig:
    """Sizes of the draft; all but `draft_vocab_size` are the target's own."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    num_boundaries: int = 3


def target_config(model_dir: str | Path, draft_vocab_size: int, num_boundaries: int) -> DraftConfig:
    """The draft's sizes from the target's config.json (Llama-like models)."""
    config = json.loads((Path(model_dir) / "config.json").read_text())
    config = config.get("text_config", config)
    heads = config["num_attention_heads"]
    rope = config.get("rope_parameters") or {}
    return DraftConfig(
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads", heads),
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocab_size=config["vocab_size"],
        draft_vocab_size=min(draft_vocab_size, config["vocab_size"]),
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=rope.get("rope_theta") or config.get("rope_theta", 10000.0),
        num_boundaries=num_boundaries,
    )


@dataclass(frozen=True)
class TargetHead:
    """What the draft borrows: embedding and LM head [vocab, H], final norm [H]; float32.

    Embedding and LM head are one tensor when the model ties them.
    """

    embedding: Tensor
    lm_head: Tensor
    final_norm: Tensor


def load_target_head(model_dir: str | Path) -> TargetHead:
    """Read the target's safetensors. KeyError when embedding or final norm are not there."""
    embedding = lm_head = final_norm = None
    for path in sorted(Path(model_dir).glob("*.safetensors")):
        with safe_open(path, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 (safe_open is not a dict)
                if name.endswith("embed_tokens.weight"):
                    embedding = weights.get_tensor(name).float()
                elif name.endswith("lm_head.weight"):
                    lm_head = weights.get_tensor(name).float()
                elif name.endswith("model.norm.weight"):
                    final_norm = weights.get_tensor(name).float()
    if embedding is None or final_norm is None:
        raise KeyError(f"{model_dir}: its safetensors hold no embed_tokens.weight or norm.weight")
    return TargetHead(embedding, embedding if lm_head is None else lm_head, final_norm)


class DraftVocab:
    """The tokens the draft can say. `ids` [draft] ascending target ids, `t2d` [vocab] bool."""

    def __init__(self, ids: Tensor, vocab_size: int) -> None:
        self.ids = ids.sort().values
        self.t2d = torch.zeros(vocab_size, dtype=torch.bool)
        self.t2d[self.ids] = True

    @property
    def d2t(self) -> Tensor:
        """Offsets, as EAGLE-3 stores them: target id = draft id + d2t[draft id]."""
        return self.ids - torch.arange(len(self.ids))

    @classmethod
    def from_counts(cls, counts: Tensor, size: int) -> DraftVocab:
        """The `size` most frequent tokens; equal counts prefer the lower id, so it is exact."""
        order = torch.argsort(counts, descending=True, stable=True)
        return cls(order[:size].clone(), len(counts))


def count_supervised(rows: Iterable[tuple[list[int], list[int]]], vocab_size: int) -> Tensor:
    """How often each token is supervised: [vocab] int64, from (input_ids, loss_mask) of a plan."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for ids, mask in rows:
        tokens = torch.tensor(ids)[torch.tensor(mask, dtype=torch.bool)]
        counts += torch.bincount(tokens, minlength=vocab_size)
    return counts


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self.weight, self.eps)


def rope(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary embedding, half-split as Llama's. x [B, heads, T, head_dim], positions [T]."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float32) / half)
    angles = positions.float()[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


class TTTAttention(nn.Module):
    """Attention over 2H-wide inputs with the keys of every test-time-training step.

    At step k, row t stands for position t + k. It sees the step-0 keys of rows 0..t (states of the
    target) and, of each later step j <= k, only its own row's key: the chain the draft itself
    produced from row t. Chains that start in other rows stay invisible, as they are at inference.
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        width = 2 * config.hidden_size
        self.q_proj = nn.Linear(width, config.num_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(width, config.num_kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(width, config.num_kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        """x [B, T, 2H] -> [B, T, H]. `cache` holds (k, v) of the earlier steps; adds this one."""
        c, (batch, length, _), step = self.config, x.shape, len(cache)
        positions = torch.arange(length) + step

        def heads(projected: Tensor) -> Tensor:
            return projected.view(batch, length, -1, c.head_dim).transpose(1, 2)

        q = rope(heads(self.q_proj(x)), positions, c.rope_theta)
        k = rope(heads(self.k_proj(x)), positions, c.rope_theta)
        v = heads(self.v_proj(x))
        group = c.num_heads // c.num_kv_heads
        cache.append((k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
        if step == 0:
            out = F.scaled_dot_product_attention(q, *cache[0], is_causal=True)
        else:
            out = self._with_own_chain(q, cache)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))

    def _with_own_chain(self, q: Tensor, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        scale = self.config.head_dim**-0.5
        length = q.shape[2]
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = [(q @ cache[0][0].transpose(-1, -2)).masked_fill(future, -torch.inf)]
        scores += [(q * k).sum(-1, keepdim=True) for k, _ in cache[1:]]
        weights = (torch.cat(scores, -1) * scale).float().softmax(-1).to(q.dtype)
        out = weights[..., :length] @ cache[0][1]
        for j, (_, v) in enumerate(cache[1:]):
            out = out + weights[..., length + j, None] * v
        return out


class MLP(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = TTTAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, embeds: Tensor, hidden: Tensor, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        both = torch.cat([self.input_layernorm(embeds), self.hidden_norm(hidden)], -1)
        hidden = hidden + self.self_attn(both, cache)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3Draft(nn.Module):
    """The draft head. Trainable: fc, midlayer, norms. Frozen: embedding, LM head, vocabulary maps.

    Boundaries differ in scale by ten and more, and deep ones have outlier channels, so each is
    normalised before `fc` (`fc_norm`, as in the newer published heads). `norm` starts in the shape
    of the target's final norm, which its LM head was trained with. `head_dtype` holds the frozen LM
    head in the dtype of the matrix products, so that it is not cast on every batch.
    """

    def __init__(
        self,
        config: DraftConfig,
        target: TargetHead,
        vocab: DraftVocab,
        head_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.config = config
        self.vocab = vocab
        self.fc_norm = nn.ModuleList(
            RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(config.num_boundaries)
        )
        self.fc = nn.Linear(config.num_boundaries * config.hidden_size, config.hidden_size, False)
        self.midlayer = DecoderLayer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        # Start quiet: a small residual lets the layer be heard, small logits let it be unsure.
        with torch.no_grad():
            self.fc.weight.mul_(0.2)
            self.norm.weight.copy_(0.3 * target.final_norm)
        self.register_buffer("embedding", target.embedding, persistent=False)
        self.register_buffer("target_lm_head", target.lm_head.to(head_dtype), persistent=False)
        own = target.lm_head[vocab.ids].to(head_dtype)
        self.register_buffer("lm_head", own, persistent=False)

    def fuse(self, hidden_state: Tensor) -> Tensor:
        """[B, T, 3H] states of the target, any float dtype -> [B, T, H]."""
        parts = hidden_state.split(self.config.hidden_size, -1)
        return self.fc(
            torch.cat([norm(x) for norm, x in zip(self.fc_norm, parts, strict=True)], -1)
        )

    def step(self, ids: Tensor, hidden: Tensor, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        """One draft step. ids [B, T]: each row's *next* token; hidden [B, T, H] -> [B, T, H]."""
        return self.midlayer(self.embedding[ids], hidden, cache)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [..., draft_vocab]."""
        return F.linear(self.norm(hidden).to(self.lm_head.dtype), self.lm_head)

    def save(self, path: str | Path) -> None:
        """Write a safetensors checkpoint; its metadata holds the config as JSON."""
        tensors = {name: p.detach().contiguous() for name, p in self.named_parameters()}
        tensors["lm_head.weight"] = self.lm_head
        tensors["d2t"] = self.vocab.d2t
        tensors["t2d"] = self.vocab.t2d
        save_file(tensors, path, {"format": "pt", "config": json.dumps(asdict(self.config))})
        # safetensors renames a private temporary file: give it the mode any new file has here.
        mask = os.umask(0)
        os.umask(mask)
        Path(path).chmod(0o666 & ~mask)


def load_draft(path: str | Path, target: TargetHead) -> Eagle3Draft:
    """Read what `Eagle3Draft.save` wrote. ValueError when it is not such a file."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if "config" not in metadata or "d2t" not in tensors:
        raise ValueError(f"{path}: not a draft saved by examples/eagle3 (no config or no d2t)")
    config = DraftConfig(**json.loads(metadata["config"]))
    d2t, _, head = tensors.pop("d2t"), tensors.pop("t2d"), tensors.pop("lm_head.weight")
    vocab = DraftVocab(d2t + torch.arange(len(d2t)), config.vocab_size)
    draft = Eagle3Draft(config, target, vocab, head.dtype)
    draft.load_state_dict(tensors, strict=True)
    return draft
