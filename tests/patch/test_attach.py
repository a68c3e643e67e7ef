"""What becomes of staging when a worker process ends."""

import multiprocessing
import os
import signal
from pathlib import Path

import pytest
from hslake_sglang.attach import close_at_exit
from hslake_sglang.capture import Capture
from hslake_sglang.taps import Taps

from hslake.checksum import RowStats
from hslake.ids import RequestId
from hslake.staging import StagingWriter, read_part, scan
from tests.patch.toy import Toy, make_spec


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
