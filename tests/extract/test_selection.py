"""Which samples, and in which order."""

from dataclasses import replace
from hashlib import md5
from pathlib import Path

import pytest

from hslake.errors import InvalidInput, Missing
from tests.extract.world import FAST, World, make_world


def test_where_order_and_limit(world: World) -> None:
    with world.serve(part_tokens=16_384) as server:
        report = world.extract(
            server,
            where="source = 'A1' and length > 20 -- the first source",
            order="length desc",
            limit=4,
            limits=replace(FAST, requests=1),
        )
        assert report.captured == 4 and report.passed and not report.complete
        assert report.message.startswith("done as far as asked: ")
        sent = [r.length for r in server.requests]
        assert sent == sorted(sent, reverse=True) and {r.source for r in server.requests} == {"A1"}
        longest = max(len(s.input_ids) for s in world.made.samples.values() if s.source == "A1")
        assert sent[0] == longest
        rest = world.extract(server, where="source = 'A1'")
        assert rest.complete and rest.planned == 20 and rest.captured == 16
        with pytest.raises(InvalidInput, match="--where 'sorce = 1'"):
            world.extract(server, where="sorce = 1")
        with pytest.raises(InvalidInput, match="selects no planned sample"):
            world.extract(server, where="length > 100000")
        with pytest.raises(InvalidInput, match="--order 'nothing'"):
            world.extract(server, order="nothing")


def test_nothing_planned(tmp_path: Path) -> None:
    world = make_world(tmp_path, [])
    with world.serve() as server, pytest.raises(Missing, match="hslake plan"):
        world.extract(server)


def test_the_default_order_mixes_and_is_fixed(world: World) -> None:
    orders = []
    for _ in range(2):
        with world.serve(part_tokens=16_384, script=lambda rid, nth: "drop") as server:
            world.extract(server, limits=replace(FAST, requests=1, tries=1))
            orders.append([r.sample_id for r in server.requests])
    assert orders[0] == orders[1] != sorted(orders[0])


def test_shards_are_disjoint_and_hold_all(world: World) -> None:
    with world.serve(part_tokens=16_384) as server:
        planned, sent = 0, []
        for i in (1, 2, 3):
            report = world.extract(server, shard=f"{i}/3")
            assert report.complete and "selected samples" in report.message
            assert report.captured == report.planned > 5
            planned += report.planned
            sent.append({r.sample_id for r in server.requests})
        assert planned == 60 == len(server.requests) and sent[-1] == set(world.names)
        # The same on every machine.
        ours = {n for n in world.names if int(md5(n.encode()).hexdigest()[:12], 16) % 3 == 0}
        assert sent[0] == ours
        assert world.extract(server).captured == 0
        for wrong in ("0/3", "4/3", "3", "1/x"):
            with pytest.raises(InvalidInput, match="expected i/n"):
                world.extract(server, shard=wrong)
    world.check_lake()
