"""Priority, then those that had started, then one turn per client."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.core.queue import WaitingQueue
from scheduler.core.sequence import Sequence
from tests.scheduler.core.builders import sequence_of


def waiting(number: int, client: str = "", priority: int = 0, started: bool = False) -> Sequence:
    sequence = sequence_of(number, number, client=client, priority=priority)
    sequence.started = started
    return sequence


def drained(queue: WaitingQueue) -> list[int]:
    order = []
    while len(queue):
        order.append(queue.pop().sequence_id)
        queue.check_integrity()
    return order


def filled(*sequences: Sequence) -> WaitingQueue:
    queue = WaitingQueue()
    for sequence in sequences:
        queue.push(sequence)
        queue.check_integrity()
    return queue


def test_one_client_is_served_in_order_of_arrival() -> None:
    assert drained(filled(*(waiting(number) for number in range(5)))) == [0, 1, 2, 3, 4]


def test_clients_take_turns() -> None:
    """A client with many requests delays another by one turn."""
    queue = filled(*(waiting(number, "many") for number in range(4)), waiting(10, "few"), waiting(11, "few"))
    assert drained(queue) == [0, 10, 1, 11, 2, 3]


def test_a_client_that_comes_back_waits_for_the_others_turn() -> None:
    queue = filled(waiting(1, "a"), waiting(2, "b"), waiting(3, "b"))
    assert queue.pop().sequence_id == 1
    queue.push(waiting(4, "a"))
    assert drained(queue) == [2, 4, 3]


def test_higher_priority_goes_first() -> None:
    assert drained(filled(waiting(1), waiting(2, priority=5), waiting(3, priority=-5))) == [2, 1, 3]


def test_started_ones_go_ahead_oldest_first_within_their_priority() -> None:
    queue = filled(waiting(1), waiting(9, started=True), waiting(7, started=True), waiting(20, priority=1))
    assert drained(queue) == [20, 7, 9, 1]


def test_peek_changes_nothing_and_skips_who_is_to_be_skipped() -> None:
    first, second, third = waiting(1, "a"), waiting(2, "b"), waiting(3, "b")
    queue = filled(first, second, third)
    assert queue.peek() is queue.peek() is first
    assert queue.peek({first}) is second
    assert queue.peek({first, second}) is third
    assert queue.peek({first, second, third}) is None
    assert WaitingQueue().peek() is None


def test_taking_another_than_the_head_ends_that_clients_turn() -> None:
    first, second, third = waiting(1, "a"), waiting(2, "b"), waiting(3, "b")
    queue = filled(first, second, third, waiting(4, "c"))
    queue.take(second)
    assert drained(queue) == [1, 4, 3]


def test_pop_of_nothing_raises() -> None:
    with pytest.raises(IndexError):
        WaitingQueue().pop()


@pytest.mark.parametrize("started", [False, True])
def test_removing_who_does_not_wait_raises(started: bool) -> None:
    queue = filled(waiting(1, "a"), waiting(2, "a", started=True))
    with pytest.raises(KeyError):
        queue.remove(waiting(3, "b", started=started))
    with pytest.raises(KeyError):
        queue.remove(waiting(3, "a", started=started))
    with pytest.raises(KeyError):
        queue.remove(waiting(3, "a", priority=9, started=started))
    queue.check_integrity()
    assert len(queue) == 2


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from("abc"), st.booleans(), st.booleans()), max_size=30))
def test_any_mixture_comes_out_once_in_order(entries: list[tuple[int, str, bool, bool]]) -> None:
    queue = WaitingQueue()
    expected = {}
    for number, (priority, client, started, removed) in enumerate(entries):
        sequence = waiting(number, client, priority, started)
        queue.push(sequence)
        if removed:
            queue.remove(sequence)
        else:
            expected[number] = (-priority, not started)
        queue.check_integrity()
    order = drained(queue)
    assert sorted(order) == sorted(expected)
    assert [expected[number] for number in order] == sorted(expected.values())
