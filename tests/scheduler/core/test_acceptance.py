"""Acceptance: conditional by position, learned by worker and by sequence."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.acceptance import (
    FIRST_GUESS,
    FIRST_TOKENS,
    SURE,
    AcceptanceCurve,
    PositionTotals,
    RowEvidence,
    shifted,
    survival,
)

PROBABILITIES = st.lists(st.floats(0.01, 0.99), min_size=1, max_size=8)
DRAFTS = st.lists(
    st.integers(0, 6).flatmap(lambda drafted: st.tuples(st.just(drafted), st.integers(0, drafted))), max_size=60
)


def verdicts(conditional: Sequence[float], count: int, seed: int = 7) -> list[tuple[int, int]]:
    """(drafted, accepted) of so many drafts, each token right as `conditional` says."""
    dice = random.Random(seed)
    found = []
    for _ in range(count):
        accepted = 0
        while accepted < len(conditional) and dice.random() < conditional[accepted]:
            accepted += 1
        found.append((len(conditional), accepted))
    return found


@given(PROBABILITIES)
def test_survival_falls_and_is_the_product(conditional: list[float]) -> None:
    products = survival(conditional)
    assert products == sorted(products, reverse=True)
    for index, product in enumerate(products):
        wanted = 1.0
        for probability in conditional[: index + 1]:
            wanted *= probability
        assert product == pytest.approx(wanted)


def test_without_evidence_the_first_guess_stands() -> None:
    assert AcceptanceCurve().conditional(3) == [FIRST_GUESS] * 3
    assert RowEvidence().odds_ratio == 1.0


@pytest.mark.parametrize("truth", [(0.51, 0.60, 0.67, 0.72), (0.9, 0.2, 0.9, 0.5), (0.05, 0.5, 0.5, 0.5)])
def test_the_curve_is_learned_position_by_position(truth: tuple[float, ...]) -> None:
    curve = AcceptanceCurve()
    for drafted, accepted in verdicts(truth, 4000):
        curve.observe(drafted, accepted)
    # A later position is tried as often as the earlier ones survive.
    reached = [1.0, *survival(truth)]
    for found, wanted, share in zip(curve.conditional(4), truth, reached, strict=False):
        assert found == pytest.approx(wanted, abs=0.07 if share > 0.1 else 0.2)


def test_a_position_never_tried_is_like_the_one_before() -> None:
    curve = AcceptanceCurve()
    for _ in range(500):
        curve.observe(1, 0)
    first, second, third = curve.conditional(3)
    assert first < 0.02
    assert second == third == first


def test_a_miss_says_nothing_of_later_positions() -> None:
    totals = PositionTotals()
    for drafted, accepted in ((4, 0), (4, 1), (2, 2), (0, 0)):
        totals.observe(drafted, accepted)
    assert (totals.tried, totals.accepted) == ([3, 2], [2, 1])
    assert totals.shares == [2 / 3, 1 / 2]


def test_rows_alike_count_together() -> None:
    one_by_one, together = AcceptanceCurve(), AcceptanceCurve()
    for drafted, accepted in ((3, 1), (2, 2)):
        for _ in range(10):
            one_by_one.observe(drafted, accepted)
        together.observe(drafted, accepted, 10)
    assert together.conditional(3) == pytest.approx(one_by_one.conditional(3), abs=0.005)


def test_the_curve_follows_a_change() -> None:
    curve = AcceptanceCurve()
    for _ in range(5000):
        curve.observe(1, 1)
    for _ in range(2000):
        curve.observe(1, 0)
    assert curve.conditional(1)[0] < 0.05


@given(DRAFTS)
def test_probabilities_stay_within_bounds(drafts: list[tuple[int, int]]) -> None:
    curve, row = AcceptanceCurve(), RowEvidence()
    for drafted, accepted in drafts:
        row.observe(drafted, accepted, curve.conditional(8))
        curve.observe(drafted, accepted)
    conditional = curve.conditional(8)
    assert all(1 - SURE - 1e-12 <= probability <= SURE + 1e-12 for probability in conditional)
    assert all(0 < probability < 1 for probability in shifted(conditional, row.odds_ratio))


@given(PROBABILITIES, DRAFTS, st.integers(1, 6))
def test_more_right_tokens_never_lower_a_rows_odds(
    curve: list[float], drafts: list[tuple[int, int]], drafted: int
) -> None:
    curve = curve * 8
    ratios = []
    for accepted in range(drafted + 1):
        row = RowEvidence()
        for before in drafts:
            row.observe(*before, curve)
        row.observe(drafted, accepted, curve)
        ratios.append(row.odds_ratio)
    assert ratios[-1] >= ratios[0] - 1e-12
    assert ratios[-1] == max(ratios)


@given(st.floats(0.02, 0.98), st.floats(0.1, 10.0))
def test_shifting_multiplies_the_odds(probability: float, odds_ratio: float) -> None:
    (found,) = shifted([probability], odds_ratio)
    assert found / (1 - found) == pytest.approx(odds_ratio * probability / (1 - probability))


@pytest.mark.parametrize(("truth", "low", "high"), [(0.95, 0.85, 1.0), (0.05, 0.0, 0.32), (0.5, 0.38, 0.62)])
def test_a_row_unlike_the_others_is_told_within_few_steps(truth: float, low: float, high: float) -> None:
    """The worker's curve says one in two; the row shows, within 24 steps, what is true of it, at every position."""
    curve = [0.5] * 4
    row = RowEvidence()
    for drafted, accepted in verdicts([truth] * 4, 24):
        row.observe(drafted, accepted, curve)
    assert all(low <= probability <= high for probability in shifted(curve, row.odds_ratio))


def test_a_row_follows_a_change() -> None:
    curve = [0.5] * 4
    row = RowEvidence()
    for _ in range(300):
        row.observe(4, 4, curve)
    for _ in range(150):
        row.observe(4, 0, curve)
    assert shifted(curve, row.odds_ratio)[0] < 0.25


def test_a_draft_grows_beyond_the_first_length_where_that_is_right() -> None:
    """A copy gets the longest within some tens of drafts; what is half right at the fourth token stays there."""
    copied, chatted = AcceptanceCurve(), AcceptanceCurve()
    assert len(copied.explored(7)) == FIRST_TOKENS
    lengths = []
    for number in range(40):
        length = len(copied.explored(7))
        copied.observe(length, length if number % 8 else 2)
        lengths.append(length)
        chatted.observe(len(chatted.explored(7)), FIRST_TOKENS - number % 2)
    assert lengths == sorted(lengths)
    assert set(lengths) == {4, 5, 6, 7}
    assert len(chatted.explored(7)) == FIRST_TOKENS
    assert copied.explored(2) == copied.conditional(2)
