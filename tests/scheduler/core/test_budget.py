"""The chooser: the best there is on its own model, never a loss, never more for more load."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.acceptance import survival
from scheduler.core.budget import Budget, Load, choose
from scheduler.core.step_time import Curve, fit

CURVES = st.dictionaries(st.integers(1, 40), st.floats(0.001, 1.0), min_size=1, max_size=8).map(
    lambda points: fit((float(size), points[size], 1.0) for size in sorted(points))
)
SURVIVALS = st.lists(st.lists(st.floats(0.0, 1.0), max_size=4).map(survival), min_size=1, max_size=4)


def linear(fixed: float, per_token: float, last: int = 4096) -> Curve:
    return Curve((0.0, float(last)), (fixed, fixed + per_token * last))


def rate(drafts: tuple[int, ...] | list[int], survivals: list[list[float]], others: int, curve: Curve) -> float:
    """Expected tokens per second, from the definition."""
    expected = len(drafts) + sum(sum(row[:k]) for row, k in zip(survivals, drafts, strict=True))
    return expected / curve.at(len(drafts) + others + sum(drafts))


@given(SURVIVALS, CURVES, CURVES, st.integers(0, 8), st.integers(0, 9), st.sampled_from([0.0, 0.05]))
def test_nothing_else_would_be_better(
    survivals: list[list[float]], plain: Curve, drafting: Curve, others: int, most: int, margin: float
) -> None:
    """Against every allowed assignment, whatever the shape of T."""
    found = choose(survivals, Load(len(survivals), others, most), plain, drafting, margin=margin)
    base = rate([0] * len(survivals), survivals, others, plain)
    best = max(
        (
            rate(drafts, survivals, others, drafting)
            for drafts in product(*(range(len(row) + 1) for row in survivals))
            if 0 < sum(drafts) <= most
        ),
        default=0.0,
    )
    if any(found.drafts):
        assert rate(found.drafts, survivals, others, drafting) == pytest.approx(best)
        assert best > base * (1 + margin) * (1 - 1e-9)
        assert found.gain == pytest.approx(best / base)
    else:
        assert best <= base * (1 + margin) * (1 + 1e-9)
        assert found.gain == 1.0


SHARES = st.lists(st.floats(0.05, 1.0), min_size=1, max_size=4).map(lambda shares: sorted(shares, reverse=True))


@given(SURVIVALS, CURVES, CURVES, st.lists(SHARES, min_size=1, max_size=3), st.integers(0, 8), st.integers(0, 12))
def test_bounds_are_kept_and_nothing_is_ever_lost(
    survivals: list[list[float]], plain: Curve, drafting: Curve, kinds: list[list[float]], others: int, most: int
) -> None:
    shares = [kinds[row % len(kinds)] for row in range(len(survivals))]
    found = choose(survivals, Load(len(survivals), others, most), plain, drafting, shares)
    assert len(found.drafts) == len(survivals)
    assert all(0 <= k <= len(row) for k, row in zip(found.drafts, survivals, strict=True))
    assert sum(found.drafts) <= most
    assert found.gain >= 1.0
    assert bool(found) == any(found.drafts)
    if found:
        # What it says to gain is what comes of its own model: tokens that are there, by the time of those.
        num_rows = len(survivals)
        there = [(s, [*own, *[own[-1]] * 9][j]) for k, row, own in zip(found.drafts, survivals, shares, strict=True)
                 for j, s in enumerate(row[:k])]  # fmt: skip
        tokens = num_rows + sum(s * share for s, share in there)
        seconds = drafting.at(num_rows + others + sum(share for _, share in there))
        assert found.gain == pytest.approx(tokens / seconds * plain.at(num_rows + others) / num_rows)


@given(
    st.lists(st.floats(0.05, 0.98), min_size=1, max_size=6).map(survival),
    st.floats(0.001, 0.1),
    st.floats(0.00001, 0.01),
    st.integers(1, 60),
    st.integers(1, 20),
)
def test_more_rows_never_get_more_each(
    row: list[float], fixed: float, per_token: float, num_rows: int, more: int
) -> None:
    curve = linear(fixed, per_token)
    few = choose([row] * num_rows, Load(num_rows, 0, 10_000), curve, curve)
    many = choose([row] * (num_rows + more), Load(num_rows + more, 0, 10_000), curve, curve)
    assert max(many.drafts) <= max(few.drafts)
    assert many.gain <= few.gain * (1 + 1e-9)


@given(st.lists(st.floats(0.05, 0.98), min_size=1, max_size=6).map(survival), st.integers(1, 20), st.integers(0, 100))
def test_the_greedy_rule_on_a_convex_curve(row: list[float], num_rows: int, others: int) -> None:
    """Token by token: add the likeliest while s > N · ΔT / T."""
    curve = linear(0.010, 0.0005)
    found = choose([row] * num_rows, Load(num_rows, others, 10_000), curve, curve)
    expected, size, drafts = float(num_rows), num_rows + others, [0] * num_rows
    for s, level in sorted(((s, level) for level, s in enumerate(row)), reverse=True):
        for index in range(num_rows):
            if s > expected * (curve.at(size + 1) - curve.at(size)) / curve.at(size) and drafts[index] == level:
                drafts[index] += 1
                expected, size = expected + s, size + 1
    assert rate(found.drafts, [row] * num_rows, others, curve) == pytest.approx(
        rate(drafts, [row] * num_rows, others, curve)
    )


def test_drafts_beyond_a_plateaus_edge_pay_together() -> None:
    """One token more costs as much as four: a rule that looks one ahead would stop, and lose."""
    stairs = Curve((1.0, 2.0, 5.0), (0.010, 0.018, 0.018))
    row = survival([0.75] * 4)
    assert 1 + row[0] < 1.8
    assert choose([row], Load(1), stairs, stairs).drafts == [4]


def test_the_likely_rows_are_served_first() -> None:
    curve = linear(0.010, 0.0001)
    good, bad = survival([0.9] * 4), survival([0.3] * 4)
    assert choose([bad, good], Load(2, 0, 4), curve, curve).drafts == [0, 4]
    assert choose([bad, good], Load(2, 0, 5), curve, curve).drafts == [1, 4]


def test_a_batch_too_large_gets_none() -> None:
    """Off when a₁ ≤ the share of the step that grows with its tokens: 0.5 at n = 20 rows here."""
    curve = linear(0.010, 0.0005)
    row = survival([0.5] * 4)
    assert choose([row] * 19, Load(19, 0, 1000), curve, curve).drafts == [1] * 19
    assert not choose([row] * 21, Load(21, 0, 1000), curve, curve)


def test_a_draft_worker_that_slows_the_target_has_to_pay_for_it() -> None:
    plain, row = linear(0.010, 0.0001), survival([0.5] * 2)
    assert choose([row], Load(1), plain, linear(0.016, 0.0001))
    assert not choose([row], Load(1), plain, linear(0.018, 0.0001))
    assert not choose([row], Load(1), plain, linear(0.012, 0.0001), availability=[(0.2,)])


def test_tokens_that_seldom_come_in_time_are_not_asked_for() -> None:
    row, curve = survival([0.9] * 4), linear(0.010, 0.0005)
    assert choose([row], Load(1), curve, curve).drafts == [4]
    # A step with drafts takes longer: what must bring that has to be there.
    slower = linear(0.012, 0.0005)
    assert choose([row], Load(1), curve, slower, [(0.05,)]).drafts == [0]
    assert choose([row], Load(1), curve, slower, [(1.0, 1.0, 0.05)]).gain > 1.3


def test_a_margin_is_asked_for() -> None:
    curve, row = linear(0.010, 0.0045), survival([0.35])
    gain = choose([row], Load(1), curve, curve).gain
    assert 1.0 < gain < 1.05
    assert choose([row], Load(1), curve, curve, margin=0.05) == Budget([0], 1.0)


def test_rows_that_may_not_draft_get_none() -> None:
    curve = linear(0.010, 0.0001)
    assert choose([[], survival([0.9, 0.9])], Load(2), curve, curve).drafts == [0, 2]
    assert choose([], Load(0), curve, curve) == Budget([], 1.0)
