"""The share of draft tokens that are there in time, by position."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.availability import LEAST, Availability


def test_the_first_half_mostly_comes_and_the_rest_seldom() -> None:
    availability = Availability()
    assert availability.shares(4) == [1.0] * 4
    for number in range(400):
        availability.observe(4, 4 if number % 4 == 0 else 2)
    assert availability.shares(4) == pytest.approx([1.0, 1.0, 0.25, 0.25], abs=0.03)


def test_what_was_not_asked_for_says_nothing() -> None:
    availability = Availability()
    for _ in range(50):
        availability.observe(4, 4)
    for _ in range(50):
        availability.observe(2, 0)
    first, second, third, fourth = availability.shares(4)
    assert second <= first < 0.6
    # Never above what comes before it.
    assert third == fourth == second


def test_a_draft_worker_that_comes_back_is_noticed() -> None:
    availability = Availability()
    for _ in range(1000):
        availability.observe(2, 0)
    assert availability.shares(2) == [LEAST, LEAST]
    for _ in range(300):
        availability.observe(2, 2)
    assert availability.shares(1)[0] > 0.85


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=60), st.integers(1, 8))
def test_shares_fall_and_stay_within_bounds(drafts: list[tuple[int, int]], num_positions: int) -> None:
    availability = Availability()
    for asked, came in drafts:
        availability.observe(asked, min(asked, came))
    shares = availability.shares(num_positions)
    assert len(shares) == num_positions
    assert all(LEAST <= share <= 1.0 for share in shares)
    assert all(later <= earlier for earlier, later in pairwise(shares))
