"""The link to a draft worker: one stream, which nobody waits for.

    dialling ──▶ linked ──▶ broken ──▶ (back-off) ──▶ dialling
        └────────────────────▲

The step thread only touches the tail table (worker/tails.py); this loop carries what is in it to and fro. The circuit
breaker is the link itself: an error, the stream's end or a silence of `stall_s` after something was sent breaks it, all
slots are forgotten, and decoding is plain from the very next step. `drafting` says whether drafts can be had; each
change is told to the scheduler at once.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable

import grpc
from tandem.v1 import draft_pb2, draft_pb2_grpc

from cluster.channel import (
    STREAM_ERRORS,
    abandon,
    backoff_delay_s,
    connect,
    end_all,
    end_if_cancelled,
    until_one_ends,
    why_ended,
)
from cluster.logs import event
from cluster.outgoing import Outgoing, nothing
from worker.convert import draft_hello_to_proto, news_to_proto, tails_from_proto
from worker.sequences import Sequence
from worker.tails import TailTable

logger = logging.getLogger(__name__)

WELCOME_TIMEOUT_S = 3.0
MAX_BACKOFF_S = 5.0
STEADY_AFTER_S = 10.0
"""a link that stood for so long starts its back-off anew"""


class LinkBroken(Exception):
    """The draft worker ended the stream, or is silent."""


class DraftLink:
    """See the module's text; the first four methods are the executor's, the rest is the event loop's."""

    def __init__(
        self,
        address: str,
        *,
        worker_id: str,
        model: str,
        vocab_size: int,
        cores: str = "",
        stall_s: float = 2.0,
        on_change: Callable[[], None] = lambda: None,
        arrived: threading.Condition | None = None,
    ) -> None:
        """cores: which ones the target computes on, if any; arrived: notified when tails come."""
        self.tails = TailTable(arrived)
        self.drafting = False
        self.shares_cores = False
        """whether the draft worker's model computes on the target's cores"""
        self.address = address
        self._hello = draft_hello_to_proto(worker_id, model, vocab_size, cores)
        self._stall_s = stall_s
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        self.on_news: Callable[[], None] = nothing
        self._awaiting_since_s: float | None = None

    # ------------------------------------------------------------------------------------- from the executor's thread

    def tail(self, slot: int, tokens: list[int], limit: int) -> list[int]:
        """See executor.Drafting."""
        return self.tails.tail(slot, tokens, limit)

    def follow(self, sequence: Sequence, max_draft_tokens: int) -> None:
        """See executor.Drafting."""
        self.tails.follow(sequence, max_draft_tokens)

    def forget(self, slot: int) -> None:
        """See executor.Drafting."""
        self.tails.forget(slot)

    def flush(self) -> None:
        """See executor.Drafting."""
        if self.tails.has_news:
            try:
                self._loop.call_soon_threadsafe(self._say)
            except RuntimeError:
                # The loop is closed; the process is about to end.
                return

    # ----------------------------------------------------------------------------------------------- on the event loop

    async def run(self) -> None:
        """Keep the link; until cancelled."""
        attempt = 0
        while True:
            began_s = time.monotonic()
            try:
                await self._converse()
            except (*STREAM_ERRORS, LinkBroken) as error:
                if self.drafting or attempt == 0:
                    event(logger, "no drafts", level=logging.WARNING, draft_worker=self.address, why=why_ended(error))
            finally:
                self._set_linked(False)
            end_if_cancelled()
            attempt = 0 if time.monotonic() - began_s > STEADY_AFTER_S else attempt + 1
            await asyncio.sleep(backoff_delay_s(attempt, max_s=MAX_BACKOFF_S))

    def close(self) -> None:
        """Nothing comes from there any more."""
        self._set_linked(False)

    async def _converse(self) -> None:
        """One stream, from Hello until it breaks."""
        channel = connect(self.address)
        call = draft_pb2_grpc.DraftServiceStub(channel).Draft()
        parts: list[asyncio.Task[None]] = []
        try:
            async with asyncio.timeout(WELCOME_TIMEOUT_S):
                await call.write(self._hello)
                welcome = await call.read()
            if welcome is grpc.aio.EOF:
                # Awaiting the end's status raises what the draft worker said.
                raise LinkBroken(f"refused: {await call.details() or (await call.code()).name}")
            self._awaiting_since_s = None
            self.shares_cores = welcome.welcome.shares_cores
            self._set_linked(True)
            event(logger, "draft worker linked", draft_worker=self.address, shares_cores=self.shares_cores)
            writing = Outgoing(call.write, self._next_message).follow(self)
            parts = [asyncio.ensure_future(part) for part in (self._read(call), writing, self._watch())]
            await until_one_ends(parts)
        finally:
            await end_all(parts)
            abandon(call)
            await channel.close()

    async def _read(self, call: grpc.aio.StreamStreamCall) -> None:
        while True:
            message: draft_pb2.DraftResponse = await call.read()
            if message is grpc.aio.EOF:
                raise LinkBroken("the draft worker ended the stream")
            self._awaiting_since_s = None
            self.tails.receive(tails_from_proto(message))

    def _say(self) -> None:
        self.on_news()

    def _next_message(self) -> draft_pb2.DraftRequest | None:
        """What to write; while a write waits for a slow peer, news gathers in the table, where it is bounded."""
        news = self.tails.drain()
        if not news:
            return None
        if self._awaiting_since_s is None and (news.opens or news.commits):
            self._awaiting_since_s = time.monotonic()
        return news_to_proto(news)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._stall_s / 4)
            since_s = self._awaiting_since_s
            if since_s is not None and time.monotonic() - since_s > self._stall_s:
                raise LinkBroken(f"silent for {self._stall_s:g} s")

    def _set_linked(self, linked: bool) -> None:
        if linked:
            self.tails.link()
        else:
            self.tails.unlink()
        if linked != self.drafting:
            self.drafting = linked
            self._on_change()
