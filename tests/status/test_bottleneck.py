"""What holds a run back is named from its figures, and what to do follows from it."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from hslake.status.bottleneck import Scene, bottleneck, needs
from hslake.status.report import (
    COMPACTOR,
    DRIVER,
    NOBODY,
    NOTHING,
    SERVER,
    STAGING,
    UNKNOWN,
    CompactorState,
    Refusals,
    RunState,
    ServerState,
    WriterState,
)

NOW = datetime(2026, 3, 1, tzinfo=UTC)
RUN = RunState("r", "extract", "h", NOW, NOW, True, None, None, 9, 900, 1, 0, 0, 10.0, 90.0)
ENDED = replace(RUN, live=False, outcome="incomplete", reason="3 refused")
UP = ServerState("http://a", "up", 0.0, 1, 1000, 600, 9, 0, 90.0)


def writer(free: int, sealed: int, *, alive: bool = True, error: str | None = None) -> WriterState:
    return WriterState(
        "http://a", "w" * 12, alive, error is None, error, 1000, free, sealed, 9, 900, 0, {}, NOW
    )


BUSY = Scene(1000, [RUN], [UP], [writer(600, 100)], [], True, True, True, 5.0)


@pytest.mark.parametrize(
    ("scene", "name", "why"),
    [
        (BUSY, SERVER, "40% full"),
        (replace(BUSY, tokens_left=0), NOTHING, "committed"),
        (replace(BUSY, writers=[writer(100, 700)]), COMPACTOR, "78% of that waits"),
        (replace(BUSY, writers=[writer(100, 200)]), STAGING, "only 22%"),
        (replace(BUSY, writers=[writer(100, 0)], waiting_tokens=800), COMPACTOR, "89%"),
        (replace(BUSY, writers=[writer(900, 0), writer(0, 900)]), COMPACTOR, "waits"),
        (replace(BUSY, writers=[writer(900, 100)], captures=False), DRIVER, "nothing is arriving"),
        (replace(BUSY, writers=[writer(900, 100)]), SERVER, "room"),
        (replace(BUSY, writers=[writer(999, 1)], captures=False, run_age=5.0), SERVER, "room"),
        (replace(BUSY, writers=[writer(800, 100)], captures=False), SERVER, "room"),
        (
            replace(BUSY, writers=[writer(0, 0, alive=False)], servers=[replace(UP, state="dead")]),
            SERVER,
            "http://a: dead",
        ),
        (
            replace(BUSY, runs=[ENDED], writers=[], captures=False),
            NOBODY,
            "no run is live",
        ),
        (
            replace(BUSY, runs=[ENDED], captures=False, going_on=False),
            NOBODY,
            "ended incomplete",
        ),
        (
            replace(BUSY, runs=[replace(RUN, live=False)], captures=False, going_on=False),
            NOBODY,
            "cut off",
        ),
        (replace(BUSY, writers=[], servers=[], told=False), UNKNOWN, "--server"),
        (replace(BUSY, runs=[], captures=False), UNKNOWN, "not known"),
        (replace(BUSY, runs=[], captures=True), SERVER, "room"),
    ],
)
def test_rules(scene: Scene, name: str, why: str) -> None:
    found = bottleneck(scene)
    assert found.name == name and why in found.why, found


def todo(scene: Scene, **more: object) -> str:
    given: dict = {
        "lake_error": None,
        "refusals": [],
        "invalidated": None,
        "forecast_bytes": 100,
        "estimate_bytes": 100,
        **more,
    }
    return " | ".join(needs(scene, bottleneck(scene), **given))


def test_what_to_do() -> None:
    assert todo(BUSY) == ""
    assert "cannot be read" in todo(BUSY, lake_error="no answer")
    assert "staging /x: gone" in todo(replace(BUSY, silent=["/x: gone"]))
    assert "server http://a: dead" in todo(replace(BUSY, servers=[replace(UP, state="dead")]))
    assert "out of memory" in todo(replace(BUSY, writers=[writer(9, 0, error="out of memory")]))
    full = replace(BUSY, writers=[writer(100, 700)])
    assert "more cores" in todo(full) and "running?" in todo(replace(full, commit_age=None))
    assert "--max-parts" in todo(replace(BUSY, writers=[writer(100, 200)]))
    waits = replace(BUSY, commit_age=900.0)
    assert "nothing was committed for 15 min" in todo(waits)
    assert todo(replace(waits, writers=[writer(600, 0)])) == ""
    never = replace(BUSY, commit_age=None)
    assert "nothing was committed yet" in todo(never)
    assert todo(replace(never, run_age=20.0)) == ""  # there was no time for it
    trouble = CompactorState("http://b", 1, 1.0, 0, 0, None, ["the store is full"])
    assert "compactor http://b: the store is full" in todo(replace(BUSY, compactors=[trouble]))
    ended = replace(BUSY, runs=[ENDED], captures=False, going_on=False)
    assert "ended incomplete: 3 refused" in todo(ended)
    # As extract tells it.
    told = replace(ENDED, reason="incomplete: 3 refused")
    assert "ended incomplete: 3 refused" in todo(replace(ended, runs=[told]))
    still = replace(BUSY, writers=[writer(1000, 0)], captures=False)
    assert "says that it is live, and nothing arrives" in todo(still)
    cut = replace(ended, runs=[replace(RUN, live=False)])
    assert "run the same `hslake extract` again" in todo(cut)
    assert todo(replace(cut, tokens_left=0)) == ""
    assert "1 sample is refused" in todo(BUSY, refusals=[Refusals("HTTP 400", 1)])
    assert "5 samples are of an older plan" in todo(BUSY, invalidated=5)
    assert "more than the lake's estimate" in todo(BUSY, forecast_bytes=110)
    assert todo(BUSY, forecast_bytes=110, estimate_bytes=None) == ""
