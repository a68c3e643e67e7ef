"""Rates and time left: whatever was told, no nonsense; and the range holds as often as it says."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hslake.rates import (
    HISTORY,
    LONGEST_S,
    WINDOWS,
    Meter,
    Stretch,
    average,
    estimate,
    merged,
    stretches,
    windows,
)

SECONDS = st.floats(1e-3, 1e5)
TOKENS = st.just(0.0) | st.floats(1e-3, 1e9)
WORK = st.lists(st.builds(Stretch, SECONDS, TOKENS), min_size=1, max_size=60)
TOLD = st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(0, 1e9)), max_size=40)
ANY = st.floats(-1e12, 1e12) | st.sampled_from([math.nan, math.inf, -math.inf])
ODD = st.lists(st.tuples(ANY, ANY), max_size=20)


@given(TOLD)
def test_stretches_of_any_clock_add_up(points: list[tuple[float, float]]) -> None:
    found = stretches(points)
    assert all(s.seconds > 0 and s.tokens >= 0 for s in found)
    if found:
        times = [at for at, _ in points]
        assert sum(s.seconds for s in found) == pytest.approx(max(times) - times[0])


@given(st.lists(st.tuples(st.floats(0, 1e5), st.floats(0, 1e6)), min_size=2, max_size=40))
def test_no_token_is_lost_to_a_clock_that_goes_back(steps: list[tuple[float, float]]) -> None:
    total, points = 0.0, []
    for at, tokens in steps:  # any times, a count that grows
        total += tokens
        points.append((at, total))
    found = stretches(points)
    if found:
        told = sum(s.tokens for s in found)
        assert told == pytest.approx(points[-1][1] - points[0][1], abs=1e-3)


@given(ODD)
def test_what_is_no_number_is_left_out(points: list[tuple[float, float]]) -> None:
    done = stretches(points)
    assert all(math.isfinite(s.seconds) and math.isfinite(s.tokens) for s in done)
    estimate(done, 1.0)


def test_a_count_that_begins_again() -> None:
    told = [(0.0, 100.0), (10.0, 150.0), (20.0, 30.0), (30.0, 60.0)]
    assert [s.tokens for s in stretches(told)] == [50.0, 30.0, 30.0]
    back = [(0.0, 0.0), (60.0, 60.0), (10.0, 70.0), (20.0, 80.0), (70.0, 90.0)]
    assert stretches(back) == [Stretch(60.0, 60.0), Stretch(10.0, 30.0)]
    assert stretches(back[:4]) == [Stretch(60.0, 80.0)]


@given(WORK)
def test_windows_hold_the_newest_work(done: list[Stretch]) -> None:
    rates, width = windows(done)
    assert 1 <= len(rates) <= HISTORY and all(r >= 0 for r in rates)
    whole = sum(s.seconds for s in done)
    assert width * len(rates) <= whole * (1 + 1e-6)
    tokens, at = 0.0, 0.0  # what the stretches hold of the time that the windows are of
    for s in reversed(done):
        share = min(1.0, max(0.0, (width * len(rates) - at) / s.seconds))
        tokens, at = tokens + share * s.tokens, at + s.seconds
    assert sum(rates) * width == pytest.approx(tokens, rel=1e-6, abs=1e-3)


def test_windows_are_a_twelfth_and_five_minutes_at_most() -> None:
    rates, width = windows([Stretch(1.0, 10.0)] * 120)
    assert (len(rates), width) == (WINDOWS, 10.0) and rates == pytest.approx([10.0] * WINDOWS)
    rates, width = windows([Stretch(60.0, 60.0)] * 60 * 10)
    assert (len(rates), width) == (HISTORY, LONGEST_S)
    assert windows([Stretch(600.0, 60.0)] * 20)[1] == 600.0  # nothing is known within one
    assert windows([]) == ([], 0.0) and average([]) is None


@given(WORK, st.floats(0, 1e12), st.floats(1, 3))
def test_time_left_is_in_its_range_and_grows_with_what_is_left(
    done: list[Stretch], left: float, factor: float
) -> None:
    found = estimate(done, left)
    if found is None:
        assert not windows(done)[0] or sum(windows(done)[0][-WINDOWS:]) < 1e-10
        return
    assert found.rate > 0 and math.isfinite(found.seconds)
    more = estimate(done, left * factor)
    assert more is not None and more.seconds >= found.seconds and more.rate == found.rate
    if found.soonest is None or found.latest is None:
        assert len(found.windows) < 3
        return
    assert 0 <= found.soonest <= found.seconds <= found.latest < math.inf
    assert more.soonest is not None and more.latest is not None
    assert more.latest >= found.latest * (1 - 1e-9)
    assert more.soonest >= found.soonest * (1 - 1e-9)


@given(WORK, st.floats(1, 1e9), st.floats(1.01, 4))
def test_who_is_faster_is_done_sooner(done: list[Stretch], left: float, factor: float) -> None:
    slow = estimate(done, left)
    fast = estimate([Stretch(s.seconds, s.tokens * factor) for s in done], left)
    if slow is not None and fast is not None:
        assert fast.seconds <= slow.seconds


def test_a_steady_rate_has_no_spread() -> None:
    found = estimate([Stretch(10.0, 100.0)] * 24, 1000.0)
    assert found is not None
    assert found.seconds == pytest.approx(100.0, rel=0.01)
    assert found.soonest == pytest.approx(100.0) and found.latest == pytest.approx(100.0)
    assert estimate([Stretch(10.0, 0.0)] * 5, 10.0) is None


@given(st.lists(TOLD, max_size=4))
@settings(max_examples=50)
def test_runs_merge_whatever_they_tell(runs: list[list[tuple[float, float]]]) -> None:
    found = merged(runs)
    assert all(s.seconds > 0 and s.tokens >= 0 for s in found)


def test_runs_at_one_time_add_up_and_pauses_are_left_out() -> None:
    one = [(0.0, 0.0), (10.0, 100.0)]
    two = [(5.0, 0.0), (15.0, 50.0)]
    night = [(1000.0, 0.0), (1010.0, 100.0)]
    found = merged([one, two, night])
    assert sum(s.seconds for s in found) == 25.0
    assert sum(s.tokens for s in found) == pytest.approx(250.0)
    assert found[1] == Stretch(5.0, 75.0)
    assert merged([]) == [] and merged([[(1.0, 5.0)]]) == []


@pytest.mark.parametrize(("alike", "spread"), [(0.0, 0.1), (0.0, 0.5), (0.5, 0.2), (0.9, 0.2)])
def test_the_range_holds_nine_times_in_ten(alike: float, spread: float) -> None:
    """Rates of every minute, each like the one before it as much as `alike`; 4 h known, 6 h left.
    Fewer than 8 in 10 of these trials would be a range that promises too much."""
    rng, held, width = random.Random(5), 0, 0.0
    trials, mean, level = 60, 340.0, 0.0

    def rate() -> float:
        nonlocal level
        level = alike * level + math.sqrt(1 - alike**2) * rng.gauss(0, 1)
        return max(0.0, mean * (1 + spread * level))

    for _ in range(trials):
        done = [Stretch(60.0, 60.0 * rate()) for _ in range(240)]
        left, seconds = mean * 6 * 3600, 0.0
        found = estimate(done, left)
        assert found is not None and found.soonest is not None and found.latest is not None
        while left > 0:
            left, seconds = left - 60 * rate(), seconds + 60
        held += found.soonest - 60 <= seconds <= found.latest + 60
        width += (found.latest - found.soonest) / found.seconds / trials
    assert held >= 0.8 * trials
    assert width < 0.8  # nor is it so wide that it says nothing


def test_a_meter() -> None:
    meter = Meter(keep_s=100.0)
    assert meter.rate() is None and meter.estimate(10.0) is None
    for at in range(0, 1000, 10):
        meter.add(float(at), 5.0 * at)
        meter.add(at - 3.0, 5.0 * at)  # a clock that jumps
    assert meter.rate(30.0) == pytest.approx(5.0) and len(meter.stretches()) <= 12
    found = meter.estimate(500.0)
    assert found is not None and found.seconds == pytest.approx(100.0, rel=0.01)
