"""A worker's attachment over real gRPC, and the scripted scheduler at its other end."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from tandem.v1 import scheduler_pb2, scheduler_pb2_grpc

from cluster.leaders import Leaders
from cluster.server import bind, create_server
from engine.batch import Batch
from engine.fake import FakeEngine
from engine.noise import choice_seed
from worker.attachment import Attachment
from worker.draft_links import DraftLinks
from worker.executor import Executor, NoDrafting
from worker.sequences import SequenceTable, limits_of
from worker.stepping import StepThread
from worker.steps import StepOutcome

PROMPT = [ord(c) for c in "the clocks were striking thirteen"]


@dataclass
class Stream:
    """One attach stream, as the scheduler sees it."""

    hello: scheduler_pb2.WorkerHello
    incoming: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    outgoing: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    heartbeats: list[scheduler_pb2.Heartbeat] = field(default_factory=list)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """the worker has said so, and closed its side"""

    def send(self, **message: Any) -> None:
        self.outgoing.put_nowait(scheduler_pb2.AttachResponse(**message))

    async def next(self, kind: str) -> Any:
        """The next message of a kind; heartbeats are put aside unless asked for."""
        while True:
            message = await asyncio.wait_for(self.incoming.get(), 10)
            if message.WhichOneof("message") == kind:
                return getattr(message, kind)
            assert message.WhichOneof("message") == "heartbeat", message
            self.heartbeats.append(message.heartbeat)


class ScriptedScheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Welcomes every worker and lets the test do the rest."""

    def __init__(self) -> None:
        self.streams: asyncio.Queue[Stream] = asyncio.Queue()
        self.term = 100
        self.epoch = 0
        self.reads = asyncio.Event()
        """clear: a scheduler that is too slow to see what comes"""
        self.reads.set()
        self.asked = asyncio.Event()
        """a worker has introduced itself"""
        self.welcomes = asyncio.Event()
        """clear: workers wait for their Welcome"""
        self.welcomes.set()

    async def Attach(self, request_iterator: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        first = await anext(request_iterator)
        stream = Stream(first.hello)
        self.epoch += 1
        self.asked.set()
        await self.welcomes.wait()
        yield scheduler_pb2.AttachResponse(welcome=scheduler_pb2.AttachWelcome(term=self.term, epoch=self.epoch))
        self.streams.put_nowait(stream)

        async def read() -> None:
            async for message in request_iterator:
                await self.reads.wait()
                if message.HasField("leaving"):
                    stream.left.set()
                else:
                    stream.incoming.put_nowait(message)
            await self.reads.wait()
            stream.outgoing.put_nowait(None)

        reading = asyncio.ensure_future(read())
        try:
            while (message := await stream.outgoing.get()) is not None:
                yield message
        finally:
            reading.cancel()

    async def next(self) -> Stream:
        return await asyncio.wait_for(self.streams.get(), 60)


class GatedEngine(FakeEngine):
    """Each forward waits for a permit, so that a test can hold a step."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.permits = threading.Semaphore(1_000_000)
        self.entered = threading.Event()

    def hold(self) -> None:
        self.permits = threading.Semaphore(0)
        self.entered.clear()

    def forward(self, batch: Batch) -> Any:
        self.entered.set()
        assert self.permits.acquire(timeout=60)
        return super().forward(batch)


@dataclass
class Bench:
    """A worker's attachment and its scheduler."""

    scheduler: ScriptedScheduler
    attachment: Attachment
    steps: StepThread
    engine: GatedEngine
    executor: Executor
    link: DraftLinks | None
    running: asyncio.Future[None]
    changes: list[bool]


@contextlib.asynccontextmanager
async def attached() -> AsyncIterator[Bench]:
    scheduler = ScriptedScheduler()
    server = create_server()
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(scheduler, server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    holder: list[Attachment] = []

    def on_outcome(outcome: StepOutcome) -> None:
        holder[0].send_outcome(outcome)

    steps = StepThread(on_outcome)
    engine = await steps.load(lambda: GatedEngine(num_blocks=64, block_size=4, max_sequences=8, max_model_len=128))
    executor = Executor(engine, SequenceTable(limits_of(engine.info), choice_seed), NoDrafting())
    steps.adopt(executor)
    link = DraftLinks(worker_id="w1", model="m", vocab_size=260)
    changes: list[bool] = []
    attachment = Attachment(
        leaders=Leaders([f"127.0.0.1:{port}"]),
        worker_id="w1",
        boot_id="b1",
        model="m",
        steps=steps,
        executor=executor,
        drafts=link,
        on_attached=changes.append,
    )
    holder.append(attachment)
    running = asyncio.ensure_future(attachment.run())
    yield Bench(scheduler, attachment, steps, engine, executor, link, running, changes)
    engine.permits.release(1000)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    steps.stop()
    await server.stop(0)


def admission(slot: int = 0, **changes: Any) -> scheduler_pb2.Admission:
    values: dict[str, Any] = {
        "slot": slot,
        "sequence_id": 5,
        "token_ids": PROMPT,
        "num_prompt_tokens": len(PROMPT),
        "params": scheduler_pb2.DecodingParams(max_tokens=8),
        "seed": 3,
        "block_ids": list(range(slot * 12, slot * 12 + 12)),
        "cache_salt": "s",
    }
    return scheduler_pb2.Admission(**{**values, **changes})


def step(bench: Bench, number: int, slots: list[int], prefill: list[int], **changes: Any) -> scheduler_pb2.Step:
    values: dict[str, Any] = {
        "term": bench.scheduler.term,
        "epoch": bench.scheduler.epoch,
        "number": number,
        "slots": slots,
        "num_prefill_tokens": prefill,
        "max_draft_tokens": [0] * len(slots),
        "num_new_blocks": [0] * len(slots),
    }
    return scheduler_pb2.Step(**{**values, **changes})


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  (what is watched belongs to another thread or to gRPC)
            await asyncio.sleep(0.005)
