"""Segments for tests, with every kind of bit pattern in them."""

import dataclasses
from pathlib import Path

import numpy as np

from hslake import checksum
from hslake.segment.layout import new_segment_id
from hslake.segment.write import SegmentInfo, SegmentSample, write_segment
from hslake.spec import Geometry, LakeSpec, ModelInfo, make_spec
from hslake.store import Store, open_store

HIDDEN = 48
COMBINATIONS = [
    ("bfloat16", "standard"),
    ("bfloat16", "bf16plane"),
    ("bfloat16", "none"),
    ("float16", "standard"),
    ("float16", "none"),
    ("float32", "standard"),
    ("float32", "none"),
]


def spec_of(dtype: str, codec: str, hidden: int = HIDDEN) -> LakeSpec:
    """Three streams, chunks of 256, shards of 512, segments of 1024 tokens."""
    model = ModelInfo("m", "LlamaForCausalLM", 8, hidden, 100, {"config": None, "weights": None})
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
    """A segment with a sample of each length in a lake folder `root`."""
    store = open_store(str(root))
    samples = [make_sample(spec, f"s{i}", n, i) for i, n in enumerate(lengths)]
    return store, write_segment(store, spec, new_segment_id(), iter(samples)), samples


def raw(a: np.ndarray) -> np.ndarray:
    """The bytes of an array, to compare bit by bit."""
    return np.ascontiguousarray(a).view(np.uint8)
