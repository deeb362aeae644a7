"""The table of states."""

from __future__ import annotations

from itertools import product

import pytest

from scheduler.core.sequence import TRANSITIONS, IllegalTransition, State
from tests.scheduler.core.builders import sequence_of

LEGAL = {
    ("HELD", "WAITING"), ("HELD", "DONE"),
    ("WAITING", "RUNNING"), ("WAITING", "DONE"),
    ("RUNNING", "WAITING"), ("RUNNING", "LEAVING"), ("RUNNING", "CLOSING"),
    ("LEAVING", "WAITING"), ("LEAVING", "CLOSING"),
    ("CLOSING", "DONE"),
}  # fmt: skip


@pytest.mark.parametrize(("before", "after"), product(State, State))
def test_only_the_arrows_of_the_table_can_be_taken(before: State, after: State) -> None:
    sequence = sequence_of()
    sequence.state = before
    if (before.name, after.name) in LEGAL:
        sequence.move(after)
        assert sequence.state is after
    else:
        with pytest.raises(IllegalTransition, match=f"{before.name} → {after.name}"):
            sequence.move(after)
        assert sequence.state is before


def test_the_table_has_every_state_and_an_end() -> None:
    assert set(TRANSITIONS) == set(State)
    assert TRANSITIONS[State.DONE] == frozenset()


def test_order_is_priority_then_arrival_then_choice() -> None:
    old, new, urgent = sequence_of("a", 1), sequence_of("b", 2), sequence_of("c", 3, priority=1)
    assert sorted([new, old, urgent], key=lambda one: one.order) == [urgent, old, new]


def test_what_was_emitted_counts_as_output() -> None:
    sequence = sequence_of(prompt=5)
    sequence.token_ids += [1, 2, 3]
    assert sequence.num_output == 3


def test_forgetting_a_placement_keeps_tokens_and_history() -> None:
    sequence = sequence_of(prompt=5, limit=20)
    sequence.token_ids.append(9)
    sequence.worker_id, sequence.slot, sequence.blocks, sequence.computed = "w", 3, [1, 2], 5
    sequence.in_flight, sequence.horizon, sequence.resumptions, sequence.crashes = 2, 9, 1, 1
    sequence.forget_placement()
    assert (sequence.worker_id, sequence.slot, sequence.blocks, sequence.computed) == (None, None, [], 0)
    assert (sequence.in_flight, sequence.horizon) == (0, 6)
    assert (sequence.resumptions, sequence.crashes, sequence.limit) == (1, 1, 20)
