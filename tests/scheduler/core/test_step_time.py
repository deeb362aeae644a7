"""T(n): monotone, robust against outliers, and current."""

from __future__ import annotations

import random
from itertools import pairwise
from math import inf, nan
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.step_time import LEVEL_STEPS, SAMPLES_KEPT, Curve, Level, StepTimes, bucket_of, completed, fit

SECONDS = st.floats(1e-5, 10.0)
POINTS = st.dictionaries(st.integers(1, 400), st.tuples(SECONDS, st.floats(0.1, 15.0)), min_size=1, max_size=12).map(
    lambda points: [(float(size), *points[size]) for size in sorted(points)]
)
CURVES = POINTS.map(fit)


def measured(times: dict[int, float], count: int = SAMPLES_KEPT) -> StepTimes:
    found = StepTimes()
    for size, seconds in times.items():
        for _ in range(count):
            found.observe(size, seconds)
    return found


def test_buckets_rise_and_tell_small_sizes_apart() -> None:
    buckets = [bucket_of(size) for size in range(1, 5000)]
    assert buckets == sorted(buckets)
    assert len(set(buckets[:16])) == 16
    assert max(buckets) < 110
    for size in range(17, 5000):
        alike = [other for other in (size, size + size // 8 + 1) if bucket_of(other) == bucket_of(size)]
        assert alike == [size], f"{size} shares a bucket with one an eighth larger"


@given(POINTS)
def test_the_fit_is_the_isotonic_regression(points: list[tuple[float, float, float]]) -> None:
    """Against the min-max formula: fitted_i = max over a ≤ i of min over b ≥ i of the mean of a to b."""

    def mean(first: int, last: int) -> float:
        part = points[first : last + 1]
        return sum(seconds * weight for _, seconds, weight in part) / sum(weight for _, _, weight in part)

    curve = fit(points)
    count = len(points)
    assert curve.sizes == tuple(size for size, _, _ in points)
    for index, seconds in enumerate(curve.seconds):
        wanted = max(min(mean(a, b) for b in range(index, count)) for a in range(index + 1))
        assert seconds == pytest.approx(wanted)


@given(CURVES, st.lists(st.floats(0.5, 3000.0), min_size=2, max_size=20))
def test_more_tokens_never_take_less_time(curve: Curve, sizes: list[float]) -> None:
    seconds = [curve.at(size) for size in sorted(sizes)]
    assert all(early <= late * (1 + 1e-12) for early, late in pairwise(seconds))
    assert seconds[0] > 0


@given(CURVES)
def test_the_curve_passes_through_what_is_known(curve: Curve) -> None:
    for size, seconds in zip(curve.sizes, curve.seconds, strict=True):
        assert curve.at(size) == pytest.approx(seconds)
    between = [(a + b) / 2 for a, b in pairwise(curve.sizes)]
    means = [(a + b) / 2 for a, b in pairwise(curve.seconds)]
    assert [curve.at(size) for size in between] == pytest.approx(means)


def test_beyond_what_is_known_the_line_goes_on() -> None:
    curve = Curve((4.0, 8.0), (0.010, 0.030))
    assert curve.at(12) == pytest.approx(0.050)
    assert curve.at(3) == pytest.approx(0.0075), "no less than its share of the first"
    flat = Curve((4.0, 8.0), (0.010, 0.010))
    assert 0.010 < flat.at(64) < 0.020
    assert flat.at(1) == 0.010
    assert Curve((6.0, 16.0), (0.016, 0.026)).at(1) == pytest.approx(0.011)
    assert 0.009 < Curve((5.0,), (0.010,)).at(1) < 0.010
    assert 1.0 < Curve().at(8) < Curve().at(64)


@given(st.integers(1, 300), st.lists(SECONDS, min_size=5, max_size=60))
def test_a_bucket_stands_for_the_median_of_its_last_samples(size: int, durations: list[float]) -> None:
    times = StepTimes()
    for seconds in durations:
        times.observe(size, seconds)
    last = durations[-SAMPLES_KEPT:]
    middle = sorted(last)[len(last) // 2]
    assert times.curve == Curve((float(size),), (middle,))
    assert middle >= median(last)


@given(st.lists(st.floats(1.0, 1000.0), max_size=7), st.randoms(use_true_random=False))
def test_outliers_are_not_believed(outliers: list[float], order: random.Random) -> None:
    """Of 15 samples, up to 7 that took much longer change nothing beyond the others' spread."""
    durations = outliers + [0.010 + 0.0001 * index for index in range(SAMPLES_KEPT - len(outliers))]
    order.shuffle(durations)
    times = StepTimes()
    for seconds in durations:
        times.observe(3, seconds)
    assert 0.010 <= times.curve.at(3) <= 0.0115


def test_a_slow_first_step_is_not_believed() -> None:
    times = measured({5: 9.0}, count=1)
    times.observe(5, 0.01)
    assert times.curve.at(5) == 0.01


@pytest.mark.parametrize("nonsense", [0.0, -1.0, nan, inf])
def test_what_can_be_no_duration_is_ignored(nonsense: float) -> None:
    times = StepTimes()
    times.observe(3, nonsense)
    times.observe(0, 1.0)
    assert not times.curve
    assert times.observed == 0


def test_what_was_true_long_ago_is_forgotten() -> None:
    times = measured({1: 0.010, 4: 0.012})
    for _ in range(SAMPLES_KEPT):
        times.observe(1, 0.030)
        times.observe(4, 0.036)
    assert times.curve.at(1) == pytest.approx(0.030)
    assert times.curve.at(4) == pytest.approx(0.036)


def test_a_stale_size_gives_way_to_fresh_ones() -> None:
    """The machine has become faster; size 4 was measured before that, and must not hold the others up."""
    times = measured({4: 0.040})
    for _ in range(20_000):
        times.observe(8, 0.020)
    assert times.curve.at(8) < 0.0215


@given(CURVES, CURVES)
def test_a_curve_is_completed_without_changing_what_it_knows(own: Curve, other: Curve) -> None:
    both = completed(own, other)
    for size, seconds in zip(own.sizes, own.seconds, strict=True):
        assert both.at(size) == pytest.approx(seconds)
    assert all(a <= b * (1 + 1e-9) for a, b in pairwise(both.seconds))
    assert all(a < b for a, b in pairwise(both.sizes))
    assert {size for size in other.sizes if not own.sizes[0] <= size <= own.sizes[-1]} <= set(both.sizes)


def test_the_other_curve_lends_its_shape() -> None:
    plain, drafting = Curve((1.0, 32.0), (0.010, 0.040)), Curve((4.0, 8.0), (0.026, 0.034))
    assert completed(drafting, plain).at(1) == pytest.approx(0.010), "as if drafts slowed nothing"
    faster = Curve((4.0, 8.0), (0.006, 0.034))
    assert completed(faster, plain).at(1) == pytest.approx(0.010 * 0.006 / plain.at(4))
    assert completed(drafting, plain).at(32) == pytest.approx(0.040 * 0.034 / plain.at(8))
    assert completed(Curve(), plain) == plain
    assert completed(plain, Curve()) == plain


def test_the_profile_is_the_curve_until_steps_are_seen_and_their_shape_elsewhere() -> None:
    times = StepTimes()
    times.begin_with([(1, 0.010), (4, 0.016), (2, 0.012), (8, 0.024), (3, nan), (5, -1.0), (0, 1.0)])
    assert times.curve == Curve((1.0, 2.0, 4.0, 8.0), (0.010, 0.012, 0.016, 0.024))
    # Real steps take half as long again, whatever the size.
    for _ in range(SAMPLES_KEPT):
        times.observe(2, 0.018)
    assert times.curve.at(2) == pytest.approx(0.018)
    assert times.curve.at(8) == pytest.approx(0.036)
    # What is known below is not made slower without need: see `completed`.
    assert 0.010 <= times.curve.at(1) <= 0.018
    for _ in range(SAMPLES_KEPT):
        times.observe(8, 0.020)
    assert times.curve.at(8) == pytest.approx(0.020)
    assert times.observed == 2 * SAMPLES_KEPT


def test_the_level_is_that_of_the_latest_steps_of_so_many_rows() -> None:
    level = Level()
    assert level.at(3) == 1.0
    for _ in range(20):
        level.observe(1, 0.010, 0.010)
        level.observe(8, 0.030, 0.020)
    assert [level.at(rows) for rows in (0, 1, 2, 7, 8, 60)] == [1.0, 1.0, 1.0, 1.5, 1.5, 1.5]
    for _ in range(LEVEL_STEPS // 2 + 1):
        level.observe(1, 0.013, 0.010)
        level.observe(1, float("nan"), 0.010)
        level.observe(1, -1.0, 0.010)
    assert level.at(1) == pytest.approx(1.3)
    assert level.at(8) == 1.5


def test_a_curve_is_scaled() -> None:
    curve = Curve((1.0, 4.0), (2.0, 3.0)).times(2.0)
    assert (curve.at(1), curve.at(4)) == (4.0, 6.0)
    assert not Curve().times(3.0)
