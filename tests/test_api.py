"""The Python of DESIGN section 8, as written there, on a local lake."""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hslake
from hslake.segment.layout import segment_prefix
from hslake.store import Store
from tests.lakes import make_lake


def test_the_code_of_the_design(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    made = make_lake(tmp_path, lengths=[300, 10, 700, 20, 30, 40])
    first = next(iter(made.samples))
    r, w = 0, 2

    lake = hslake.open(made.url, version=None)
    relation = lake.sql("select source, count(*), sum(length) from samples group by 1")
    if importlib.util.find_spec("pandas"):  # an extra of DuckDB's, not ours
        assert len(relation.df()) == 3
    assert sorted(relation.fetchall()) == [("A1", 2, 320), ("B3", 2, 40), ("B4", 2, 740)]
    s = lake.read(first)
    assert s.hidden_states.shape == (4, 300, 8)
    assert s.input_ids.shape == s.loss_mask.shape == (300,)
    part = lake.read(first, streams=["final"], rows=slice(0, 128))
    assert np.array_equal(part.hidden_states, s.hidden_states[3:, :128])

    from hslake.torch import HiddenStateDataset, HiddenStateLoader

    ds = HiddenStateDataset(lake, where="source <> 'B7' and length <= 4096")
    loader = HiddenStateLoader(
        ds, tokens_per_batch=16384, layout="padded", seed=0, rank=r, world_size=w
    )
    state = loader.state_dict()
    assert set(state) == {"version", "plan_digest", "seed", "epoch", "consumed"}
    assert len(ds) == 6
    for batch in loader:
        assert batch["hidden_state"].shape[2] == 3 * 8 and batch["target"].shape[2] == 8


def test_training_starts_while_extraction_runs(tmp_path: Path) -> None:
    torch = pytest.importorskip("hslake.torch")
    made = make_lake(tmp_path, lengths=[10, 20])
    ds = torch.HiddenStateDataset(made.lake, version="latest-per-epoch")
    loader = torch.HiddenStateLoader(ds)
    assert sorted(i for b in loader for i in b["sample_ids"]) == sorted(made.samples)
    made.add([30])
    loader.set_epoch(1)
    assert sorted(i for b in loader for i in b["sample_ids"]) == sorted(made.samples)
    assert loader.state_dict()["version"] == made.lake.version


def test_some_rows_read_only_their_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_lake(tmp_path, lengths=[10, 700], hidden=64)
    name = list(made.samples)[1]
    lake = made.lake
    reads: list[tuple[str, int]] = []
    real = Store.read_range

    def counted(self: Store, path: str, *args: int, **more: int) -> bytes:
        data = real(self, path, *args, **more)
        reads.append((path, len(data)))
        return data

    states = f"{segment_prefix(lake.location(name).segment_id)}hidden_states"
    monkeypatch.setattr(Store, "read_range", counted)

    def range_of_states(**what: Any) -> int:
        reads.clear()
        lake.read(name, **what)
        (size,) = (n for path, n in reads if path.startswith(states))
        return size

    lake.read(name)  # the shard's index is read once
    whole = range_of_states()
    one = range_of_states(streams=["final"], rows=slice(0, 128))
    # One of 4 streams x 3 chunks, the last of them short: its zeros take no bytes.
    assert whole / 12 < one < whole / 8
    assert range_of_states(streams=["final"], rows=slice(0, 256)) == one
    assert range_of_states(streams=["final"], rows=slice(0, 257)) > one
