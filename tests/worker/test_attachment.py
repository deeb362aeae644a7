"""The attach stream against a scripted scheduler, over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import numpy as np
import pytest
from tandem.v1 import scheduler_pb2

from cluster.errors import from_status
from tests.worker.attaching import PROMPT, Bench, admission, attached, step, until


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with attached() as opened:
        yield opened


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
    await asyncio.wait_for(draining, 60)
    await asyncio.wait_for(bench.running, 60)


async def test_who_is_told_to_stop_between_hello_and_welcome_asks_to_be_relieved(bench: Bench) -> None:
    """It is attached then, for all that the scheduler knows, and a stream that breaks is a crash."""
    scheduler = bench.scheduler
    first = await scheduler.next()
    scheduler.asked.clear()
    scheduler.welcomes.clear()
    first.outgoing.put_nowait(None)
    await asyncio.wait_for(scheduler.asked.wait(), 60)
    draining = asyncio.ensure_future(bench.attachment.drain(60))
    await asyncio.sleep(0)
    assert not draining.done()
    scheduler.welcomes.set()
    stream = await scheduler.next()
    await stream.next("draining")
    stream.send(drained=scheduler_pb2.WorkerDrained())
    await asyncio.wait_for(draining, 60)
    await asyncio.wait_for(bench.running, 60)


async def test_drain_ends_with_the_stream_or_the_timeout(bench: Bench) -> None:
    stream = await bench.scheduler.next()
    await bench.attachment.drain(0.05)
    assert not bench.running.done()
    stream.outgoing.put_nowait(None)
    await asyncio.wait_for(bench.running, 60)


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
