"""The attach stream against a scripted scheduler, over real gRPC."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
import pytest
from tandem.v1 import scheduler_pb2, scheduler_pb2_grpc

from cluster.errors import from_status
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
    """the worker has closed its side in order"""

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

    async def Attach(self, request_iterator: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        first = await anext(request_iterator)
        stream = Stream(first.hello)
        self.epoch += 1
        yield scheduler_pb2.AttachResponse(welcome=scheduler_pb2.AttachWelcome(term=self.term, epoch=self.epoch))
        self.streams.put_nowait(stream)

        async def read() -> None:
            async for message in request_iterator:
                await self.reads.wait()
                stream.incoming.put_nowait(message)
            await self.reads.wait()
            stream.left.set()
            stream.outgoing.put_nowait(None)

        reading = asyncio.ensure_future(read())
        try:
            while (message := await stream.outgoing.get()) is not None:
                yield message
        finally:
            reading.cancel()

    async def next(self) -> Stream:
        return await asyncio.wait_for(self.streams.get(), 10)


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
        assert self.permits.acquire(timeout=20)
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


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
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
        link=link,
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
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  (what is watched belongs to another thread or to gRPC)
            await asyncio.sleep(0.005)


async def test_hello_says_what_the_worker_is_and_steps_run(bench: Bench) -> None:
    stream = await bench.scheduler.next()
    hello = stream.hello
    assert (hello.worker_id, hello.boot_id, hello.model, hello.fingerprint) == ("w1", "b1", "m", "fake-1")
    assert (hello.num_blocks, hello.block_size, hello.max_sequences) == (64, 4, 8)
    assert (hello.max_model_len, hello.vocab_size, list(hello.residents)) == (128, 260, [])
    stream.send(step=step(bench, 1, [0], [20], admissions=[admission()]))
    stream.send(step=step(bench, 2, [0], [20]))
    first, second = await stream.next("result"), await stream.next("result")
    assert (first.number, list(first.num_tokens), first.num_model_tokens) == (1, [0], 20)
    assert (second.number, list(second.num_tokens), len(second.token_ids)) == (2, [1], 1)
    assert (second.term, second.epoch, list(second.slots)) == (100, 1, [0])
    tokens = list(second.token_ids)
    for number in range(3, 11):
        stream.send(step=step(bench, number, [0], [0]))
        result = await stream.next("result")
        tokens += result.token_ids
        assert list(result.finish_reasons) == [2 if len(tokens) == 8 and result.num_tokens[0] else 0]
    assert len(tokens) == 8
    assert np.ptp(tokens) > 0


async def test_a_refused_admission_travels_as_a_row_error(bench: Bench) -> None:
    stream = await bench.scheduler.next()
    bad = admission(1, params=scheduler_pb2.DecodingParams(max_tokens=4, temperature=float("nan")))
    stream.send(step=step(bench, 1, [1, 0], [50, 50], admissions=[bad, admission()]))
    result = await stream.next("result")
    assert list(result.num_tokens) == [0, 1]
    [error] = result.errors
    assert error.row == 0
    assert from_status(error.status).code is grpc.StatusCode.INTERNAL
    assert "temperature" in from_status(error.status).message


async def test_other_epochs_terms_and_repeated_numbers_are_dropped(bench: Bench) -> None:
    stream = await bench.scheduler.next()
    good = step(bench, 1, [0], [50], admissions=[admission()])
    for changes in ({"epoch": 99}, {"term": 99}, {"epoch": 0}):
        bad = scheduler_pb2.Step()
        bad.CopyFrom(good)
        for name, value in changes.items():
            setattr(bad, name, value)
        stream.send(step=bad)
    stream.send(step=good)
    stream.send(step=good)
    stream.send(step=step(bench, 2, [0], [0]))
    assert [(await stream.next("result")).number for _ in range(2)] == [1, 2]
    assert len(bench.executor.sequences.get(0).tokens) == len(PROMPT) + 2  # type: ignore[union-attr]


async def test_heartbeats_come_while_a_step_hangs(bench: Bench) -> None:
    stream = await bench.scheduler.next()
    bench.engine.hold()
    stream.send(step=step(bench, 1, [0], [50], admissions=[admission()]))
    await until(bench.engine.entered.is_set)
    beats: list[scheduler_pb2.Heartbeat] = []
    while len(beats) < 2 or beats[-1].running_step_s == 0:
        beats.append(await stream.next("heartbeat"))
    assert beats[-1].running_step_s > 0
    assert beats[-1].last_step == 0
    bench.engine.permits.release(1000)
    assert (await stream.next("result")).number == 1
    await until(lambda: bench.attachment.last_step == 1)
    bench.attachment.send_heartbeat()
    while (beat := await stream.next("heartbeat")).last_step == 0:
        pass
    assert (beat.last_step, beat.running_step_s) == (1, 0)


async def test_re_attach_after_the_running_step_with_queued_ones_dropped(bench: Bench) -> None:
    stream = await bench.scheduler.next()
    stream.send(step=step(bench, 1, [0], [50], admissions=[admission()]))
    await stream.next("result")
    bench.engine.hold()
    stream.send(step=step(bench, 2, [0], [0]))
    stream.send(step=step(bench, 3, [0], [0]))
    await until(bench.engine.entered.is_set)
    bench.scheduler.term = 200
    stream.outgoing.put_nowait(None)  # the scheduler's end of the stream
    await until(lambda: not bench.attachment.attached)
    assert bench.scheduler.streams.empty()
    # Nothing is said before the step has ended.
    bench.engine.permits.release(1)
    again = await bench.scheduler.next()
    bench.engine.permits.release(1000)
    [resident] = again.hello.residents
    # Step 2 counted, step 3 never ran.
    assert list(resident.token_ids[: len(PROMPT)]) == PROMPT
    assert len(resident.token_ids) == len(PROMPT) + 2
    assert resident.num_computed_tokens == len(PROMPT) + 1
    assert list(resident.block_ids) == list(range(-(-resident.num_computed_tokens // 4)))
    assert resident.cache_salt == "s"
    assert again.hello.highest_term == 100
    await until(lambda: bench.attachment.attached)
    # The slots are the new leader's: what it did not admit does not exist, and numbers start afresh.
    again.send(step=step(bench, 1, [0], [0]))
    result = await again.next("result")
    assert (result.term, result.epoch, result.number, list(result.num_tokens)) == (200, 2, 1, [0])
    assert bench.changes == [True, False, True]


async def test_a_lower_term_is_not_obeyed(bench: Bench) -> None:
    stream = await bench.scheduler.next()
    bench.scheduler.term = 50
    stream.outgoing.put_nowait(None)
    second = await bench.scheduler.next()
    assert second.hello.highest_term == 100
    third = await bench.scheduler.next()
    assert third.hello.highest_term == 100
    assert not bench.attachment.attached
    bench.scheduler.term = 101
    await until(lambda: bench.attachment.attached)


async def test_residents_survive_failed_dials_but_not_a_welcome(bench: Bench) -> None:
    stream = await bench.scheduler.next()
    stream.send(step=step(bench, 1, [0], [50], admissions=[admission()]))
    await stream.next("result")
    bench.scheduler.term = 1
    stream.outgoing.put_nowait(None)
    for _ in range(2):
        assert len((await bench.scheduler.next()).hello.residents) == 1
    bench.scheduler.term = 300
    while (last := await bench.scheduler.next()).hello.highest_term == 100 and bench.attachment.attached is False:
        await asyncio.sleep(0.01)
        if bench.attachment.attached:
            break
    assert len(last.hello.residents) == 1
    await until(lambda: bench.attachment.attached)
    last.outgoing.put_nowait(None)
    assert len((await bench.scheduler.next()).hello.residents) == 0


async def test_drain_goes_on_executing_until_relieved(bench: Bench) -> None:
    stream = await bench.scheduler.next()
    stream.send(step=step(bench, 1, [0], [50], admissions=[admission()]))
    await stream.next("result")
    draining = asyncio.ensure_future(bench.attachment.drain(10))
    await stream.next("draining")
    stream.send(step=step(bench, 2, [0], [0]))
    assert list((await stream.next("result")).num_tokens) == [1]
    assert not draining.done()
    stream.send(drained=scheduler_pb2.WorkerDrained())
    await asyncio.wait_for(draining, 5)
    await asyncio.wait_for(bench.running, 5)


async def test_drain_ends_with_the_stream_or_the_timeout(bench: Bench) -> None:
    stream = await bench.scheduler.next()
    await bench.attachment.drain(0.05)
    assert not bench.running.done()
    stream.outgoing.put_nowait(None)
    await asyncio.wait_for(bench.running, 5)


async def test_too_many_steps_reset_the_stream(bench: Bench) -> None:
    stream = await bench.scheduler.next()
    bench.engine.hold()
    stream.send(step=step(bench, 1, [0], [50], admissions=[admission()]))
    await until(bench.engine.entered.is_set)
    for number in (2, 3):
        stream.send(step=step(bench, number, [0], [0]))
    await until(lambda: not bench.attachment.attached)
    bench.engine.permits.release(1000)
    again = await bench.scheduler.next()
    assert len(again.hello.residents) == 1


async def test_the_list_of_draft_workers_reaches_the_link(bench: Bench) -> None:
    stream = await bench.scheduler.next()
    assert bench.link is not None
    told = scheduler_pb2.DraftWorkerList(addresses=["127.0.0.1:9", "127.0.0.1:8"], max_draft_tokens=5)
    stream.send(draft_workers=told)
    await until(lambda: sorted(bench.link._links) == ["127.0.0.1:8", "127.0.0.1:9"])  # type: ignore[union-attr]
    assert bench.link.longest_draft == 5


async def test_a_wish_to_be_relieved_outlives_the_scheduler_that_passed_it_on(bench: Bench) -> None:
    stream = await bench.scheduler.next()
    assert not stream.hello.draining
    stream.outgoing.put_nowait(scheduler_pb2.AttachResponse(drain=scheduler_pb2.WorkerDrain()))
    stream.outgoing.put_nowait(None)
    assert (await bench.scheduler.next()).hello.draining


@pytest.fixture
async def outranking(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Another scheduler leads under a higher term, says what this returns; it listens at the same address."""
    newer = asyncio.Event()

    async def outranked(term: int) -> str:
        await newer.wait()
        newer.clear()
        return "127.0.0.1:1"

    monkeypatch.setattr(bench.attachment._leaders, "outranked", outranked)
    monkeypatch.setattr("worker.attachment.LEAVE_TIMEOUT_S", 60)
    # The first attachment asks the real one.
    (await bench.scheduler.next()).outgoing.put_nowait(None)
    return newer.set


async def test_leaving_for_a_newer_leader_is_told_apart_from_a_crash(
    bench: Bench, outranking: Callable[[], None]
) -> None:
    """The scheduler counts a stream that breaks as a crash of what the worker computed."""
    old = await bench.scheduler.next()
    outranking()
    await asyncio.wait_for(old.left.wait(), 10)
    assert (await bench.scheduler.next()).hello.worker_id == "w1"


async def test_a_slow_old_leader_is_not_waited_for_and_still_sees_no_crash(
    bench: Bench, outranking: Callable[[], None]
) -> None:
    old = await bench.scheduler.next()
    bench.scheduler.reads.clear()
    outranking()
    new = await bench.scheduler.next()
    await until(lambda: bench.attachment.attached)
    assert not old.left.is_set()
    bench.scheduler.reads.set()
    await asyncio.wait_for(old.left.wait(), 10)
    await until(lambda: not bench.attachment._farewells)
    new.send(step=step(bench, 1, [0], [50], admissions=[admission()]))
    assert (await new.next("result")).number == 1


async def test_a_leader_that_is_being_left_has_no_say(bench: Bench, outranking: Callable[[], None]) -> None:
    """What it issues after that would change what the worker is about to offer."""
    old = await bench.scheduler.next()
    bench.engine.hold()
    old.send(step=step(bench, 1, [0], [50], admissions=[admission()]))
    await until(bench.engine.entered.is_set)
    bench.scheduler.reads.clear()
    outranking()
    await until(lambda: bool(bench.attachment._farewells))
    old.send(step=step(bench, 2, [0], [0]))
    bench.scheduler.reads.set()
    # It ends the stream behind that step, and the worker has read all of it.
    await until(lambda: not bench.attachment._farewells)
    assert bench.scheduler.streams.empty()
    bench.engine.permits.release(1000)
    [resident] = (await bench.scheduler.next()).hello.residents
    assert len(resident.token_ids) == len(PROMPT) + 1


@pytest.mark.parametrize("leaves", [True, False])
async def test_no_stream_outlives_its_end(bench: Bench, outranking: Callable[[], None], leaves: bool) -> None:
    """One that waits for the garbage collector keeps its connection."""
    old = await bench.scheduler.next()
    gc.collect()
    gc.disable()
    try:
        calls = count_calls()
        if leaves:
            outranking()
        else:
            old.outgoing.put_nowait(None)
        await bench.scheduler.next()
        await until(lambda: not bench.attachment._farewells and count_calls() == calls)
    finally:
        gc.enable()


def count_calls() -> int:
    return sum(type(one).__name__ == "StreamStreamCall" for one in gc.get_objects())
