"""What becomes of staging when a worker process ends, and when it is given other weights."""

import logging
import multiprocessing
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hslake_sglang import attach
from hslake_sglang.attach import close_at_exit
from hslake_sglang.capture import Capture
from hslake_sglang.taps import Taps

from hslake.checksum import RowStats
from hslake.ids import RequestId
from hslake.staging import StagingWriter, read_part, scan
from tests.patch.recording import RecordingWriter
from tests.patch.toy import Toy, make_batch, make_spec


def work(staging: Path, end: str) -> None:
    """A worker that captured one sample, has another half done, and ends."""
    spec = make_spec(("2", "final"))
    writer = StagingWriter(
        staging, spec, part_tokens=16, max_parts=2, fingerprint={}, engine={"hook_version": "1"}
    )
    capture = Capture(spec, Taps(Toy(), spec), writer)
    close_at_exit(capture)
    done = writer.begin(RequestId(spec.lake8, "attempt1", 4, "A1", "a"))
    writer.wrote(done, 0, 4, [0] * 2, [RowStats()] * 2)
    writer.begin(RequestId(spec.lake8, "attempt2", 4, "A1", "b"))
    if end == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if end == "raises":
        raise RuntimeError("a failed forward")


@pytest.mark.parametrize("method", ["spawn", "fork"])
@pytest.mark.parametrize("end", ["returns", "raises", "killed"])
def test_an_orderly_end_seals_staging(tmp_path: Path, method: str, end: str) -> None:
    context = multiprocessing.get_context(method)
    process = context.Process(target=work, args=(tmp_path, end))
    process.start()
    process.join(60)
    (found,) = scan(tmp_path)
    info = read_part(found.parts[0], dead=True)
    assert not found.alive and info.damage is None
    assert info.sealed is (end != "killed")
    # What is complete is there however it ended.
    states = [r.state for r in info.reserved]
    assert states == ["complete", "open" if end == "killed" else "abandoned"]


@dataclass(frozen=True, slots=True)
class Updater:
    """As SGLang's WeightUpdater: nothing can be set on it, and it knows its runner."""

    runner: Any

    def get_model_runner(self) -> Any:
        return self.runner


@pytest.mark.parametrize("updater", [True, False])
def test_other_weights_end_the_capture(updater: bool, caplog: pytest.LogCaptureFixture) -> None:
    spec, model = make_spec(("2", "final")), Toy()
    writer = RecordingWriter(spec)
    capture = Capture(spec, Taps(model, spec), writer, upkeep=False)
    runner = SimpleNamespace(**{attach._ATTRIBUTE: capture})
    half = RequestId(spec.lake8, "attempt1", 8, "A1", "a")
    attach.before_forward(runner, make_batch([(half.encode(), list(range(8)), 0, 4)]))
    attach.before_weight_change("update_weights_from_disk", Updater(runner) if updater else runner)
    assert capture.armed is False and writer.health[0] is False
    assert "update_weights_from_disk" in str(writer.health[1]) and "DISARMED" in caplog.text
    batch = make_batch([(half.encode(), list(range(8)), 0, 8)])
    attach.before_forward(runner, batch)
    model(batch.input_ids)
    assert not writer.done and not writer.open
    # The first reason is what a person needs to see.
    attach.before_weight_change("end_weight_update", runner)
    assert "update_weights_from_disk" in str(writer.health[1])


def test_other_weights_on_a_rank_that_does_not_write(caplog: pytest.LogCaptureFixture) -> None:
    spec = make_spec(("2", "final"))
    capture = Capture(spec, Taps(Toy(), spec), None)
    attach.before_weight_change("f", SimpleNamespace(**{attach._ATTRIBUTE: capture}))
    assert "DISARMED" in caplog.text
    assert not [r for r in caplog.records if r.exc_info]
    caplog.clear()
    attach.before_weight_change("f", SimpleNamespace())  # nothing was armed there
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


@pytest.mark.parametrize(
    ("action", "harmless"), [("compare", True), ("checksum", True), ("reset_tensors", False)]
)
def test_a_look_at_the_weights_is_no_change(action: str, harmless: bool) -> None:
    spec = make_spec(("2", "final"))
    for args, kwargs in (((action,), {}), ((), {"action": action})):
        capture = Capture(spec, Taps(Toy(), spec), RecordingWriter(spec), upkeep=False)
        runner = SimpleNamespace(**{attach._ATTRIBUTE: capture})
        attach.before_weight_change("check_weights", runner, *args, **kwargs)
        assert capture.armed is harmless


def test_a_capture_that_nobody_can_be_told_of_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its samples would fill staging, and no driver would learn of them."""
    spec = make_spec(("2", "final"))
    capture = Capture(spec, Taps(Toy(), spec), RecordingWriter(spec), upkeep=False)

    def half(runner: Any) -> None:
        setattr(runner, attach._ATTRIBUTE, capture)
        raise PermissionError(".hook")

    monkeypatch.setattr(attach, "arm", half)
    monkeypatch.setenv("HSLAKE_STAGING", str(tmp_path))
    attach.after_load_model(None, SimpleNamespace())
    assert capture.armed is False
