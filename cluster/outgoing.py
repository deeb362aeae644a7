"""The sending side of a stream whose news come up in callbacks: written at once, without a task in between.

A task that waits for news and then for its write is woken twice for every message, and on a machine whose caches the
model has just swept each of these turns costs more than making the message does. Here whoever has news calls `pump`,
which begins the write then and there:

    pump() ──▶ next_message() ──▶ write begins ┄┄┄▶ it has ended, which nobody need see
    pump() while a write runs ──▶ nothing, until it has ended: then one message with all that has come meanwhile

A write is a coroutine that stands at the future of its completion; the next `pump` takes it over that. So a write that
has failed is noticed with the next one, or by `until_ended`; that the peer is gone is gRPC's to say, which cancels the
handler of the call.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Generator
from typing import Any, Protocol


class News(Protocol):
    """What comes up by itself, and says so to one listener."""

    on_news: Callable[[], None]
    """called when there may be something to say, or nothing more will come"""


class Outgoing:
    """See the module's text. Everything happens on the event loop; nothing waits but `follow` and `until_ended`."""

    def __init__(
        self,
        write: Callable[[Any], Awaitable[None]],
        next_message: Callable[[], Any | None],
        has_more: Callable[[], bool] = lambda: False,
    ) -> None:
        """`next_message`: all that is to be said now, or None.

        `write` takes one message at a time and waits for its completion only: after any wait before that, it goes on
        with the next pump.

        `has_more`: for messages that can't be merged, whether there is another one already.
        """
        self._write = write
        self._next_message = next_message
        self._has_more = has_more
        self._steps: Generator[Any, None, None] | None = None
        self._completion: asyncio.Future[Any] | None = None
        """what the write stands at; neither, or both"""
        self._resuming = False
        self._ending = False
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._error: Exception | None = None

    def pump(self) -> None:
        """There may be something to say: say it now, or when the running write has ended. Never raises."""
        if self._ended.done():
            return
        try:
            while self._go_on() and not self._ending and (message := self._next_message()) is not None:
                self._steps = self._write(message).__await__()
                if not self._go_on() and not (self._ending or self._has_more()):
                    return
            if self._steps is not None:
                self._resume_later()
            elif self._ending:
                self._ended.set_result(None)
        except Exception as error:
            self._fail(error)
        except asyncio.CancelledError:
            # The call's end, not that of whoever has news.
            self._fail(asyncio.InvalidStateError("the call was cancelled"))

    def end(self) -> None:
        """The message that `next_message` is about to return, or none, is the last; to be called from within it."""
        self._ending = True

    async def follow(self, news: News) -> None:
        """Pump whenever there is news, until all is written or nobody listens any more. Raises as `until_ended`."""
        news.on_news = self.pump
        self.pump()
        try:
            await self.until_ended()
        finally:
            news.on_news = nothing
            self.abandon()

    async def until_ended(self) -> None:
        """Wait until `end` was called and all is written. Raises what writing, or making a message, has raised."""
        await self._ended
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # see `channel.until_one_ends`: a cycle would keep the call

    def abandon(self) -> None:
        """Nobody listens any more. What a cancelled task does to the write that it waits for. Idempotent."""
        self._ended.cancel()
        # What makes messages may know this object, and `write` the call, which no cycle must keep alive.
        self._write = self._next_message = self._has_more = nothing
        steps, completion, self._steps, self._completion = self._steps, self._completion, None, None
        if steps is None or completion is None:
            return
        try:
            if completion.done():
                steps.send(None)
            else:
                completion.cancel()
                steps.throw(asyncio.CancelledError())
        except (Exception, asyncio.CancelledError):
            return
        finally:
            del steps, completion

    def _go_on(self) -> bool:
        """Take the running write as far as it goes; whether none runs any more. Raises what the write does."""
        while self._steps is not None:
            if self._completion is not None and not self._completion.done():
                return False
            steps, self._steps, self._completion = self._steps, None, None
            try:
                completion = steps.send(None)
            except StopIteration:
                break
            if not asyncio.isfuture(completion):
                raise TypeError(f"a write waited for {completion!r}, which is no future")
            self._steps, self._completion = steps, completion
        return True

    def _fail(self, error: Exception) -> None:
        self._error = error
        self._ended.set_result(None)

    def _resume_later(self) -> None:
        if not self._resuming and self._completion is not None:
            self._resuming = True
            self._completion.add_done_callback(self._resume)

    def _resume(self, _: asyncio.Future[Any]) -> None:
        self._resuming = False
        self.pump()


class Source(News, Protocol):
    """What is to be written into a stream, as it comes up."""

    closed: bool
    """Nothing more will come up; what waits is still written."""

    @property
    def has_more(self) -> bool:
        """Whether `next_message` has one."""
        ...

    def next_message(self) -> Any | None:
        """What to write next; None where nothing is."""
        ...


class Outbox:
    """Messages that can't be merged, in order. Bounded by who fills it."""

    def __init__(self) -> None:
        self.on_news: Callable[[], None] = nothing
        self.closed = False
        self._waiting: deque[Any] = deque()

    def send(self, message: Any) -> None:
        """Write it, now or after those before it; without effect once closed."""
        if not self.closed:
            self._waiting.append(message)
            self.on_news()

    def close(self, *, drop: bool = False) -> None:
        """Nothing more is taken; `drop`: what waits isn't written either."""
        if drop:
            self._waiting.clear()
        self.closed = True
        self.on_news()

    @property
    def has_more(self) -> bool:
        """Whether `next_message` has one."""
        return bool(self._waiting)

    def next_message(self) -> Any | None:
        """What to write next; None where nothing is."""
        return self._waiting.popleft() if self._waiting else None


async def write_until_closed(write: Callable[[Any], Awaitable[None]], source: Source) -> None:
    """Write what the source has, whenever it has something, and the last of it once it is closed."""

    def next_message() -> Any | None:
        message = source.next_message()
        if source.closed and not source.has_more:
            outgoing.end()
        return message

    outgoing = Outgoing(write, next_message, lambda: source.has_more)
    await outgoing.follow(source)


def nothing(*_: Any) -> Any:
    """Stands for what was let go of."""
