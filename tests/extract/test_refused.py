"""Samples that cannot be captured."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web

import hslake
from hslake.compact import compact
from hslake.extract.refusals import EARLIER, HINT, RECORDED
from hslake.ids import RequestId, parse_request_id
from tests.extract.world import FAST, World, make_world


def test_too_long_for_parts_or_context(tmp_path: Path) -> None:
    world = make_world(tmp_path, [50, 1500, 60, 700])
    with world.serve(part_tokens=1024, context=600) as server:
        report = world.extract(server)
        assert not report.passed and report.captured == 2
        assert {m.sample_id for m in report.missing_samples} == {world.names[1], world.names[3]}
        assert "2 longer than the server takes (599 tokens)" in report.message
        assert len(server.requests) == 2
    with world.serve(part_tokens=1024) as server:
        report = world.extract(server, staging=(world.staging,))
        assert report.captured == 1
        assert "1 longer than a staging part (1,024 tokens)" in report.message


def test_what_no_server_can_take_is_named_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = make_world(tmp_path, [50, 1500, 60, 700, 900])
    told: list[str] = []

    def script(rid: RequestId, nth: int) -> str:
        told.extend(r.getMessage() for r in caplog.records if r.name == "hslake.extract")
        return "ok"

    long = f"never asked for: {world.names[1]!r} (1,500 tokens): longer than a staging part (1,024"
    with world.serve(part_tokens=1024, script=script) as server:
        report = world.extract(server, limit=1, order="length desc")
        assert report.captured == 0 and report.planned == 5 and not report.passed
        report = world.extract(server, order="length desc")
        assert report.captured == 4 and told[0].startswith(long), told
    # Neither are they waited for: nothing else is left to do.
    with world.serve(part_tokens=512) as server:
        begun = time.monotonic()
        report = world.extract(server, where="length > 600")
        assert report.waiting == 2 and report.missing == {
            "longer than a staging part (512 tokens): start the server with larger parts": 1
        }
        assert time.monotonic() - begun < FAST.patience
    others = [r.getMessage() for r in caplog.records if r.name == "hslake.extract"][-1]
    assert all(f"{n!r} (" in others for n in (world.names[1], world.names[3], world.names[4]))


def test_the_larger_of_two_servers_gets_the_long_ones(tmp_path: Path) -> None:
    world = make_world(tmp_path, [50, 1500, 60, 700, 1400] * 3)
    with world.serve(part_tokens=512, max_parts=20) as small:
        with world.serve(part_tokens=2048, max_parts=20) as large:
            report = world.extract(small, large)
            assert report.complete, report.message
            assert {r.length for r in small.requests} <= {50, 60}
    world.check_lake()


def test_refused_and_hopeless_samples_are_named(world: World) -> None:
    bad, worse = world.names[7], world.names[9]

    def script(rid: RequestId, nth: int) -> str:
        return {bad: "refuse", worse: "error"}.get(rid.sample_id, "ok")

    with world.serve(part_tokens=8192, script=script) as server:
        report = world.extract(server, limits=replace(FAST, tries=3))
        assert report.captured == 58 and not report.passed
        why = {m.sample_id: m.reason for m in report.missing_samples}
        assert why[bad] == f"refused by the server: HTTP 400: bad tokens ({RECORDED})"
        assert why[worse] == "failed 3 times, last: HTTP 500: CUDA error"
        assert sum(r.sample_id == bad for r in server.requests) == 2
        assert sum(r.sample_id == worse for r in server.requests) == 3


def refusals(world: World) -> dict[str, str]:
    rows = hslake.open(world.url).sql("select sample_id, reason from refusals").fetchall()
    return dict(rows)


def test_a_refusal_is_recorded_left_out_and_lifted(world: World) -> None:
    bad = world.names[7]
    actions = {bad: "refuse"}
    with world.serve(
        part_tokens=8192, script=lambda rid, nth: actions.get(rid.sample_id, "ok")
    ) as server:
        assert world.extract(server).captured == 59
        assert refusals(world) == {bad: "HTTP 400: bad tokens"}
        asked = len(server.requests)
        again = world.extract(server)
        assert len(server.requests) == asked and not again.passed
        assert list(again.missing) == [f"{EARLIER}: HTTP 400: bad tokens ({HINT})"]
        # Refused again: what it was recorded for once needs no more proof.
        assert world.extract(server, retry_refused=True, canary_share=0.0).captured == 0
        assert len(server.requests) == asked + 2 and refusals(world).keys() == {bad}
        actions.clear()
        assert world.extract(server).captured == 0
        report = world.extract(server, retry_refused=True)
        assert report.complete and report.captured == 1 and refusals(world) == {}
    world.check_lake()


@pytest.mark.parametrize(
    "answer", ["Input length (900) exceeds the maximum allowed length", "context too long"]
)
def test_what_is_the_servers_setting_is_not_recorded(world: World, answer: str) -> None:
    bad = world.names[7]
    server = world.serve(part_tokens=8192)
    generate = server._generate

    async def limited(request: web.Request) -> web.Response:
        rid = parse_request_id((await request.json())["rid"])
        if rid is not None and rid.sample_id == bad:
            return web.json_response({"error": {"message": answer}}, status=400)
        return await generate(request)

    server._generate = limited  # type: ignore[method-assign]
    with server:
        report = world.extract(server)
        assert list(report.missing) == [f"refused by the server: HTTP 400: {answer}"]
        assert refusals(world) == {}


def test_a_server_that_refuses_all_condemns_no_sample(world: World) -> None:
    refusing = ["refuse"]
    with world.serve(part_tokens=8192, script=lambda rid, nth: refusing[0]) as server:
        report = world.extract(server)
        assert report.captured == 0 and sum(report.missing.values()) == 60
        assert refusals(world) == {}
        refusing[0] = "ok"
        assert world.extract(server).complete


def test_a_server_that_never_captures(world: World) -> None:
    with world.serve(part_tokens=8192, script=lambda rid, nth: "silent") as server:
        limits = replace(FAST, tries=2, ack_timeout=0.1)
        report = world.extract(server, limits=limits, limit=5)
        assert report.captured == 0
        assert (
            report.missing["failed 2 times, last: the server answered but acknowledged no capture"]
            == 5
        )


def test_what_a_server_answers_and_does_not_acknowledge_is_told(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    limits = replace(FAST, patience=2, stall=0.5, ack_timeout=60, request_timeout=3)
    with world.serve(part_tokens=8192, script=lambda rid, nth: "silent") as server:
        assert world.extract(server, limits=limits).captured == 0
    told = [m for m in caplog.messages if m.startswith("nothing captured for")]
    assert len(told) == 1 and "acknowledge nothing" in told[0]


def test_what_a_dying_server_captured_unheard_counts_and_is_within_the_limit(world: World) -> None:
    server = world.serve(part_tokens=8192)
    capture = server._capture

    async def last(rid: RequestId, ids: list[int]) -> None:
        await capture(rid, ids)
        # Dead before anybody could read the event.
        server.dying = asyncio.create_task(server._stop(orderly=False))
        await asyncio.sleep(5)

    server._capture = last  # type: ignore[method-assign]
    limits = replace(FAST, patience=0.5, requests=1)
    with server:
        report = world.extract(server, limits=limits, limit=1, staging=(world.staging,))
    (name,) = server.captured
    tokens = len(world.made.samples[name].input_ids)
    assert (report.captured, report.captured_tokens) == (1, tokens)
    # The one that was asked for is there: that it was not heard is no reason to take another.
    assert report.waiting == 1 and report.passed
    assert report.message.startswith("done as far as asked: ")


def test_a_server_that_refuses_now_and_then_condemns_no_sample(world: World) -> None:
    """Some it refuses twice; that it took the others when asked again says what that means."""
    names = world.names
    times = dict.fromkeys(names[:3], 2) | dict.fromkeys(names[3:15], 1)

    def script(rid: RequestId, nth: int) -> str:
        return "refuse" if nth < times.get(rid.sample_id, 0) else "ok"

    with world.serve(part_tokens=8192, script=script) as server:
        report = world.extract(server, canary_share=0.0)
        assert report.captured == 57 and refusals(world) == {}
        assert list(report.missing) == ["refused by the server: HTTP 400: bad tokens"]
        assert world.extract(server).complete
    world.check_lake()


def test_what_one_server_refuses_another_one_takes(world: World) -> None:
    bad = world.names[7]

    def script(rid: RequestId, nth: int) -> str:
        return "refuse" if rid.sample_id == bad else "ok"

    with (
        world.serve(part_tokens=8192, script=lambda rid, nth: "refuse") as broken,
        world.serve(part_tokens=8192, script=script, delay=0.02) as sound,
    ):
        report = world.extract(broken, sound, canary_share=0.0)
        assert report.captured == 59 and refusals(world) == {}
        assert [m.sample_id for m in report.missing_samples] == [bad]
        asked = [r.sample_id for r in broken.requests]
        assert len(asked) == len(set(asked))
    compact(world.url, [world.staging])
    assert hslake.open(world.url).sql("select count(*) from samples").fetchall() == [(59,)]
