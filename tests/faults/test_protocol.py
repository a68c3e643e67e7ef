"""The commit protocol: random courses against a model, and two at once at every step of one."""

from datetime import timedelta
from pathlib import Path

import pytest

from hslake import plan, versions
from hslake.compactreport import CompactReport
from hslake.errors import InvalidInput
from hslake.lake import open_lake
from hslake.verify import hide
from tests.faults import protocol
from tests.faults.actors import Actor, instruments
from tests.faults.publish import publish
from tests.faults.world import World, copy_world, judge_samples, make_world, write_plan

_FIRST = "select sample_id, segment_id from samples order by sample_id limit 1"


_FIRST = "select sample_id, segment_id from samples order by sample_id limit 1"


def test_random_courses_keep_the_models_promises():
    protocol.check(8, start=4)


@pytest.fixture(scope="module")
def template() -> World:
    return protocol.template()


def _other(name: str, world: World) -> None:
    """What the other one does, whole."""
    lake = open_lake(world.url)
    if name == "compactor":
        batch = list(protocol.captured(world)[1].values())
        publish(lake, batch, CompactReport())
    elif name == "vacuum":
        versions.vacuum(world.url, retain=timedelta(0))
    else:
        sample, segment = lake.sql(_FIRST).fetchall()[0]
        assert hide(lake, {(segment, sample): "damaged"}) == 1


@pytest.mark.parametrize(
    ("other", "fault"),
    [("compactor", None), ("compactor", "lost"), ("vacuum", None), ("quarantine", None)],
)
def test_another_at_every_step_of_a_compactor(tmp_path, template, other, fault):
    steps, after = 0, None
    while after != 0:
        world = copy_world(template, tmp_path / str(steps))
        first, second = protocol.captured(world)
        lake = open_lake(world.url)
        if other == "quarantine":  # it needs somebody's commit
            one = world.names[0]
            publish(lake, [second[one]], CompactReport())
        report = CompactReport()
        with instruments():
            actor = Actor(lambda: publish(lake, list(first.values()), report))  # noqa: B023
            actor.fault = fault
            for _ in range(steps):
                actor.step()
            _other(other, world)
            after = 0
            while actor.at is not None:
                actor.step()
                after += 1
        assert actor.error is None
        live = [r[0] for r in open_lake(world.url).sql("select sample_id from samples").fetchall()]
        gone = {world.names[0]} if other == "quarantine" else set()
        # Hidden, it may be live again if the compactor had not looked yet.
        assert sorted({*live, *gone}) == world.names and len(live) == len(set(live))
        assert judge_samples(world) == []
        steps += 1
    assert steps > 7  # others are of threads that store


def test_a_commit_at_every_step_of_a_vacuum(tmp_path, template):
    steps, after = 0, None
    while after != 0:
        world = copy_world(template, tmp_path / str(steps))
        lake = open_lake(world.url)
        batch = list(protocol.captured(world)[0].values())
        with instruments():
            slow = Actor(lambda: publish(lake, batch, CompactReport()))  # noqa: B023
            while slow.at != "append":  # its segment is there, and nobody names it yet
                slow.step()
            url = world.url
            vacuum = Actor(lambda: versions.vacuum(url, retain=timedelta(0)))  # noqa: B023
            for _ in range(steps):
                vacuum.step()
            for actor in (slow, vacuum):
                after = 0
                while actor.at is not None:
                    actor.step()
                    after += 1
        assert slow.error is None and vacuum.error is None
        assert judge_samples(world) == []
        live = open_lake(world.url).sql("select sample_id from samples order by 1").fetchall()
        assert [r[0] for r in live] == world.names
        steps += 1
    assert steps > 4


@pytest.mark.parametrize("same", [True, False], ids=["same", "other content"])
def test_two_plans_at_once(tmp_path: Path, same: bool) -> None:
    template = make_world(tmp_path / "template", 1)
    names = [f"S-{i:05d}" for i in range(1, 4)]
    write_plan(tmp_path / "a.parquet", names)
    write_plan(tmp_path / "b.parquet", names, source="A1" if same else "B2")
    steps, left = 0, None
    while left != 0:
        world = copy_world(template, tmp_path / str(steps))
        with instruments():
            url = world.url
            actor = Actor(lambda: plan.plan_files(url, [tmp_path / "a.parquet"]))  # noqa: B023
            for _ in range(steps):
                actor.step()
            try:
                added = plan.plan_files(world.url, [tmp_path / "b.parquet"]).added
            except InvalidInput:
                assert not same
                added = 0
            left = 0
            while actor.at is not None:
                actor.step()
                left += 1
        if actor.error is not None:
            assert isinstance(actor.error, InvalidInput) and not same
        else:
            added += actor.result.added
        assert added == len(names)
        lake = open_lake(world.url)
        planned = lake.sql("select sample_id, source from plan").fetchall()
        assert sorted(n for n, _ in planned) == [*template.names, *names]
        assert len({source for n, source in planned if n in names}) == 1  # all of one call
        steps += 1
    assert steps > 4
