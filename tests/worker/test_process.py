"""The worker as a process: its lines, its health, its drain, and the ways it ends."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tandem.v1 import scheduler_pb2, scheduler_pb2_grpc

from cluster.server import bind, create_server
from engine.errors import ModelNotFound
from worker.config import WorkerConfig
from worker.loading import load_engine


class ScriptedScheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Welcomes one worker; the test does the rest."""

    def __init__(self) -> None:
        self.incoming: asyncio.Queue[Any] = asyncio.Queue()
        self.outgoing: asyncio.Queue[Any] = asyncio.Queue()

    async def Attach(self, request_iterator: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async def read() -> None:
            async for message in request_iterator:
                if message.WhichOneof("message") != "heartbeat":
                    self.incoming.put_nowait(message)

        reading = asyncio.ensure_future(read())
        yield scheduler_pb2.AttachResponse(welcome=scheduler_pb2.AttachWelcome(term=1, epoch=1))
        try:
            while True:
                yield await self.outgoing.get()
        finally:
            reading.cancel()

    async def next(self, kind: str) -> Any:
        message = await asyncio.wait_for(self.incoming.get(), 30)
        assert message.WhichOneof("message") == kind, message
        return getattr(message, kind)


@contextlib.asynccontextmanager
async def scheduling() -> AsyncIterator[tuple[ScriptedScheduler, str]]:
    scheduler = ScriptedScheduler()
    server = create_server()
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(scheduler, server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    try:
        yield scheduler, f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@contextlib.asynccontextmanager
async def process(*flags: str) -> AsyncIterator[asyncio.subprocess.Process]:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "worker", *flags, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


FAKE = ("--engine=fake", "--model=/nowhere/tiny", "--threads=1", "--max-sequences=4", "--num-blocks=32")


def step(number: int, slots: list[int], admissions: list[Any]) -> scheduler_pb2.AttachResponse:
    return scheduler_pb2.AttachResponse(
        step=scheduler_pb2.Step(
            term=1,
            epoch=1,
            number=number,
            admissions=admissions,
            slots=slots,
            num_prefill_tokens=[5] * len(slots),
            max_draft_tokens=[0] * len(slots),
            num_new_blocks=[0] * len(slots),
        )
    )


def admission(slot: int, first: int = 70) -> scheduler_pb2.Admission:
    return scheduler_pb2.Admission(
        slot=slot,
        token_ids=[first, 71, 72, 73, 74],
        num_prompt_tokens=5,
        params=scheduler_pb2.DecodingParams(max_tokens=3),
        block_ids=[slot],
    )


async def test_it_serves_drains_and_leaves_stdout_clean() -> None:
    async with scheduling() as (scheduler, at), process(*FAKE, f"--scheduler={at}", "--port=0") as child:
        assert child.stdout is not None
        words = (await asyncio.wait_for(child.stdout.readline(), 60)).decode().split()
        assert words[:2] == ["READY", "worker"]
        hello = await scheduler.next("hello")
        assert (hello.model, hello.num_blocks, hello.max_sequences) == ("tiny", 32, 4)
        assert hello.worker_id.startswith("worker-")
        async with grpc.aio.insecure_channel(words[2]) as channel:
            watching = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="tiny"))
            while (await watching.read()).status != health_pb2.HealthCheckResponse.SERVING:
                pass
            scheduler.outgoing.put_nowait(step(1, [0], [admission(0)]))
            assert list((await scheduler.next("result")).num_tokens) == [1]
            child.send_signal(signal.SIGTERM)
            await scheduler.next("draining")
            assert (await watching.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            # It goes on executing until it is relieved.
            scheduler.outgoing.put_nowait(step(2, [0], []))
            assert list((await scheduler.next("result")).num_tokens) == [1]
            scheduler.outgoing.put_nowait(scheduler_pb2.AttachResponse(drained=scheduler_pb2.WorkerDrained()))
            assert await asyncio.wait_for(child.wait(), 30) == 0
            watching.cancel()
        assert await child.stdout.read() == b""
        assert child.stderr is not None
        assert "Traceback" not in (await child.stderr.read()).decode()


async def test_without_a_scheduler_it_waits_and_ends_when_told() -> None:
    async with process(*FAKE, "--scheduler=127.0.0.1:1") as child:
        assert child.stderr is not None
        seen = b""
        while b"no scheduler" not in seen:
            seen = await asyncio.wait_for(child.stderr.readline(), 60)
        child.send_signal(signal.SIGTERM)
        out, _ = await asyncio.wait_for(child.communicate(), 30)
        assert (child.returncode, out) == (0, b"")


def test_a_model_that_is_not_there_is_named() -> None:
    with pytest.raises(ModelNotFound, match="/nowhere/tiny"):
        load_engine(WorkerConfig(model="/nowhere/tiny", threads=1))


async def test_a_step_that_never_ends_is_told_and_ends_the_process() -> None:
    """Its supervisor's business then: nothing else gives the device back."""
    flags = ("--port=0", "--fake-step-ms=3600000", "--hung-step-s=0.5")
    async with scheduling() as (scheduler, at), process(*FAKE, f"--scheduler={at}", *flags) as child:
        assert child.stdout is not None
        address = (await asyncio.wait_for(child.stdout.readline(), 60)).decode().split()[2]
        await scheduler.next("hello")
        async with grpc.aio.insecure_channel(address) as channel:
            alive = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="liveness"))
            assert (await alive.read()).status == health_pb2.HealthCheckResponse.SERVING
            scheduler.outgoing.put_nowait(step(1, [0], [admission(0)]))
            assert (await alive.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            await scheduler.next("draining")
            scheduler.outgoing.put_nowait(scheduler_pb2.AttachResponse(drained=scheduler_pb2.WorkerDrained()))
            assert await asyncio.wait_for(child.wait(), 60) == 1
        assert child.stderr is not None
        assert "a step has run for" in (await child.stderr.read()).decode()


async def test_a_worker_that_is_to_be_relieved_is_not_ready() -> None:
    async with scheduling() as (scheduler, at), process(*FAKE, f"--scheduler={at}", "--port=0") as child:
        assert child.stdout is not None
        address = (await asyncio.wait_for(child.stdout.readline(), 60)).decode().split()[2]
        await scheduler.next("hello")
        async with grpc.aio.insecure_channel(address) as channel:
            ready = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="readiness"))
            while (await ready.read()).status != health_pb2.HealthCheckResponse.SERVING:
                pass
            scheduler.outgoing.put_nowait(scheduler_pb2.AttachResponse(drain=scheduler_pb2.WorkerDrain()))
            assert (await ready.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            ready.cancel()
