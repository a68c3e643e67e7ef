"""Forward passes into a writer: exact rows, and no failure that reaches the server."""

import time
from typing import Any

import numpy as np
import pytest
import torch
from hslake_sglang import capture as module
from hslake_sglang.capture import Capture
from hslake_sglang.copies import copy_bits
from hslake_sglang.taps import Taps, find_logits_processors, logits_inputs

from hslake.checksum import row_stats, rows_checksum, sample_checksum, to_float32
from hslake.ids import RequestId
from tests.patch.recording import RecordingWriter, Slot
from tests.patch.toy import VOCAB, Toy, make_batch, make_spec

STREAMS = ("0", "2", "4", "final")
TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Server:
    """The toy model with the capture on it, as attach.py wires it."""

    def __init__(self, dtype: str = "float32", streams: tuple = STREAMS, **writer: Any) -> None:
        self.spec = make_spec(streams, dtype)
        self.model = Toy(TORCH[dtype])
        self.writer = RecordingWriter(self.spec, **writer)
        taps = Taps(self.model, self.spec)
        self.capture = Capture(self.spec, taps, self.writer, upkeep=False)
        (processor,) = find_logits_processors(self.model)
        processor.register_forward_pre_hook(
            lambda m, args, kwargs: self.capture.before_logits(*logits_inputs(args, kwargs)),
            with_kwargs=True,
        )

    def forward(self, *requests: tuple, pad: int = 0, mode: str = "EXTEND", **more: Any) -> None:
        batch = make_batch(list(requests), mode)
        for name, value in more.items():
            setattr(batch, name, value)
        self.capture.before_forward(batch)
        self.model(batch.input_ids, pad)

    def check(self, slot: Slot, prompt: list[int]) -> None:
        """The stored sample is the prompt's own states, bit for bit; its checksums match."""
        assert slot.input_ids.tolist() == prompt
        truth = self.model.truth(prompt)
        for i, name in enumerate(self.spec.streams):
            bits = slot.hidden[i]
            values = to_float32(bits, self.spec.dtype)
            tight = 1e-6 if self.spec.dtype == "float32" else 3e-2
            np.testing.assert_allclose(values, truth[name].float(), rtol=tight, atol=tight)
            assert slot.checksums()[i] == sample_checksum(bits)
            expected = row_stats(values)
            assert slot.stats[i].rms() == pytest.approx(expected.rms(), rel=1e-6)
            assert slot.stats[i].absmax == expected.absmax
            assert slot.stats[i].count == expected.count


def sample(name: str, length: int, seed: int = 0) -> tuple[RequestId, list[int]]:
    prompt = np.random.default_rng(seed).integers(0, VOCAB, length).tolist()
    return RequestId("0123abcd", f"attempt{name}", length, "A1", name), prompt


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_chunks_of_concurrent_requests_between_strangers(dtype: str) -> None:
    server = Server(dtype)
    (a, pa), (b, pb) = sample("a", 10, 1), sample("b", 7, 2)
    stranger = ("HEALTH_CHECK_1", [1, 2, 3], 0, 3)
    server.forward((a.encode(), pa, 0, 4), stranger, (b.encode(), pb, 0, 5), pad=3)
    server.forward(stranger, (b.encode(), pb, 5, 2), (a.encode(), pa, 4, 6))
    assert set(server.writer.done) == {"attempta", "attemptb"}
    server.check(server.writer.done["attempta"], pa)
    server.check(server.writer.done["attemptb"], pb)
    assert server.capture.armed and not server.writer.dropped and not server.writer.open


def test_decode_rows_and_other_modes_leave_nothing() -> None:
    server = Server()
    (a, pa), (b, pb) = sample("a", 4), sample("b", 3)
    server.forward((a.encode(), pa, 0, 4))
    server.forward((a.encode(), [*pa, 9], 4, 1), (b.encode(), pb, 0, 3), mode="MIXED")
    for mode in ("DECODE", "IDLE", "TARGET_VERIFY", "DRAFT_EXTEND"):
        server.forward((sample("c", 4)[0].encode(), pa, 0, 4), mode=mode)
    assert set(server.writer.done) == {"attempta", "attemptb"}
    server.check(server.writer.done["attempta"], pa)
    server.check(server.writer.done["attemptb"], pb)


def test_a_retracted_request_starts_again() -> None:
    server = Server()
    a, pa = sample("a", 9)
    server.forward((a.encode(), pa, 0, 5))
    first = server.writer.get(a.attempt)
    server.forward((a.encode(), pa, 0, 6))
    assert server.writer.get(a.attempt) is not first
    server.forward((a.encode(), pa, 6, 3))
    server.check(server.writer.done[a.attempt], pa)


def test_a_finished_attempt_is_not_stored_twice() -> None:
    server = Server()
    a, pa = sample("a", 4)
    server.forward((a.encode(), pa, 0, 4))
    kept = server.writer.done[a.attempt]
    server.forward((a.encode(), [*pa, 1, 2], 0, 6))  # retracted while it generated
    assert server.writer.done[a.attempt] is kept and not server.writer.dropped


@pytest.mark.parametrize(
    ("request_", "more", "reason"),
    [
        ((0, 5), {"mm_inputs": [object()]}, "media"),
        ((0, 5), {"lora_ids": ["x"]}, "LoRA"),
        ((0, 5), {"input_embeds": torch.zeros(5, 8)}, "embeddings"),
        ((2, 3), {}, "without their beginning"),
    ],
)
def test_unfit_attempts_are_dropped_with_the_reason(request_, more, reason) -> None:
    server = Server()
    a, pa = sample("a", 5)
    server.forward((a.encode(), pa, *request_), **more)
    assert reason in server.writer.dropped[a.attempt]
    assert server.capture.armed and not server.writer.done


def test_wrong_lengths_are_dropped() -> None:
    server = Server(longest=20)
    a, pa = sample("a", 5)
    server.forward((a.encode(), [*pa, 1], 0, 6))
    assert "more than the 5 tokens" in server.writer.dropped[a.attempt]
    b, pb = sample("b", 21)
    server.forward((b.encode(), pb, 0, 8))
    server.forward((b.encode(), pb, 8, 13))
    assert "do not fit" in server.writer.dropped[b.attempt]
    c, pc = sample("c", 9)
    server.forward((c.encode(), pc, 0, 3))
    server.forward((c.encode(), pc, 5, 4))  # rows 3 and 4 never came
    assert "on after 3 rows" in server.writer.dropped[c.attempt]
    assert not server.writer.done and not server.writer.open and server.capture.armed


def test_waits_for_room_but_not_long(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(full=3)
    a, pa = sample("a", 5)
    server.forward((a.encode(), pa, 0, 5))
    server.check(server.writer.done[a.attempt], pa)
    monkeypatch.setattr(module, "MAX_WAIT_S", 0.2)
    server.writer.full = 10**9
    (b, pb), (c, pc) = sample("b", 5), sample("c", 5)
    start = time.monotonic()
    server.forward((b.encode(), pb, 0, 5), (c.encode(), pc, 0, 5))
    assert time.monotonic() - start < 0.5  # for the whole forward, not for each request
    assert set(server.writer.dropped) == {b.attempt, c.attempt}
    server.writer.full = 0
    server.forward((b.encode(), pb, 0, 5))  # the same attempt does not come back to life
    assert b.attempt not in server.writer.done


def test_the_wait_is_at_most_one_second() -> None:
    assert module.MAX_WAIT_S <= 1.0


def test_an_internal_failure_disarms_and_never_raises(caplog: pytest.LogCaptureFixture) -> None:
    server = Server()
    a, pa = sample("a", 6)
    server.writer.broken = OSError("disk on fire")
    server.forward((a.encode(), pa, 0, 6))
    assert not server.capture.armed
    assert server.writer.health[0] is False and "disk on fire" in str(server.writer.health[1])
    assert "DISARMED" in caplog.text
    server.writer.broken = None
    server.forward((a.encode(), pa, 0, 6))
    assert not server.writer.done


def test_missing_boundaries_disarm_at_the_warm_up() -> None:
    server = Server(streams=("1", "3", "final"))
    server.model.model.layers_to_capture = [1]
    server.forward(("warm-up", [1, 2], 0, 2))
    assert not server.capture.armed and "expected 2" in str(server.writer.health[1])


def test_a_batch_without_request_ids_disarms() -> None:
    server = Server()
    server.forward(("warm-up", [1, 2], 0, 2), rids=None)
    assert not server.capture.armed and "request ids" in str(server.writer.health[1])


def test_the_ranks_that_do_not_write_store_nothing_and_do_not_fail() -> None:
    spec = make_spec(STREAMS)
    model = Toy()
    silent = Capture(spec, Taps(model, spec), None)
    a, pa = sample("a", 4)
    silent.before_forward(make_batch([(a.encode(), pa, 0, 4)]))
    model(torch.tensor(pa))
    silent.close()
    assert model.model.layers_to_capture == [2]  # the same capture as the writing rank


def test_copy_is_bit_exact_for_odd_values() -> None:
    values = torch.tensor([[float("nan"), float("inf"), -0.0, 1e-40]], dtype=torch.float32)
    for dtype, lanes in ((torch.float32, np.uint32), (torch.bfloat16, np.uint16)):
        tensor = values.to(dtype)
        view = np.zeros(tensor.shape, lanes)
        copy_bits(tensor, view)
        signed = torch.int32 if dtype == torch.float32 else torch.int16
        assert (view.view(f"i{view.itemsize}") == tensor.view(signed).numpy()).all()
        assert rows_checksum(view) == rows_checksum(view.copy())


@pytest.mark.parametrize("error", [FileNotFoundError("staging is gone"), ValueError("a mistake")])
def test_only_our_own_mistakes_are_logged_with_the_call_stack(
    caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    server = Server()
    server.writer.broken = error
    a, prompt = sample("a", 4)
    server.forward((a.encode(), prompt, 0, 4))
    server.forward((a.encode(), prompt, 0, 4))
    assert server.capture.armed is False and str(error) in caplog.text
    stacks = [r for r in caplog.records if r.exc_info]
    assert len(stacks) == isinstance(error, ValueError)
