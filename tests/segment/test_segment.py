"""Segments: written and read back, damaged, and found damaged."""

import dataclasses
import json
import tempfile
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hslake.errors import Corrupt, InvalidInput
from hslake.segment import bf16plane, inventory
from hslake.segment.codec import decode_chunk, encode_chunk
from hslake.segment.layout import hidden_grid, new_segment_id, segment_prefix, token_grid
from hslake.segment.read import SegmentReader
from hslake.segment.write import write_segment
from hslake.store import Store, open_store
from tests.segments import COMBINATIONS, HIDDEN, make_sample, make_segment, raw, spec_of


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
        reader = SegmentReader(store, spec)
        for (_, start), sample, length in zip(info.placements, samples, lengths, strict=True):
            assert start % 256 == 0
            hidden, ids, mask = reader.sample(info.segment_id, start, length)
            assert np.array_equal(raw(hidden), raw(np.stack(sample.hidden)))
            assert np.array_equal(ids, sample.input_ids)
            assert np.array_equal(mask, sample.loss_mask)
            a = data.draw(st.integers(0, length))
            b = data.draw(st.integers(a, length))
            part, ids, _ = reader.sample(
                info.segment_id, start, length, ["final", "0"], slice(a, b)
            )
            assert np.array_equal(raw(part), raw(np.stack(sample.hidden)[[2, 0], a:b]))
            assert np.array_equal(ids, sample.input_ids[a:b])


def test_reads_into_strided_buffer(tmp_path: Path) -> None:
    spec = spec_of("bfloat16", "standard")
    store, info, samples = make_segment(tmp_path, spec, [700, 300])
    wide = np.zeros((700, 2 * HIDDEN), np.int16)
    out = [wide[:, :HIDDEN], wide[:, HIDDEN:]]
    reader = SegmentReader(store, spec)
    reader.rows_into(out, info.segment_id, 0, 700, ["0", "4"])
    expected = np.concatenate(samples[0].hidden[:2], axis=1)
    assert np.array_equal(wide.view(np.uint16), expected)
    with pytest.raises(InvalidInput, match="expected 1 arrays of 2-byte values"):
        reader.rows_into(out, info.segment_id, 0, 700, ["0"])


class CountingStore(Store):
    """Remembers what was read: (path, "index" or "data")."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.reads: list[tuple[str, str]] = []

    def read_range(self, path: str, *args: int, suffix: int | None = None) -> memoryview:
        self.reads.append((path, "index" if suffix else "data"))
        return super().read_range(path, *args, suffix=suffix)


def test_each_index_is_read_once(tmp_path: Path) -> None:
    spec = spec_of("bfloat16", "standard")
    _, info, samples = make_segment(tmp_path, spec, [300, 200, 100, 500])
    store = CountingStore(str(tmp_path))
    reader = SegmentReader(store, spec)

    def read(k: int) -> bool:
        start = info.placements[k][1]
        hidden, _, _ = reader.sample(info.segment_id, start, len(samples[k].input_ids))
        return np.array_equal(hidden, np.stack(samples[k].hidden))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, [*range(4)] * 10))
    found = Counter(store.reads)
    indexes = {path: n for (path, kind), n in found.items() if kind == "index"}
    # 1536 tokens: three shards of 512; two of 1024 for ids and as many for the mask.
    assert len(indexes) == 3 + 2 * 2 and set(indexes.values()) == {1}
    # One range for all streams of a sample in a shard, one for its ids, one for its mask.
    assert sum(found.values()) - 7 == 10 * (4 + 4 + 4)


def test_indexes_are_forgotten_and_failures_not_remembered(tmp_path: Path) -> None:
    spec = spec_of("bfloat16", "standard")
    _, info, _ = make_segment(tmp_path, spec, [512, 512])
    store = CountingStore(str(tmp_path))
    small = SegmentReader(store, spec, index_bytes=hidden_grid(spec).index_bytes)
    for start in (0, 512, 512, 0):
        small.rows(info.segment_id, start, 512)
    assert [path[-3] for path, kind in store.reads if kind == "index"] == ["0", "1", "0"]
    path = tmp_path / segment_prefix(info.segment_id) / hidden_grid(spec).key(1)
    whole = path.read_bytes()
    path.write_bytes(b"")
    with pytest.raises(Corrupt, match="cut short"):
        small.rows(info.segment_id, 512, 512)
    path.write_bytes(whole)
    small.rows(info.segment_id, 512, 512)


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
        SegmentReader(store, spec).rows(info.segment_id, 0, 200)
    for word in (info.segment_id, "hidden_states/c/0/0/0", "chunk 0"):
        assert word in str(e.value)
    SegmentReader(store, spec).rows(info.segment_id, 256, 200)


@pytest.mark.parametrize("position", [-1, -5, -60])
def test_damaged_index(tmp_path: Path, position: int) -> None:
    spec = spec_of("bfloat16", "standard")
    store, info, _ = make_segment(tmp_path, spec, [200])
    flip(store, segment_prefix(info.segment_id) + hidden_grid(spec).key(0), position)
    flip(store, segment_prefix(info.segment_id) + token_grid(spec, "loss_mask").key(0), position)
    with pytest.raises(Corrupt, match="shard index"):
        SegmentReader(store, spec).rows(info.segment_id, 0, 200)
    with pytest.raises(Corrupt, match="loss_mask"):
        SegmentReader(store, spec).tokens(info.segment_id, 0, 200)


def test_lost_data_is_never_zeros(tmp_path: Path) -> None:
    spec = spec_of("bfloat16", "standard")
    store, info, _ = make_segment(tmp_path, spec, [600])
    path = segment_prefix(info.segment_id) + hidden_grid(spec).key(1)
    with pytest.raises(Corrupt, match="absent"):  # chunk 3 was never written
        SegmentReader(store, spec).rows(info.segment_id, 0, 1000)
    whole = store.read(path)
    for data in (b"", whole[:10], whole[:-1], whole[40:]):
        store.put(path, data)
        with pytest.raises(Corrupt, match="hidden_states/c/0/1/0"):
            SegmentReader(store, spec).rows(info.segment_id, 0, 600)
    (tmp_path / path).unlink()
    with pytest.raises(Corrupt, match=r"missing.*chunk 2"):
        SegmentReader(store, spec).rows(info.segment_id, 0, 600)
    SegmentReader(store, spec).rows(info.segment_id, 0, 600, rows=slice(0, 512))


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
