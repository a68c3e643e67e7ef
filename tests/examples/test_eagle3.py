"""The draft head's loss: shifts, masks and test-time-training attention on known answers."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from examples.eagle3.draft import (
    DraftConfig,
    DraftVocab,
    Eagle3Draft,
    TargetHead,
    count_supervised,
    load_draft,
)
from examples.eagle3.evaluate import evaluate
from examples.eagle3.loss import (
    shift_left,
    step_loss,
    target_answers,
    ttt_loss,
    unroll,
)

VOCAB, HIDDEN = 12, 8
CONFIG = DraftConfig(
    hidden_size=HIDDEN,
    intermediate_size=16,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    vocab_size=VOCAB,
    draft_vocab_size=8,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
)


@pytest.fixture
def draft() -> Eagle3Draft:
    torch.manual_seed(0)
    head = TargetHead(
        torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB, HIDDEN), torch.rand(HIDDEN) + 0.5
    )
    return Eagle3Draft(CONFIG, head, DraftVocab(torch.tensor([0, 1, 3, 4, 6, 7, 9, 11]), VOCAB))


def make_batch(lengths: list[int], seed: int = 1) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    rows, width = len(lengths), max(lengths)
    attention = torch.zeros(rows, width, dtype=torch.int64)
    for i, n in enumerate(lengths):
        attention[i, :n] = 1
    return {
        "input_ids": torch.randint(0, VOCAB, (rows, width), generator=g) * attention,
        "attention_mask": attention,
        "loss_mask": attention.clone(),
        "hidden_state": torch.randn(rows, width, 3 * HIDDEN, generator=g) * attention[..., None],
        "target": torch.randn(rows, width, HIDDEN, generator=g) * attention[..., None],
    }


def test_shift_left_drops_the_front_and_fills_with_zeros() -> None:
    x = torch.tensor([[1, 2, 3]])
    assert shift_left(x, 1).tolist() == [[2, 3, 0]]
    assert shift_left(x, 3).tolist() == shift_left(x, 9).tolist() == [[0, 0, 0]]


def test_each_step_is_judged_by_the_target_at_the_position_before_the_token(
    draft: Eagle3Draft,
) -> None:
    batch = make_batch([7])
    target = target_answers(draft, batch)
    for k, step in enumerate(unroll(draft, batch, target, 3)):
        # Rows t = 0 .. 7-3-k predict token t+2+k; the target answers it at position t+1+k.
        expected = batch["target"][0, 1 + k : 6] @ draft.target_lm_head.T
        assert len(step.logits) == 5 - k
        assert torch.equal(target.argmax[step.target], expected.argmax(-1))
        torch.testing.assert_close(
            target.draft_logits[step.target], expected[:, draft.vocab.ids], rtol=1e-5, atol=1e-5
        )


def test_a_row_reads_the_next_token_and_nothing_later(draft: Eagle3Draft) -> None:
    batch = make_batch([8])
    target = target_answers(draft, batch)
    before = [s.logits for s in unroll(draft, batch, target, 2)]
    changed = {k: v.clone() for k, v in batch.items()}
    changed["input_ids"][0, 4] = (changed["input_ids"][0, 4] + 1) % VOCAB
    after = [s.logits for s in unroll(draft, changed, target, 2)]
    same = [(a == b).all(-1).tolist() for a, b in zip(before, after, strict=True)]
    # Token 4 is the "next token" of row 3 at step 0, and of row 2 at step 1.
    assert same[0] == [True, True, True, False, False, False]
    assert same[1] == [True, True, False, False, False]


def test_the_mask_says_which_predicted_tokens_count(draft: Eagle3Draft) -> None:
    batch = make_batch([9, 6])
    batch["loss_mask"][0, :5] = 0
    batch["loss_mask"][1] = 0
    batch["loss_mask"][1, 5] = 1
    target = target_answers(draft, batch)
    # Sample 0: rows 3..6 (step 0) and 2..5 (step 1) predict tokens 5..8; sample 1: token 5.
    assert [len(s.logits) for s in unroll(draft, batch, target, 2)] == [5, 5]
    batch["loss_mask"][:] = 0
    loss, per_step = ttt_loss(draft, batch, 2)
    assert loss.item() == 0.0 and per_step == [0.0, 0.0]
    loss.backward()


def test_padding_and_neighbours_change_nothing(draft: Eagle3Draft) -> None:
    both, alone = make_batch([5, 9]), make_batch([5, 9])
    alone = {k: v[:1, :5] for k, v in alone.items()}
    target = target_answers(draft, alone)
    together = unroll(draft, both, target_answers(draft, both), 3)
    for a, b in zip(unroll(draft, alone, target, 3), together, strict=True):
        torch.testing.assert_close(a.logits, b.logits[: len(a.logits)], rtol=1e-5, atol=1e-5)


def test_ttt_equals_a_real_draft_chain(draft: Eagle3Draft) -> None:
    """Step k, row t = what inference computes: a chain started at t over the true prefix."""
    batch, steps, length = make_batch([8]), 3, 8
    ids, states = batch["input_ids"], draft.fuse(batch["hidden_state"])
    cache: list = []
    hidden, training = states, []
    for k in range(steps):
        hidden = draft.step(shift_left(ids, 1 + k), hidden, cache)
        training.append(hidden[0])
    for t in range(length - steps - 1):
        # One sequence: the target's states of rows 0..t, then the draft's own, causal throughout.
        tokens, sequence = ids[:, 1 : t + 2], states[:, : t + 1]
        for k in range(steps):
            out = draft.step(tokens, sequence, [])
            torch.testing.assert_close(out[0, -1], training[k][t], rtol=1e-4, atol=1e-5)
            tokens = ids[:, 1 : t + 3 + k]
            sequence = torch.cat([sequence, out[:, -1:]], 1)


def test_loss_is_cross_entropy_over_the_draft_vocabulary(draft: Eagle3Draft) -> None:
    batch = make_batch([10])
    target = target_answers(draft, batch)
    step = next(unroll(draft, batch, target, 1))
    total, rows = step_loss(step, target, draft)
    expected, known = 0.0, 0
    for i, logits in enumerate(step.logits):
        answer = batch["target"][0, 1 + i] @ draft.target_lm_head.T
        if answer.argmax() in draft.vocab.ids:
            p = answer[draft.vocab.ids].softmax(-1)
            expected, known = expected - (p * F.log_softmax(logits, -1)).sum(), known + 1
    assert rows == known < len(step.logits)
    torch.testing.assert_close(total, torch.as_tensor(expected), rtol=1e-5, atol=1e-5)


def test_agreement_counts_tokens_outside_the_draft_vocabulary_as_misses(draft: Eagle3Draft) -> None:
    batch = make_batch([10, 7])
    result = evaluate(draft, [batch, batch], 2)
    target = target_answers(draft, batch)
    steps = list(unroll(draft, batch, target, 2))
    hits = [(draft.vocab.ids[s.logits.argmax(-1)] == target.argmax[s.target]).sum() for s in steps]
    assert result.rows == [2 * (8 + 5), 2 * (7 + 4)]
    assert result.agreement == [2 * int(h) / n for h, n in zip(hits, result.rows, strict=True)]


def test_training_learns_a_rule_and_leaves_the_head_frozen(draft: Eagle3Draft) -> None:
    """The target always continues token i with i+3 mod 12: the draft learns it from the token."""
    length = 16
    ids = torch.arange(length)[None] * 3 % VOCAB
    frozen = draft.lm_head.clone()
    target = torch.linalg.pinv(draft.target_lm_head) @ (8 * torch.eye(VOCAB))
    batch = make_batch([length])
    batch["input_ids"] = ids
    batch["target"] = target.T[(ids[0] + 3) % VOCAB][None]
    optimizer = torch.optim.Adam(draft.parameters(), lr=0.02)
    first = ttt_loss(draft, batch, 2)[1]
    for _ in range(60):
        loss, last = ttt_loss(draft, batch, 2)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(b < 0.7 * a for a, b in zip(first, last, strict=True))
    assert torch.equal(frozen, draft.lm_head)


def test_draft_vocabulary_maps_both_ways() -> None:
    counts = count_supervised([([5, 5, 2, 9], [1, 1, 0, 1]), ([9, 9, 0], [1, 1, 1])], VOCAB)
    assert counts.tolist() == [1, 0, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0]
    vocab = DraftVocab.from_counts(counts, 3)
    assert vocab.ids.tolist() == [0, 5, 9]
    assert (torch.arange(3) + vocab.d2t).tolist() == [0, 5, 9]
    assert vocab.t2d.nonzero().flatten().tolist() == [0, 5, 9]


def test_save_and_load_give_the_same_draft(draft: Eagle3Draft, tmp_path: Path) -> None:
    draft.save(tmp_path / "draft.safetensors")
    (tmp_path / "any").touch()
    modes = {(tmp_path / name).stat().st_mode for name in ("any", "draft.safetensors")}
    assert len(modes) == 1
    head = TargetHead(draft.embedding, draft.target_lm_head, torch.ones(HIDDEN))
    loaded = load_draft(tmp_path / "draft.safetensors", head)
    batch = make_batch([6])
    assert ttt_loss(loaded, batch, 2)[1] == ttt_loss(draft, batch, 2)[1]
