"""Segments: written by hslake, read back by hslake, zarr-python, TensorStore and zarrs.

zarr-python (alone or over zarrs) needs `import hslake.zarr_dtype` for bfloat16.
"""

import dataclasses
import json
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import hslake.zarr_dtype
from hslake import checksum
from hslake.errors import Corrupt, InvalidInput
from hslake.segment import bf16plane, inventory
from hslake.segment.codec import decode_chunk, encode_chunk
from hslake.segment.layout import hidden_grid, new_segment_id, segment_prefix, token_grid
from hslake.segment.read import read_rows, read_sample, read_tokens
from hslake.segment.write import SegmentInfo, SegmentSample, write_segment
from hslake.spec import Geometry, LakeSpec, ModelInfo, make_spec
from hslake.store import Store, open_store

HIDDEN = 48
COMBINATIONS = [
    ("bfloat16", "standard"),
    ("bfloat16", "bf16plane"),
    ("bfloat16", "none"),
    ("float16", "standard"),
    ("float32", "standard"),
    ("float32", "none"),
]


def spec_of(dtype: str, codec: str) -> LakeSpec:
    model = ModelInfo("m", "LlamaForCausalLM", 8, HIDDEN, 100, {"config": None, "weights": None})
    spec = make_spec(model, ("0", "4", "final"), dtype=dtype, codec=codec)
    return dataclasses.replace(spec, geometry=Geometry(256, 512, 1024))


def make_sample(spec: LakeSpec, name: str, length: int, seed: int) -> SegmentSample:
    """Normal values, with every kind of special bit pattern (-0.0, NaN payloads) mixed in."""
    rng = np.random.default_rng(seed)
    hidden = []
    for _ in spec.streams:
        values = rng.normal(size=(length, spec.hidden_size)).astype(np.float32)
        if spec.itemsize == 4:
            bits = values.view(np.uint32)
        elif spec.dtype == "float16":
            bits = values.astype(np.float16).view(np.uint16)
        else:
            bits = (values.view(np.uint32) >> 16).astype(np.uint16)
        wild = rng.random(bits.shape) < 0.05
        bits[wild] = rng.integers(0, np.iinfo(bits.dtype).max, wild.sum(), bits.dtype)
        bits[0] = 1 << (8 * spec.itemsize - 1)  # a row of -0.0
        hidden.append(bits)
    return SegmentSample(
        name,
        hidden,
        rng.integers(0, 100, length).astype(np.int32),
        rng.integers(0, 2, length),
        [checksum.sample_checksum(h) for h in hidden],
    )


def make_segment(
    root: Path, spec: LakeSpec, lengths: list[int]
) -> tuple[Store, SegmentInfo, list[SegmentSample]]:
    store = open_store(str(root))
    samples = [make_sample(spec, f"s{i}", n, i) for i, n in enumerate(lengths)]
    return store, write_segment(store, spec, new_segment_id(), iter(samples)), samples


def raw(a: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(a).view(np.uint8)


def flip(store: Store, path: str, position: int) -> None:
    data = bytearray(store.read(path))
    data[position] ^= 0x10
    store.put(path, bytes(data))


@settings(max_examples=25, deadline=None)
@given(
    combination=st.sampled_from(COMBINATIONS),
    lengths=st.lists(st.integers(1, 1400), min_size=1, max_size=5),
    data=st.data(),
)
def test_reads_what_was_written(
    combination: tuple[str, str], lengths: list[int], data: st.DataObject
) -> None:
    spec = spec_of(*combination)
    with tempfile.TemporaryDirectory() as root:
        store, info, samples = make_segment(Path(root), spec, lengths)
        assert [p[0] for p in info.placements] == [s.sample_id for s in samples]
        assert info.raw_bytes == sum(lengths) * spec.bytes_per_token
        for (_, start), sample, length in zip(info.placements, samples, lengths, strict=True):
            assert start % 256 == 0
            hidden, ids, mask = read_sample(store, spec, info.segment_id, start, length)
            assert np.array_equal(raw(hidden), raw(np.stack(sample.hidden)))
            assert np.array_equal(ids, sample.input_ids)
            assert np.array_equal(mask, sample.loss_mask)
            a = data.draw(st.integers(0, length))
            b = data.draw(st.integers(a, length))
            part, ids, _ = read_sample(
                store, spec, info.segment_id, start, length, ["final", "0"], slice(a, b)
            )
            assert np.array_equal(raw(part), raw(np.stack(sample.hidden)[[2, 0], a:b]))
            assert np.array_equal(ids, sample.input_ids[a:b])


def test_reads_into_strided_buffer(tmp_path: Path) -> None:
    spec = spec_of("bfloat16", "standard")
    store, info, samples = make_segment(tmp_path, spec, [700, 300])
    wide = np.zeros((700, 2 * HIDDEN), np.int16)
    out = wide.reshape(700, 2, HIDDEN).transpose(1, 0, 2)
    read_rows(store, spec, info.segment_id, 0, 700, ["0", "4"], out=out)
    expected = np.concatenate(samples[0].hidden[:2], axis=1)
    assert np.array_equal(wide.view(np.uint16), expected)
    with pytest.raises(InvalidInput, match="expected 2-byte values"):
        read_rows(store, spec, info.segment_id, 0, 700, ["0"], out=out)


@pytest.mark.parametrize(("dtype", "codec"), COMBINATIONS)
def test_zarr_python_reads_it(tmp_path: Path, dtype: str, codec: str) -> None:
    spec = spec_of(dtype, codec)
    lengths = [300, 700, 5]
    _, info, samples = make_segment(tmp_path, spec, lengths)
    group = zarr.open_group(tmp_path / "segments" / info.segment_id, mode="r")
    if dtype == "bfloat16":
        assert isinstance(group["hidden_states"].metadata.data_type, hslake.zarr_dtype.BFloat16)
    assert group["hidden_states"].shape == (3, info.tokens, HIDDEN)
    for (_, start), sample, n in zip(info.placements, samples, lengths, strict=True):
        hidden = group["hidden_states"][:, start : start + n]
        assert np.array_equal(raw(hidden), raw(np.stack(sample.hidden)))
        assert np.array_equal(group["input_ids"][start : start + n], sample.input_ids)
        assert np.array_equal(group["loss_mask"][start : start + n], sample.loss_mask)


_TENSORSTORE = """
import sys
sys.modules["hslake"] = None  # any import of it fails
import numpy as np, tensorstore as ts
folder, out = sys.argv[1:]
arrays = {n: ts.open({"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{folder}/{n}"}},
                     open=True).result().read().result()
          for n in ("hidden_states", "input_ids", "loss_mask")}
h = arrays["hidden_states"]
arrays["hidden_states"] = np.ascontiguousarray(h).view(f"u{h.dtype.itemsize}")
np.savez(out, **arrays)
"""

_ZARRS = """
import sys, numpy as np, zarr, zarrs, hslake.zarr_dtype
folder, out = sys.argv[1:]
zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline",
                 "codec_pipeline.strict": True})
group = zarr.open_group(folder, mode="r")
pipeline = group["hidden_states"].async_array.codec_pipeline
assert type(pipeline).__name__ == "ZarrsCodecPipeline", pipeline
arrays = {n: group[n][:] for n in ("hidden_states", "input_ids", "loss_mask")}
h = arrays["hidden_states"]
arrays["hidden_states"] = np.ascontiguousarray(h).view(f"u{h.dtype.itemsize}")
np.savez(out, **arrays)
"""


@pytest.mark.parametrize("reader", ["tensorstore", "zarrs"])
@pytest.mark.parametrize(("dtype", "codec"), [c for c in COMBINATIONS if c[1] != "bf16plane"])
def test_other_readers(tmp_path: Path, reader: str, dtype: str, codec: str) -> None:
    spec = spec_of(dtype, codec)
    lengths = [300, 700, 5]
    _, info, samples = make_segment(tmp_path, spec, lengths)
    script = _TENSORSTORE if reader == "tensorstore" else _ZARRS
    out = tmp_path / "out.npz"
    folder = tmp_path / "segments" / info.segment_id
    subprocess.run([sys.executable, "-c", script, str(folder), str(out)], check=True, cwd=tmp_path)
    found = np.load(out)
    for (_, start), sample, n in zip(info.placements, samples, lengths, strict=True):
        part = found["hidden_states"][:, start : start + n]
        assert np.array_equal(raw(part), raw(np.stack(sample.hidden)))
        assert np.array_equal(found["input_ids"][start : start + n], sample.input_ids)
        assert np.array_equal(found["loss_mask"][start : start + n], sample.loss_mask)


@pytest.mark.parametrize(("dtype", "codec"), COMBINATIONS)
def test_every_flipped_payload_bit_is_found(dtype: str, codec: str) -> None:
    spec = spec_of(dtype, codec)
    rows = make_sample(spec, "s", 256, 1).hidden[0]
    data = encode_chunk(spec, rows)
    assert np.array_equal(raw(decode_chunk(spec, data, "here")), raw(rows))
    rng = np.random.default_rng(0)
    for bit in rng.integers(0, 8 * len(data), 300):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(Corrupt, match="here"):
            decode_chunk(spec, bytes(damaged), "here")
    for end in (0, 3, 20, len(data) - 1):
        with pytest.raises(Corrupt, match="here"):
            decode_chunk(spec, data[:end], "here")


def test_damage_costs_one_sample(tmp_path: Path) -> None:
    spec = spec_of("bfloat16", "standard")
    store, info, _ = make_segment(tmp_path, spec, [200, 200])
    path = segment_prefix(info.segment_id) + hidden_grid(spec).key(0)
    flip(store, path, 100)
    with pytest.raises(Corrupt) as e:
        read_rows(store, spec, info.segment_id, 0, 200)
    for word in (info.segment_id, "hidden_states/c/0/0/0", "chunk 0"):
        assert word in str(e.value)
    read_rows(store, spec, info.segment_id, 256, 200)


@pytest.mark.parametrize("position", [-1, -5, -60])
def test_damaged_index(tmp_path: Path, position: int) -> None:
    spec = spec_of("bfloat16", "standard")
    store, info, _ = make_segment(tmp_path, spec, [200])
    flip(store, segment_prefix(info.segment_id) + hidden_grid(spec).key(0), position)
    flip(store, segment_prefix(info.segment_id) + token_grid(spec, "loss_mask").key(0), position)
    with pytest.raises(Corrupt, match="shard index"):
        read_rows(store, spec, info.segment_id, 0, 200)
    with pytest.raises(Corrupt, match="loss_mask"):
        read_tokens(store, spec, info.segment_id, 0, 200)


def test_lost_data_is_never_zeros(tmp_path: Path) -> None:
    spec = spec_of("bfloat16", "standard")
    store, info, _ = make_segment(tmp_path, spec, [600])
    path = segment_prefix(info.segment_id) + hidden_grid(spec).key(1)
    with pytest.raises(Corrupt, match="absent"):  # chunk 3 was never written
        read_rows(store, spec, info.segment_id, 0, 1000)
    whole = store.read(path)
    for data in (b"", whole[:10], whole[:-1], whole[40:]):
        store.put(path, data)
        with pytest.raises(Corrupt, match="hidden_states/c/0/1/0"):
            read_rows(store, spec, info.segment_id, 0, 600)
    (tmp_path / path).unlink()
    with pytest.raises(Corrupt, match=r"missing.*chunk 2"):
        read_rows(store, spec, info.segment_id, 0, 600)
    read_rows(store, spec, info.segment_id, 0, 600, rows=slice(0, 512))


def test_wrong_checksum_is_refused(tmp_path: Path) -> None:
    spec = spec_of("bfloat16", "standard")
    good = make_sample(spec, "s", 300, 0)
    bad = dataclasses.replace(good, checksum=[*good.checksum[:2], good.checksum[2] ^ 1])
    store = open_store(str(tmp_path))
    segment_id = new_segment_id()
    with pytest.raises(Corrupt, match="sample s, stream final"):
        write_segment(store, spec, segment_id, [bad])
    with pytest.raises(Corrupt, match="never"):
        inventory.load(store, segment_id)
    with pytest.raises(InvalidInput, match="at least one sample"):
        write_segment(store, spec, segment_id, [])


def test_inventory(tmp_path: Path) -> None:
    spec = spec_of("bfloat16", "standard")
    store, info, _ = make_segment(tmp_path, spec, [600, 30])
    objects = inventory.load(store, info.segment_id, info.inventory_digest)
    folder = tmp_path / "segments" / info.segment_id
    files = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    assert files == {o.key for o in objects} | {"inventory.json"}
    assert info.stored_bytes == sum((folder / f).stat().st_size for f in files)
    assert inventory.check(store, info.segment_id, objects, content=True) == []
    key = hidden_grid(spec).key(0)
    flip(store, segment_prefix(info.segment_id) + key, 0)
    assert inventory.check(store, info.segment_id, objects, content=False) == []
    (problem,) = inventory.check(store, info.segment_id, objects, content=True)
    assert key in problem
    (folder / "zarr.json").unlink()
    (problem,) = inventory.check(store, info.segment_id, objects, content=False)
    assert "zarr.json is missing" in problem
    with pytest.raises(Corrupt, match="the manifest says"):
        inventory.load(store, info.segment_id, "0" * 64)


def test_padding_costs_no_bytes() -> None:
    for dtype, codec in [c for c in COMBINATIONS if c[1] != "none"]:
        spec = spec_of(dtype, codec)
        rows = np.zeros((256, HIDDEN), f"u{spec.itemsize}")
        assert len(encode_chunk(spec, rows)) < 200


def test_segment_ids_are_uuid7_in_order() -> None:
    parsed = uuid.UUID(new_segment_id())
    assert parsed.version == 7 and parsed.variant == uuid.RFC_4122


@given(st.lists(st.integers(0, 65535), max_size=600))
def test_bf16plane_round_trip(values: list[int]) -> None:
    bits = np.array(values, "<u2")
    assert np.array_equal(bf16plane.decode(bf16plane.encode(bits)), bits)


def test_metadata_names_the_codec(tmp_path: Path) -> None:
    spec = spec_of("bfloat16", "bf16plane")
    _, info, _ = make_segment(tmp_path, spec, [5])
    path = tmp_path / "segments" / info.segment_id / "hidden_states" / "zarr.json"
    (sharding,) = json.loads(path.read_text())["codecs"]
    names = [c["name"] for c in sharding["configuration"]["codecs"]]
    assert names == ["bytes", "hslake.bf16plane", "crc32c"]
