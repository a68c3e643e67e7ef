"""The epoch plan: every sample once, whatever the ranks, and the same again after a resume."""

import hashlib

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hslake.errors import InvalidInput
from hslake.torch import order

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=60)
FEW = settings(max_examples=40, deadline=None)


def refs_of(lengths):
    return pa.table(
        {
            "sample_id": [f"s{i}" for i in range(len(lengths))],
            "source": ["A1"] * len(lengths),
            "length": pa.array(lengths, pa.int32()),
        }
    )


def batch_tokens(lengths, layout, multiple=1):
    """Token slots that a batch of samples with these lengths takes."""
    padded = [-(-n // multiple) * multiple for n in (max(lengths), sum(lengths))]
    return len(lengths) * padded[0] if layout == "padded" else padded[1]


def plan_of(lengths, layout="padded", seed=1, epoch=0, tokens=64, **more):
    return order.epoch_plan(
        refs_of(lengths), seed=seed, epoch=epoch, tokens_per_batch=tokens, layout=layout, **more
    )


def batches_of(plan):
    return [plan.batch(i).tolist() for i in range(len(plan))]


def test_order_is_md5_of_seed_epoch_and_id():
    refs = refs_of([1] * 50)
    ids = refs["sample_id"].to_pylist()
    wanted = sorted(range(50), key=lambda i: hashlib.md5(f"7:3:{ids[i]}".encode()).hexdigest())
    assert order.epoch_order(refs, 7, 3).tolist() == wanted


def test_order_does_not_depend_on_the_order_of_rows():
    refs = refs_of([1] * 50)
    mixed = refs.take(pa.array(np.random.default_rng(0).permutation(50)))
    one = refs["sample_id"].take(pa.array(order.epoch_order(refs, 1, 2)))
    two = mixed["sample_id"].take(pa.array(order.epoch_order(mixed, 1, 2)))
    assert one.to_pylist() == two.to_pylist()


def test_plan_is_fixed_for_ever():
    """A changed plan would make old checkpoints resume elsewhere: then change _ALGORITHM too."""
    lengths = [5, 9, 1, 30, 12, 7, 64, 2, 2, 18]
    found = [plan_of(lengths, layout, seed=3, epoch=1).digest[:16] for layout in order.LAYOUTS]
    assert found == ["a1cd564dac5426e1", "d7f1e70aba0bf371"]


@FEW
@given(LENGTHS, st.sampled_from(order.LAYOUTS), st.integers(0, 5), st.sampled_from([1, 4, 16]))
def test_every_sample_once_and_no_batch_above_the_limit(lengths, layout, epoch, multiple):
    plan = plan_of(lengths, layout, epoch=epoch, multiple=multiple)
    assert sorted(plan.samples.tolist()) == list(range(len(lengths)))
    for batch in batches_of(plan):
        assert batch
        assert batch_tokens([lengths[i] for i in batch], layout, multiple) <= 64
    assert plan.oversized == 0


@FEW
@given(LENGTHS, st.sampled_from(order.LAYOUTS), st.integers(1, 7))
def test_ranks_split_the_plan_exactly(lengths, layout, world):
    plan = plan_of(lengths, layout)
    ranks = [list(order.rank_batches(len(plan), 0, r, world)) for r in range(world)]
    assert len({len(r) for r in ranks}) == 1  # every rank has the same number of steps
    together = [step[rank][0] for step in zip(*ranks, strict=True) for rank in range(world)]
    assert [b for b in together if b is not None] == list(range(len(plan)))
    assert together[: len(plan)] == list(range(len(plan)))  # padding only at the very end
    for rank in ranks:
        assert rank[-1][1] == len(plan)


@FEW
@given(st.integers(0, 40), st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6)), max_size=8))
def test_resume_with_other_world_sizes_neither_replays_nor_skips(batches, runs):
    seen, consumed = [], 0
    for world, stop_after in [*runs, (3, 100)]:
        ranks = [list(order.rank_batches(batches, consumed, r, world)) for r in range(world)]
        for step in list(zip(*ranks, strict=True))[:stop_after]:
            seen += [b for b, _ in step if b is not None]
            assert len({after for _, after in step}) == 1
            consumed = step[0][1]
    assert seen == list(range(batches))
    assert consumed == batches


def test_epochs_and_seeds_differ_in_order_and_in_mates():
    lengths = np.random.default_rng(0).integers(1, 60, 300).tolist()
    plans = [plan_of(lengths, epoch=e, seed=s) for e, s in ((0, 1), (1, 1), (0, 2))]
    mates = [{frozenset(b) for b in batches_of(p) if len(b) > 1} for p in plans]
    assert len({p.digest for p in plans}) == 3
    for a, b in ((0, 1), (0, 2)):
        assert len(mates[a] & mates[b]) < 0.2 * len(mates[a])


def test_sorting_cuts_padding():
    lengths = np.random.default_rng(0).integers(1, 2000, 2000)
    plan = plan_of(lengths.tolist(), tokens=16384)
    slots = sum(batch_tokens(lengths[b].tolist(), "padded") for b in batches_of(plan))
    assert lengths.sum() / slots > 0.93  # about 0.6 without windows
    # and the sequence of batches is mixed: short and long ones do not come in runs
    firsts = np.array([lengths[plan.batch(i)].max() for i in range(len(plan))])
    assert abs(np.corrcoef(firsts[:-1], firsts[1:])[0, 1]) < 0.3


def test_small_lakes_still_shuffle_mates():
    assert order.window_size(1000, 64) == 256
    assert order.window_size(10_000, 64) == 1250
    assert order.window_size(10**9, 64) == 32 * 64


def test_a_sample_above_the_limit_is_named_before_anything_is_read():
    with pytest.raises(InvalidInput, match=r"1 samples .* 's2' with 65 tokens.*own_batch"):
        plan_of([3, 4, 65])
    plan = plan_of([3, 4, 65], oversize="own_batch")
    assert plan.oversized == 1
    assert [2] in batches_of(plan)


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"layout": "ragged"}, "layout"),
        ({"tokens": 0}, "tokens_per_batch=0"),
        ({"tokens": 30, "multiple": 16}, "not a multiple"),
        ({"seed": -1}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"epoch": 1 << 63}, "epoch"),
    ],
)
def test_settings_that_make_no_sense(settings_, message):
    with pytest.raises(InvalidInput, match=message):
        plan_of([1, 2], **settings_)


def test_an_empty_selection_has_an_empty_plan():
    assert len(plan_of([])) == 0
