"""Draining of workers, draft workers, gateways and the cell, over real gRPC."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from google.rpc import code_pb2
from tandem.v1 import admin_pb2, scheduler_pb2, scheduler_pb2_grpc

from tests.scheduler.peers import Served, submit
from tests.scheduler.test_service import EXPECTED, until


async def test_a_drained_worker_s_sequences_move_and_it_is_told(served: Served) -> None:
    gateway, first = await served.gateway(), await served.worker("w1", run=False)
    await gateway.send(submits=[submit(1)])
    steps = [await first.next_step(), await first.next_step()]
    await served.worker("w2")
    await served.admin.Drain(admin_pb2.DrainRequest(worker_id="w1"))
    status = await served.admin.GetStatus(admin_pb2.GetStatusRequest())
    assert [worker.state for worker in status.workers] == [2, 1]
    for step in steps:
        await first.answer(step)
    assert await gateway.finished(1) == EXPECTED
    while not (message := await asyncio.wait_for(first.call.read(), 60)).HasField("drained"):
        if message.HasField("step"):
            await first.answer(message.step)


async def test_draining_an_unknown_worker_is_not_found(served: Served) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.admin.Drain(admin_pb2.DrainRequest(worker_id="nobody"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_draining_cell_refuses_new_requests_and_ends_old_ones(served: Served) -> None:
    gateway, worker = await served.gateway(), await served.worker(run=False)
    await gateway.send(submits=[submit(1)])
    await worker.next_step()
    served.cell.drain()
    await gateway.send(submits=[submit(2)])
    error = await gateway.error(2)
    assert error.code == code_pb2.UNAVAILABLE
    served.tasks.append(asyncio.create_task(worker.run()))
    await worker.answer(worker.steps[0])
    assert await gateway.finished(1) == EXPECTED
    await asyncio.wait_for(served.cell.gateways.idle.wait(), 60)


async def test_a_draft_worker_is_told_to_drain_and_workers_leave_it_first(served: Served) -> None:
    worker = await served.worker("w1", run=False)
    calls = [scheduler_pb2_grpc.SchedulerServiceStub(served.channel).Announce() for _ in range(2)]
    for number, call in enumerate(calls):
        hello = scheduler_pb2.DraftWorkerHello(worker_id=f"d{number}", model="m", address=f"127.0.0.1:{number}")
        await call.write(scheduler_pb2.AnnounceRequest(hello=hello))
        assert not (await call.read()).drain
    await served.admin.Drain(admin_pb2.DrainRequest(draft_worker_id="d1"))
    told = await asyncio.wait_for(calls[1].read(), 60)
    assert (told.drain, told.term) == (True, served.cell.term)
    lists = [list((await worker.call.read()).draft_workers.addresses) for _ in range(4)]
    assert lists[2:] == [["127.0.0.1:0", "127.0.0.1:1"], ["127.0.0.1:0"]]
    await calls[1].done_writing()
    assert await asyncio.wait_for(calls[1].code(), 60) is grpc.StatusCode.OK
    assert list(served.cell.drafters) == ["d0"]


async def test_a_gateway_is_told_to_drain_and_shown_doing_so(served: Served) -> None:
    gateway, other = await served.gateway("g1"), await served.gateway("g2")
    await gateway.send(submits=[submit(1), submit(2)])
    await until(lambda: len(served.cell.gateways.owners) == 2)
    await served.admin.Drain(admin_pb2.DrainRequest(gateway_id="g1"))
    while not (await gateway.read()).drain:
        pass
    await other.send(draining=True)
    await until(lambda: served.cell.gateways.sessions["g2"].gateway_draining)
    status = await served.admin.GetStatus(admin_pb2.GetStatusRequest())
    assert [(one.gateway_id, one.live_requests, one.draining) for one in status.gateway_sessions] == [
        ("g1", 2, True), ("g2", 0, True),
    ]  # fmt: skip
    assert not any(response.drain for response in other.responses)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"gateway_id": "nobody"}, grpc.StatusCode.NOT_FOUND),
        ({"draft_worker_id": "nobody"}, grpc.StatusCode.NOT_FOUND),
        ({"scheduler": True}, grpc.StatusCode.FAILED_PRECONDITION),
        ({"worker_id": "w1", "gateway_id": "g1"}, grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_what_cannot_be_drained_is_refused(served: Served, fields: Any, code: grpc.StatusCode) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.admin.Drain(admin_pb2.DrainRequest(**fields))
    assert caught.value.code() is code
    assert not served.cell.gateways.draining


async def test_a_worker_that_was_to_be_relieved_under_an_earlier_leader_is(served: Served) -> None:
    worker = await served.worker("w1", run=False, hello={"draining": True})
    kinds = [(await asyncio.wait_for(worker.call.read(), 60)).WhichOneof("message") for _ in range(3)]
    assert kinds == ["draft_workers", "drain", "drained"]
