"""A bfloat16 run, as in production: shapes, exact bits through the pipeline, plausible values."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import hslake
from hslake.checksum import sample_checksum, to_float32
from hslake.compact import compact
from hslake.lake import Lake
from hslake.lmhead import tolerance
from hslake.verify import verify
from tests.e2e.canaries import stored_as
from tests.e2e.conftest import capture_all, set_stage
from tests.e2e.reference import reference_states, row_errors


@pytest.fixture(scope="module")
def lake(
    ram: Path, sglang_python: Path, model_dir: Path, prompts: dict[str, list[int]]
) -> Iterator[Lake]:
    folder = ram / "bfloat16"
    folder.mkdir()
    made = set_stage(folder, sglang_python, model_dir, prompts, capture="eagle3", dtype="bfloat16")
    with made.server:
        # Canaries alone, then among others; the first of a call always is one.
        capture_all(made, where="length >= 31", canaries=1.0, requests=1)
        capture_all(made, canaries=1.0, requests=6)
    compact(made.lake, [made.staging])  # the server is gone: its staging is still good
    yield hslake.open(made.lake)


def test_shapes_and_bits_from_device_to_lake(lake: Lake, prompts: dict[str, list[int]]) -> None:
    rows = lake.sql("select sample_id, checksum, rms, absmax, nonfinite from samples").fetchall()
    assert {r[0] for r in rows} == set(prompts)
    streams, hidden = len(lake.spec.streams), lake.spec.hidden_size
    for name, checksums, rms, absmax, nonfinite in rows:
        states = lake.read(name).hidden_states
        assert states.shape == (streams, len(prompts[name]), hidden)
        assert states.dtype == np.uint16  # bfloat16 bit patterns
        # The manifest's checksum was computed on the device, before the copy.
        assert [sample_checksum(s) for s in states] == checksums
        values = to_float32(states, "bfloat16").reshape(streams, -1)
        np.testing.assert_allclose(np.sqrt((values**2).mean(1)), rms, rtol=1e-4)
        np.testing.assert_array_equal(np.abs(values).max(1), absmax)
        assert nonfinite == [0] * streams


def test_values_agree_within_bfloat16(
    lake: Lake, model_dir: Path, prompts: dict[str, list[int]]
) -> None:
    """As near to the truth as Hugging Face's own bfloat16 is."""
    truth = reference_states(model_dir, torch.float64, prompts)
    peer = reference_states(model_dir, torch.bfloat16, prompts)
    stored = {n: to_float32(lake.read(n).hidden_states, "bfloat16") for n in prompts}
    for i, stream in enumerate(lake.spec.streams):
        ours, theirs = (
            np.concatenate([row_errors(states(n), truth[n][stream]) for n in prompts])
            for states in (lambda n, i=i: stored[n][i], lambda n, s=stream: peer[n][s])
        )
        assert ours.mean() <= 1.5 * theirs.mean(), f"stream {stream}: mean"
        assert ours.max() <= 2 * theirs.max(), f"stream {stream}: row {ours.argmax()}"
        assert theirs.max() < 0.1, "ill-conditioned prompts: this would prove nothing"


# -- canaries ------------------------------------------------------------------------------------


def _asked(lake: Lake) -> set[str]:
    return {name for (name,) in lake.sql("select sample_id from canaries").fetchall()}


def test_what_the_server_said_is_what_is_stored(lake: Lake, model_dir: Path) -> None:
    report = verify(lake.url, "canary", model=model_dir)
    assert report.ok, report
    # A sample may be captured, and the next one sent, before a canary is answered.
    assert 2 <= report.samples == len(_asked(lake))
    found = report.agreement
    assert found is not None and found.fingerprint and found.unlike == 0
    assert found.untelling <= 1  # the prompt of two tokens, if it is one
    assert found.figures.correlation is not None and found.figures.correlation > 0.999
    # The tolerance is no more than a few times what rounding really does.
    assert found.figures.mean_off is not None and 0.002 < found.figures.mean_off < 0.1
    assert tolerance("bfloat16", np.array([40.0]))[0] < 0.4


WRONG = {
    "shifted by one": lambda s: np.roll(s, 1, axis=1),
    "shifted the other way": lambda s: np.roll(s, -1, axis=1),
    "boundaries the other way round": lambda s: s[::-1],
    "last rows zero": lambda s: np.concatenate([s[:, :-8], np.zeros_like(s[:, -8:])], axis=1),
}


@pytest.mark.parametrize("how", list(WRONG))
def test_sound_rows_that_are_not_what_the_server_said_are_found(
    lake: Lake, model_dir: Path, prompts: dict[str, list[int]], tmp_path: Path, how: str
) -> None:
    bad = max(_asked(lake), key=lambda name: len(prompts[name]))
    other = stored_as(
        tmp_path / "lake", lake, model_dir, lambda n, s: WRONG[how](s) if n == bad else s
    )
    assert verify(other, "full").ok
    report = verify(other, "canary", model=model_dir)
    assert list(report.by_sample()) == [bad], report
