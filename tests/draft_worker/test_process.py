"""The draft worker as a process: its lines, its announcement, its stream, its end, and a port in use."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tandem.v1 import draft_pb2, draft_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc

from cluster.server import bind, create_server

PROMPT = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]


class ScriptedScheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    def __init__(self) -> None:
        self.term = 10
        self.hellos: asyncio.Queue[Any] = asyncio.Queue()
        self.beats: asyncio.Queue[Any] = asyncio.Queue()
        self.ends: asyncio.Queue[None] = asyncio.Queue()
        self.hang_up = asyncio.Event()
        self.drain = asyncio.Event()

    async def Announce(self, request_iterator: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        first = await anext(request_iterator)
        self.hellos.put_nowait(first.hello)
        yield scheduler_pb2.AnnounceResponse(term=self.term)

        async def read() -> None:
            async for message in request_iterator:
                self.beats.put_nowait(message)

        reading = asyncio.ensure_future(read())
        hanging_up = asyncio.ensure_future(self.hang_up.wait())
        draining = asyncio.ensure_future(self.drain.wait())
        try:
            await asyncio.wait({reading, hanging_up, draining}, return_when=asyncio.FIRST_COMPLETED)
            if self.drain.is_set():
                yield scheduler_pb2.AnnounceResponse(term=self.term, drain=True)
                await reading
        finally:
            draining.cancel()
            reading.cancel()
            hanging_up.cancel()
            self.ends.put_nowait(None)


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
        sys.executable,
        "-P",
        "-m",
        "draft_worker",
        *flags,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


async def ready(child: asyncio.subprocess.Process) -> str:
    assert child.stdout is not None
    words = (await asyncio.wait_for(child.stdout.readline(), 60)).decode().split()
    assert words[:2] == ["READY", "draft_worker"]
    return words[2]


async def get(queue: asyncio.Queue[Any]) -> Any:
    return await asyncio.wait_for(queue.get(), 20)


async def test_it_announces_drafts_and_ends() -> None:
    async with scheduling() as (scheduler, at):
        flags = ("--target=m", "--draft=ngram", f"--scheduler={at}", "--worker-id=d1", "--metrics-port=0")
        async with process(*flags) as child:
            address = await ready(child)
            hello = await get(scheduler.hellos)
            assert (hello.worker_id, hello.model, hello.address, hello.proposer) == ("d1", "m", address, "ngram")
            assert hello.highest_term == 0
            await get(scheduler.beats)

            channel = grpc.aio.insecure_channel(address)
            check = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert check.status == health_pb2.HealthCheckResponse.SERVING
            call = draft_pb2_grpc.DraftServiceStub(channel).Draft()
            # The target says that it has 4 ids: what is 4 or more is never sent.
            await call.write(draft_pb2.DraftRequest(hello=draft_pb2.DraftHello(worker_id="w", model="m", vocab_size=4)))
            assert (await call.read()) == draft_pb2.DraftResponse(welcome=draft_pb2.DraftWelcome())
            opening = draft_pb2.DraftOpen(
                slot=3,
                generation=9,
                token_ids=PROMPT,
                num_prompt_tokens=4,
                temperature=float("nan"),
                max_draft_tokens=4,
            )
            await call.write(draft_pb2.DraftRequest(opens=[opening]))
            tails: list[Any] = []
            while not tails or not tails[-1].token_ids:
                tails += (await asyncio.wait_for(call.read(), 10)).tails
            assert (tails[-1].slot, tails[-1].generation, tails[-1].base) == (3, 9, len(PROMPT))
            assert list(tails[-1].token_ids) == [3]

            # The scheduler's end of the stream: it announces again, with the term that it has seen.
            scheduler.term = 11
            scheduler.hang_up.set()
            assert (await get(scheduler.hellos)).highest_term == 10
            await get(scheduler.ends)
            child.send_signal(signal.SIGTERM)
            assert child.stdout is not None
            assert await asyncio.wait_for(child.wait(), 20) == 0
            assert await child.stdout.read() == b""
            await channel.close()


async def test_it_ends_when_it_is_drained() -> None:
    async with scheduling() as (scheduler, at), process("--target=m", f"--scheduler={at}") as child:
        await ready(child)
        await get(scheduler.hellos)
        scheduler.drain.set()
        await get(scheduler.ends)
        assert await asyncio.wait_for(child.wait(), 60) == 0
        assert scheduler.hellos.empty(), "it did not announce again"


async def test_it_announces_an_address_that_others_can_dial() -> None:
    """A container listens on every address, and is known by its name."""
    async with scheduling() as (scheduler, at), process("--target=m", f"--scheduler={at}", "--host=0.0.0.0") as child:
        port = (await ready(child)).rpartition(":")[2]
        assert (await get(scheduler.hellos)).address == f"{socket.gethostname()}:{port}"


async def test_a_worker_that_does_not_introduce_itself_is_refused() -> None:
    async with process("--target=m", "--scheduler=127.0.0.1:1") as child:
        address = await ready(child)
        async with grpc.aio.insecure_channel(address) as channel:
            for hello, code in (
                (draft_pb2.DraftHello(), grpc.StatusCode.INVALID_ARGUMENT),
                (draft_pb2.DraftHello(worker_id="w", model="m"), grpc.StatusCode.INVALID_ARGUMENT),
                (draft_pb2.DraftHello(worker_id="w", model="x", vocab_size=9), grpc.StatusCode.NOT_FOUND),
            ):
                call = draft_pb2_grpc.DraftServiceStub(channel).Draft()
                await call.write(draft_pb2.DraftRequest(hello=hello))
                with pytest.raises(grpc.RpcError):
                    await call.read()
                assert await call.code() is code


async def test_a_port_in_use_is_named() -> None:
    server = create_server()
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    async with process("--target=m", f"--port={port}") as child:
        out, err = await asyncio.wait_for(child.communicate(), 60)
        assert (child.returncode, out) == (2, b"")
        assert str(port) in err.decode()
        assert "Traceback" not in err.decode()
    await server.stop(0)
