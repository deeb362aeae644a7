"""Accept-iff-equal against a one-token-at-a-time oracle."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.steps import Finish
from worker.verification import Verdict, verify


def plainly(draft: list[int], truth: list[int], stops: set[int], limit: int) -> Verdict:
    """Decode one token at a time while the draft agrees; each token is looked at alone, as plain decoding would."""
    emitted = accepted = 0
    for index, token in enumerate(truth):
        emitted += 1
        agrees = index < len(draft) and draft[index] == token
        accepted += agrees
        if token in stops:
            return Verdict(emitted, accepted, Finish.STOP)
        if emitted == limit:
            return Verdict(emitted, accepted, Finish.LENGTH)
        if not agrees:
            break
    return Verdict(emitted, accepted, Finish.NOT)


@pytest.mark.parametrize(
    ("draft", "sampled", "expected"),
    [
        ([], [5], Verdict(1, 0, Finish.NOT)),
        ([5, 6], [5, 6, 7], Verdict(3, 2, Finish.NOT)),
        ([5, 6], [5, 9, 7], Verdict(2, 1, Finish.NOT)),
        ([5, 6], [9, 6, 7], Verdict(1, 0, Finish.NOT)),
        # Case 67: the stop is the first of the accepted ones; nothing after it is emitted or counted.
        ([0, 6, 7, 8, 9, 10], [0, 6, 7, 8, 9, 10, 11], Verdict(1, 1, Finish.STOP)),
        ([5, 6], [5, 6, 0], Verdict(3, 2, Finish.STOP)),
        ([5, 0], [5, 0, 7], Verdict(2, 2, Finish.STOP)),
    ],
)
def test_runs(draft: list[int], sampled: list[int], expected: Verdict) -> None:
    assert verify(draft, sampled, {0}, 100) == expected


def test_the_limit_cuts_and_a_stop_at_the_limit_is_a_stop() -> None:
    assert verify([5, 6], [5, 6, 7], set(), 2) == Verdict(2, 2, Finish.LENGTH)
    assert verify([5], [5, 6], set(), 2) == Verdict(2, 1, Finish.LENGTH)
    assert verify([5], [5, 6], {6}, 2) == Verdict(2, 1, Finish.STOP)


@given(st.data())
def test_equals_one_token_at_a_time(data: st.DataObject) -> None:
    draft = data.draw(st.lists(st.integers(0, 2), max_size=8))
    sampled = data.draw(st.lists(st.integers(0, 2), min_size=len(draft) + 1, max_size=len(draft) + 1))
    stops = data.draw(st.sets(st.integers(0, 2), max_size=1))
    limit = data.draw(st.integers(1, 10))
    assert verify(draft, sampled, stops, limit) == plainly(draft, sampled, stops, limit)
