"""The gateway's one stream to the scheduler, and what keeps requests alive when it breaks.

    connect ─▶ Hello{highest term} ─▶ Welcome{term} ─▶ resubmit every live request ─▶ up
       ▲                                  │ lower term than seen: a stale leader        │
       └────── back-off, next address ◀───┴── stream ends, or a higher term leads ◀─────┘

* `Leaders` says whom to call, and when a scheduler leads under a higher term than ours: however healthy this stream
  looks, its scheduler has missed that, and is left.
* A resubmission carries what the request has emitted, and a higher attempt; clients only see a pause. Resubmissions are
  paced, so that a scheduler that has just started isn't met by everything at once.
* Output is matched by handle, and a handle belongs to one submission: whatever an earlier one still says is dropped.
* A gap in a choice's indices is never forwarded; the request is submitted anew.
* The reader takes output into per-request buffers and never waits for a client.
* After `loss_s` without any session, live requests end as UNAVAILABLE.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence

import grpc
from tandem.v1 import scheduler_pb2_grpc

from cluster import channel
from cluster.errors import Internal, Unavailable, from_status
from cluster.leaders import Leaders
from cluster.logs import event
from gateway import convert
from gateway.metrics import GatewayMetrics
from gateway.requests import LiveRequest, Reaction, RequestTable
from gateway.streams import OutputNews

logger = logging.getLogger(__name__)

# One message carries at most so many submissions, or so many prompt tokens.
_MAX_SUBMITS = 32
_MAX_SUBMIT_TOKENS = 262_144
# Pause between messages of resubmissions.
_PACE_S = 0.005
_WELCOME_TIMEOUT_S = 5.0


class SessionRefused(Exception):
    """What answered can't be this gateway's scheduler."""


class Session:
    """Keeps a session open as long as the gateway runs. Everything happens on the event loop."""

    def __init__(
        self,
        leaders: Leaders,
        gateway_id: str,
        table: RequestTable,
        metrics: GatewayMetrics,
        on_models: Callable[[Sequence[convert.ModelNews]], None],
        on_change: Callable[[], None],
        loss_s: float = 60.0,
        first_backoff_s: float = 0.1,
        cell: str = "",
        on_drain: Callable[[], None] = lambda: None,
    ) -> None:
        """`leaders`: not yet started, ours to close; `cell`: the requests of the table that are this session's.

        `on_models`: the scheduler's models; `on_change`: the session went up or down, or the scheduler drains;
        `on_drain`: an operator wants this gateway to end.
        """
        self._leaders = leaders
        self._gateway_id = gateway_id
        self._table = table
        self._metrics = metrics
        self._on_models = on_models
        self._on_change = on_change
        self._loss_s = loss_s
        self._first_backoff_s = first_backoff_s
        self._cell = cell
        self._on_drain = on_drain
        self._ending = False
        self._ending_told = False
        self._highest_term = 0
        self._draining = False
        self._up = asyncio.Event()
        self._submits: deque[LiveRequest] = deque()
        self._cancels: list[tuple[int, int | None]] = []
        self._wake = asyncio.Event()
        self._loss_timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------------------------------- for requests

    @property
    def up(self) -> bool:
        """Whether a scheduler has welcomed this gateway and the stream stands."""
        return self._up.is_set()

    @property
    def draining(self) -> bool:
        """Whether the scheduler says that it refuses new requests."""
        return self._draining

    async def wait_up(self, timeout_s: float) -> bool:
        """Wait until the session is up; False if it isn't after so long."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._up.wait()
        except TimeoutError:
            return False
        return True

    def begin_drain(self) -> None:
        """Tell the scheduler, and each later one, that this gateway ends with its last request."""
        self._ending = True
        self._wake.set()

    def submit(self, request: LiveRequest) -> None:
        """Send a registered request as soon as there is a session."""
        self._submits.append(request)
        self._wake.set()

    def cancel(self, request: LiveRequest) -> None:
        """Nobody waits for the request any more; it leaves the table next. Idempotent."""
        if request.sent and self.up and not all(choice.finish is not None for choice in request.choices):
            self._cancels.append((request.handle, None))
            self._wake.set()

    # ----------------------------------------------------------------------------------------------- lifetime

    def start(self) -> None:
        """Begin to connect, and keep doing so."""
        self._arm_loss_timer()
        self._leaders.start()
        self._task = asyncio.create_task(self._run(), name="session")

    async def close(self) -> None:
        """End the session and its task."""
        if self._loss_timer is not None:
            self._loss_timer.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        await self._leaders.close()

    async def _run(self) -> None:
        attempt = 0
        while True:
            address = await self._leaders.candidate()
            try:
                await self._serve(address)
            except (*channel.STREAM_ERRORS, SessionRefused, OSError) as error:
                self._log_loss(address, error, attempt)
                self._leaders.refused(error)
            except Exception:
                logger.exception("the session failed")
            channel.end_if_cancelled()
            was_up = self.up
            self._go_down()
            attempt = 0 if was_up else attempt + 1
            await self._leaders.pause(attempt, first_s=self._first_backoff_s)

    def _log_loss(self, address: str, error: BaseException, attempt: int) -> None:
        # A scheduler that is away for long would fill the log; powers of two tell the story.
        if self.up or attempt & (attempt - 1) == 0:
            reason = (
                error.code().name if isinstance(error, grpc.aio.AioRpcError) else str(error) or type(error).__name__
            )
            what = "scheduler lost" if self.up else "scheduler not reached"
            event(logger, what, level=logging.WARNING, address=address, reason=reason, live_requests=len(self._table))

    async def _serve(self, address: str) -> None:
        """One connection, from Hello until the stream ends."""
        async with channel.connect(address) as connection:
            call = scheduler_pb2_grpc.SchedulerServiceStub(connection).Session()
            parts: list[asyncio.Task[None]] = []
            try:
                async with asyncio.timeout(_WELCOME_TIMEOUT_S):
                    await call.write(convert.hello(self._gateway_id, self._highest_term, self._leaders.cell))
                    first = await call.read()
                if first is grpc.aio.EOF:
                    raise SessionRefused("the stream ended before a welcome")
                self._welcome(address, convert.session_news(first))
                parts = [asyncio.create_task(self._write(call)), asyncio.create_task(self._until_outranked())]
                for part in parts:
                    part.add_done_callback(lambda _: call.cancel())
                while (message := await call.read()) is not grpc.aio.EOF:
                    self._take(convert.session_news(message))
                if (code := await call.code()) is not grpc.StatusCode.OK:
                    raise SessionRefused(f"the stream ended: {code.name}")
            except asyncio.CancelledError:
                # A part that has ended cancels the call; that is a lost session, not the end of this task.
                why = next((part.exception() for part in parts if part.done() and not part.cancelled()), None)
                if why is None:
                    raise
                raise SessionRefused(str(why) if isinstance(why, SessionRefused) else "writing failed") from why
            finally:
                channel.abandon(call)
                for part in parts:
                    part.cancel()
                await asyncio.gather(*parts, return_exceptions=True)

    async def _until_outranked(self) -> None:
        address = await self._leaders.outranked(self._highest_term)
        raise SessionRefused(f"{address} leads under a higher term")

    # -------------------------------------------------------------------------------------------- up and down

    def _welcome(self, address: str, news: convert.SessionNews) -> None:
        if news.term is None:
            raise SessionRefused("the first message is no welcome")
        if news.term < self._highest_term:
            raise SessionRefused(f"term {news.term} is over: {self._highest_term} has been seen")
        self._highest_term = news.term
        self._leaders.welcomed()
        self._submits.clear()
        self._cancels.clear()
        self._ending_told = False
        resubmitted = 0
        for request in self._mine():
            if not request.finished:
                resubmitted += int(request.sent)
                self._table.renew(request)
                self._submits.append(request)
        self._draining = news.draining
        if self._loss_timer is not None:
            self._loss_timer.cancel()
            self._loss_timer = None
        self._metrics.session_opened(resubmitted)
        event(logger, "scheduler joined", address=address, term=news.term, resubmitted=resubmitted)
        self._up.set()
        self._wake.set()
        self._take(news)
        self._on_change()

    def _go_down(self) -> None:
        if not self.up:
            return
        self._up.clear()
        self._arm_loss_timer()
        self._on_change()

    def _arm_loss_timer(self) -> None:
        self._loss_timer = asyncio.get_running_loop().call_later(self._loss_s, self._give_up)

    def _give_up(self) -> None:
        """No scheduler for loss_s; requests that wait for one end now. Later ones are not let in while it lasts."""
        requests = self._mine()
        if requests:
            event(logger, "no scheduler for too long", level=logging.WARNING, ended=len(requests), seconds=self._loss_s)
        for request in requests:
            request.fail(Unavailable(f"no scheduler for {self._loss_s:g} s", retry_after_s=1.0))
        self._loss_timer = None

    def _mine(self) -> list[LiveRequest]:
        """The live requests that are this session's, the oldest submission first."""
        return [request for request in self._table if request.cell == self._cell]

    # ------------------------------------------------------------------------------------------------ writing

    async def _write(self, call: grpc.aio.StreamStreamCall) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._submits or self._cancels or self._ending != self._ending_told:
                submits, resubmits = self._next_submits()
                cancels, self._cancels = self._cancels, []
                now = asyncio.get_running_loop().time()
                messages = [convert.submit(request, now) for request in submits]
                if messages or cancels or self._ending != self._ending_told:
                    self._ending_told = self._ending
                    await call.write(convert.session_request(messages, cancels, self._ending))
                if resubmits and self._submits:
                    await asyncio.sleep(_PACE_S)

    def _next_submits(self) -> tuple[list[LiveRequest], int]:
        """Take what goes into the next message; also how many of these are resubmissions."""
        chosen: list[LiveRequest] = []
        num_tokens = resubmits = 0
        while self._submits and len(chosen) < _MAX_SUBMITS and num_tokens < _MAX_SUBMIT_TOKENS:
            request = self._submits.popleft()
            if request.finished or request.sent or request.cell != self._cell or not self._table.is_current(request):
                continue
            request.sent = True
            resubmits += int(request.attempt > 0)
            num_tokens += len(request.spec.prompt_token_ids)
            chosen.append(request)
        return chosen, resubmits

    # ------------------------------------------------------------------------------------------------ reading

    def _take(self, news: convert.SessionNews) -> None:
        if news.models is not None:
            self._on_models(news.models)
        if news.drain:
            self._on_drain()
        if news.draining != self._draining:
            self._draining = news.draining
            self._on_change()
        now = asyncio.get_running_loop().time()
        told = []
        for output in news.outputs:
            request = self._table.find(output.handle)
            if request is None:
                continue
            told.append(request)
            try:
                self._deliver(request, output, now)
            except Exception:
                # One broken request never takes the session, and with it everybody else's, down.
                logger.exception("output could not be taken in")
                request.fail(Internal("the output of this request could not be read"))
                self.cancel(request)
        # After all of them, so that a request's choices travel together.
        for request in told:
            request.announce()

    def _deliver(self, request: LiveRequest, output: OutputNews, now: float) -> None:
        if output.error is not None:
            request.fail(from_status(output.error))
            request.sent = False  # the scheduler has let go of it: there is nothing to cancel
            return
        reaction, num_new = request.accept(output)
        if num_new:
            self._metrics.tokens_received(request, num_new, now)
        if reaction is Reaction.CANCEL_CHOICE:
            self._cancels.append((request.handle, output.choice))
            self._wake.set()
        elif reaction is Reaction.RESUBMIT:
            self._resubmit(request, output)

    def _resubmit(self, request: LiveRequest, output: OutputNews) -> None:
        event(
            logger,
            "tokens missing",
            level=logging.WARNING,
            request_id=request.spec.request_id,
            choice=output.choice,
            index=output.first_token_index,
        )
        self._metrics.gap()
        if request.gapped_too_often:
            request.fail(Internal("tokens of this request went missing again and again"))
            self._cancels.append((request.handle, None))
        else:
            self._table.renew(request)
            self._submits.append(request)
        self._wake.set()
