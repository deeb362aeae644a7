"""The table of a child's states, and the restart rule."""

from __future__ import annotations

import itertools

import pytest

from cli.lifecycle import TRANSITIONS, Event, Lifecycle, RestartPolicy, State, describe_exit

POLICY = RestartPolicy(first_delay_s=1.0, max_delay_s=4.0, stable_after_s=30.0, max_crashes=3)


def test_every_state_can_be_stopped_and_ends() -> None:
    for state in State:
        assert (state, Event.STOP) in TRANSITIONS
        after = TRANSITIONS[state, Event.STOP]
        assert after is State.STOPPED or TRANSITIONS[after, Event.EXIT] is State.STOPPED


def test_illegal_moves_raise() -> None:
    illegal = set(itertools.product(State, Event)) - set(TRANSITIONS)
    for state, event in illegal:
        lifecycle = Lifecycle(POLICY)
        lifecycle.state = state
        with pytest.raises(ValueError, match="illegal"):
            lifecycle.apply(event)


def test_restarts_come_later_and_later_while_it_keeps_dying() -> None:
    lifecycle = Lifecycle(POLICY)
    delays = []
    for now_s in range(5):
        lifecycle.ready(now_s)
        delays.append(lifecycle.exited(1, now_s))
        lifecycle.restarted()
    assert delays == [1.0, 2.0, 4.0, 4.0, 4.0]
    assert lifecycle.num_restarts == 5


def test_a_stable_run_clears_the_record() -> None:
    lifecycle = Lifecycle(POLICY)
    for _ in range(3):
        lifecycle.ready(0.0)
        lifecycle.exited(-9, 1.0)
        lifecycle.restarted()
    lifecycle.ready(10.0)
    assert lifecycle.exited(-9, 40.0) == 1.0


def test_never_ready_and_exits_by_itself_is_given_up_at_once() -> None:
    lifecycle = Lifecycle(POLICY)
    assert lifecycle.exited(2, 0.0) is None
    assert lifecycle.state is State.FAILED


def test_never_ready_and_killed_gets_its_tries() -> None:
    lifecycle = Lifecycle(POLICY)
    for delay_s in (1.0, 2.0):
        assert lifecycle.exited(-9, 0.0) == delay_s
        lifecycle.restarted()
    assert lifecycle.exited(-9, 0.0) is None


def test_ready_once_is_never_given_up() -> None:
    lifecycle = Lifecycle(POLICY)
    lifecycle.ready(0.0)
    for _ in range(20):
        assert lifecycle.exited(1, 0.0) is not None
        lifecycle.restarted()


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (0, "exit status 0"),
        (2, "exit status 2"),
        (-15, "killed by SIGTERM"),
        (-9, "killed by SIGKILL; is memory short?"),
    ],
)
def test_exit_in_words(status: int, text: str) -> None:
    assert describe_exit(status) == text
