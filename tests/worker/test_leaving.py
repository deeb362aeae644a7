"""How a worker leaves one scheduler for another: the old one sees no crash, and nothing is left of its stream."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable

import pytest

from tests.worker.attaching import PROMPT, Bench, admission, attached, step, until


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with attached() as opened:
        yield opened


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
    await asyncio.wait_for(old.left.wait(), 60)
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
    await asyncio.wait_for(old.left.wait(), 60)
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
