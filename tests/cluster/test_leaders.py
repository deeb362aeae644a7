"""Finding and following the leader among schedulers that say what a test tells them to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from tandem.v1 import scheduler_pb2, scheduler_pb2_grpc

from cluster import errors
from cluster.leaders import Leaders
from cluster.server import bind, create_server
from cluster.state import MemoryState, SchedulerEntry


class Scheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Reports what it is told to."""

    def __init__(self) -> None:
        self.address = ""
        self.num_watches = 0
        self._report = scheduler_pb2.WatchLeaderResponse(cell="a")
        self._changed = asyncio.Event()
        self._server = create_server()
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(self, self._server)

    async def start(self) -> Scheduler:
        self.address = f"127.0.0.1:{bind(self._server, '127.0.0.1', 0)}"
        await self._server.start()
        return self

    def say(self, leading: bool, term: int, cell: str = "a", schedulers: tuple[str, ...] = ()) -> None:
        self._report = scheduler_pb2.WatchLeaderResponse(cell=cell, leading=leading, term=term, schedulers=schedulers)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def WatchLeader(self, request: Any, context: Any) -> None:
        self.num_watches += 1
        while True:
            changed = self._changed
            await context.write(self._report)
            await changed.wait()

    async def stop(self) -> None:
        await self._server.stop(0)


@pytest.fixture
async def pair() -> AsyncIterator[tuple[Scheduler, Scheduler]]:
    one, two = await Scheduler().start(), await Scheduler().start()
    yield one, two
    await one.stop()
    await two.stop()


@pytest.fixture
async def started() -> AsyncIterator[Any]:
    """Starts what it is given; closes it in the end."""
    running: list[Leaders] = []

    def start(*addresses: str, **options: Any) -> Leaders:
        leaders = Leaders(addresses, **options)
        leaders.start()
        running.append(leaders)
        return leaders

    yield start
    for leaders in running:
        await leaders.close()


async def until(leaders: Leaders, condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await leaders._changed()


async def test_a_single_scheduler_is_not_watched(pair: Any, started: Any) -> None:
    one, _ = pair
    leaders = started(one.address)
    assert [await leaders.candidate() for _ in range(3)] == [one.address] * 3
    assert leaders._known[one.address].watch is None


async def test_candidates_take_turns_while_nobody_leads(started: Any) -> None:
    leaders = started("127.0.0.1:1", "127.0.0.1:2")
    tried = [await leaders.candidate() for _ in range(4)]
    assert tried == ["127.0.0.1:1", "127.0.0.1:2"] * 2
    leaders.welcomed()
    assert await leaders.candidate() == "127.0.0.1:2", "where we were welcome we go first"


async def test_the_leader_is_called_first_and_followed(pair: Any, started: Any) -> None:
    one, two = pair
    one.say(False, 7)
    two.say(True, 7)
    leaders = started(one.address, two.address)
    await until(leaders, lambda: leaders.leader == (two.address, 7))
    assert await leaders.candidate() == two.address
    assert await leaders.candidate() == one.address, "the leader would not have us: the others may know better"
    assert await leaders.candidate() == two.address
    leaders.welcomed()

    leaving = asyncio.ensure_future(leaders.outranked(7))
    one.say(False, 8)
    two.say(True, 7)
    one.say(True, 9)
    async with asyncio.timeout(10):
        assert await leaving == one.address
    assert await leaders.candidate() == one.address


async def test_of_two_that_say_that_they_lead_the_higher_term_counts(pair: Any, started: Any) -> None:
    one, two = pair
    one.say(True, 5)
    two.say(True, 6)
    leaders = started(one.address, two.address)
    await until(leaders, lambda: leaders.leader == (two.address, 6))
    await two.stop()
    await until(leaders, lambda: leaders.leader == (one.address, 5))


async def test_a_pause_ends_with_news(pair: Any, started: Any) -> None:
    one, two = pair
    leaders = started(one.address, two.address)
    await leaders.candidate()
    pausing = asyncio.ensure_future(leaders.pause(0, first_s=60, max_s=60))
    two.say(True, 3)
    async with asyncio.timeout(10):
        await pausing
    assert await leaders.candidate() == two.address
    again = asyncio.ensure_future(leaders.pause(0, first_s=60, max_s=60))
    two.say(True, 3)
    leaders._tell()
    one.say(True, 4)
    async with asyncio.timeout(10):
        await again
    assert leaders.leader == (one.address, 4), "the leader that refused us was no news"


async def test_schedulers_that_others_report_or_the_state_holds_are_found(pair: Any, started: Any) -> None:
    one, two = pair
    state = MemoryState()
    await state.register(SchedulerEntry("s1", one.address, "a", 0), ttl_s=60)
    await state.register(SchedulerEntry("s3", "127.0.0.1:3", "b", 9), ttl_s=60)
    one.say(False, 0, schedulers=(one.address, two.address))
    two.say(True, 4)
    leaders = started(state=state, cell="a")
    assert await leaders.candidate() == one.address
    await until(leaders, lambda: leaders.leader == (two.address, 4))
    assert leaders.addresses == [one.address, two.address], "the other cell's is none of ours"


async def test_a_scheduler_of_another_cell_is_not_obeyed(pair: Any, started: Any) -> None:
    one, two = pair
    one.say(True, 9, cell="b", schedulers=("127.0.0.1:5",))
    two.say(True, 4)
    leaders = started(one.address, two.address, cell="a")
    await until(leaders, lambda: leaders.leader == (two.address, 4))
    assert leaders.addresses == [one.address, two.address]
    await until(leaders, lambda: leaders._own == [two.address])
    assert [await leaders.candidate() for _ in range(3)] == [two.address] * 3, "nor is it ever called"


async def test_who_was_told_no_cell_stays_with_the_first(pair: Any, started: Any) -> None:
    one, two = pair
    one.say(True, 4)
    leaders = started(one.address)
    leaders._know(two.address)
    await until(leaders, lambda: leaders.leader is not None)
    two.say(True, 9, cell="b")
    await until(leaders, lambda: leaders._own == [one.address])
    assert leaders.leader == (one.address, 4)
    two.say(False, 4)
    await until(leaders, lambda: leaders._own == [one.address, two.address])


async def test_a_standby_names_the_leader(pair: Any, started: Any) -> None:
    one, two = pair
    leaders = started(one.address)
    await leaders.candidate()
    status = errors.to_status(errors.Unavailable("a standby", reason="NOT_LEADER", leader=two.address))
    trailers = grpc.aio.Metadata((errors.DETAILS_KEY, status.SerializeToString()))
    leaders.refused(grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), trailers, "a standby"))
    assert await leaders.candidate() == two.address
    two.say(True, 4)
    await until(leaders, lambda: leaders.leader == (two.address, 4))


async def test_hearsay_that_leads_nowhere_is_forgotten(started: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("cluster.leaders.MAX_BACKOFF_S", 0.01)
    leaders = started("127.0.0.1:1")
    leaders._know("127.0.0.1:2")
    await until(leaders, lambda: leaders.addresses == ["127.0.0.1:1"])
    for port in range(10, 200):
        leaders._know(f"127.0.0.1:{port}")
    assert len(leaders.addresses) <= 64


async def test_a_watch_that_breaks_is_renewed(pair: Any, started: Any) -> None:
    one, two = pair
    one.say(True, 4)
    leaders = started(one.address, two.address)
    await until(leaders, lambda: leaders.leader == (one.address, 4))
    port = int(one.address.rpartition(":")[2])
    await one.stop()
    await until(leaders, lambda: leaders.leader is None)
    again = Scheduler()
    bind(again._server, "127.0.0.1", port)
    await again._server.start()
    again.say(True, 8)
    await until(leaders, lambda: leaders.leader == (one.address, 8))
    await again.stop()
