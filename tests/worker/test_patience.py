"""δ as a pure function: the formula, and where it must be 0."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from math import inf

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from worker.patience import FEW, FIRST_GAP, LONGEST_GAP, LONGEST_S, SHARE, Exploration, Late, Pace, wait_s

EVEN = [0.002] * 8


def row(waited_s: float, gain: float, latencies: Sequence[float] = EVEN) -> Late:
    return Late(waited_s, gain, latencies)


def test_one_row_waits_for_a_tail_that_brings_more_than_the_time_is_worth() -> None:
    # 100 tokens/s: 2 ms are worth 0.2 tokens.
    assert wait_s([row(0.0, 1.0)], 100.0) == pytest.approx(0.002)
    assert wait_s([row(0.0, 0.19)], 100.0) == 0.0
    # What has been waited already is not waited again.
    assert wait_s([row(0.0015, 0.19)], 100.0) == pytest.approx(0.0005)


def test_nobody_waits_beside_many_rows() -> None:
    assert wait_s([row(0.0, 1.0)], 100.0 * 8) == 0.0
    # Unless many are late.
    assert wait_s([row(0.0, 1.0)] * 8, 100.0 * 8) == pytest.approx(0.002)


def test_tails_that_seldom_come_are_not_waited_for() -> None:
    assert wait_s([row(0.0, 1.0, [0.002] * 4 + [inf] * 4)], 100.0) == pytest.approx(0.002)
    assert wait_s([row(0.0, 1.0, [0.002] + [inf] * 7)], 100.0) == 0.0
    assert wait_s([row(0.0, 9.0, [inf] * 8)], 1.0) == 0.0
    # It has taken longer than any that came: it won't come.
    assert wait_s([row(0.01, 9.0)], 1.0) == 0.0


def test_the_wait_ends_where_more_waiting_no_longer_pays() -> None:
    # Six of eight come within 1 ms, the others take 30: worth 0.75 - 0.05 tokens, then 1 - 1.5.
    latencies = [0.001] * 6 + [0.03] * 2
    assert wait_s([row(0.0, 1.0, latencies)], 50.0) == pytest.approx(0.001)
    assert wait_s([row(0.0, 1.0, latencies)], 5.0) == pytest.approx(0.03)


def test_bounds_and_beginnings() -> None:
    assert wait_s([], 100.0) == 0.0
    assert wait_s([row(0.0, 1.0)], 100.0, longest_s=0.001) == 0.0
    assert wait_s([row(0.0, 1.0)], 100.0, longest_s=0.0) == 0.0
    assert wait_s([row(0.0, -1.0)], 0.0) == 0.0
    # Before anything is known of latencies a short wait is tried, and one slow tail is not taken for the rule.
    assert 0 < wait_s([row(0.0, 1.0, [])], 10.0) < 0.01
    assert 0 < wait_s([row(0.0, 1.0, [9.0])], 10.0) < 0.01
    assert wait_s([row(0.0, 1.0, [9.0] * FEW)], 10.0) == 0.0


LATENCIES = st.lists(st.one_of(st.floats(0, 0.1), st.just(inf)), min_size=FEW, max_size=12)
LATE = st.builds(row, st.floats(0, 0.05), st.floats(-1, 4))


@example(rows=[(0.049999999999999996, 1.0, 0)], of_link=([0.1], [0.0]), rate=0.0)  # 0.1 - that is above LONGEST_S
@given(
    st.lists(st.tuples(st.floats(0, 0.05), st.floats(-1, 4), st.integers(0, 1)), min_size=1, max_size=6),
    st.tuples(LATENCIES, LATENCIES),
    st.floats(0, 5000),
)
def test_a_wait_never_costs_more_than_it_is_expected_to_bring_and_falls_with_the_load(
    rows: list[tuple[float, float, int]], of_link: tuple[list[float], list[float]], rate: float
) -> None:
    """Two draft workers, each with its own latencies."""
    late = [Late(waited_s, gain, of_link[link]) for waited_s, gain, link in rows]
    delta = wait_s(late, rate)
    assert 0 <= delta <= LONGEST_S

    def worth(seconds: float, rounding_s: float = 1e-9) -> float:
        total = -rate * seconds
        for waited_s, gain, link in rows:
            longer = [one for one in of_link[link] if one > waited_s]
            in_time = [one for one in longer if one <= waited_s + seconds + rounding_s]
            total += max(0.0, gain) * len(in_time) / len(longer) if longer else 0.0
        return total

    assert delta == 0 or worth(delta) > 0
    # Nothing on a grid is better, but for the hair's breadth above.
    hair = 1e-6 + 2e-9 * rate
    grid = [worth(index * LONGEST_S / 40, rounding_s=-1e-9) for index in range(41)]
    assert max(grid) <= max(0.0, worth(delta)) + hair
    assert wait_s(late, 2 * rate + 1) <= delta + 1e-12


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.floats(0.0, 0.2), st.lists(LATE, max_size=3), st.booleans()), max_size=300),
    st.floats(0.5, 5000),
)
def test_exploring_costs_no_more_than_its_share_and_never_more_than_it_could_bring(
    steps: list[tuple[float, list[Late], bool]], rate: float
) -> None:
    exploration = Exploration()
    began_s = lost_s = 0.0
    for _ in range(FIRST_GAP):
        exploration.step(0.02)
        began_s += 0.02
    for duration_s, late, comes in steps:
        delta_s = exploration.wait_s(late, rate)
        assert 0 <= delta_s <= LONGEST_S
        assert rate * delta_s <= sum(max(0.0, row.gain) for row in late) * (1 + 1e-9) + 1e-300
        if delta_s:
            exploration.explored(delta_s, comes)
            lost_s += 0.0 if comes else delta_s
        exploration.step(duration_s)
        began_s += duration_s
        assert lost_s <= SHARE * began_s + 1e-9


def explorations(num_steps: int, latency_s: float) -> list[int]:
    """Steps of 10 ms, 100 tokens/s, one late row: which of them explore, where its tail takes so long."""
    exploration, found = Exploration(), []
    for number in range(num_steps):
        delta_s = exploration.wait_s([row(0.0, 0.6)], 100.0)
        if delta_s:
            found.append(number)
            exploration.explored(min(delta_s, latency_s), latency_s <= delta_s)
        exploration.step(0.010)
    return found


def test_explorations_in_vain_come_ever_more_seldom() -> None:
    found = explorations(20_000, inf)
    gaps = [late - early for early, late in pairwise(found)]
    assert found[0] >= FIRST_GAP
    assert gaps == sorted(gaps)
    assert gaps[0] >= 2 * FIRST_GAP
    assert gaps[-1] == LONGEST_GAP
    # What comes only after it has stopped to pay is not waited for either.
    assert explorations(20_000, 0.007) == found


def test_a_draft_worker_that_has_become_fast_is_found_out() -> None:
    """32 vain waits, and δ is 0 for ever; one exploration after the other tells otherwise."""
    latencies: deque[float] = deque([inf] * 32, maxlen=32)
    late, exploration = [row(0.0, 1.0, latencies)], Exploration()
    steps = 0
    while not wait_s(late, 100.0):
        steps += 1
        if exploration.wait_s(late, 100.0):
            exploration.explored(0.003, True)
            latencies.append(0.003)
        exploration.step(0.010)
        assert steps < FIRST_GAP + 150
    assert steps >= FIRST_GAP
    assert wait_s(late, 100.0) == pytest.approx(0.003)


def test_a_wait_that_pays_makes_exploring_needless() -> None:
    exploration = Exploration()
    for _ in range(5 * FIRST_GAP):
        assert exploration.wait_s([row(0.0, 0.5)], 100.0) == 0.0
        exploration.step(0.010)
        exploration.waited()
    assert Exploration().wait_s([row(0.0, 0.5)], 0.0) == 0.0


def test_one_draft_workers_silence_says_nothing_of_anothers() -> None:
    never, soon = [inf] * 8, [0.002] * 8
    assert wait_s([row(0.0, 1.0, never), row(0.0, 1.0, soon)], 100.0) == pytest.approx(0.002)
    assert wait_s([row(0.0, 1.0, soon), row(0.0, 1.0, never)], 100.0) == pytest.approx(0.002)
    assert wait_s([row(0.0, 1.0, never), row(0.0, 0.1, soon)], 100.0) == 0.0


def test_pace_follows_the_latest_steps() -> None:
    pace = Pace()
    assert (pace.tokens_per_s, pace.accepted, pace.drafted) == (0.0, 1.0, 2.0)
    for _ in range(200):
        pace.observe(3, 0.01)
    assert pace.tokens_per_s == pytest.approx(300)
    for _ in range(200):
        pace.observe(1, 0.02)
        pace.observe(0, 1.0)
        pace.observe(1, 0.0)
    assert pace.tokens_per_s == pytest.approx(50, rel=0.01)


def test_what_late_drafts_bring_is_known_of_them_alone() -> None:
    pace = Pace()
    for _ in range(200):
        pace.observe_late(2, 6, 4)
        pace.observe_late(0, 0, 0)
    assert (pace.accepted, pace.drafted) == (pytest.approx(2, rel=0.1), pytest.approx(3, rel=0.1))
    for _ in range(300):
        pace.observe_late(1, 1, 0)
    assert pace.accepted < 0.15
    assert pace.drafted == pytest.approx(1, rel=0.1)
