"""What every shared state promises, checked on each: embedded, and in a real Redis."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.redis_state import RedisState
from cluster.state import (
    MAX_TERM,
    Lease,
    MemoryState,
    SchedulerEntry,
    State,
    StateUnavailable,
    check_url,
    next_term,
    open_state,
)
from tests.redis_server import RedisServer, redis_server

LONG_S = 60.0
SHORT_S = 0.05
NOW_MS = 1_700_000_000_000
names = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture(params=["memory", "redis"])
async def state(request: Any) -> AsyncIterator[State]:
    """An empty state."""
    if request.param == "memory":
        yield MemoryState()
        return
    # A cluster of its own within the module's server.
    opened = open_state(request.getfixturevalue("server").url, f"cluster-{next(names)}")
    yield opened
    await opened.close()


async def acquire(state: State, who: str, ttl_s: float = LONG_S, seen: int = 0, now: int = 0, cell: str = "a") -> Lease:
    return await state.acquire(cell, who, f"{who}:1", ttl_s=ttl_s, highest_seen=seen, now_ms=now)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait for what only time brings about."""
    async with asyncio.timeout(10):
        while True:
            if await condition():
                return
            await asyncio.sleep(0.005)


async def vacant(state: State, cell: str = "a") -> bool:
    return await state.leader(cell) is None


async def test_one_holds_the_lease_and_others_are_told_who(state: State) -> None:
    assert await state.leader("a") is None
    first = await acquire(state, "s1", now=NOW_MS)
    assert first == Lease("a", "s1", "s1:1", NOW_MS)
    assert await acquire(state, "s2", seen=NOW_MS + 5) == first
    assert await state.leader("a") == first


async def test_cells_are_apart(state: State) -> None:
    await acquire(state, "s1", cell="a")
    other = await acquire(state, "s2", cell="b")
    assert other.scheduler_id == "s2"
    assert (await state.leader("a"), await state.leader("b")) == (Lease("a", "s1", "s1:1", 1), other)


async def test_the_holder_outbids_itself(state: State) -> None:
    first = await acquire(state, "s1", now=NOW_MS)
    second = await acquire(state, "s1", seen=NOW_MS + 70, now=NOW_MS)
    assert second.term == NOW_MS + 71
    assert await state.renew(first, ttl_s=LONG_S) == second
    assert await state.leader("a") == second


async def test_a_lapsed_lease_goes_to_another_under_a_higher_term(state: State) -> None:
    first = await acquire(state, "s1", ttl_s=SHORT_S)
    await until(lambda: vacant(state))
    second = await acquire(state, "s2")
    assert second.term > first.term
    assert await state.renew(first, ttl_s=LONG_S) == second, "the old holder learns who leads"
    await state.release(first)
    assert await state.leader("a") == second, "and takes nothing away"


async def test_renewing_keeps_it(state: State) -> None:
    lease = await acquire(state, "s1", ttl_s=SHORT_S)
    assert await state.renew(lease, ttl_s=LONG_S) == lease
    await acquire(state, "s1", ttl_s=2 * SHORT_S, cell="clock")
    await until(lambda: vacant(state, "clock"))
    assert await acquire(state, "s2") == lease


async def test_a_lapsed_lease_that_nobody_took_is_put_back(state: State) -> None:
    lease = await acquire(state, "s1", ttl_s=SHORT_S)
    await until(lambda: vacant(state))
    assert await state.renew(lease, ttl_s=LONG_S) == lease
    assert await acquire(state, "s2") == lease


async def test_a_released_lease_is_free_at_once_and_its_term_is_remembered(state: State) -> None:
    first = await acquire(state, "s1")
    second = await acquire(state, "s1")
    await state.release(first)
    assert await state.leader("a") == second, "an outbid lease is nobody's to release"
    await state.release(second)
    assert await state.leader("a") is None
    third = await acquire(state, "s2")
    assert third.term > second.term > first.term
    await state.release(third)
    assert await state.renew(second, ttl_s=LONG_S) is None, "there has been a later one"
    assert await state.leader("a") is None


@pytest.mark.parametrize(
    ("seen", "now", "term"),
    [(0, 0, 1), (0, NOW_MS, NOW_MS), (NOW_MS + 9, NOW_MS, NOW_MS + 10), (MAX_TERM, 0, MAX_TERM + 1)],
)
async def test_the_first_term(state: State, seen: int, now: int, term: int) -> None:
    assert (await acquire(state, "s1", seen=seen, now=now)).term == term


async def test_terms_rise_whatever_clocks_and_peers_say(state: State) -> None:
    last = 0
    for seen, now in [(0, 1000), (0, 10), (5000, 10), (0, 0), (3, 2**47), (2**48, 9), (0, 2**40)]:
        lease = await acquire(state, "s1", seen=seen, now=now)
        assert lease.term == next_term(last, seen, now)
        last = lease.term
        await state.release(lease)


@given(st.integers(0, 2**50), st.integers(0, 2**50), st.integers(0, 2**50))
def test_a_next_term_is_above_whatever_is_left_of_earlier_ones(stored: int, seen: int, now: int) -> None:
    term = next_term(stored, seen, now)
    assert term > stored
    assert term > seen
    assert term >= now
    assert term in (stored + 1, seen + 1, now)


async def test_entries_come_go_and_vanish(state: State) -> None:
    one = SchedulerEntry("s1", "h1:1", "a", 7)
    two = SchedulerEntry("s2", "[::1]:2", "b", 0)
    assert await state.schedulers() == []
    await state.register(two, ttl_s=LONG_S)
    await state.register(SchedulerEntry("s1", "h1:1", "a", 0), ttl_s=LONG_S)
    await state.register(one, ttl_s=LONG_S)
    assert await state.schedulers() == [one, two]
    await state.withdraw("s2")
    await state.withdraw("s2")
    assert await state.schedulers() == [one]
    await state.register(two, ttl_s=SHORT_S)

    async def forgotten() -> bool:
        return await state.schedulers() == [one]

    await until(forgotten)


async def test_many_schedulers_that_race_get_one_leader(state: State) -> None:
    leases = await asyncio.gather(*(acquire(state, f"s{index}") for index in range(20)))
    assert len(set(leases)) == 1


# ------------------------------------------------------------------------------------------------ Redis alone


@pytest.fixture
async def opened(server: RedisServer) -> AsyncIterator[RedisState]:
    state = RedisState(server.url, f"cluster-{next(names)}", timeout_s=0.2)
    yield state
    await state.close()


async def test_clusters_are_apart(server: RedisServer, opened: RedisState) -> None:
    other = RedisState(server.url, f"cluster-{next(names)}")
    await acquire(opened, "s1")
    await opened.register(SchedulerEntry("s1", "h:1", "a", 1), ttl_s=LONG_S)
    assert (await acquire(other, "s2")).scheduler_id == "s2"
    assert await other.schedulers() == []
    await other.close()


async def test_an_emptied_server_falls_behind_nobody(server: RedisServer, opened: RedisState) -> None:
    lease = await acquire(opened, "s1", now=NOW_MS)
    server.empty()
    assert await opened.renew(lease, ttl_s=LONG_S) == lease, "the leader puts its lease back, if it is first"
    assert await acquire(opened, "s2", now=NOW_MS) == lease
    server.empty()
    taken = await acquire(opened, "s2", seen=lease.term, now=NOW_MS - 1000)
    assert taken.term > lease.term, "else a standby takes it, above the term that it has seen"
    assert await opened.renew(lease, ttl_s=LONG_S) == taken


async def test_every_key_expires(server: RedisServer, opened: RedisState) -> None:
    server.empty()
    lease = await acquire(opened, "s1")
    await opened.renew(lease, ttl_s=LONG_S)
    await opened.register(SchedulerEntry("s1", "h:1", "a", 1), ttl_s=LONG_S)
    prefix = f"tandem:{{{opened._cluster}"
    for key in (f"{prefix}/a}}:lease", f"{prefix}/a}}:term", f"{prefix}}}:schedulers"):
        assert int(server.command("TTL", key).removeprefix(":")) > 0, key
    assert server.command("DBSIZE") == ":3"


async def test_entries_of_the_dead_are_cleared_away(server: RedisServer, opened: RedisState) -> None:
    for index in range(10):
        await opened.register(SchedulerEntry(f"dead-{index}", "h:1", "a", 0), ttl_s=SHORT_S)

    async def gone() -> bool:
        return not await opened.schedulers()

    await until(gone)
    await opened.register(SchedulerEntry("s1", "h:1", "a", 0), ttl_s=LONG_S)
    assert server.command("HLEN", opened._entries_key) == ":1"


async def test_a_server_away_says_so_and_comes_back(tmp_path: Any) -> None:
    with redis_server(tmp_path) as server:
        state = RedisState(server.url, "x", timeout_s=0.2)
        lease = await acquire(state, "s1")
        server.kill()
        for call in (state.leader("a"), state.renew(lease, ttl_s=LONG_S), state.schedulers(), acquire(state, "s1")):
            with pytest.raises(StateUnavailable):
                await call
        server.restart()
        assert await state.renew(lease, ttl_s=LONG_S) == lease
        server.pause()
        with pytest.raises(StateUnavailable):
            await state.leader("a")
        server.resume()
        assert await state.leader("a") == lease
        await state.close()


async def test_what_somebody_else_wrote_is_refused(server: RedisServer, opened: RedisState) -> None:
    key = opened._keys("a")[0]
    for words in (("SET", key, "nonsense"), ("DEL", key), ("LPUSH", key, "1")):
        server.command(*words)
        if words[0] != "DEL":
            with pytest.raises(StateUnavailable):
                await acquire(opened, "s1")


@pytest.mark.parametrize("url", ["", "Memory", "localhost:6379", "http://x", "redis"])
def test_a_wrong_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="--state is memory or a Redis URL"):
        check_url(url)
    with pytest.raises(ValueError, match="--state"):
        open_state(url, "tandem")
