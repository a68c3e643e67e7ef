"""Canaries on their way: who asks for log-probs, what is recorded, and what a refusal costs."""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import hslake
from hslake.canary import POSITIONS, Canaries, first_position, prompt_log_probs
from hslake.compact import compact
from hslake.drive import Driver, Limits
from hslake.errors import InvalidInput
from hslake.ids import RequestId, new_attempt, token_hash
from hslake.items import Item
from hslake.plan import plan_files
from hslake.runlog import RunLog
from hslake.server import RequestFailed, RequestRefused, Server, new_session
from hslake.verify import VerifyReport, verify
from hslake.worklist import read_ids
from tests import fakeserver
from tests.fakeserver import FakeServer
from tests.models import bf16, write_model

VOCAB, HIDDEN = 400, 8
HEAD = bf16(np.random.default_rng(4), VOCAB, HIDDEN)
LENGTHS = (40, 300, 1, 7, 260, 64, 65, 66, 2, 100)
FAST = Limits(requests=4, patience=20, backoff=0.02, poll_min=0.005, poll_max=0.05)


class Told:
    """Keeps what canaries record."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def canary(self, *values: Any) -> None:
        names = ("sample_id", "token_hash", "attempt", "server", "first", "log_probs")
        self.rows.append(dict(zip(names, values, strict=True)))


class Answers:
    """A server that answers as it is told to: log-probs, `"refuse"`, `"fail"` or nothing."""

    url = "http://here"

    def __init__(self, *then: str) -> None:
        self.then, self.asked = list(then), list[dict[str, Any]]()

    async def generate(self, rid: RequestId, ids: Sequence[int], **more: Any) -> Any:
        self.asked.append({"rid": rid, "ids": list(ids), **more})
        await asyncio.sleep(0)
        now = self.then.pop(0) if self.then else "tell"
        if now == "refuse":
            raise RequestRefused("HTTP 400: no")
        if now == "fail":
            raise RequestFailed("HTTP 500: no")
        if now == "hang":
            await asyncio.sleep(3600)
        told = [[-0.5 * i, t, None] for i, t in enumerate(ids)][more.get("logprob_start_len", 0) :]
        meta = {"input_token_logprobs": told} if more and now == "tell" else {}
        return {"meta_info": meta}


def rid_of(name: str, length: int) -> RequestId:
    return RequestId("0123abcd", new_attempt(), length, "A1", name)


def send(canaries: Canaries, server: Answers, names: Sequence[str], length: int = 5) -> list[Any]:
    """One after the other; errors are results."""

    async def main() -> list[Any]:
        found = []
        for name in names:
            call = canaries.generate(server, rid_of(name, length), list(range(length)))  # type: ignore[arg-type]
            found += await asyncio.gather(call, return_exceptions=True)
        return found

    return asyncio.run(main())


def asked(server: Answers) -> list[int]:
    """Which of its requests were canaries, by number."""
    return [i for i, a in enumerate(server.asked) if a.get("return_logprob")]


NAMES = [f"s{i}" for i in range(1000)]


def test_the_first_of_a_server_and_every_hundredth() -> None:
    server, told = Answers(), Told()
    send(Canaries(0.01, told), server, NAMES)
    assert asked(server) == list(range(0, 1000, 100)) and len(told.rows) == 10
    server = Answers()
    send(Canaries(0.0, told), server, NAMES)
    assert asked(server) == []
    server = Answers()
    send(Canaries(1.0, told), server, NAMES[:20])
    assert asked(server) == list(range(20))
    for wrong in (-0.1, 1.1, float("nan")):
        with pytest.raises(InvalidInput, match="canary-share"):
            Canaries(wrong, told)


def test_each_server_has_its_own_share() -> None:
    canaries, a, b = Canaries(0.1, Told()), Answers(), Answers()
    b.url = "http://there"
    send(canaries, a, NAMES[:15])
    send(canaries, b, NAMES[:15])
    assert asked(a) == [0, 10] and asked(b) == [0, 10]


@pytest.mark.parametrize("length", [2, 63, 64, 65, 66, 300])
def test_the_last_positions_are_asked_for(length: int) -> None:
    server, told = Answers(), Told()
    send(Canaries(1.0, told), server, ["a"], length)
    (row,) = told.rows
    assert server.asked[0]["logprob_start_len"] == row["first"] - 1
    assert row["first"] == max(1, length - POSITIONS) == first_position(length)
    assert len(row["log_probs"]) == min(POSITIONS, length - 1)
    # The fake one tells -i / 2 of the token at position i.
    assert row["log_probs"] == [-0.5 * i for i in range(row["first"], length)]
    assert row["attempt"] == server.asked[0]["rid"].attempt and row["server"] == server.url
    assert row["token_hash"] == token_hash(range(length)) and row["sample_id"] == "a"


def test_a_prompt_of_one_token_is_none() -> None:
    server, told = Answers(), Told()
    send(Canaries(0.5, told), server, ["a"], 1)
    assert asked(server) == [] and told.rows == []
    assert first_position(1) == 1


def test_one_at_a_time_and_the_next_comes_after_it() -> None:
    canaries, server = Canaries(0.5, Told()), Answers("hang")

    async def main() -> None:
        tasks = [
            asyncio.create_task(canaries.generate(server, rid_of(n, 5), [1, 2, 3, 4, 5]))  # type: ignore[arg-type]
            for n in NAMES[:10]
        ]
        await asyncio.sleep(0.05)
        assert asked(server) == [0] and sum(t.done() for t in tasks) == 9
        tasks[0].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(main())
    send(canaries, server, NAMES[10:14])
    assert asked(server) == [0, 10, 11, 12]  # two were due, no more, and then one in two


def test_a_refusal_costs_nothing_but_the_canaries(caplog: pytest.LogCaptureFixture) -> None:
    canaries, server, told = Canaries(0.5, Told()), Answers("refuse"), Told()
    with caplog.at_level(logging.WARNING):
        found = send(canaries, server, NAMES[:9])
    assert all(isinstance(f, dict) for f in found) and told.rows == []
    first, again = server.asked[:2]
    assert first["rid"] == again["rid"] and "return_logprob" not in again
    assert asked(server) == [0] and len(server.asked) == 10
    (warning,) = caplog.messages
    assert "http://here: no more canaries" in warning and "HTTP 400: no" in warning


def test_a_sample_that_is_refused_itself_ends_no_canaries() -> None:
    server, told = Answers("refuse", "refuse"), Told()
    found = send(Canaries(1.0, told), server, NAMES[:3])
    assert isinstance(found[0], RequestRefused) and len(told.rows) == 2


def test_an_answer_without_them_ends_them(caplog: pytest.LogCaptureFixture) -> None:
    server, told = Answers("silent"), Told()
    with caplog.at_level(logging.WARNING):
        found = send(Canaries(1.0, told), server, NAMES[:3])
    assert all(isinstance(f, dict) for f in found)
    assert asked(server) == [0] and told.rows == [] and len(caplog.messages) == 1


def test_three_failures_in_a_row_end_them_and_no_sample_is_one_twice() -> None:
    server, told = Answers("fail", "tell", "fail"), Told()
    canaries = Canaries(1.0, told)
    found = send(canaries, server, ["a", "a", "b", "c", "b"])
    assert isinstance(found[0], RequestFailed) and isinstance(found[2], RequestFailed)
    assert asked(server) == [0, 2, 3] and len(told.rows) == 1  # `a` and `b` plainly from then on
    server = Answers("fail", "fail", "fail")
    canaries = Canaries(1.0, told)
    send(canaries, server, ["a", "b", "c", "d", "e"])
    assert asked(server) == [0, 1, 2]


def test_answers() -> None:
    told = [[None, 5, None], [-1.5, 6, None], [None, 7, None]]
    found = prompt_log_probs({"meta_info": {"input_token_logprobs": told}}, [5, 6, 7])
    assert found is not None and found[0] == -1.5 and np.isnan(found[1])


# -- through the driver into the lake ------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    config = {"num_hidden_layers": 8, "hidden_size": HIDDEN, "vocab_size": VOCAB}
    return write_model(tmp_path / "model", {"lm_head.weight": HEAD}, **config)


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


def drive(url: str, server: FakeServer, share: float) -> tuple[Driver, Canaries]:
    """All planned samples, through the real driver, into the real run log."""
    lake = hslake.open(url)
    runs = RunLog(lake.store)
    canaries = Canaries(share, runs)
    rows = lake.sql("select sample_id, source, length from plan order by sample_id").fetchall()
    items = [Item(*row) for row in rows]

    async def main() -> Driver:
        async with new_session() as session:
            driver = Driver(
                lake.spec.lake_id,
                [Server(server.url, session)],
                items,
                lambda some: {k: v.to_numpy() for k, v in read_ids(lake, some).items()},
                limits=FAST,
                ask=canaries.generate,
            )
            await driver.run()
            return driver

    driver = asyncio.run(main())
    runs.flush()
    return driver, canaries


def canary(url: str, model: Path) -> VerifyReport:
    return verify(url, "canary", model=model)


def test_from_the_driver_to_verify(lake: str, model: Path, tmp_path: Path) -> None:
    (tmp_path / "staging").mkdir()
    with FakeServer(lake, tmp_path / "staging", head=HEAD) as server:
        driver, canaries = drive(lake, server, 1.0)
        assert driver.captured == len(LENGTHS) and driver.retried == 0
        # The run may end before its last request is answered: captured is captured.
        assert server.most_canaries == 1 and len(server.log_probs_from) >= canaries.recorded
        compact(lake, [tmp_path / "staging"])
    report = canary(lake, model)
    assert report.ok and 0 < report.samples == canaries.recorded < len(LENGTHS)
    assert report.agreement is not None and report.agreement.figures.correlation > 0.9999
    (group,) = report.agreement.groups
    assert group.server == server.url and group.figures.samples == report.samples


@pytest.mark.parametrize("how", ["refuse_log_probs", "break_log_probs", "none"])
def test_no_sample_is_lost_to_a_server_without_log_probs(
    lake: str, tmp_path: Path, how: str
) -> None:
    (tmp_path / "staging").mkdir()
    with FakeServer(lake, tmp_path / "staging", head=None) as server:
        setattr(server, how, True)
        driver, canaries = drive(lake, server, 1.0)
        assert driver.captured == len(LENGTHS) and not driver.failed and not driver.refused
    assert canaries.recorded == 0
    assert len(server.log_probs_from) == (3 if how == "break_log_probs" else 1)
    assert driver.retried == (3 if how == "break_log_probs" else 0)


def test_what_the_server_goes_on_from_is_not_what_it_stores(
    lake: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = fakeserver.states_of
    monkeypatch.setattr(fakeserver, "states_of", lambda *a: np.roll(true(*a), 1, axis=1))
    (tmp_path / "staging").mkdir()
    with FakeServer(lake, tmp_path / "staging", head=HEAD) as server:
        drive(lake, server, 1.0)
        compact(lake, [tmp_path / "staging"])
    report = canary(lake, model)
    assert len(report.by_sample()) == report.samples
