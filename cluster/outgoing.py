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
from collections.abc import Awaitable, Callable, Generator
from typing import Any


class Outgoing:
    """See the module's text. Everything happens on the event loop; nothing but `until_ended` waits."""

    def __init__(
        self,
        write: Callable[[Any], Awaitable[None]],
        next_message: Callable[[], Any | None],
        has_more: Callable[[], bool] = lambda: False,
    ) -> None:
        """`write` takes one message at a time. `next_message`: all that is to be said now, or None.

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
        self._write = self._next_message = self._has_more = _nothing
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


def _nothing(*_: Any) -> Any:
    """Stands for what was let go of."""
