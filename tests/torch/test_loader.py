"""The loader over a real lake: exact order, exact resume, damage, memory, processes."""

import functools
import logging
import multiprocessing
import pickle
import threading

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import hslake
from hslake.errors import Conflict, Corrupt, InvalidInput
from hslake.store import Store
from hslake.torch import HiddenStateDataset, HiddenStateLoader, collate_batch
from hslake.torch import loader as loader_module
from hslake.torch.collate import TORCH_DTYPES, bits
from tests.lakes import damage_sample, make_lake

LENGTHS = [3, 300, 17, 256, 80, 5, 64, 257, 33, 120, 9, 700, 41, 2, 511, 90, 12, 1, 150, 28]
FEW = settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_lake(tmp_path_factory.mktemp("lake"), lengths=LENGTHS, hidden=8, dtype="bfloat16")


@pytest.fixture(scope="module")
def ds(made):
    return HiddenStateDataset(made.lake)


def run(loader):
    return [tuple(batch["sample_ids"]) for batch in loader]


def small(ds, **more):
    return HiddenStateLoader(ds, **{"tokens_per_batch": 1024, "seed": 3, **more})


# --- dataset ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_items_are_bit_equal_to_what_was_captured(tmp_path, dtype):
    made = make_lake(tmp_path, lengths=[5, 300, 256], hidden=8, dtype=dtype)
    ds = HiddenStateDataset(made.lake)
    assert len(ds) == 3
    for i in range(3):
        item = ds[i]
        sample = made.samples[item["sample_id"]]
        boundaries = np.concatenate(list(sample.states[:-1]), axis=1)
        assert item["hidden_state"].dtype == TORCH_DTYPES[dtype]
        assert (bits(item["hidden_state"]) == boundaries).all()
        assert (bits(item["target"]) == sample.states[-1]).all()
        assert item["input_ids"].tolist() == sample.input_ids
        assert item["loss_mask"].tolist() == sample.loss_mask
    assert ds[-1]["sample_id"] == ds[2]["sample_id"]
    with pytest.raises(IndexError):
        ds[3]


def test_where_split_and_streams_select(made):
    lake = made.lake
    assert sorted(HiddenStateDataset(lake, where="length <= 9").lengths.tolist()) == [1, 2, 3, 5, 9]
    both = [HiddenStateDataset(lake, split=s) for s in ("train", "validation")]
    assert sum(len(d) for d in both) == len(LENGTHS) and all(len(d) for d in both)
    final = HiddenStateDataset(lake, streams=["final"])
    assert "hidden_state" not in final[0] and final[0]["target"].shape[1] == 8
    last = lake.spec.streams[-2]
    one = HiddenStateDataset(lake, streams=[last])
    assert "target" not in one[0]
    whole = HiddenStateDataset(lake)[0]["hidden_state"]
    assert torch.equal(one[0]["hidden_state"], whole[:, -8:])
    # comments and "or" in a condition stay inside it
    assert len(HiddenStateDataset(lake, where="length = 1 or true -- all", split="train")) == len(
        both[0]
    )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"where": "lenght > 3"}, "lenght"),
        ({"where": "length >"}, "where="),
        ({"split": "valid"}, "no such split; there are 'train', 'validation'"),
        ({"split": "valid", "version": "latest-per-epoch"}, "there are 'train', 'validation'"),
        ({"streams": ["999"]}, "999"),
        ({"streams": []}, "streams"),
        ({"version": "newest"}, "latest-per-epoch"),
    ],
)
def test_wrong_selections_are_explained(made, wrong, message):
    with pytest.raises(InvalidInput, match=message):
        HiddenStateDataset(made.lake, **wrong)


def test_nothing_selected_is_an_error_not_an_empty_training(made):
    ds = HiddenStateDataset(made.lake, where="length > 100000")
    assert len(ds) == 0
    with pytest.raises(InvalidInput, match="selects no sample"):
        next(iter(HiddenStateLoader(ds)))


def test_one_query_and_no_store_access_to_plan(made, monkeypatch):
    ds = pickle.loads(pickle.dumps(HiddenStateDataset(made.lake)))
    for name in ("read", "read_range", "list", "size"):
        monkeypatch.setattr(Store, name, None)
    assert len(HiddenStateLoader(ds)) == 1
    assert len(pickle.dumps(ds)) < 20_000


def test_spawned_dataloader_workers(made, ds):
    workers = DataLoader(
        ds,
        batch_size=4,
        num_workers=2,
        multiprocessing_context="spawn",
        collate_fn=functools.partial(collate_batch, layout="packed"),
    )
    seen = {}
    for batch in workers:
        for i, name in enumerate(batch["sample_ids"]):
            seen[name] = bits(batch["target"])[0][batch["document_ids"][0].numpy() == i]
    assert seen.keys() == made.samples.keys()
    for name, target in seen.items():
        assert (target == made.samples[name].states[-1]).all()


def _read_in_child(ds, queue):
    try:
        ds[0]
        queue.put("read")
    except InvalidInput as error:
        queue.put(str(error))


def test_a_forked_process_is_refused_not_hung(ds):
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_read_in_child, args=(ds, queue))
    child.start()
    child.join(30)
    assert "spawn" in queue.get()


# --- order and batches ------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_an_epoch_holds_every_sample_once_bit_for_bit(made, ds, layout):
    seen = {}
    for batch in small(ds, layout=layout, threads=2):
        lengths = batch["lengths"].tolist()
        assert batch["input_ids"].numel() <= 1024
        start = 0
        for i, (name, n) in enumerate(zip(batch["sample_ids"], lengths, strict=True)):
            at = (i, slice(0, n)) if layout == "padded" else (0, slice(start, start + n))
            start += n
            assert name not in seen
            seen[name] = {k: v[at] for k, v in batch.items() if torch.is_tensor(v) and v.dim() > 1}
        if layout == "padded":
            for i, n in enumerate(lengths):
                assert not batch["hidden_state"][i, n:].any() and not batch["target"][i, n:].any()
                assert batch["attention_mask"][i].sum() == n
    assert seen.keys() == made.samples.keys()
    for name, got in seen.items():
        sample = made.samples[name]
        assert (bits(got["hidden_state"]) == np.concatenate(list(sample.states[:-1]), 1)).all()
        assert (bits(got["target"]) == sample.states[-1]).all()
        assert got["input_ids"].tolist() == sample.input_ids
        assert got["loss_mask"].tolist() == sample.loss_mask


def test_order_does_not_depend_on_threads_prefetch_or_opening_again(made, ds):
    wanted = run(small(ds))
    for more in ({"threads": 1}, {"threads": 8}, {"prefetch_bytes": 0}):
        assert run(small(HiddenStateDataset(made.lake.url), **more)) == wanted


@pytest.mark.parametrize("world", [2, 3, 7, 40])
def test_order_does_not_depend_on_world_size(ds, world):
    wanted = run(small(ds))
    ranks = [list(small(ds, rank=r, world_size=world)) for r in range(world)]
    assert len({len(r) for r in ranks}) == 1
    together = [b for step in zip(*ranks, strict=True) for b in step]
    assert [tuple(b["sample_ids"]) for b in together if not b["is_padding"]] == wanted
    for batch in together[len(wanted) :]:
        assert batch["is_padding"] and not batch["loss_mask"].any()


@FEW
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5)), max_size=4))
def test_resume_anywhere_with_any_world_size_is_the_uninterrupted_run(ds, stops):
    wanted = run(small(ds, tokens_per_batch=700))
    seen, state = [], None
    for world, count in [*stops, (1, 1000)]:
        ranks = [small(ds, tokens_per_batch=700, rank=r, world_size=world) for r in range(world)]
        for loader in ranks:
            if state is not None:
                loader.load_state_dict(state)
        iterators = [iter(loader) for loader in ranks]
        for _ in range(count):
            step = [next(it, None) for it in iterators]
            seen += [tuple(b["sample_ids"]) for b in step if b is not None and not b["is_padding"]]
        states = [loader.state_dict() for loader in ranks]
        assert all(s == states[0] for s in states)
        state = pickle.loads(pickle.dumps(states[0]))
        for loader in ranks:
            loader.close()
    assert seen == wanted


def test_resume_at_every_position(ds):
    wanted = run(small(ds, tokens_per_batch=700))
    for stop in range(len(wanted) + 1):
        first, second = (small(ds, tokens_per_batch=700) for _ in range(2))
        iterator = iter(first)
        head = [tuple(next(iterator)["sample_ids"]) for _ in range(stop)]
        second.load_state_dict(first.state_dict())
        second.set_epoch(0)  # what an epoch loop does: must not start over
        assert head + run(second) == wanted
        assert run(second) == run_epoch(ds, 1)


def run_epoch(ds, epoch):
    loader = small(ds, tokens_per_batch=700)
    loader.set_epoch(epoch)
    return run(loader)


def test_epochs(ds):
    loader = small(ds)
    first, second = run(loader), run(loader)  # without set_epoch: the next epoch
    assert loader.epoch == 1 and first != second
    assert sorted(sum(first, ())) == sorted(sum(second, ()))
    loader.set_epoch(0)
    assert run(loader) == first
    loader.set_epoch(0)  # a finished epoch, asked for again
    assert run(loader) == first


def test_leaving_early_goes_on_and_reset_starts_over(ds):
    loader = small(ds, tokens_per_batch=700)
    wanted = run(small(ds, tokens_per_batch=700))
    for batch in loader:
        assert tuple(batch["sample_ids"]) == wanted[0]
        break
    assert run(loader) == wanted[1:]
    loader.set_epoch(0)
    next(iter(loader))
    loader.reset()
    assert run(loader) == wanted


def test_states_that_do_not_fit_are_refused_and_change_nothing(made, ds):
    state = small(ds).state_dict()
    cases = [
        (small(ds, seed=4), state, InvalidInput, "seed"),
        (small(ds, tokens_per_batch=800), state, Conflict, "tokens_per_batch"),
        (small(ds, layout="packed"), state, Conflict, "layout"),
        (small(HiddenStateDataset(made.lake, where="length > 2")), state, Conflict, "where"),
        (small(ds), {**state, "version": state["version"] + 1}, Conflict, "version="),
        (small(ds), {**state, "consumed": 10_000}, Conflict, "10000"),
        (small(ds), {**state, "consumed": "3"}, InvalidInput, "consumed"),
        (small(ds), {}, InvalidInput, "version"),
    ]
    for loader, wrong, error, message in cases:
        before = loader.state_dict()
        with pytest.raises(error, match=message):
            loader.load_state_dict(wrong)
        assert loader.state_dict() == before


def test_a_pinned_run_does_not_see_later_samples_and_latest_does(tmp_path):
    made = make_lake(tmp_path, lengths=[10, 20, 30], hidden=8)
    pinned = HiddenStateDataset(made.lake)
    latest = HiddenStateDataset(made.lake, version="latest-per-epoch")
    loader = small(latest)
    first = run(loader)
    old = loader.state_dict()
    made.add([40, 50])
    assert len(HiddenStateDataset(hslake.open(made.lake.url))) == 5
    assert len(HiddenStateDataset(made.lake.url, version=pinned.version)) == 3
    again = small(pinned)
    assert run(again) == first
    again.set_epoch(1)
    assert sum(map(len, run(again))) == 3
    loader.set_epoch(1)
    assert sum(map(len, run(loader))) == 5
    # a state of the first epoch is continued on the version it was made with
    loader.load_state_dict({**old, "consumed": 0})
    assert loader.dataset.version == old["version"] and run(loader) == first
    several = small(latest, rank=0, world_size=2)
    with pytest.raises(InvalidInput, match="rank 0 choose"):
        several.set_epoch(1)
    several.set_epoch(1, version=pinned.version)
    assert len(several.dataset) == 3
    with pytest.raises(InvalidInput, match="pinned"):
        again.set_epoch(2, version=pinned.version + 1)


def test_long_samples(ds, caplog):
    with pytest.raises(InvalidInput, match="700 tokens"):
        next(iter(small(ds, tokens_per_batch=600)))
    with caplog.at_level(logging.WARNING):
        batches = run(small(ds, tokens_per_batch=600, oversize="own_batch"))
    assert sorted(sum(batches, ())) == sorted(ds.refs["sample_id"].to_pylist())
    assert "1 samples are longer" in caplog.text


def test_prefetch_is_bounded_in_bytes(ds, monkeypatch):
    held, peak = {}, 0

    def allocate(shape, ids, lengths, real=loader_module.allocate):
        nonlocal peak
        batch = real(shape, ids, lengths)
        held[tuple(ids)] = loader_module.batch_bytes(shape, lengths)
        peak = max(peak, sum(held.values()))
        return batch

    monkeypatch.setattr(loader_module, "allocate", allocate)
    largest = 700 * (8 * 4 * 2 + 24)
    for limit in (0, 2 * largest):
        held.clear()
        peak = 0
        for batch in small(ds, tokens_per_batch=700, prefetch_bytes=limit):
            del held[tuple(batch["sample_ids"])]
        assert 0 < peak <= max(limit, largest) + largest  # the one handed out is the caller's
    assert not held


def test_threads_end_with_the_iteration(ds):
    def threads():
        return [t for t in threading.enumerate() if t.name.startswith("hslake-loader")]

    loader = small(ds, tokens_per_batch=700)
    for _ in loader:
        assert threads()
        break
    assert not threads()
    iterator = iter(loader)
    next(iterator)
    loader.close()
    assert not threads()


@pytest.mark.parametrize(
    "wrong",
    [
        {"rank": 2, "world_size": 2},
        {"world_size": 0},
        {"on_error": "ignore"},
        {"oversize": "cut"},
        {"threads": 0},
        {"layout": "ragged"},
    ],
)
def test_wrong_settings(ds, wrong):
    with pytest.raises(InvalidInput):
        HiddenStateLoader(ds, **wrong)


# --- damage -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hurt(tmp_path_factory):
    """A lake with two damaged samples, and the loader settings to read it."""
    folder = tmp_path_factory.mktemp("hurt")
    made = make_lake(folder, lengths=LENGTHS, hidden=8, dtype="bfloat16")
    names = [n for n, s in made.samples.items() if len(s.input_ids) in (700, 41)]
    for name in names:
        damage_sample(made.lake, name)
    return made, set(names)


def test_raise_names_the_sample(hurt):
    made, names = hurt
    with pytest.raises(Corrupt, match="does not read back") as caught:
        run(small(HiddenStateDataset(made.lake)))
    assert any(name in str(caught.value) for name in names)


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("world", [1, 3])
def test_skip_loses_only_the_damaged_ones(hurt, layout, world):
    made, names = hurt
    ds = HiddenStateDataset(made.lake)
    loaders = [
        small(ds, layout=layout, on_error="skip", rank=r, world_size=world) for r in range(world)
    ]
    ranks = [list(loader) for loader in loaders]
    assert len({len(r) for r in ranks}) == 1  # no rank stalls the others
    seen = [n for rank in ranks for b in rank for n in b["sample_ids"]]
    assert sorted(seen) == sorted(made.samples.keys() - names)
    for batch in (b for rank in ranks for b in rank):
        for i, name in enumerate(batch["sample_ids"]):
            if layout == "packed":
                rows = batch["target"][batch["document_ids"] == i]
            else:
                rows = batch["target"][i, : batch["lengths"][i]]
            assert (bits(rows.contiguous()) == made.samples[name].states[-1]).all()
    damaged = [d for loader in loaders for d in loader.damaged]
    assert {d.sample_id for d in damaged} == names
    assert all(d.segment_id and d.error for d in damaged)


def test_substitute_keeps_the_count_and_says_who(hurt):
    made, names = hurt
    ds = HiddenStateDataset(made.lake)
    batches = run(small(ds, on_error="substitute"))
    assert batches == run(small(ds, on_error="substitute", threads=1))
    seen = [n for b in batches for n in b]
    assert len(seen) == len(LENGTHS) and not names & set(seen)
    for batch in batches:
        assert len(set(batch)) == len(batch)
    extra = sorted(len(made.samples[n].input_ids) for n in set(seen) if seen.count(n) > 1)
    assert len(extra) == 2 and extra[0] <= 41 and extra[1] <= 700


@pytest.mark.parametrize("mode", ["skip", "substitute"])
def test_the_budget_ends_a_run_on_a_broken_lake(hurt, mode):
    made, names = hurt
    ds = HiddenStateDataset(made.lake)
    run(small(ds, on_error=mode, error_budget=2))
    with pytest.raises(Corrupt, match="error_budget=1") as caught:
        run(small(ds, on_error=mode, error_budget=1))
    assert all(name in str(caught.value) for name in names)


def test_a_shard_that_is_gone_costs_its_samples_and_is_not_read_as_zeros(tmp_path):
    made = make_lake(tmp_path, lengths=[20, 30], hidden=8)
    old = made.samples.keys() - set(made.add([40]))
    segment = made.lake.location(next(iter(old))).segment_id
    (tmp_path / "lake/segments" / segment / "hidden_states/c/0/0/0").unlink()
    loader = small(HiddenStateDataset(made.lake), on_error="skip")
    (batch,) = list(loader)
    assert set(batch["sample_ids"]) == made.samples.keys() - old
    assert {d.sample_id for d in loader.damaged} == old
    assert all(d.segment_id == segment and "missing" in d.error for d in loader.damaged)


def test_a_batch_with_nothing_left_becomes_padding(hurt):
    made, _ = hurt
    ds = HiddenStateDataset(made.lake, where="length = 700")
    (batch,) = list(small(ds, on_error="skip"))
    assert batch["is_padding"] and not batch["loss_mask"].any() and batch["sample_ids"] == []
    (batch,) = list(small(ds, on_error="substitute"))
    assert batch["is_padding"]


def test_nan_passes_unchanged(tmp_path):
    made = make_lake(tmp_path, lengths=[10, 300], hidden=8, nan=True)
    ds = HiddenStateDataset(made.lake)
    for batch in small(ds):
        for i, (name, n) in enumerate(
            zip(batch["sample_ids"], batch["lengths"].tolist(), strict=True)
        ):
            assert batch["target"][i, :n].isnan().any()
            assert (bits(batch["target"][i, :n]) == made.samples[name].states[-1]).all()
            assert not batch["target"][i, n:].any()
    assert len(HiddenStateDataset(made.lake, where="list_sum(nonfinite) = 0")) == 0
