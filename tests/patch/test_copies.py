"""Copies that run beside the forwards: rows count only when they have landed.

The side here does its copies when it is told to, as late as a test likes; on CUDA it is a stream.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hslake_sglang import capture as module
from hslake_sglang.capture import Capture
from hslake_sglang.copies import runs
from hslake_sglang.taps import Taps, find_logits_processors, logits_inputs

from hslake.checksum import sample_checksum
from hslake.staging import StagingWriter, read_part
from hslake.staging.reader import read_rows
from tests.patch.test_capture import STREAMS, sample
from tests.patch.toy import Toy, make_batch, make_spec


class Copy:
    """Copies that were launched, and what they do when they happen."""

    def __init__(self, launch: Callable[[], None]) -> None:
        self.launch, self.happened = launch, False


class LateSide:
    """Copies happen when `release` has been called once for each forward, and not before.
    `computed`: whether the forwards have been."""

    def __init__(self) -> None:
        self.released, self.launched, self.computed = 0, 0, True

    def enter(self) -> None:
        pass

    def mark(self) -> None:
        return None

    def done(self, mark: Copy | None) -> bool:
        if mark is None:
            return self.computed
        if not mark.happened and self.released:
            self.released -= 1
            mark.launch()
            mark.happened = True
        return mark.happened

    def run(self, mark: None, launch: Callable[[], None]) -> Copy:
        self.launched += 1
        return Copy(launch)

    def retries(self) -> int:
        return self.launched + 100

    def release(self, forwards: int = 1) -> None:
        self.released += forwards


def writer_in(staging: Path, **more: Any) -> StagingWriter:
    """A buffered writer of the toy model's lake."""
    return StagingWriter(
        staging,
        make_spec(STREAMS),
        fingerprint={"config": None, "weights": None},
        engine={"hook_version": "1"},
        buffered=True,
        **more,
    )


def attach(capture: Capture, model: Toy) -> None:
    """The capture on the model's logits processor, as attach.py wires it."""
    (processor,) = find_logits_processors(model)
    processor.register_forward_pre_hook(
        lambda m, args, kwargs: capture.before_logits(*logits_inputs(args, kwargs)),
        with_kwargs=True,
    )


class Server:
    """The toy model, a real staging writer, and copies that come late."""

    def __init__(self, staging: Path, *, part_tokens: int = 32, max_parts: int = 2) -> None:
        self.spec = make_spec(STREAMS)
        self.model = Toy()
        self.side = LateSide()
        self.writer = writer_in(staging, part_tokens=part_tokens, max_parts=max_parts)
        self.capture = Capture(
            self.spec, Taps(self.model, self.spec), self.writer, side=self.side, upkeep=False
        )
        attach(self.capture, self.model)

    def forward(self, *requests: tuple) -> None:
        batch = make_batch(list(requests))
        self.capture.before_forward(batch)
        self.model(batch.input_ids)
        batch.input_ids.zero_()  # the server's buffer is the next batch's

    @property
    def in_flight(self) -> int:
        return self.capture._copies.in_flight

    def land(self, forwards: int = 1) -> None:
        expected = self.in_flight - forwards
        self.side.release(forwards)
        self.capture._pump()
        assert self.in_flight == expected

    def journal(self) -> dict[str, list[str]]:
        """States of every attempt's incarnations, by part."""
        self.writer.flush()
        found: dict[str, list[str]] = {}
        for path in sorted(self.writer.folder.glob("part-*")):
            for row in read_part(path).reserved:
                found.setdefault(row.attempt, []).append(row.state)
        return found

    def check(self, attempt: str, prompt: list[int]) -> None:
        """The complete rows of an attempt are the prompt's own."""
        for path in sorted(self.writer.folder.glob("part-*")):
            info = read_part(path)
            for row in info.reserved:
                if row.attempt == attempt and row.state == "complete":
                    hidden, ids = read_rows(info, row)
                    assert ids.tolist() == prompt
                    truth = self.model.truth(prompt)
                    for i, name in enumerate(self.spec.streams):
                        assert sample_checksum(hidden[i]) == row.checksum[i]
                        values = torch.from_numpy(hidden[i].view("float32").copy())
                        torch.testing.assert_close(values, truth[name], rtol=1e-6, atol=1e-6)
                    return
        raise AssertionError(f"{attempt} is not complete")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    yield made
    made.side.release(100)
    made.capture.close()


def test_nothing_is_journalled_before_its_copy_has_landed(server: Server) -> None:
    a, pa = sample("a", 9)
    server.forward((a.encode(), pa, 0, 9))
    server.capture._pump()
    assert server.journal() == {a.attempt: ["open"]}
    assert server.writer._counts["samples_captured"] == 0
    server.land()
    assert server.journal() == {a.attempt: ["complete"]}
    server.check(a.attempt, pa)


def test_copies_line_up_behind_the_answer_or_wait_until_it_is_computed(server: Server) -> None:
    server.side.computed = False
    a, pa = sample("a", 4)
    server.forward((a.encode(), pa, 0, 4))
    server.capture._pump()  # no forward has come by since
    assert server.side.launched == 0
    server.forward(("somebody else", [1, 2], 0, 2))
    assert server.side.launched == 1
    b, pb = sample("b", 4)
    server.forward((b.encode(), pb, 0, 4))
    server.side.computed = True
    server.land(2)
    assert server.side.launched == 2
    server.check(a.attempt, pa)
    server.check(b.attempt, pb)


def test_neighbours_are_copied_at_once(server: Server) -> None:
    (a, pa), (b, pb), (c, pc) = sample("a", 4, 1), sample("b", 5, 2), sample("c", 3, 3)
    stranger = ("somebody else", [1, 2], 0, 2)
    server.forward((a.encode(), pa, 0, 4), (b.encode(), pb, 0, 3), stranger, (c.encode(), pc, 0, 3))
    (flight,) = server.capture._copies._flights
    places = [place for _, place in flight.pieces]
    assert runs(flight.pieces) == [(0, 7, places[0], 0), (9, 3, places[2], 0)]
    server.forward((b.encode(), pb, 3, 2))
    server.land(2)
    for rid, prompt in ((a, pa), (b, pb), (c, pc)):
        server.check(rid.attempt, prompt)


def test_a_chunk_may_follow_one_that_is_still_on_its_way(server: Server) -> None:
    (a, pa), (b, pb) = sample("a", 10, 1), sample("b", 5, 2)
    server.forward((a.encode(), pa, 0, 6), (b.encode(), pb, 0, 2))
    server.forward((b.encode(), pb, 2, 3), (a.encode(), pa, 6, 4))
    assert server.journal() == {a.attempt: ["open"], b.attempt: ["open"]}
    server.land(2)
    server.check(a.attempt, pa)
    server.check(b.attempt, pb)


def test_a_gap_is_seen_although_nothing_has_landed(server: Server) -> None:
    a, pa = sample("a", 10)
    server.forward((a.encode(), pa, 0, 4))
    server.forward((a.encode(), pa, 6, 4))
    assert server.journal() == {a.attempt: ["abandoned"]}
    server.land()
    assert server.capture.armed and server.journal() == {a.attempt: ["abandoned"]}


def test_at_most_two_forwards_are_held_and_the_wait_for_them_is_bounded(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_WAIT_S", 0.2)
    samples = [sample(name, 4, i) for i, name in enumerate("abcd")]
    for rid, prompt in samples[:3]:
        server.forward((rid.encode(), prompt, 0, 4))
    assert server.in_flight == 2
    late = samples[2][0].attempt
    assert late not in server.journal() and server.capture.armed
    assert server.writer._counts["dropped"] == 1
    server.land(2)
    server.forward((samples[3][0].encode(), samples[3][1], 0, 4))
    server.land()
    for rid, prompt in (samples[0], samples[1], samples[3]):
        server.check(rid.attempt, prompt)
    server.forward((samples[2][0].encode(), samples[2][1], 0, 4))  # dropped for good
    assert late not in server.journal()
    assert server.capture.figures.wait_max_s >= 0.2


def test_the_wait_ends_as_soon_as_a_copy_lands(server: Server) -> None:
    samples = [sample(name, 4, i) for i, name in enumerate("abc")]
    for rid, prompt in samples[:2]:
        server.forward((rid.encode(), prompt, 0, 4))
    threading.Timer(0.1, server.side.release).start()
    server.forward((samples[2][0].encode(), samples[2][1], 0, 4))
    server.land(2)
    for rid, prompt in samples:
        server.check(rid.attempt, prompt)


def test_a_restarted_prompt_does_not_take_the_old_copies(server: Server) -> None:
    a, pa = sample("a", 9)
    server.forward((a.encode(), pa, 0, 5))
    server.forward((a.encode(), pa, 0, 9))  # retracted, and computed again
    assert server.journal() == {a.attempt: ["abandoned", "open"]}
    server.land(2)
    assert server.journal() == {a.attempt: ["abandoned", "complete"]}
    server.check(a.attempt, pa)


def test_a_part_is_not_recycled_under_a_copy(server: Server) -> None:
    """Its rows would be the next sample's."""
    a, pa = sample("a", 20)
    server.forward((a.encode(), pa, 0, 5))
    place = server.writer.get(a.attempt)
    assert place is not None
    server.writer.abandon(place, "given up meanwhile")
    path = place.part.path
    (path / "DONE").touch()
    server.writer.tick()
    assert path.exists() and server.writer._parts.all[0].path == path
    server.land()
    server.writer.tick()
    assert not path.exists()


def test_the_end_waits_for_what_is_on_its_way(tmp_path: Path) -> None:
    server = Server(tmp_path)
    a, pa = sample("a", 9)
    server.forward((a.encode(), pa, 0, 9))
    threading.Timer(0.2, server.side.release).start()
    server.capture.close()
    (path,) = server.writer.folder.glob("part-*")
    info = read_part(path, dead=True)
    assert info.sealed and [r.state for r in info.reserved] == ["complete"]


def test_a_copy_that_fails_disarms(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    a, pa = sample("a", 9)
    server.forward((a.encode(), pa, 0, 9))
    memory = server.writer._parts.all[0].memory
    memory.input_ids = memory.input_ids[:0]  # what the device would report is an error like any
    server.side.release()
    server.forward(("somebody else", [1, 2], 0, 2))
    assert not server.capture.armed and "DISARMED" in caplog.text
    assert "Error" in str(server.writer._health[1])
    server.forward((a.encode(), pa, 0, 9))
    assert server.journal() == {a.attempt: ["abandoned"]}


def test_the_status_tells_how_often_the_gpu_ran_out_of_memory(tmp_path: Path) -> None:
    spec = make_spec(STREAMS)
    writer = StagingWriter(
        tmp_path,
        spec,
        part_tokens=16,
        max_parts=2,
        fingerprint={"config": None, "weights": None},
        engine={"hook_version": "1"},
    )
    capture = Capture(spec, Taps(Toy(), spec), writer, side=LateSide())
    path, end = writer.folder / "status.json", time.monotonic() + 30
    while json.loads(path.read_text()).get("hook", {}).get("gpu_retries") != 100:
        assert time.monotonic() < end
        time.sleep(0.05)
    capture.close()


def test_parts_are_made_beside_the_forwards(tmp_path: Path) -> None:
    spec, model = make_spec(STREAMS), Toy()
    writer = writer_in(tmp_path, part_tokens=16, max_parts=4, ahead=True)
    capture = Capture(spec, Taps(model, spec), writer)
    attach(capture, model)
    samples = [sample(name, 12, i) for i, name in enumerate("abcd")]
    for rid, prompt in samples:  # each needs a part of its own
        batch = make_batch([(rid.encode(), prompt, 0, 12)])
        capture.before_forward(batch)
        model(batch.input_ids)
    assert capture.armed and writer._counts == {
        "samples_captured": 4,
        "tokens_captured": 48,
        "dropped": 0,
    }
    capture.close()
    assert len(list(writer.folder.glob("part-*/manifest.arrow"))) == 4


def test_the_upkeep_thread_stays_out_while_the_server_launches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call it makes would take Python's lock from the thread that feeds the GPU."""
    monkeypatch.setattr(module, "_LAUNCH_S", 60.0)
    spec, model, side = make_spec(STREAMS), Toy(), LateSide()
    writer = writer_in(tmp_path, part_tokens=16, max_parts=2)
    capture = Capture(spec, Taps(model, spec), writer, side=side)
    attach(capture, model)
    (a, pa), (b, pb) = sample("a", 4, 1), sample("b", 4, 2)
    batch = make_batch([(a.encode(), pa, 0, 4)])
    capture.before_forward(batch)
    model(batch.input_ids)
    batch = make_batch([(b.encode(), pb, 0, 4)])
    capture.before_forward(batch)  # launches the first one's copies
    side.release()
    assert capture._busy() and capture._pause() > module._TICK_S / 2
    time.sleep(4 * module._PUMP_S)
    assert side.launched == 1 and capture._copies.in_flight == 1
    model(batch.input_ids)  # and then nothing comes by
    side.release()
    end = time.monotonic() + 30
    while capture._copies.in_flight:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert not capture._busy() and writer._counts["samples_captured"] == 2
    capture.close()
