"""Layouts of a batch: names, shapes, padding, and that nothing moves."""

from functools import partial

import pytest
import torch

from hslake.torch import collate

H = 4


def item(name, length, boundaries=2, dtype=torch.float32):
    """A sample whose every value says where it belongs."""
    tokens = torch.arange(length)
    state = (tokens[:, None] + 1000 * torch.arange(1, boundaries * H + 1)[None]).to(dtype)
    return {
        "sample_id": name,
        "input_ids": tokens + 10,
        "loss_mask": torch.ones(length, dtype=torch.int64),
        "hidden_state": state,
        "target": -state[:, :H],
    }


def test_padded():
    a, b = item("a", 3), item("b", 5)
    batch = collate.collate_batch([a, b])
    assert batch["sample_ids"] == ["a", "b"] and not batch["is_padding"]
    assert batch["lengths"].tolist() == [3, 5]
    assert batch["hidden_state"].shape == (2, 5, 2 * H)
    assert batch["target"].shape == (2, 5, H)
    for name in ("input_ids", "attention_mask", "loss_mask"):
        assert batch[name].shape == (2, 5) and batch[name].dtype == torch.int64
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1] * 5]
    for i, sample in enumerate((a, b)):
        n = len(sample["input_ids"])
        for name in ("input_ids", "loss_mask", "hidden_state", "target"):
            assert torch.equal(batch[name][i, :n], sample[name])
            assert not batch[name][i, n:].any()


def test_packed():
    a, b = item("a", 3), item("b", 2)
    batch = collate.collate_batch([a, b], "packed", multiple=4)
    assert batch["document_ids"].tolist() == [[0, 0, 0, 1, 1, -1, -1, -1]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 0, 0]]
    assert batch["hidden_state"].shape == (1, 8, 2 * H)
    for name in ("input_ids", "loss_mask", "hidden_state", "target"):
        assert torch.equal(batch[name][0, :5], torch.cat([a[name], b[name]]))
        assert not batch[name][0, 5:].any()
    assert "attention_mask" not in batch


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_batch_without_samples(layout):
    shape = collate.Shape(layout, 2 * H, H, torch.bfloat16, multiple=16)
    batch = collate.allocate(shape, [], [])
    assert batch["is_padding"] and batch["sample_ids"] == [] and len(batch["lengths"]) == 0
    assert batch["input_ids"].shape == (1, 16)
    for name in ("input_ids", "loss_mask", "hidden_state", "target"):
        assert not batch[name].any()
    if layout == "padded":
        assert batch["attention_mask"].all()  # attention over nothing is NaN
    else:
        assert (batch["document_ids"] == -1).all()
    collate.zero_last_loss(batch)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_taking_samples_out_leaves_the_others_whole(layout):
    items = [item(n, k) for n, k in (("a", 3), ("b", 6), ("c", 2))]
    shape = collate.Shape(layout, 2 * H, H, torch.float32)
    a, _, c = collate.items(collate.collate_batch(items, layout), shape)
    kept = collate.assemble([a, c], shape)
    wanted = collate.collate_batch([items[0], items[2]], layout)
    assert kept.keys() == wanted.keys()
    for name, value in wanted.items():
        same = torch.equal(kept[name], value) if torch.is_tensor(value) else kept[name] == value
        assert same, name
    assert collate.assemble([], shape)["is_padding"]


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_bytes_are_those_allocated(layout):
    shape = collate.Shape(layout, 3 * H, H, torch.bfloat16, multiple=8)
    for lengths in ([3, 9, 1], [7], []):
        batch = collate.allocate(shape, [str(n) for n in lengths], lengths)
        size = sum(t.nbytes for n, t in batch.items() if torch.is_tensor(t) and n != "lengths")
        assert collate.batch_bytes(shape, lengths) == size


def test_streams_that_were_not_asked_for_are_absent():
    only_target = item("a", 3)
    del only_target["hidden_state"]
    assert "hidden_state" not in collate.collate_batch([only_target])
    only_state = item("a", 3)
    del only_state["target"]
    assert "target" not in partial(collate.collate_batch, layout="packed")([only_state])


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_zero_last_loss(layout):
    batch = collate.zero_last_loss(collate.collate_batch([item("a", 3), item("b", 2)], layout))
    if layout == "padded":
        assert batch["loss_mask"].tolist() == [[1, 1, 0], [1, 0, 0]]
    else:
        assert batch["loss_mask"].tolist() == [[1, 1, 0, 1, 0]]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_bits_round_trip_every_pattern(dtype):
    kind = collate.TORCH_DTYPES[dtype]
    tensor = torch.randint(-(2**15), 2**15, (64, 8), dtype=torch.int16).view(kind)
    again = collate.from_bits(collate.bits(tensor), dtype)
    assert again.dtype == kind and (collate.bits(again) == collate.bits(tensor)).all()
