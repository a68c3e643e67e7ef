"""The driver's own parts: lists of samples, the token file, the pace, who gets the last samples."""

import random
from typing import Any

import numpy as np
import pytest
from aiohttp import ClientSession

from hslake.errors import Missing, NoSpace
from hslake.extract.drive import Driver, Limits
from hslake.extract.items import Item, Items
from hslake.extract.pace import Pace
from hslake.extract.reach import Reach
from hslake.extract.tokenfile import TokenFile
from hslake.extract.worklist import worklist
from hslake.lake import Lake
from hslake.server import Server
from tests.extract.world import World


def test_items(world: World) -> None:
    items = worklist(world.made.lake).missing
    every = list(items)
    assert len(items) == len(every) == 60 and items[0] == every[0] and items[-1] == every[-1]
    assert [i.place for i in every] == list(range(60))
    assert list(items[3:9]) == every[3:9] and list(items[::-2]) == every[::-2]
    assert items.tokens == sum(i.length for i in every)
    names = {i.sample_id for i in every[:5]}
    assert items.among([*names, "nobody"]) == names and items.among([]) == set()
    assert list(items.only(names)) == every[:5] and list(items.without(names)) == every[5:]
    assert list(items.longer(150)) == [i for i in every if i.length > 150]
    with pytest.raises(IndexError):
        items[60]


def test_token_file(world: World) -> None:
    lake = world.made.lake
    items = worklist(lake, order="length").missing
    some = items.without({i.sample_id for i in list(items)[::3]})
    with TokenFile(lake, some) as tokens:
        order = list(some)
        random.Random(1).shuffle(order)
        found = tokens.read(order)
        assert found.keys() == {i.sample_id for i in order}
        for item in order:
            np.testing.assert_array_equal(
                found[item.sample_id], world.made.samples[item.sample_id].input_ids
            )
    strange = Items(some._table.set_column(0, "sample_id", [["x"] * len(some)]))
    with pytest.raises(Missing, match="the plan lacks 40 samples"):
        TokenFile(lake, strange)


def test_no_room_for_the_token_file(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Any, lake: Lake, items: Items) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TokenFile, "_fill", full)
    lake = world.made.lake
    with pytest.raises(NoSpace, match="TMPDIR"):
        TokenFile(lake, worklist(lake).missing)


def test_pace() -> None:
    now = [0.0]
    pace = Pace(lambda: now[0])
    assert pace.rate() is None
    for second in range(200):
        now[0] = second
        pace.tell(10 * second if second < 100 else 1000 + 2 * (second - 100))
        if second == 1:
            assert pace.rate() is None
        if second == 90:
            assert pace.rate() == pytest.approx(10)
    assert pace.rate() == pytest.approx(2)
    pace.forget()
    assert pace.rate() is None


@pytest.fixture
async def driver() -> Any:
    """Two servers that were never asked, of which one is three times as fast."""
    async with ClientSession() as session:
        servers = [Server(f"http://127.0.0.1:{port}", session) for port in (1, 2)]
        items = [Item(str(i), "A1", 100) for i in range(1000)]
        found = Driver(
            "0" * 32,
            servers,
            items,
            lambda some: {i.sample_id: np.zeros(i.length, np.int32) for i in some},
            limits=Limits(),
            reach={s.url: Reach(1000, "") for s in servers},
        )
        now = [0.0]
        for slot, rate in zip(found.slots, (300, 100), strict=True):
            slot.up, slot.pace = True, Pace(lambda: now[0])
            now[0] = 0.0
            slot.pace.tell(0)
            now[0] = 10.0
            slot.pace.tell(10 * rate)
        yield found


async def test_a_slow_server_does_not_get_the_last_samples(driver: Driver) -> None:
    fast, slow = driver.slots
    fast.asked_tokens = slow.asked_tokens = 3000
    assert driver.queue.tokens == 100_000
    assert driver._in_time(fast) and driver._in_time(slow)
    driver.queue.tokens = 2000  # in all 8,000: the slow one's quarter is 2,000
    assert driver._in_time(fast) and not driver._in_time(slow)
    slow.asked_tokens = 0  # nobody is idle while there is work
    assert driver._in_time(slow)
    slow.asked_tokens = 2500
    fast.up = False
    assert driver._in_time(slow)
    fast.up = True
    fast.pace.forget()  # came back just now
    assert driver._in_time(slow) and driver._in_time(fast)


async def test_one_of_several_servers_is_always_in_time(driver: Driver) -> None:
    rng = random.Random(2)
    for _ in range(500):
        driver.queue.tokens = rng.randrange(3000)
        for slot in driver.slots:
            slot.asked_tokens = rng.randrange(5000)
        assert any(driver._in_time(slot) for slot in driver.slots)


async def test_extras_are_sent_and_answered(world: World) -> None:
    class Extra:
        asked: list[str] = []  # noqa: RUF012
        answers: list[Any] = []  # noqa: RUF012

        def fields(self, server: str, item: Item, attempt: str) -> dict[str, Any]:
            self.asked.append(item.sample_id)
            return {"return_logprob": True} if item.sample_id in world.names[:10] else {}

        def answered(self, server: str, item: Item, attempt: str, answer: Any) -> None:
            self.answers.append((item.sample_id, answer))

    import asyncio

    from hslake.extract.run import Run
    from hslake.progress import Silent
    from hslake.server import new_session
    from hslake.server.listeners import server_at
    from tests.extract.world import FAST, ExtractOptions

    with world.serve(part_tokens=16_384, refuse_log_probs=True) as server:
        async with new_session() as session:
            run = Run(
                world.url,
                [server_at(server.url, session)],
                ExtractOptions(limits=FAST),
                Silent,
                asyncio.Event(),
            )
            run.extras = Extra()
            report = await run.all()
        # What was refused for its extra fields was asked for without them, and is not recorded.
        assert report.complete and report.captured == 60
        assert len(Extra.asked) == 60 and len(Extra.answers) == 10
        assert {name for name, _ in Extra.answers} == set(world.names[:10])
        assert all(answer is None for _, answer in Extra.answers)
