"""Canaries on their way: who asks for log-probs, what is recorded, and what a refusal costs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import hslake
from hslake.compact import compact
from hslake.errors import InvalidInput
from hslake.extract import ExtractOptions, extract
from hslake.extract.canary import POSITIONS, Canaries, first_position, prompt_log_probs
from hslake.extract.drive import Limits
from hslake.extract.items import Item
from hslake.extract.report import ExtractReport
from hslake.ids import token_hash
from hslake.plan import plan_files
from hslake.verify import VerifyReport, verify
from tests import fakeserver
from tests.fakeserver import FakeServer
from tests.models import bf16, write_model

VOCAB, HIDDEN = 400, 8
HEAD = bf16(np.random.default_rng(4), VOCAB, HIDDEN)
LENGTHS = (40, 300, 1, 7, 260, 64, 65, 66, 2, 100)
FAST = Limits(requests=4, patience=20, backoff=0.02, poll_min=0.005, poll_max=0.05)
HERE = "http://here:30000"


class Told:
    """Keeps what canaries record."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def canary(self, *values: Any) -> None:
        names = ("sample_id", "token_hash", "attempt", "server", "first", "log_probs")
        self.rows.append(dict(zip(names, values, strict=True)))


def item_of(name: str, length: int = 5) -> Item:
    return Item(name, "A1", length, token_hash(range(length)))


def answer_of(length: int, start: int) -> Any:
    """As SGLang answers: here -i / 2 of the token at position i."""
    told = [[-0.5 * i, i, None] for i in range(length)][start:]
    return {"meta_info": {"input_token_logprobs": [[None, *told[0][1:]], *told[1:]]}}


def send(
    canaries: Canaries, names: Sequence[str], length: int = 5, server: str = HERE, how: str = "tell"
) -> list[int]:
    """One after the other; which of them were canaries, by number."""
    found = []
    for i, name in enumerate(names):
        item = item_of(name, length)
        fields = canaries.fields(server, item, f"attempt{i}")
        if fields:
            found.append(i)
            assert fields["return_logprob"] is True
            answer = answer_of(length, fields["logprob_start_len"])
            made = {"tell": answer, "fail": None, "silent": {"meta_info": {}}}[how]
            canaries.answered(server, item, f"attempt{i}", made)
    return found


NAMES = [f"s{i}" for i in range(1000)]


def test_the_first_of_a_server_and_every_hundredth() -> None:
    told = Told()
    assert send(Canaries(0.01, told), NAMES) == list(range(0, 1000, 100))
    assert len(told.rows) == 10
    assert send(Canaries(0.0, told), NAMES) == []
    assert send(Canaries(1.0, told), NAMES[:20]) == list(range(20))
    for wrong in (-0.1, 1.1, float("nan")):
        with pytest.raises(InvalidInput, match="canary-share"):
            Canaries(wrong, told)
        with pytest.raises(InvalidInput, match="canary-share"):
            ExtractOptions(canary_share=wrong)


def test_each_server_has_its_own_share() -> None:
    canaries = Canaries(0.1, Told())
    assert send(canaries, NAMES[:15]) == [0, 10]
    assert send(canaries, NAMES[:15], server="http://there") == [0, 10]


@pytest.mark.parametrize("length", [2, 63, 64, 65, 66, 300])
def test_the_last_positions_are_asked_for(length: int) -> None:
    told = Told()
    assert send(Canaries(1.0, told), ["a"], length) == [0]
    (row,) = told.rows
    assert row["first"] == max(1, length - POSITIONS) == first_position(length)
    assert len(row["log_probs"]) == min(POSITIONS, length - 1)
    assert row["log_probs"] == [-0.5 * i for i in range(row["first"], length)]
    assert row["attempt"] == "attempt0" and row["server"] == HERE
    assert row["token_hash"] == token_hash(range(length)) and row["sample_id"] == "a"


def test_a_prompt_of_one_token_is_none() -> None:
    assert send(Canaries(1.0, Told()), ["a"], 1) == []


def test_one_at_a_time_and_the_next_comes_after_it() -> None:
    canaries, first = Canaries(0.5, Told()), item_of("first")
    fields = canaries.fields(HERE, first, "x")
    assert fields and send(canaries, NAMES[:9]) == []
    canaries.answered(HERE, first, "x", answer_of(5, fields["logprob_start_len"]))
    assert send(canaries, NAMES[:4]) == [0, 1, 2]  # two were due, no more, and then one in two


def test_an_answer_without_them_ends_them(caplog: pytest.LogCaptureFixture) -> None:
    told = Told()
    canaries = Canaries(1.0, told)
    assert send(canaries, NAMES[:3], how="silent") == [0] and told.rows == []
    (warning,) = caplog.messages
    assert warning.startswith(f"{HERE}: no more canaries") and "has no log-probs" in warning
    assert send(canaries, NAMES[:3], server="http://there") == [0, 1, 2]


def test_three_failures_in_a_row_end_them(caplog: pytest.LogCaptureFixture) -> None:
    canaries = Canaries(1.0, Told())
    assert send(canaries, ["a", "b"], how="fail") == [0, 1]
    assert send(canaries, ["a", "b", "c"]) == [2]  # what came to nothing once is asked for plainly
    assert send(canaries, ["d", "e"], how="fail") == [0, 1] and not caplog.messages
    assert send(canaries, ["f", "g"], how="fail") == [0]
    assert send(canaries, ["h"]) == [] and "3 in a row" in caplog.text and len(caplog.messages) == 1


def test_answers() -> None:
    told = [[None, 5, None], [-1.5, 6, None], [None, 7, None]]
    found = prompt_log_probs({"meta_info": {"input_token_logprobs": told}}, [5, 6, 7])
    assert found is not None and found[0] == -1.5 and np.isnan(found[1])
    rows = Told()
    canaries = Canaries(1.0, rows)
    item = item_of("a", 3)
    canaries.fields(HERE, item, "x")
    canaries.answered(HERE, item, "x", {"meta_info": {"input_token_logprobs": told}})
    assert np.isnan(rows.rows[0]["log_probs"][1])


@pytest.mark.filterwarnings("error")
def test_answers_of_somebody_else(caplog: pytest.LogCaptureFixture) -> None:
    """Numbers that no float holds end the canaries of a server, and nothing else."""
    rows = Told()
    canaries = Canaries(1.0, rows)
    for value in (10**400, -(10**30), "-1.5", [1]):
        server, item = f"{HERE}/{value}"[:60], item_of("a", 3)
        canaries.fields(server, item, "x")
        told = [[None, 5, None], [value, 6, None], [-1.0, 7, None]]
        canaries.answered(server, item, "x", {"meta_info": {"input_token_logprobs": told}})
        assert not canaries.fields(server, item_of("b", 3), "y")
    assert not rows.rows and len(caplog.messages) == 4
    canaries.fields(HERE, item, "x")
    told = [[None, 5, None], [-1e39, 6, None], [-1.0, 7, None]]
    canaries.answered(HERE, item, "x", {"meta_info": {"input_token_logprobs": told}})
    assert rows.rows[0]["log_probs"] == [-np.inf, -1.0]


# -- through the driver into the lake ------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    config = {"num_hidden_layers": 8, "hidden_size": HIDDEN, "vocab_size": VOCAB}
    return write_model(tmp_path / "model", {"lm_head.weight": HEAD}, **config)


@pytest.fixture
def staging(tmp_path: Path) -> Path:
    (tmp_path / "staging").mkdir()
    return tmp_path / "staging"


@pytest.fixture
def lake(tmp_path: Path, model: Path) -> str:
    rng = np.random.default_rng(1)
    rows = [
        {"sample_id": f"s{i}", "source": "A1", "input_ids": rng.integers(0, VOCAB, n).tolist()}
        for i, n in enumerate(LENGTHS)
    ]
    made = hslake.create(
        tmp_path / "lake", streams=[2, 4, "final"], model_config=model / "config.json"
    )
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "plan.parquet")
    plan_files(made.url, [tmp_path / "plan.parquet"])
    return made.url


def run(url: str, server: FakeServer, share: float = 1.0) -> ExtractReport:
    options = ExtractOptions(limits=FAST, canary_share=share)
    return extract(url, [server.url], options)


def recorded(url: str) -> int:
    return len(hslake.open(url).sql("select 1 from canaries").fetchall())


def canary(url: str, model: Path) -> VerifyReport:
    return verify(url, "canary", model=model)


def test_from_extract_to_verify(lake: str, model: Path, staging: Path) -> None:
    with FakeServer(lake, staging, head=HEAD) as server:
        report = run(lake, server)
        assert report.complete and report.captured == len(LENGTHS) and report.retried == 0
        # The run may end before its last request is answered: captured is captured.
        assert server.most_canaries == 1 and len(server.log_probs_from) >= recorded(lake)
        compact(lake, [staging])
    found = canary(lake, model)
    assert found.ok and 0 < found.samples == recorded(lake) < len(LENGTHS)
    assert found.agreement is not None and found.agreement.fingerprint
    assert found.agreement.figures.correlation is not None
    assert found.agreement.figures.correlation > 0.9999
    (group,) = found.agreement.groups
    assert group.server == server.url and group.figures.samples == found.samples
    assert hslake.open(lake).sql("select run_id from runs").fetchall() == [(group.run_id,)]


@pytest.mark.parametrize("how", ["refuse_log_probs", "break_log_probs", "tells"])
def test_no_sample_is_lost_to_a_server_without_log_probs(
    lake: str, staging: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    with FakeServer(lake, staging) as server:
        setattr(server, how, how != "tells")
        report = run(lake, server)
    assert report.complete and report.captured == len(LENGTHS) and not report.missing
    assert recorded(lake) == 0 and len(server.log_probs_from) == (1 if how == "tells" else 3)
    assert sum("no more canaries" in m for m in caplog.messages) == 1


def test_none_are_sent_where_they_are_not_wanted(lake: str, staging: Path, tmp_path: Path) -> None:
    with FakeServer(lake, staging, head=HEAD) as server:
        assert run(lake, server, 0.0).complete and not server.log_probs_from
    bare = hslake.create(tmp_path / "bare", streams=[2, 4], hidden_size=HIDDEN, num_layers=8)
    plan_files(bare.url, [tmp_path / "plan.parquet"])
    (tmp_path / "other").mkdir()
    with FakeServer(bare.url, tmp_path / "other") as server:
        assert run(bare.url, server).complete and not server.log_probs_from


def test_what_the_server_goes_on_from_is_not_what_it_stores(
    lake: str, model: Path, staging: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = fakeserver.states_of
    monkeypatch.setattr(fakeserver, "states_of", lambda *a: np.roll(true(*a), 1, axis=1))
    with FakeServer(lake, staging, head=HEAD) as server:
        run(lake, server)
        compact(lake, [staging])
    report = canary(lake, model)
    assert report.samples and len(report.by_sample()) == report.samples
