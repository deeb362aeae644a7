"""Calls that outlive their stream: in grpcio's core, where a write failed, and in cycles of ours."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref

import grpc
import pytest
from tandem.v1 import scheduler_pb2, scheduler_pb2_grpc

from cluster.channel import abandon, connect, end_all, end_if_cancelled, until_one_ends
from cluster.inspection import open_tasks
from cluster.server import bind, create_server

STATUS = "_AioCall._handle_status_once_received"
MESSAGES = 50


class Talkative(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Says much that nobody reads."""

    def __init__(self) -> None:
        self.has_spoken = asyncio.Event()

    async def Session(self, request_iterator: object, context: grpc.aio.ServicerContext) -> None:
        for _ in range(MESSAGES):
            await context.write(scheduler_pb2.SessionResponse())
        self.has_spoken.set()
        await asyncio.Event().wait()


async def test_an_abandoned_call_leaves_nothing() -> None:
    servicer, server = Talkative(), create_server()
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(servicer, server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    channel = connect(f"127.0.0.1:{port}")
    call = scheduler_pb2_grpc.SchedulerServiceStub(channel).Session()
    await call.write(scheduler_pb2.SessionRequest())
    await call.read()
    await asyncio.wait_for(servicer.has_spoken.wait(), 30)
    assert open_tasks()[STATUS] == 1
    await server.stop(0)
    with pytest.raises((grpc.RpcError, asyncio.InvalidStateError)):
        await asyncio.wait_for(_write_on(call), 30)
    abandon(call)
    abandon(call)
    await channel.close()
    async with asyncio.timeout(30):
        while STATUS in open_tasks():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def _write_on(call: grpc.aio.StreamStreamCall) -> None:
    while True:
        await call.write(scheduler_pb2.SessionRequest())


async def test_a_cancellation_hidden_by_a_calls_end_is_raised_after_it() -> None:
    waiting = asyncio.Event()

    async def loop() -> None:
        try:
            waiting.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            pass  # what a call's own status does that takes its place
        end_if_cancelled()

    task = asyncio.ensure_future(loop())
    await waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    end_if_cancelled()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await asyncio.Event().wait()
    end_if_cancelled()


async def test_a_stream_whose_part_fails_is_gone_at_once() -> None:
    """A call in a cycle of error, traceback and task would keep its connection until the garbage collector comes."""
    servicer, server = Talkative(), create_server()
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(servicer, server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    gc.collect()
    gc.disable()
    try:
        left: list[weakref.ref[object]] = []
        with contextlib.suppress(ValueError):  # unlike pytest.raises, it keeps no traceback
            await _converse(f"127.0.0.1:{port}", left)
        async with asyncio.timeout(30):
            while left[0]() is not None:  # noqa: ASYNC110  (grpcio still tells it how it ended)
                await asyncio.sleep(0.01)
    finally:
        gc.enable()
        await server.stop(0)


async def _converse(address: str, left: list[weakref.ref[object]]) -> None:
    """One stream, as the services keep theirs."""
    channel = connect(address)
    call = scheduler_pb2_grpc.SchedulerServiceStub(channel).Session()
    left.append(weakref.ref(call))
    parts: list[asyncio.Task[None]] = []
    try:
        await call.write(scheduler_pb2.SessionRequest())
        parts = [asyncio.ensure_future(part) for part in (_read_on(call), _fail())]
        await until_one_ends(parts)
    finally:
        await end_all(parts)
        abandon(call)
        await channel.close()


async def _read_on(call: grpc.aio.StreamStreamCall) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def _fail() -> None:
    await asyncio.sleep(0)
    raise ValueError("a part")
