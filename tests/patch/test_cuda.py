"""The capture on a real GPU: bit-equal digests, page-locked parts, copies beside other work.

Skipped where there is none; run on a machine with one: python -m pytest tests/patch/test_cuda.py
"""

import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hslake_sglang.copies import Copies, CudaSide, Flight, page_lock, wait_below, warm_up
from hslake_sglang.memory import capture_bytes
from hslake_sglang.split import Piece

from hslake import torch_checksum
from hslake.checksum import fold, sample_checksum
from hslake.ids import RequestId, new_attempt
from hslake.spec import ModelInfo, make_spec
from hslake.staging import Reservation, StagingWriter, read_part
from hslake.staging.reader import read_rows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture
def ram() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hslake-cuda-", dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "hidden"), [(3, 8), (64, 7168)])
def test_digests_are_the_cpus(dtype: torch.dtype, rows: int, hidden: int) -> None:
    wide = (torch.randn(rows, 3 * hidden, dtype=torch.float64) * 50).to(dtype)
    wide[0, hidden], wide[rows - 1, 2 * hidden - 1] = float("nan"), float("-inf")
    part = wide[:, hidden : 2 * hidden]
    on_device = wide.cuda()[:, hidden : 2 * hidden]
    found = torch_checksum.row_digests(on_device).cpu().numpy()
    expected = torch_checksum.row_digests(part).numpy()
    assert (found[[0, 2, 3]] == expected[[0, 2, 3]]).all()
    assert found[1].view(np.float64) == pytest.approx(expected[1].view(np.float64), rel=1e-12)


class Run:
    """Forwards of random states through real copies into a real staging writer."""

    def __init__(self, root: Path, hidden: int, part_tokens: int) -> None:
        model = ModelInfo("toy", "Toy", 61, hidden, 1000, {"config": None, "weights": None})
        self.spec = make_spec(model, ("3", "31", "59", "final"), dtype="bfloat16")
        self.device = torch.device("cuda", torch.cuda.current_device())
        warm_up(self.device, torch.bfloat16, hidden)
        self.writer = StagingWriter(
            root,
            self.spec,
            part_tokens=part_tokens,
            max_parts=1,
            fingerprint={"config": None, "weights": None},
            engine={"hook_version": "1"},
            page_lock=page_lock(self.device),
        )
        self.copies = Copies(CudaSide(self.device), self.land)
        self.sent: dict[str, torch.Tensor] = {}

    def land(self, flight: Flight) -> None:
        assert flight.digests is not None
        rows = [(p.row, p.count, p.position) for p, _ in flight.pieces]
        sums = fold(flight.digests.numpy(), rows, self.spec.hidden_size)
        for (piece, place), found in zip(flight.pieces, sums, strict=True):
            self.writer.wrote(
                place, piece.position, piece.count, [c for c, _ in found], [s for _, s in found]
            )

    def forward(self, lengths: list[int]) -> None:
        hidden, total = self.spec.hidden_size, sum(lengths)
        packed = torch.randn(total, 3 * hidden, device=self.device).bfloat16()
        streams = [*packed.split(hidden, dim=1), torch.randn_like(packed[:, :hidden])]
        ids = torch.arange(total, device=self.device)
        pieces: list[tuple[Piece, Reservation]] = []
        row = 0
        for i, n in enumerate(lengths):
            rid = RequestId(self.spec.lake8, new_attempt(), n, "A1", f"s{len(self.sent)}")
            self.sent[rid.sample_id] = torch.stack([s[row : row + n] for s in streams]).cpu()
            pieces.append((Piece(rid, i, row, n, 0), self.writer.begin(rid)))
            row += n
        pump = partial(self.copies.pump, in_forward=True)
        assert wait_below(self.copies, 2, time.monotonic() + 30, pump)
        self.copies.start(pieces, streams, ids)
        ids.zero_()  # the server's buffer, and other work on its stream
        torch.randn(total, hidden, device=self.device)

    def drain(self) -> bool:
        pump = partial(self.copies.pump, in_forward=False)
        return wait_below(self.copies, 1, time.monotonic() + 60, pump)


def test_rows_arrive_bit_for_bit_beside_other_work(ram: Path) -> None:
    run = Run(ram, 7168, 8 * 1100)
    for _ in range(8):
        run.forward([1, 255, 512, 300])
    assert run.drain()
    info = read_part(next(run.writer.folder.glob("part-*")))
    assert len(info.reserved) == len(run.sent) == 32
    for row in info.reserved:
        hidden, _ = read_rows(info, row)
        assert row.state == "complete"
        for i, bits in enumerate(run.sent[row.sample_id].view(torch.int16).numpy()):
            assert np.array_equal(hidden[i].view(np.int16), bits)
            assert sample_checksum(np.ascontiguousarray(hidden[i])) == row.checksum[i]
    run.writer.close()


def test_gpu_memory_stays_within_what_is_set_aside(ram: Path) -> None:
    run = Run(ram, 2048, 6 * 4096)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    lengths = [1024] * 4
    for _ in range(6):
        # What the test makes beside the states themselves: float32 sources, their comparison.
        run.forward(lengths)
    assert run.drain()
    torch.cuda.synchronize()
    own = 4096 * 2048 * (3 * 4 + 2 + 4 * 2 + 4)
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= capture_bytes(run.spec, 4096) + own
    run.writer.close()


def test_memory_that_ran_out_is_counted() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    side, total = CudaSide(device), torch.cuda.get_device_properties(device).total_memory
    torch.cuda.empty_cache()
    before, room = side.retries(), torch.cuda.memory_reserved() + (300 << 20)
    torch.cuda.set_per_process_memory_fraction(room / total)
    try:
        kept = torch.empty(200 << 20, dtype=torch.uint8, device=device)
        del kept  # PyTorch keeps its memory for the like
        torch.empty(250 << 20, dtype=torch.uint8, device=device)
        assert side.retries() == before + 1
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
