"""Pins, vacuum and delete on an object store, where nothing can be renamed or linked."""

from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

import hslake
from hslake.errors import InvalidInput, Missing
from hslake.pins import pin, pins, unpin
from hslake.query import run
from hslake.verify import hide, verify
from hslake.versions import delete, log, repair, vacuum
from tests.lakes import make_lake
from tests.test_s3 import bucket, server  # noqa: F401  fixtures


def test_versions_on_s3(bucket: str, tmp_path: Path) -> None:  # noqa: F811
    made = make_lake(tmp_path, lengths=[30, 40], streams=2, url=f"{bucket}/lake")
    made.add([50])
    pin(made.url, "run", 1)
    with pytest.raises(InvalidInput, match="names version 1 already"):
        pin(made.url, "run", 2)
    assert hslake.open(made.url, version="run").version == 1
    at = made.lake.location("B4-000002").segment_id
    hide(made.lake, {(at, "B4-000002"): "test"})
    orphan = "01900000-0000-7000-8000-000000000000"
    made.lake.store.put(f"segments/{orphan}/zarr.json", b"{}")
    assert vacuum(made.url, timedelta(days=1)).segments == (orphan,)
    assert vacuum(made.url, timedelta(0)).segments == (at,)
    with pytest.raises(Missing, match="not whole any more"):
        hslake.open(made.url, version=2).read("B4-000002")
    unpin(made.url, "run")
    done = delete(made.url, "sample_id = 'A1-000000'", reason="request")
    assert len(done.removed) == 1
    lake = made.lake
    assert run(lake, "select sample_id from samples")["sample_id"].to_pylist() == ["B3-000001"]
    assert np.array_equal(lake.read("B3-000001").hidden_states, made.samples["B3-000001"].states)
    assert verify(made.url).damage == [] and pins(lake) == []
    assert len({p.split("/")[1] for p in lake.store.list("segments")}) == 1
    assert repair(made.url).findings == []
    assert log(made.url, 2)[0]["action"] == "delete"
