"""Which target is tried next, and when."""

from __future__ import annotations

import pytest

from tandem_client.retry import RetryPolicy, Targets

POLICY = RetryPolicy(initial_backoff_s=1.0, max_backoff_s=4.0, multiplier=2.0)


def test_backoff_doubles_within_bounds() -> None:
    assert [POLICY.backoff_s(failures, jitter=1.0) for failures in (1, 2, 3, 4, 50)] == [1, 2, 4, 4, 4]
    assert POLICY.backoff_s(1, jitter=0.0) == 0.5


def test_one_target_is_waited_for() -> None:
    targets = Targets(["a"])
    targets.failed("a", now=10.0, policy=POLICY, jitter=1.0, retry_after_s=0.0)
    assert targets.choose(10.25) == ("a", 0.75)
    targets.succeeded("a")
    assert targets.choose(10.25) == ("a", 0.0)


def test_the_next_target_is_tried_at_once_and_kept() -> None:
    targets = Targets(["a", "b", "c"])
    targets.failed("a", now=0.0, policy=POLICY, jitter=1.0, retry_after_s=0.0)
    assert targets.choose(0.0) == ("b", 0.0)
    targets.succeeded("b")
    # a's pause is over, but b works.
    assert targets.choose(100.0) == ("b", 0.0)


def test_with_all_down_the_first_that_is_free_again_is_tried() -> None:
    targets = Targets(["a", "b"])
    targets.failed("a", now=0.0, policy=POLICY, jitter=1.0, retry_after_s=9.0)
    targets.failed("b", now=0.0, policy=POLICY, jitter=1.0, retry_after_s=0.0)
    assert targets.choose(0.5) == ("b", 0.5)
    targets.failed("b", now=1.0, policy=POLICY, jitter=1.0, retry_after_s=30.0)
    assert targets.choose(1.0) == ("a", 8.0)


@pytest.mark.parametrize("addresses", [[], ["a", "a"]])
def test_bad_lists_are_refused(addresses: list[str]) -> None:
    with pytest.raises(ValueError, match="target"):
        Targets(addresses)


def test_a_target_that_failed_thousands_of_times_is_waited_for_no_longer_than_the_bound() -> None:
    """Many calls at once count their failures together: a long outage reaches thousands."""
    policy = RetryPolicy(max_backoff_s=3.0)
    targets = Targets(["a"])
    for _ in range(5000):
        targets.failed("a", 0.0, policy, jitter=0.0, retry_after_s=0.0)
    assert targets.choose(0.0) == ("a", 1.5)
    assert policy.backoff_s(10**9, jitter=0.0) == 1.5
