"""Making and opening lakes; the store; model fingerprints and the final norm."""

import json
import os
import pickle
import struct
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import zarr

import hslake
import hslake.zarr_dtype  # for open_array: zarr before 3.4.1 loads no entry point there
from hslake import lake as lakes
from hslake.checksum import sample_checksum
from hslake.errors import Conflict, InvalidInput, Missing
from hslake.segment.write import SegmentSample, new_segment_id, write_segment
from hslake.spec import check_fingerprint, model_fingerprint, read_spec
from hslake.store import Store, open_store
from hslake.tables import catalog
from tests.lakes import make_lake

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "num_hidden_layers": 10,
    "vocab_size": 100,
    "rms_norm_eps": 1e-5,
    "dtype": "float16",
    "transformers_version": "5.0",
}


def write_model(folder: Path, weight: np.ndarray | None = None, **changes: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}), "utf-8")
    if weight is not None:
        entry = {"dtype": "BF16", "shape": [len(weight)], "data_offsets": [0, weight.nbytes]}
        header = json.dumps({"model.norm.weight": entry}).encode()
        data = struct.pack("<Q", len(header)) + header + weight.tobytes()
        (folder / "model.safetensors").write_bytes(data)
    return folder


WEIGHT = np.arange(0x3F80, 0x3F88, dtype="<u2")


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "local":
        return open_store(tmp_path / "lake")
    return open_store(f"memory://{tmp_path.name}-{request.node.name[:4]}/lake")


def test_store(store: Store) -> None:
    store.put("a/b", b"0123456789")
    assert store.read("a/b") == b"0123456789"
    assert store.read_range("a/b", 2, 5) == b"234"
    assert store.read_range("a/b", 7) == b"789"
    assert store.read_range("a/b", suffix=3) == b"789"
    assert store.size("a/b") == 10
    assert store.exists("a/b") and not store.exists("a") and not store.exists("x")
    store.put("a/b", b"new")
    store.put_new("a/c", b"1")
    with pytest.raises(Conflict):
        store.put_new("a/c", b"2")
    assert store.read("a/c") == b"1"
    assert store.list("a") == store.list() == ["a/b", "a/c"]
    assert store.list("nothing") == []
    store.delete("a/c")
    store.delete("a/c")
    for call in (store.read, store.size, store.read_range):
        with pytest.raises(Missing):
            call("a/c")
    store.check_put_new()
    assert store.list() == ["a/b"]
    assert pickle.loads(pickle.dumps(store)).read("a/b") == b"new"


def test_create_from_config(tmp_path: Path) -> None:
    model = write_model(tmp_path / "toy", WEIGHT)
    lake = hslake.create(
        tmp_path / "lake", model_config=model / "config.json", capture="eagle3", estimate_tokens=5
    )
    assert lake.spec == read_spec(str(tmp_path / "lake")) == hslake.open(tmp_path / "lake").spec
    assert lake.spec.streams == ("2", "5", "7", "final")
    assert (lake.spec.dtype, lake.spec.model.name) == ("float16", "toy")
    assert lake.spec.estimate.tokens == 5
    assert (lake.version, lake.plan_version) == (0, 0)
    norm = zarr.open_array(tmp_path / "lake/model/final_norm", mode="r")
    assert norm.attrs["eps"] == 1e-5
    assert norm.metadata.to_dict()["data_type"] == "bfloat16"
    assert np.array_equal(norm[:], WEIGHT)
    assert lake.sql("select count(*) from samples").fetchall() == [(0,)]
    with pytest.raises(InvalidInput, match="SELECT"):
        lake.sql("drop view samples")
    with pytest.raises(Missing, match="A1-0"):
        lake.read("A1-0")


def test_create_without_a_model(tmp_path: Path) -> None:
    made = {"hidden_size": 8, "num_layers": 4}
    lake = hslake.create(tmp_path / "l", streams=[1, "final"], **made)
    assert lake.spec.streams == ("1", "final")
    assert lake.spec.dtype == "bfloat16"
    assert not lake.store.list("model")
    for bad, message in (
        ({"capture": "1"}, "num_layers"),
        (made, "capture"),
        ({**made, "capture": "1", "streams": ["1"]}, "capture"),
        ({**made, "capture": "9"}, "boundaries"),
        ({**made, "capture": "1", "dtype": "int8"}, "dtype"),
        ({**made, "capture": "1", "estimate_bytes": 0}, "estimate_bytes"),
    ):
        with pytest.raises(InvalidInput, match=message):
            hslake.create(tmp_path / "bad", **bad)
    assert not (tmp_path / "bad").exists()


def test_config_and_weights_must_agree(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", WEIGHT[:4])
    with pytest.raises(InvalidInput, match="norm"):
        hslake.create(tmp_path / "l", model_config=model, capture="final")
    with pytest.raises(InvalidInput, match="hidden_size"):
        hslake.create(tmp_path / "l", model_config=model, capture="final", hidden_size=16)


def test_text_config_of_a_multimodal_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["KimiK25"], "text_config": CONFIG}), "utf-8"
    )
    lake = hslake.create(tmp_path / "l", model_config=tmp_path, capture="final")
    assert (lake.spec.hidden_size, lake.spec.num_layers, lake.spec.dtype) == (8, 10, "float16")


def test_an_existing_lake_is_refused(tmp_path: Path) -> None:
    url = tmp_path / "l"
    first = hslake.create(url, hidden_size=8, num_layers=4, capture="1")
    with pytest.raises(InvalidInput, match="already"):
        hslake.create(url, hidden_size=8, num_layers=4, capture="1")
    assert hslake.open(url).spec == first.spec


def test_of_racing_creates_one_wins(tmp_path: Path) -> None:
    models = [write_model(tmp_path / f"m{k}", WEIGHT + np.uint16(k)) for k in range(4)]
    made: list[hslake.lake.Lake] = []  # type: ignore[name-defined]
    refused: list[InvalidInput] = []

    def work(k: int) -> None:
        try:
            made.append(hslake.create(tmp_path / "l", model_config=models[k], capture="1"))
        except InvalidInput as e:
            refused.append(e)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert (len(made), len(refused)) == (1, 3)
    lake = hslake.open(tmp_path / "l")
    assert lake.spec == made[0].spec
    k = int(lake.spec.model.name[1:])
    assert lake.store.read("model/final_norm/c/0") == (WEIGHT + np.uint16(k)).tobytes()


def test_interrupted_create_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"model_config": write_model(tmp_path / "m", WEIGHT), "capture": "1"}
    real = Store.put_new

    def dies(self: Store, path: str, data: bytes) -> None:
        if path == "hslake.json":
            raise KeyboardInterrupt
        real(self, path, data)

    with monkeypatch.context() as m:
        m.setattr(Store, "put_new", dies)
        with pytest.raises(KeyboardInterrupt):
            hslake.create(tmp_path / "l", **settings)
    with pytest.raises(Missing, match="no lake"):
        hslake.open(tmp_path / "l")
    other = write_model(tmp_path / "other", WEIGHT + np.uint16(1))
    for another in ({"model_config": other}, {"hidden_size": 8, "num_layers": 4}):
        with pytest.raises(InvalidInput, match="another model's norm"):
            hslake.create(tmp_path / "l", capture="1", **another)
    assert hslake.create(tmp_path / "l", **settings).version == 0


def test_missing_lake_and_version(tmp_path: Path) -> None:
    with pytest.raises(Missing, match="hslake create"):
        hslake.open(tmp_path / "nothing")
    hslake.create(tmp_path / "l", hidden_size=8, num_layers=4, capture="1")
    with pytest.raises(Missing):
        lakes.open_lake(tmp_path / "l", version=7)


def test_fingerprint(tmp_path: Path) -> None:
    base = model_fingerprint(write_model(tmp_path / "a", WEIGHT))
    same = write_model(tmp_path / "b", WEIGHT, transformers_version="6", torch_dtype="bfloat16")
    assert model_fingerprint(same) == model_fingerprint(same / "config.json") == base
    config = model_fingerprint(write_model(tmp_path / "c", WEIGHT, rms_norm_eps=1e-6))
    weights = model_fingerprint(write_model(tmp_path / "d", WEIGHT + np.uint16(1)))
    bare = model_fingerprint(write_model(tmp_path / "e"))
    assert (config["config"] != base["config"], config["weights"]) == (True, base["weights"])
    assert (weights["config"], weights["weights"] != base["weights"]) == (base["config"], True)
    assert bare == {"config": base["config"], "weights": None}
    check_fingerprint(base, bare, "the server")
    for other, part in ((config, "config"), (weights, "weights")):
        with pytest.raises(InvalidInput, match=f"the server .* its {part}"):
            check_fingerprint(base, other, "the server")
    index = tmp_path / "a/model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "model-2.safetensors"}}), "utf-8")
    with pytest.raises(Missing, match=r"model-2\.safetensors"):
        model_fingerprint(tmp_path / "a")


def test_read(tmp_path: Path) -> None:
    lake = hslake.create(tmp_path / "l", hidden_size=8, num_layers=4, streams=[1, 3, "final"])
    rng = np.random.default_rng(0)
    truth = rng.integers(0, 0x3FFF, (3, 300, 8), dtype=np.uint16)
    token_ids, mask = np.arange(300, dtype=np.int32), np.ones(300, np.uint8)
    sums = [sample_checksum(s) for s in truth]
    segment = new_segment_id()
    info = write_segment(
        lake.store, lake.spec, segment, [SegmentSample("A1-0", list(truth), token_ids, mask, sums)]
    )
    row = {
        "op": ["add"], "sample_id": ["A1-0"], "source": ["A1"], "split": ["train"],
        "length": [300], "segment_id": [segment], "segment_tokens": [info.tokens],
        "token_start": [dict(info.placements)["A1-0"]],
    }  # fmt: skip
    catalog.commit(lake.store, "manifest", lambda _: pa.table(row), segment)
    with pytest.raises(Missing, match="refresh"):
        lake.read("A1-0")  # pinned at the version before
    lake = lake.refresh()
    sample = lake.read("A1-0")
    assert np.array_equal(sample.hidden_states, truth)
    assert np.array_equal(sample.input_ids, token_ids) and np.array_equal(sample.loss_mask, mask)
    assert (sample.source, sample.split, sample.length, sample.dtype) == (
        "A1", "train", 300, "bfloat16",
    )  # fmt: skip
    part = lake.read("A1-0", streams=["final", 1], rows=slice(250, 260))
    assert part.streams == ("final", "1") and part.length == 300
    assert np.array_equal(part.hidden_states, truth[[2, 0], 250:260])
    assert np.array_equal(part.input_ids, token_ids[250:260])
    with pytest.raises(InvalidInput, match="stream"):
        lake.read("A1-0", streams=["2"])
    assert hslake.open(lake.url, version=0).sql("select * from samples").fetchall() == []
    found = lake.sql("select length from samples where sample_id = $i", {"i": "A1-0"}).fetchall()
    assert found == [(300,)]


def test_locations_are_the_same_however_often_they_are_asked_for(tmp_path: Path) -> None:
    lake = hslake.create(tmp_path / "lake", hidden_size=8, num_layers=10, capture="1,final")
    names = [f"A1-{i}" for i in range(20)]
    rows = {
        "op": ["add"] * 20, "sample_id": names, "source": ["A1"] * 20, "split": ["train"] * 20,
        "length": [5] * 20, "segment_id": ["s"] * 20, "segment_tokens": [5120] * 20,
        "token_start": [256 * i for i in range(20)],
    }  # fmt: skip
    catalog.commit(lake.store, "manifest", lambda _: pa.table(rows), "t1")
    hide = {"op": ["hide"], "sample_id": ["A1-3"], "segment_id": ["s"]}
    catalog.commit(lake.store, "manifest", lambda _: pa.table(hide), "t2")
    lake = lake.refresh()
    for name in names * 2:  # the first look-up reads the manifest, the others a table of it
        if name == "A1-3":
            with pytest.raises(Missing, match="A1-3"):
                lake.location(name)
        else:
            assert lake.location(name).token_start == 256 * names.index(name)
    lake = lake.refresh()
    for _ in range(3):
        with pytest.raises(Missing, match="A1-3"):
            lake.location("A1-3")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # its hazard is the point
def test_reading_while_a_result_is_open_and_in_a_forked_process(tmp_path: Path) -> None:
    made = make_lake(tmp_path, 3)
    lake = hslake.open(made.url)
    rows = lake.sql("select sample_id from samples").to_arrow_reader(1)
    assert rows.read_next_batch().num_rows == 1
    for name in made.samples:  # the result above is not read to its end
        assert lake.read(name).length == len(made.samples[name].input_ids)
    child = os.fork()
    if not child:
        ok = all(lake.location(n).length == len(t.input_ids) for n, t in made.samples.items())
        os._exit(0 if ok else 1)
    end = time.monotonic() + 60
    while (done := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > end:
            os.kill(child, 9)
        time.sleep(0.05)
    assert done[1] == 0
