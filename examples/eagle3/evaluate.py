"""How often the draft proposes the token that the target would have chosen."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from .draft import Eagle3Draft
from .loss import Batch, step_loss, target_answers, unroll


@dataclass(frozen=True)
class Evaluation:
    """Per test-time-training step: agreement in [0, 1] over the target's whole vocabulary, mean
    cross-entropy in nats, and how many rows were judged."""

    agreement: list[float]
    loss: list[float]
    rows: list[int]


@torch.inference_mode()
def evaluate(draft: Eagle3Draft, batches: Iterable[Batch], steps: int) -> Evaluation:
    """Greedy agreement with the target on every supervised row.

    A target token outside the draft vocabulary counts as a miss: the draft cannot propose it.
    """
    hits, rows, summed, counted = [0] * steps, [0] * steps, [0.0] * steps, [0] * steps
    was_training = draft.training
    draft.eval()
    for batch in batches:
        target = target_answers(draft, batch)
        for k, step in enumerate(unroll(draft, batch, target, steps)):
            proposed = draft.vocab.ids[step.logits.argmax(-1)]
            hits[k] += int((proposed == target.argmax[step.target]).sum())
            rows[k] += len(proposed)
            loss, known = step_loss(step, target, draft)
            summed[k] += float(loss)
            counted[k] += known
    draft.train(was_training)
    return Evaluation(
        [h / max(n, 1) for h, n in zip(hits, rows, strict=True)],
        [s / max(n, 1) for s, n in zip(summed, counted, strict=True)],
        rows,
    )
