"""The multi-step ("test-time training") loss of EAGLE-3.

Row t of a sample, at step k, holds the embedding of token t+1+k and a hidden state, and predicts
token t+2+k: the target's own answer there is softmax(lm_head(final[t+1+k])). At step 0 the hidden
state is the target's (three boundaries through fc); at step k > 0 it is the draft's own output of
step k-1, as it will be when the draft runs alone. Nothing is shifted in storage: all shifting
happens here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .draft import Eagle3Draft

Batch = dict[str, Tensor]
STEP_WEIGHT = 0.8  # step k counts 0.8^k, as in the published training code


def shift_left(x: Tensor, by: int) -> Tensor:
    """x [B, T, ...] -> the same shape, row t holding x[t + by]; zeros (False) past the end."""
    out = torch.zeros_like(x)
    if by < x.shape[1]:
        out[:, : x.shape[1] - by] = x[:, by:]
    return out


@dataclass(frozen=True)
class Target:
    """The target's answers at the supervised positions of a batch; all without gradient.

    `index` [B, T] int64: where position t of the batch lies in the other two, 0 where unsupervised.
    `argmax` [n] int64 over the whole vocabulary; `draft_logits` [n, draft_vocab], the target's
    logits of the tokens that the draft can say.
    """

    index: Tensor
    argmax: Tensor
    draft_logits: Tensor


@dataclass(frozen=True)
class Step:
    """One draft step, supervised rows only. `logits` [n, draft_vocab], `target` [n] into Target."""

    logits: Tensor
    target: Tensor


@torch.no_grad()
def target_answers(draft: Eagle3Draft, batch: Batch) -> Target:
    """lm_head(final) once a batch, at the positions t whose next token t+1 is supervised."""
    wanted = shift_left(supervised(batch), 1)
    final = batch["target"][wanted]
    logits = F.linear(final.to(draft.target_lm_head.dtype), draft.target_lm_head)
    index = (wanted.flatten().cumsum(0) - 1).clamp(min=0).view_as(wanted)
    return Target(index, logits.max(-1).indices, logits[:, draft.vocab.ids])


def supervised(batch: Batch) -> Tensor:
    """[B, T] bool: the token at t is real and supervised."""
    return (batch["loss_mask"] * batch["attention_mask"]).bool()


def unroll(draft: Eagle3Draft, batch: Batch, target: Target, steps: int) -> Iterator[Step]:
    """Run `steps` draft steps over a padded batch of the loader.

    A row counts at step k when the token it predicts, t+2+k, exists and is supervised. `batch`
    needs input_ids, attention_mask, loss_mask [B, T], hidden_state [B, T, 3H], target [B, T, H].
    """
    mask = supervised(batch)
    hidden = draft.fuse(batch["hidden_state"])
    cache: list[tuple[Tensor, Tensor]] = []
    for k in range(steps):
        hidden = draft.step(shift_left(batch["input_ids"], 1 + k), hidden, cache)
        rows = shift_left(mask, 2 + k)
        yield Step(draft.logits(hidden[rows]), shift_left(target.index, 1 + k)[rows])


def step_loss(step: Step, target: Target, draft: Eagle3Draft) -> tuple[Tensor, int]:
    """(cross-entropy summed over rows, number of rows) of one step.

    The target's distribution is restricted to the draft vocabulary and renormalised; rows whose
    most likely token the draft cannot say are left out, as in the published training code.
    """
    known = draft.vocab.t2d[target.argmax[step.target]]
    p = target.draft_logits[step.target[known]].float().softmax(-1)
    log_p = step.logits[known].float().log_softmax(-1)
    return -(p * log_p).sum(), int(known.sum())


def ttt_loss(draft: Eagle3Draft, batch: Batch, steps: int) -> tuple[Tensor, list[float]]:
    """(weighted loss to minimise, mean cross-entropy of each step in nats).

    A batch without a supervised row gives a zero loss that still has a gradient.
    """
    total = draft.fc.weight.sum() * 0.0
    per_step = []
    target = target_answers(draft, batch)
    for k, step in enumerate(unroll(draft, batch, target, steps)):
        summed, rows = step_loss(step, target, draft)
        mean = summed / max(rows, 1)
        per_step.append(float(mean.detach()))
        total = total + STEP_WEIGHT**k * mean
    return total, per_step
