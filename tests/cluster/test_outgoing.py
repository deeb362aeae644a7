"""Messages written from callbacks: at once, one at a time, merged while one is on its way, and no error lost."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from typing import Any

import pytest

from cluster.outgoing import Outbox, Outgoing, write_until_closed


class Stream:
    """A peer that takes messages when the test says so, and news that wait for it."""

    def __init__(self) -> None:
        self.begun: list[list[int]] = []
        self.news: list[int] = []
        self.last = False
        self.writes: list[asyncio.Future[None]] = []
        self.cancelled = 0
        self.outgoing = Outgoing(self.write, self.next_message)

    async def write(self, message: list[int]) -> None:
        self.begun.append(message)
        self.writes.append(asyncio.get_running_loop().create_future())
        try:
            await self.writes[-1]
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    def next_message(self) -> list[int] | None:
        if self.last:
            self.outgoing.end()
        taken, self.news = self.news, []
        return taken or None

    def say(self, *news: int, last: bool = False) -> None:
        self.news += news
        self.last = last
        self.outgoing.pump()


async def turn() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_news_are_written_within_the_call_and_a_finished_write_needs_no_turn() -> None:
    stream = Stream()
    stream.say(1)
    assert stream.begun == [[1]]
    stream.writes[0].set_result(None)
    stream.say(2)
    assert stream.begun == [[1], [2]]


async def test_while_a_write_runs_news_wait_and_go_out_as_one_message() -> None:
    stream = Stream()
    for number in range(4):
        stream.say(number)
    await turn()
    assert stream.begun == [[0]]
    stream.writes[0].set_result(None)
    await turn()
    assert stream.begun == [[0], [1, 2, 3]]


async def test_it_ends_when_the_last_message_is_written() -> None:
    stream = Stream()
    stream.say(1)
    stream.say(2, last=True)
    ended = asyncio.ensure_future(stream.outgoing.until_ended())
    stream.writes[0].set_result(None)
    await turn()
    assert stream.begun == [[1], [2]]
    assert not ended.done()
    stream.writes[1].set_result(None)
    await asyncio.wait_for(ended, 10)
    stream.say(3)
    assert len(stream.begun) == 2


async def test_it_ends_without_a_last_message() -> None:
    stream = Stream()
    stream.say(1)
    stream.writes[0].set_result(None)
    stream.say(last=True)
    await asyncio.wait_for(stream.outgoing.until_ended(), 10)
    assert stream.begun == [[1]]


@pytest.mark.parametrize("late", [False, True])
async def test_a_failed_write_is_told(late: bool) -> None:
    stream = Stream()
    stream.say(1)
    if late:
        stream.say(2)
    stream.writes[0].set_exception(ConnectionError("gone"))
    if late:
        await turn()
    else:
        stream.say(2)
    with pytest.raises(ConnectionError, match="gone"):
        await asyncio.wait_for(stream.outgoing.until_ended(), 10)
    stream.say(3)
    assert stream.begun == [[1]]


async def test_a_cancelled_write_does_not_cancel_who_has_news() -> None:
    stream = Stream()
    stream.say(1)
    stream.writes[0].cancel()
    stream.say(2)  # raises nothing
    with pytest.raises(asyncio.InvalidStateError):
        await asyncio.wait_for(stream.outgoing.until_ended(), 10)


async def test_a_message_that_cannot_be_made_ends_it() -> None:
    def broken() -> Any:
        raise ValueError("no message")

    async def write(message: Any) -> None:
        raise AssertionError("nothing is to be written")

    outgoing = Outgoing(write, broken)
    outgoing.pump()
    with pytest.raises(ValueError, match="no message"):
        await asyncio.wait_for(outgoing.until_ended(), 10)


@pytest.mark.parametrize("at_once", [False, True])
async def test_messages_that_cannot_be_merged_follow_each_other(at_once: bool) -> None:
    waiting, begun, writes = [1, 2, 3], [], []

    async def write(message: int) -> None:
        begun.append(message)
        if not at_once:
            writes.append(asyncio.get_running_loop().create_future())
            await writes[-1]

    outgoing = Outgoing(write, lambda: waiting.pop(0) if waiting else None, lambda: bool(waiting))
    outgoing.pump()
    for number in range(1, 4):
        assert begun == ([1, 2, 3] if at_once else list(range(1, number + 1)))
        if not at_once:
            writes[-1].set_result(None)
        await turn()
    assert begun == [1, 2, 3]


async def test_a_write_of_several_waits_and_one_of_none() -> None:
    """A client's call waits for its metadata before its first write; a write may also end at once."""
    gates = [asyncio.get_running_loop().create_future() for _ in range(2)]
    done: list[int] = []
    waiting = iter([1, 2, 3])

    async def write(message: int) -> None:
        if message == 1:
            for gate in gates:
                await gate
        done.append(message)

    outgoing = Outgoing(write, lambda: next(waiting, None))
    outgoing.pump()
    outgoing.pump()
    for gate in gates:
        assert done == []
        gate.set_result(None)
        await turn()
    assert done == [1, 2, 3]


@pytest.mark.parametrize("state", ["running", "failed", "done"])
async def test_abandoning_cancels_the_write_and_keeps_nothing(state: str) -> None:
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    stream = Stream()
    stream.say(1)
    if state == "failed":
        stream.writes[0].set_exception(ConnectionError("gone"))
    elif state == "done":
        stream.writes[0].set_result(None)
    gc.collect()
    gc.disable()
    try:
        stream.outgoing.abandon()
        stream.outgoing.abandon()
        stream.say(2)
        assert stream.begun == [[1]]
        assert stream.writes[0].cancelled() == (state == "running") == bool(stream.cancelled)
        stream.writes.clear()  # an error's traceback knows the stream
        outgoing, still_there = stream.outgoing, weakref.ref(stream)
        del stream
        assert still_there() is None, "a cycle keeps the stream until the collector comes by"
    finally:
        gc.enable()
    del outgoing
    gc.collect()
    await turn()
    assert complaints == []


async def test_an_error_that_was_raised_keeps_nothing() -> None:
    """Its traceback knows the frames that it has passed, and they the stream."""
    stream = Stream()

    async def serve(outgoing: Outgoing) -> None:
        try:
            await outgoing.until_ended()
        finally:
            outgoing.abandon()

    stream.say(1)
    stream.writes.pop().set_exception(ConnectionError("gone"))
    stream.say(2)
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(ConnectionError):
            await serve(stream.outgoing)
        still_there = weakref.ref(stream)
        del stream
        assert still_there() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("drop", [False, True])
async def test_an_outbox_is_written_in_order_and_closed_after_what_waits_or_without_it(drop: bool) -> None:
    begun: list[int] = []
    writes: list[asyncio.Future[None]] = []

    async def write(message: int) -> None:
        begun.append(message)
        writes.append(asyncio.get_running_loop().create_future())
        await writes[-1]

    outbox = Outbox()
    outbox.send(1)
    writing = asyncio.ensure_future(write_until_closed(write, outbox))
    await turn()
    assert begun == [1]
    outbox.send(2)
    outbox.send(3)
    outbox.close(drop=drop)
    outbox.send(4)
    expected = [1] if drop else [1, 2, 3]
    for number in range(len(expected)):
        assert begun == expected[: number + 1]
        assert not writing.done()
        writes[-1].set_result(None)
        await turn()
    await asyncio.wait_for(writing, 10)
    assert begun == expected


async def test_who_no_longer_writes_is_told_nothing() -> None:
    async def write(message: int) -> None:
        await asyncio.get_running_loop().create_future()

    outbox = Outbox()
    writing = asyncio.ensure_future(write_until_closed(write, outbox))
    outbox.send(1)
    await turn()
    writing.cancel()
    await asyncio.wait([writing], timeout=10)
    outbox.send(2)
    assert writing.cancelled()
    assert (outbox.next_message(), outbox.has_more) == (2, False)
