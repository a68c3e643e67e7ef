"""What a store does not keep as it was sent is found before anything is committed."""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from hslake.errors import Corrupt
from hslake.segment import inventory
from hslake.segment.layout import INVENTORY, new_segment_id
from hslake.segment.readback import check_sample, check_whole, take_sample
from hslake.segment.write import write_segment
from hslake.store import Piece, Store, Written, open_store
from tests.segments import make_sample, spec_of


def test_samples_are_what_was_sent(tmp_path: Path) -> None:
    store, rng = open_store(tmp_path), np.random.default_rng(0)
    for count in (0, 1, 3, 40):
        pieces: list[Piece] = [rng.bytes(int(n)) for n in rng.integers(0, 60_000, count)]
        pieces = [memoryview(p) if i % 2 else p for i, p in enumerate(pieces)]
        whole = b"".join(pieces)
        store.put("x", pieces)
        for _ in range(20):
            sample = take_sample(pieces)
            assert all(whole[at : at + len(data)] == data for at, data in sample)
            assert sum(len(d) for _, d in sample) >= min(len(whole), 64 << 10)
            check_sample(store, "x", sample)


def test_damage_is_found(tmp_path: Path) -> None:
    store, rng = open_store(tmp_path), np.random.default_rng(0)
    data = bytearray(rng.bytes(1_000_000))
    sample, entry = take_sample([bytes(data)]), inventory.describe("x", [bytes(data)])
    for at in (0, 500_000, 999_999):
        data[at] ^= 1
        store.put("x", bytes(data))
        with pytest.raises(Corrupt, match="SHA-256 read back differ"):
            check_whole(store, "x", entry)
        data[at] ^= 1
    for place, _ in sample:
        data[place] ^= 1
        store.put("x", bytes(data))
        with pytest.raises(Corrupt) as told:
            check_sample(store, "x", sample)
        begin, end = map(int, re.findall(r"bytes (\d+) to (\d+)", str(told.value))[0])
        assert begin <= place < end  # random ranges may overlap: then either may be told
        data[place] ^= 1
    store.put("x", bytes(data[:-1]))
    for check in (lambda: check_sample(store, "x", sample), lambda: check_whole(store, "x", entry)):
        with pytest.raises(Corrupt, match="differ"):
            check()


class Careless(Store):
    """Keeps objects whose name ends in `bad` with one bit flipped at `at`, or a byte short."""

    bad, at, cut = "nothing", 0, 0

    def put(self, path: str, data: bytes | Sequence[Piece]) -> Written:
        written = super().put(path, data)
        if path.endswith(self.bad):
            kept = bytearray(self.read(path))
            kept[self.at] ^= 1
            super().put(path, bytes(kept[: len(kept) - self.cut]))
        return written


@pytest.mark.parametrize(
    ("bad", "at", "cut", "paranoid"),
    [
        ("/hidden_states/c/0/0/0", -1, 0, False),
        ("/hidden_states/c/0/0/0", 70_000, 0, True),
        ("/hidden_states/c/0/0/0", -1, 1, False),
        ("/zarr.json", 5, 0, False),
        (f"/{INVENTORY}", 5, 0, False),
    ],
)
def test_a_careless_store(tmp_path: Path, bad: str, at: int, cut: int, paranoid: bool) -> None:
    spec = spec_of("bfloat16", "none")
    store = Careless(str(tmp_path))
    samples = [make_sample(spec, f"s{i}", n, i) for i, n in enumerate((600, 300))]
    write_segment(store, spec, new_segment_id(), samples, paranoid=paranoid)
    store.bad, store.at, store.cut = bad, at, cut
    with pytest.raises(Corrupt, match="nothing was committed"):
        write_segment(store, spec, new_segment_id(), samples, paranoid=paranoid)
