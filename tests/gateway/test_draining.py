"""A gateway that is told to end: by an operator, or by a signal."""

from __future__ import annotations

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tandem.v1 import scheduler_pb2

from cluster.errors import Unavailable
from cluster.server import run_until_signal

from .calls import LENGTH, ask, collect, failure, joined
from .conftest import Cell


async def test_an_operator_drains_a_gateway(cell: Cell) -> None:
    """As its process does it: new requests are refused, the live one goes on under the next scheduler, then it ends."""
    gateway = cell.gateway
    serving = asyncio.ensure_future(
        run_until_signal(gateway.server, gateway.drain, health=gateway.health, stop=gateway.stop)
    )
    scheduler = await cell.scheduler.connection()
    call = cell.stub.GenerateStream(ask())
    submit = await scheduler.submit()
    scheduler.emit(submit, b"a")
    await call.read()
    scheduler.outbox.put_nowait(scheduler_pb2.SessionResponse(drain=True))
    await asyncio.wait_for(scheduler.draining.wait(), 10)
    error = await failure(cell.stub.GenerateStream(ask()))
    assert isinstance(error, Unavailable)
    assert (error.code, error.reason, error.retry_after_s) == (grpc.StatusCode.UNAVAILABLE, "DRAINING", 1.0)
    check = health_pb2_grpc.HealthStub(cell.channel).Check
    for service, status in (("", 2), ("tiny", 2), ("tandem.v1.GenerationService", 2), ("liveness", 1)):
        assert (await check(health_pb2.HealthCheckRequest(service=service))).status == status, service

    scheduler.drop()
    cell.scheduler.term += 1
    scheduler = await cell.scheduler.connection()
    submit = await scheduler.submit()
    await asyncio.wait_for(scheduler.draining.wait(), 10)
    assert not serving.done()
    scheduler.emit(submit, b"b", 1, finish_reason=LENGTH)
    assert joined(await collect(call))[0] == "b"
    await asyncio.wait_for(serving, 30)


async def test_a_gateway_says_nothing_of_draining_before_it_does(cell: Cell) -> None:
    scheduler = await cell.scheduler.connection()
    call = cell.stub.GenerateStream(ask())
    scheduler.emit(await scheduler.submit(), b"a", finish_reason=LENGTH)
    assert joined(await collect(call))[0] == "a"
    assert not scheduler.draining.is_set()
    assert not cell.gateway.stop.is_set()
