"""Schedulers that share a state: who leads, who stands by, and what peers of each see."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from tandem.v1 import admin_pb2, admin_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc

from cluster.channel import connect
from cluster.errors import from_rpc_error
from cluster.server import bind, create_server
from cluster.state import Lease, MemoryState, StateUnavailable
from scheduler.config import SchedulerConfig
from scheduler.leadership import Leadership, View
from scheduler.loop import Cell
from scheduler.servicer import AdminServicer, SchedulerServicer
from tests.scheduler.peers import Served, submit

TTL_S = 0.3


class Store(MemoryState):
    """A shared state that can be away; `closed` by one scheduler it still serves the others."""

    away = False
    rounds = 0

    def _check(self) -> None:
        if self.away:
            raise StateUnavailable("gone")

    async def acquire(self, *args: Any, **kwargs: Any) -> Lease:
        self._check()
        return await super().acquire(*args, **kwargs)

    async def renew(self, lease: Lease, *, ttl_s: float) -> Lease | None:
        self._check()
        return await super().renew(lease, ttl_s=ttl_s)

    async def leader(self, cell: str) -> Lease | None:
        self._check()
        return await super().leader(cell)

    def lose_everything(self) -> None:
        self.__init__()  # type: ignore[misc]

    def steal(self, term: int) -> Lease:
        """Another scheduler, elsewhere, has taken the lease."""
        lease = Lease("main", "other", "other:1", term)
        self._put(lease, 60.0)
        return lease


@dataclass
class Member:
    """One scheduler of the cell, behind its port."""

    served: Served
    leadership: Leadership
    server: Any

    @property
    def leading(self) -> bool:
        return self.leadership.view.leading

    async def stall(self) -> None:
        """Its rounds stop, as if the process stood still."""
        assert self.leadership._task is not None
        self.leadership._task.cancel()
        await asyncio.gather(self.leadership._task, return_exceptions=True)

    def resume(self) -> None:
        self.leadership._task = asyncio.create_task(self.leadership._run())

    async def until(self, condition: Any) -> View:
        async with asyncio.timeout(10):
            async for view in self.leadership.watch():
                if condition(view):
                    return view
        raise AssertionError("its views ended")


@pytest.fixture
async def store() -> Store:
    return Store()


@pytest.fixture
async def member(store: Store) -> AsyncIterator[Any]:
    """Starts schedulers of one cell."""
    members: list[Member] = []

    async def start(name: str, ttl_s: float = TTL_S) -> Member:
        cell = Cell(SchedulerConfig(port=0))
        server = create_server()
        address = f"127.0.0.1:{bind(server, '127.0.0.1', 0)}"
        leadership = Leadership(cell, store, cell_name="main", scheduler_id=name, address=address, ttl_s=ttl_s)
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(SchedulerServicer(cell, leadership), server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminServicer(cell, leadership), server)
        await leadership.start()
        await server.start()
        one = Member(Served(cell, address, connect(address)), leadership, server)
        members.append(one)
        return one

    yield start
    for one in members:
        one.served.cell.core.check_integrity()
        for task in one.served.tasks:
            task.cancel()
        await one.served.channel.close()
        await one.leadership.close()
        await one.server.stop(0)


async def refusal(call: Any, hello: Any) -> Any:
    """The error that ends a stream which begins with this hello."""
    await call.write(hello)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with asyncio.timeout(10):
            await call.read()
    return from_rpc_error(caught.value)


async def ended(call: Any) -> None:
    """The scheduler has let go of a stream."""
    async with asyncio.timeout(10):
        while await call.read() is not grpc.aio.EOF:
            pass


async def test_one_leads_and_the_other_refuses_every_stream_naming_the_leader(member: Any) -> None:
    one, two = await member("s1"), await member("s2")
    assert one.leading
    assert not two.leading
    stub = scheduler_pb2_grpc.SchedulerServiceStub(two.served.channel)
    hello = scheduler_pb2.WorkerHello(worker_id="w", model="m", num_blocks=1, block_size=1, max_sequences=1)
    for call, message in (
        (stub.Session(), scheduler_pb2.SessionRequest(hello=scheduler_pb2.SessionHello(gateway_id="g"))),
        (stub.Attach(), scheduler_pb2.AttachRequest(hello=hello)),
        (stub.Announce(), scheduler_pb2.AnnounceRequest(hello=scheduler_pb2.DraftWorkerHello(worker_id="d"))),
    ):
        error = await refusal(call, message)
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "NOT_LEADER")
        assert error.metadata["leader"] == one.served.address
        assert error.metadata["term"] == str(one.served.cell.term)
    for member_, leads in ((one, True), (two, False)):
        status = await member_.served.admin.GetStatus(admin_pb2.GetStatusRequest())
        assert (status.leading, status.leader, status.cell) == (leads, one.served.address, "main")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await two.served.admin.Drain(admin_pb2.DrainRequest())
    assert from_rpc_error(refused.value).metadata["leader"] == one.served.address


async def test_watchers_are_told_who_leads_and_who_else_is_there(member: Any) -> None:
    one = await member("s1")
    watch = scheduler_pb2_grpc.SchedulerServiceStub(one.served.channel).WatchLeader(scheduler_pb2.WatchLeaderRequest())
    first = await asyncio.wait_for(watch.read(), 10)
    assert (first.leading, first.term, first.leader) == (True, one.served.cell.term, one.served.address)
    two = await member("s2")
    both = sorted([one.served.address, two.served.address])
    assert list((await asyncio.wait_for(watch.read(), 10)).schedulers) == both
    assert two.leadership.view == View("main", False, first.term, one.served.address, tuple(both))


async def test_a_standby_takes_over_when_the_lease_lapses_under_a_higher_term(member: Any) -> None:
    one, two = await member("s1"), await member("s2")
    term = one.served.cell.term
    await one.stall()
    view = await two.until(lambda view: view.leading)
    assert two.served.cell.term == view.term > term


async def test_an_old_leader_that_stood_still_learns_of_it_and_lets_everybody_go(member: Any) -> None:
    one, two = await member("s1"), await member("s2")
    gateway, worker = await one.served.gateway(), await one.served.worker("w1", run=False)
    await one.stall()
    new = await two.until(lambda view: view.leading)
    assert one.leading, "it does not know yet, and serves on"
    await gateway.send(submits=[submit(1)])
    await worker.answer(await worker.next_step())
    one.resume()
    view = await one.until(lambda view: not view.leading)
    assert (view.leader, view.term, one.served.cell.term) == (two.served.address, new.term, 0)
    await ended(gateway.call)
    await ended(worker.call)
    assert not one.served.cell.links


async def test_a_hello_with_a_higher_term_makes_a_stale_leader_look(member: Any) -> None:
    """Before its own next round: who has seen the new leader is not welcomed by the old one."""
    one, two = await member("s1", ttl_s=60.0), await member("s2")
    one.leadership._state._leases.clear()  # lapsed
    term = (await two.until(lambda view: view.leading)).term
    call = scheduler_pb2_grpc.SchedulerServiceStub(one.served.channel).Session()
    hello = scheduler_pb2.SessionHello(gateway_id="g", highest_term=term)
    error = await refusal(call, scheduler_pb2.SessionRequest(hello=hello))
    assert (error.reason, error.metadata["leader"]) == ("NOT_LEADER", two.served.address)
    assert one.served.cell.term == 0


async def test_a_leader_shown_a_higher_term_outbids_it(member: Any, store: Store) -> None:
    one = await member("s1", ttl_s=60.0)
    term = one.served.cell.term
    worker = await one.served.worker("w1", run=False)
    gateway = await one.served.gateway("g1", highest_term=term + 10**6)
    assert gateway.responses[0].welcome.term == one.served.cell.term == term + 10**6 + 1
    await ended(worker.call)
    assert (await store.leader("main")).term == term + 10**6 + 1  # type: ignore[union-attr]


async def test_a_leader_serves_on_while_the_store_is_away(member: Any, store: Store) -> None:
    one, two = await member("s1", ttl_s=60.0), await member("s2", ttl_s=60.0)
    store.away = True
    term = one.served.cell.term
    await one.served.worker("w1")
    gateway = await one.served.gateway()
    await gateway.send(submits=[submit(1)])
    assert await gateway.finished(1) == [100, 101, 102, 103, 104]
    for each in (one, two):
        await each.leadership._ask()
    assert one.leading
    assert not two.leading, "nobody can begin to lead"
    assert one.served.cell.term == term
    call = scheduler_pb2_grpc.SchedulerServiceStub(one.served.channel).Session()
    await call.write(
        scheduler_pb2.SessionRequest(hello=scheduler_pb2.SessionHello(gateway_id="g2", highest_term=term + 5))
    )
    assert (await call.read()).welcome.term == term, "it can't outbid; the peer will refuse it"
    call.cancel()
    store.away = False
    await one.leadership._ask()
    assert one.served.cell.term > term + 5, "now it can"


async def test_a_store_that_was_away_and_lost_everything_finds_the_leader_first(member: Any, store: Store) -> None:
    one, two = await member("s1", ttl_s=60.0), await member("s2", ttl_s=60.0)
    store.away = True
    await two.leadership._ask()
    store.lose_everything()
    store.away = False
    await two.leadership._ask()
    assert not two.leading, "it gives the leader the time to renew"
    await one.leadership._ask()
    await two.leadership._ask()
    assert one.leading
    assert two.leadership.view.leader == one.served.address


async def test_an_emptied_store_costs_nothing_if_the_leader_is_first(member: Any, store: Store) -> None:
    one = await member("s1", ttl_s=60.0)
    term = one.served.cell.term
    store.lose_everything()
    await one.leadership._ask()
    assert (await store.leader("main")) == Lease("main", "s1", one.served.address, term)
    assert one.served.cell.term == term


async def test_an_emptied_store_and_a_standby_that_is_first(member: Any, store: Store) -> None:
    one, two = await member("s1", ttl_s=60.0), await member("s2", ttl_s=60.0)
    term = one.served.cell.term
    store.lose_everything()
    await two.leadership._ask()
    assert two.served.cell.term > term
    await one.leadership._ask()
    assert not one.leading


async def test_a_leader_told_to_stop_hands_over_without_waiting_for_the_lease(member: Any) -> None:
    one, two = await member("s1", ttl_s=60.0), await member("s2", ttl_s=0.3)
    gateway = await one.served.gateway()
    assert await one.leadership.hand_over(10)
    assert two.leading
    assert not one.leading
    await ended(gateway.call)
    assert await one.leadership.hand_over(10), "a standby has nothing to hand over"


async def test_a_leader_without_a_standby_keeps_what_it_has(member: Any) -> None:
    one = await member("s1", ttl_s=0.1)
    assert not await one.leadership.hand_over(10)
    await one.leadership._ask()
    assert one.leading


async def test_a_leader_whose_standby_does_not_come_goes_on(member: Any, store: Store) -> None:
    one, two = await member("s1"), await member("s2")
    await two.stall()
    assert not await one.leadership.hand_over(0.2)
    assert one.leading
    two.resume()
    await two.until(lambda view: view.leading)
    await one.until(lambda view: not view.leading)


async def test_a_lease_that_another_took_is_not_taken_back(member: Any, store: Store) -> None:
    one = await member("s1", ttl_s=60.0)
    lease = store.steal(one.served.cell.term + 1)
    await one.leadership._ask()
    assert one.leadership.view == View("main", False, lease.term, "other:1", (one.served.address,))


@pytest.mark.parametrize("flags", [{"state": "localhost"}, {"cell": ""}, {"cell": "a b"}, {"cluster": "x{y}"}])
def test_wrong_settings_are_refused(flags: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="--"):
        SchedulerConfig(**flags).validate()
