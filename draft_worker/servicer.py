"""DraftService: one stream per worker, news in, tails out."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable

import grpc
from tandem.v1 import draft_pb2, draft_pb2_grpc

from cluster.cores import share_cores
from cluster.draft_news import Tail
from cluster.errors import InvalidField, NotFound, abort
from cluster.logs import event
from cluster.outgoing import Outgoing, nothing
from draft_worker.convert import news_from_proto, tails_to_proto
from draft_worker.inbox import Inbox
from drafting.mirror import ALWAYS, SHARED_CORES, Worth

logger = logging.getLogger(__name__)

MAX_SLOTS = 4096
MAX_TAILS = 8
"""of one slot: the likeliest continuation and its branches"""


class DraftServicer(draft_pb2_grpc.DraftServiceServicer):
    """Everything happens on the event loop; the drafting thread is met through the inbox and `deliver`."""

    def __init__(self, target: str, worth: Worth = ALWAYS, cores: str = "") -> None:
        """target is the served name of the model that is drafted for.

        worth: how far guesses go for workers that don't share `cores`, which this process's model computes on.
        """
        self._target = target
        self._worth = worth
        self._cores = cores
        self._streams = itertools.count(1)
        self._outboxes: dict[int, Outbox] = {}
        self._closing = asyncio.Event()
        self.inbox: Inbox

    @property
    def num_streams(self) -> int:
        """Linked workers."""
        return len(self._outboxes)

    def deliver(self, stream: int, tails: list[Tail]) -> None:
        """Tails for a worker; silently dropped when it is gone."""
        outbox = self._outboxes.get(stream)
        if outbox is not None:
            outbox.put(tails)

    async def Draft(
        self, request_iterator: AsyncIterator[draft_pb2.DraftRequest], context: grpc.aio.ServicerContext
    ) -> None:
        """One worker's stream. The first response comes at once: the worker is welcome."""
        hello = await self._hello(request_iterator, context)
        stream = next(self._streams)
        outbox = self._outboxes[stream] = Outbox(hello.vocab_size)
        shares_cores = share_cores(self._cores, hello.cores)
        self.inbox.begin_stream(stream, SHARED_CORES if shares_cores else self._worth)
        event(logger, "worker linked", worker=hello.worker_id, stream=stream, shares_cores=shares_cores)
        welcome = draft_pb2.DraftWelcome(shares_cores=shares_cores)
        parts = [
            asyncio.ensure_future(part)
            for part in (
                self._read(stream, request_iterator),
                _send(outbox, context, welcome),
                self._closing.wait(),
            )
        ]
        try:
            await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # First what must happen: a handler that is cancelled again never gets past an await.
            self._outboxes.pop(stream, None)
            self.inbox.end_stream(stream)
            event(logger, "worker gone", worker=hello.worker_id, stream=stream)
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)

    def close(self) -> None:
        """End all streams in order; their workers go on without drafts."""
        self._closing.set()

    async def _read(self, stream: int, request_iterator: AsyncIterator[draft_pb2.DraftRequest]) -> None:
        async for message in request_iterator:
            self.inbox.put(stream, news_from_proto(message))

    async def _hello(
        self, request_iterator: AsyncIterator[draft_pb2.DraftRequest], context: grpc.aio.ServicerContext
    ) -> draft_pb2.DraftHello:
        hello = draft_pb2.DraftHello()
        async for message in request_iterator:
            hello = message.hello
            break
        if not hello.worker_id or hello.vocab_size == 0:
            await abort(context, InvalidField("hello", "the first message introduces the worker"))
        if hello.model != self._target:
            await abort(context, NotFound("model", hello.model))
        return hello


class Outbox:
    """The latest tails of each slot; a slow worker never gets older ones, nor makes them pile up."""

    def __init__(self, vocab_size: int) -> None:
        """vocab_size is the target's."""
        self.on_news: Callable[[], None] = nothing
        self._vocab_size = vocab_size
        self._tails: dict[int, list[Tail]] = {}
        self._filled = False

    def put(self, tails: list[Tail]) -> None:
        """A tail takes the place of those after other tokens and of those that it only lengthens."""
        for tail in tails:
            if tail.slot not in self._tails and len(self._tails) >= MAX_SLOTS:
                continue
            at = (tail.generation, tail.base)
            waiting = [
                one
                for one in self._tails.get(tail.slot, ())
                if (one.generation, one.base) == at and one.token_ids != tail.token_ids[: len(one.token_ids)]
            ]
            self._tails[tail.slot] = [*waiting[-MAX_TAILS + 1 :], tail]
        self._filled = True
        self.on_news()

    def next_message(self) -> draft_pb2.DraftResponse | None:
        """Everything that waits; no tails are an answer, too."""
        if not self._filled:
            return None
        self._filled = False
        waiting, self._tails = self._tails, {}
        return tails_to_proto([tail for tails in waiting.values() for tail in tails], self._vocab_size)


async def _send(outbox: Outbox, context: grpc.aio.ServicerContext, welcome: draft_pb2.DraftWelcome) -> None:
    await context.write(draft_pb2.DraftResponse(welcome=welcome))
    await Outgoing(context.write, outbox.next_message).follow(outbox)
