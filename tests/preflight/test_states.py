"""Log-probs and batch invariance against real staging, with rows that are wrong in every way."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import hslake
from hslake.checks import FAIL, PASS, WARN, Check
from hslake.extract import extract
from hslake.plan import plan_files
from hslake.preflight import PreflightReport, preflight
from hslake.preflight.invariance import row_differences
from hslake.preflight.states import prompt_log_probs
from hslake.spec import LakeSpec
from tests import fakeserver
from tests.fakeserver import FakeServer
from tests.models import bf16, write_model

VOCAB, HIDDEN = 400, 8
HEAD = bf16(np.random.default_rng(4), VOCAB, HIDDEN)
Change = Callable[[np.ndarray], np.ndarray]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(
        tmp_path / "model",
        {"lm_head.weight": HEAD},
        num_hidden_layers=8,
        hidden_size=HIDDEN,
        vocab_size=VOCAB,
    )


@pytest.fixture
def lake(tmp_path: Path, model: Path) -> str:
    return make_lake(tmp_path, model, "bfloat16")


def make_lake(tmp_path: Path, model: Path, dtype: str) -> str:
    rng = np.random.default_rng(1)
    rows = [
        {"sample_id": f"s{i}", "source": "A1", "input_ids": rng.integers(0, VOCAB, n).tolist()}
        for i, n in enumerate((40, 300, 7, 260))
    ]
    made = hslake.create(
        tmp_path / "lake",
        streams=[2, 4, "final"],
        model_config=model / "config.json",
        dtype=dtype,
    )
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "plan.parquet")
    plan_files(made.url, [tmp_path / "plan.parquet"])
    return made.url


@pytest.fixture
def staging(tmp_path: Path) -> Path:
    (tmp_path / "staging").mkdir()
    return tmp_path / "staging"


def look(lake: str, staging: Path, model: Path | None, head: np.ndarray | None) -> PreflightReport:
    with FakeServer(lake, staging, head=head, tells=head is not None) as server:
        return preflight(lake, [server.url], staging=[staging], model=model)


def named(report: PreflightReport, name: str) -> Check:
    (found,) = [c for c in report.checks if c.name == name]
    assert bool(found.todo) == (found.result != PASS)
    return found


def capture_as(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    """The hook writes other rows than those that the server goes on from."""
    true = fakeserver.states_of
    monkeypatch.setattr(fakeserver, "states_of", lambda spec, ids: change(true(spec, ids)))


def test_true_rows_agree(lake: str, staging: Path, model: Path) -> None:
    report = look(lake, staging, model, HEAD)
    found = named(report, "log-probs")
    assert report.passed and report.warnings == []
    # The probe's 9 tokens and the 255 of the prompt that is sent alone.
    assert found.found.startswith("264 tokens through lm_head.weight agree"), found


@pytest.mark.parametrize(
    "change",
    [
        lambda s: np.stack([s[0], s[1], s[1] + 1]),  # another boundary
        lambda s: np.stack([s[2], s[1], s[0]]),  # streams swapped
        lambda s: np.roll(s, 1, axis=1),  # a row too late
        lambda s: np.roll(s, -1, axis=1),  # a row too early
        lambda s: s[:, ::-1],
        lambda s: s + np.uint16(3),  # near, but not what was computed
    ],
)
def test_wrong_rows_fail(
    lake: str, staging: Path, model: Path, monkeypatch: pytest.MonkeyPatch, change: Change
) -> None:
    capture_as(monkeypatch, change)
    report = look(lake, staging, model, HEAD)
    assert [c.name for c in report.failures] == ["log-probs"], report.failures
    assert "does not give the server's log-probs" in report.failures[0].found


def test_one_wrong_row_among_264_fails(
    lake: str, staging: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(states: np.ndarray) -> np.ndarray:
        states = states.copy()
        if states.shape[1] > 200:
            states[2, 200] = states[2, 199]
        return states

    capture_as(monkeypatch, change)
    found = named(look(lake, staging, model, HEAD), "log-probs")
    assert found.result == FAIL and ": 1 of 264 tokens" in found.found


def test_another_models_head(lake: str, staging: Path, model: Path, tmp_path: Path) -> None:
    other = np.random.default_rng(5).normal(size=HEAD.shape).astype("<f4")
    found = named(look(lake, staging, model, other), "log-probs")
    assert found.result == FAIL
    elsewhere = write_model(tmp_path / "other", {"lm_head.weight": other}, hidden_size=HIDDEN)
    found = named(look(lake, staging, elsewhere, HEAD), "model")
    assert found.result == FAIL and "fingerprint" in found.found


def test_what_cannot_be_judged_is_a_warning(
    lake: str, staging: Path, model: Path, tmp_path: Path
) -> None:
    for given, head, text in (
        (None, HEAD, "no --model given"),
        (tmp_path / "nowhere", HEAD, "config.json is not there"),
        (model, None, "gave no log-probs of the prompt"),
    ):
        report = look(lake, staging, given, head)
        found = named(report, "log-probs")
        assert report.passed and found.result == WARN and text in found.found, found
    with FakeServer(lake, staging, head=HEAD) as server:
        report = preflight(lake, [server.url], model=model)
    assert report.passed and named(report, "log-probs").result == WARN
    with FakeServer(lake, staging, head=HEAD, refuse_log_probs=True) as server:
        report = preflight(lake, [server.url], staging=[staging], model=model)
    found = named(report, "log-probs")
    assert report.passed and found.result == WARN and "no log-probs here" in found.found


def test_logits_that_are_too_flat_prove_nothing(tmp_path: Path, staging: Path) -> None:
    """As those of weights that were never loaded: whatever rows come, all agree."""
    flat = (HEAD * 1e-5).astype(np.float32)
    shape = {"num_hidden_layers": 8, "hidden_size": HIDDEN, "vocab_size": VOCAB}
    model = write_model(tmp_path / "flat", {"lm_head.weight": flat}, **shape)
    report = look(make_lake(tmp_path, model, "bfloat16"), staging, model, flat)
    found = named(report, "log-probs")
    assert found.result == WARN and "264 are as good as uniform" in found.found, found
    assert "dummy" in found.todo


def test_a_quantised_head_is_a_warning(tmp_path: Path, staging: Path) -> None:
    model = write_model(
        tmp_path / "quantised",
        {"lm_head.weight_packed": HEAD},
        num_hidden_layers=8,
        hidden_size=HIDDEN,
        vocab_size=VOCAB,
    )
    report = look(make_lake(tmp_path, model, "bfloat16"), staging, model, HEAD)
    found = named(report, "log-probs")
    assert report.passed and found.result == WARN and "quantised" in found.found


def test_a_lake_without_final(tmp_path: Path, staging: Path, model: Path) -> None:
    made = hslake.create(
        tmp_path / "lake", streams=[2, 4], model_config=model / "config.json", dtype="bfloat16"
    )
    with FakeServer(made.url, staging) as server:
        report = preflight(made.url, [server.url], staging=[staging], model=model)
    assert "no `final` stream" in named(report, "log-probs").found


def test_answers_without_all_log_probs() -> None:
    told = [[None, 5, None], [-1.5, 6, None], [-2.5, 7, None]]
    answer = {"meta_info": {"input_token_logprobs": told}}
    found = prompt_log_probs(answer, [5, 6, 7])
    assert found is not None and found.tolist() == [-1.5, -2.5]
    assert prompt_log_probs(answer, [5, 6, 8]) is None  # of other tokens
    assert prompt_log_probs(answer, [5, 6, 7, 8]) is None
    # SGLang tells NaN as null, and the vocabulary's last token as 0.
    odd = prompt_log_probs(
        {"meta_info": {"input_token_logprobs": [[None, 0], [None, 6]]}}, [49151, 6]
    )
    assert odd is not None and np.isnan(odd).tolist() == [True]
    for bad in (None, {}, {"meta_info": {"input_token_logprobs": [[None, 5], ["x", 6]]}}):
        assert prompt_log_probs(bad, [5, 6]) is None


# -- batch invariance ---------------------------------------------------------------------------


def second_time(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    """The prompt of 256 tokens is captured otherwise when it comes again."""
    true, seen = fakeserver.states_of, []

    def states(spec: LakeSpec, ids: list[int]) -> np.ndarray:
        found = true(spec, ids)
        if len(ids) == 256:
            seen.append(ids)
        return change(found) if len(ids) == 256 and len(seen) == 2 else found

    monkeypatch.setattr(fakeserver, "states_of", states)


def test_rounding_passes_and_is_told(
    lake: str, staging: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second_time(monkeypatch, lambda s: s ^ np.uint16(1))  # the last bit of every value
    found = named(look(lake, staging, None, None), "batch invariance")
    assert found.result == PASS and "largest relative row difference: 2 0.0" in found.found
    assert "256 tokens alone and among 7 others of 5 to 200" in found.found


@pytest.mark.parametrize(
    "change",
    [
        lambda s: np.roll(s, 1, axis=1),
        lambda s: np.concatenate([s[:, :250], s[:, :6]], axis=1),  # the last rows are others'
        lambda s: np.stack([s[0], s[2], s[1]]),
        lambda s: s ^ np.uint16(1 << 5),  # everywhere a little: not rounding
    ],
)
def test_rows_that_depend_on_the_batch_fail(
    lake: str, staging: Path, monkeypatch: pytest.MonkeyPatch, change: Change
) -> None:
    second_time(monkeypatch, change)
    report = look(lake, staging, None, None)
    assert [c.name for c in report.failures] == ["batch invariance"]


def test_a_stray_row_is_a_warning(
    lake: str, staging: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(states: np.ndarray) -> np.ndarray:
        states = states.copy()
        states[1, 77] ^= np.uint16(1 << 5)
        return states

    second_time(monkeypatch, change)
    found = named(look(lake, staging, None, None), "batch invariance")
    assert found.result == WARN and "exceeded by 1 of 256 rows" in found.found


def test_without_room_it_is_not_tried(lake: str, staging: Path) -> None:
    with FakeServer(lake, staging, part_tokens=300, max_parts=2) as server:
        report = preflight(lake, [server.url], staging=[staging])
    found = named(report, "batch invariance")
    assert found.result == WARN and "rows of staging" in found.found
    assert "--part-tokens" in found.todo and "too few also when all are" in found.found
    assert not server.violations
    with FakeServer(lake, staging, part_tokens=600, max_parts=4) as server:
        extract(lake, [server.url])
        report = preflight(lake, [server.url], staging=[staging])
    assert "hslake compact" in named(report, "batch invariance").todo


def test_row_differences() -> None:
    a = np.array([[3.0, 4.0], [0.0, 0.0], [0.0, 0.0]])
    b = np.array([[3.0, 4.5], [0.0, 0.0], [1.0, 0.0]])
    assert row_differences(a, b).tolist() == [0.1, 0.0, np.inf]
