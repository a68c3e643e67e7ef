"""Which of server, staging and compactor sets the pace."""

import pytest

from hslake.preflight.pace import TURNAROUND_S, Quota, as_seen, slowest, through
from hslake.units import format_span

SIZE = 8192
RATES = [(500.0, 8000.0), (4000.0, 8000.0), (4000.0, 200_000.0), (40_000.0, 8000.0), (9e4, 9e4)]


@pytest.mark.parametrize(("server", "compactor"), RATES)
def test_one_part_is_filled_and_compacted_in_turns(server: float, compactor: float) -> None:
    cycle = SIZE / server + SIZE / compactor + TURNAROUND_S
    assert through(Quota(1, SIZE, 100), server, compactor) == pytest.approx(SIZE / cycle, rel=0.01)


@pytest.mark.parametrize(("server", "compactor"), RATES)
def test_of_two_parts_one_is_filled_while_the_other_is_compacted(
    server: float, compactor: float
) -> None:
    cycle = max(SIZE / server, SIZE / compactor + TURNAROUND_S)
    assert through(Quota(2, SIZE, 100), server, compactor) == pytest.approx(SIZE / cycle, rel=0.01)


def test_with_many_parts_the_slower_end_decides() -> None:
    assert through(Quota(40, SIZE, 100), 4000, 8000) == pytest.approx(4000, rel=0.02)
    # The compactor pays the turnaround once for all that is full.
    passes = 40 * SIZE / (40 * SIZE / 4000 + TURNAROUND_S)
    assert passes * 0.97 < through(Quota(40, SIZE, 100), 8000, 4000) < 4000


def test_rows_on_their_way_take_room() -> None:
    few, many = Quota(4, SIZE, 4000), Quota(4, SIZE, 3 * SIZE)
    assert through(many, 8000, 9000) < through(few, 8000, 9000)
    assert through(many, 8000, 9000) == through(Quota(2, SIZE, 10), 8000, 9000)
    assert through(Quota(2, SIZE, 9 * SIZE), 8000, 9000) == through(Quota(1, SIZE, 1), 8000, 9000)


def test_what_was_seen_beats_the_model() -> None:
    # 32 requests in parts of 2,000: the model takes a single part to be at work.
    quota = Quota(4, 2000, 7000)
    assert through(quota, 1088, 20_000) < 520
    assert as_seen(quota, 1088, 20_000) == pytest.approx(1088, rel=0.03)
    # The burst's rows were not encoded: that is still to be paid for.
    assert as_seen(quota, 1088, 700) <= 700
    one = Quota(1, 2000, 100)
    seen = through(one, 1088, 1e9)
    assert as_seen(one, seen, 1000) == pytest.approx(1 / (1 / seen + 1 / 1000), rel=0.2)
    assert as_seen(Quota(2, SIZE, 100), 9e4, 1e9) == pytest.approx(9e4, rel=1e-3)  # no model


def test_who_is_to_blame() -> None:
    assert slowest(100, 300, 99) == ("server", 100)
    assert slowest(100, 300, 50) == ("staging", 50)
    assert slowest(100, 30, 29.5) == ("compactor", 30)
    assert slowest(100, 30, 10) == ("staging", 10)
    assert slowest(100, None, None) == ("server", 100)


def test_spans() -> None:
    assert [format_span(s) for s in (40, 720, 11_100)] == ["40 s", "12 min", "3 h 05 min"]
    assert format_span(260_000) == "3 d 0 h"
