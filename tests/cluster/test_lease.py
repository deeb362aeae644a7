"""Terms rise, whatever clocks and peers say."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cluster.lease import MemoryLease


@given(st.lists(st.tuples(st.integers(0, 2**50), st.integers(0, 2**50)), min_size=1, max_size=20))
def test_every_term_is_above_all_before_it(calls: list[tuple[int, int]]) -> None:
    lease, last = MemoryLease(), 0
    assert lease.term == 0
    for highest_seen, now_ms in calls:
        term = lease.acquire(highest_seen, now_ms)
        assert term > last
        assert term > highest_seen
        assert term >= now_ms
        assert term == max(last + 1, now_ms, highest_seen + 1)
        assert lease.term == last or lease.term == term
        last = term


def test_a_restart_with_an_emptied_store_rises_by_the_clock() -> None:
    before = MemoryLease().acquire(0, 1_700_000_000_000)
    assert MemoryLease().acquire(0, 1_700_000_005_000) > before


def test_a_clock_set_back_and_a_peer_that_saw_more() -> None:
    lease = MemoryLease()
    assert lease.acquire(0, 1000) == 1000
    assert lease.acquire(0, 10) == 1001
    assert lease.acquire(5000, 10) == 5001
