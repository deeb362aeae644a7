"""The worker's side of the attach stream: it dials, introduces itself, runs what it is told and says what came of it.

    dialling ──Hello──▶ waiting ──Welcome──▶ attached ──▶ lost ──▶ (back-off) ──▶ dialling
                                                 └──drain──▶ draining ──Drained──▶ ended

`Leaders` says whom to dial, and when a scheduler leads under a higher term than the one attached to: that one has
missed it, and is left, however healthy the stream looks.

Hello is said only after the running step has ended and the queued ones were dropped; what the slots still hold is
offered in it, and forgotten at Welcome. Whatever carries another term or epoch than the Welcome's is dropped, and so is
the outcome of a step that was issued in an earlier epoch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import grpc
from tandem.v1 import scheduler_pb2, scheduler_pb2_grpc

from cluster.channel import STREAM_ERRORS, abandon, connect, end_all, end_if_cancelled, until_one_ends, why_ended
from cluster.leaders import Leaders
from cluster.logs import event
from cluster.outgoing import Outbox, write_until_closed
from worker.convert import (
    draining_to_proto,
    heartbeat_to_proto,
    hello_to_proto,
    leaving_to_proto,
    result_to_proto,
    step_from_proto,
)
from worker.executor import Executor
from worker.stepping import StepThread, TooManySteps
from worker.steps import Resident, StepOutcome

logger = logging.getLogger(__name__)

WELCOME_TIMEOUT_S = 5.0
HEARTBEAT_S = 1.0
MAX_BACKOFF_S = 2.0
LEAVE_TIMEOUT_S = 5.0
"""how long an old leader may take to see that the worker has left; nobody waits for it meanwhile"""


class Drafts(Protocol):
    """Where drafts come from, as the scheduler is told of it and has a say in it."""

    longest_draft: int
    """largest draft budget of a row; 0: not told"""

    @property
    def drafting(self) -> bool:
        """Whether drafts can be had."""
        ...

    def set_addresses(self, addresses: Sequence[str]) -> None:
        """Where draft workers are now."""
        ...


class StreamEnded(Exception):
    """The scheduler ended the stream, or broke the protocol."""


class Outranked(StreamEnded):
    """The worker leaves for a newer leader."""


class Attachment:
    """See the module's text. Everything happens on the event loop."""

    def __init__(
        self,
        *,
        leaders: Leaders,
        worker_id: str,
        boot_id: str,
        model: str,
        steps: StepThread,
        executor: Executor,
        drafts: Drafts | None,
        step_times: Sequence[tuple[int, float]] = (),
        on_attached: Callable[[bool], None] = lambda attached: None,
    ) -> None:
        self.attached = False
        self.last_step = 0
        """number of the last step whose result was sent, in this epoch"""
        self._leaders = leaders
        self._scheduler = ""
        self._identity = (worker_id, boot_id, model)
        self._steps = steps
        self._fingerprint = executor.engine.info.fingerprint
        self._limits = executor.sequences.limits
        self._drafts = drafts
        self._step_times = step_times
        self._on_attached = on_attached
        self._term = 0
        self._epoch = 0
        self._issued = 0
        self._highest_term = 0
        self._outbox = Outbox()
        self._call: grpc.aio.StreamStreamCall | None = None
        """the stream that counts, from Hello on; one that is being left does no more"""
        self._farewells: set[asyncio.Task[None]] = set()
        self._draining = False
        self.to_be_relieved = False
        """an operator wants it so; whichever scheduler comes next is told"""
        self._drained = asyncio.Event()
        self._ended = asyncio.Event()

    @property
    def epoch(self) -> int:
        """Of the latest attachment; 0 before the first."""
        return self._epoch

    async def run(self) -> None:
        """Attach, and attach again whenever the stream is lost; returns once relieved, or lost while draining."""
        attempt = 0
        self._leaders.start()
        try:
            while not (self._drained.is_set() or self._draining):
                self._scheduler = await self._leaders.candidate()
                try:
                    await self._converse()
                except (*STREAM_ERRORS, StreamEnded, TooManySteps) as error:
                    self._leaders.refused(error)
                    if self.attached or attempt == 0:
                        event(logger, "no scheduler", level=logging.WARNING, at=self._scheduler, why=why_ended(error))
                end_if_cancelled()
                attempt = 0 if self.attached else attempt + 1
                self._set_attached(False)
                if not (self._drained.is_set() or self._draining):
                    await self._leaders.pause(attempt, max_s=MAX_BACKOFF_S)
        finally:
            self._set_attached(False)
            self._ended.set()
            for farewell in self._farewells:
                farewell.cancel()
            await asyncio.gather(*self._farewells, return_exceptions=True)
            await self._leaders.close()

    async def drain(self, timeout_s: float) -> None:
        """Ask to be relieved, and go on executing until that is so, the stream is lost or the time is over."""
        self._draining = True
        if self._call is None:
            return
        if self.attached:
            self._outbox.send(draining_to_proto())
        try:
            await asyncio.wait_for(self._ended.wait(), timeout_s)
        except TimeoutError:
            event(logger, "not relieved in time", level=logging.WARNING, timeout_s=timeout_s)

    def send_outcome(self, outcome: StepOutcome) -> None:
        """Pass on what came of a step, if its epoch still is the stream's."""
        if self.attached and (outcome.term, outcome.epoch) == (self._term, self._epoch):
            self._outbox.send(result_to_proto(outcome))
            self.last_step = outcome.number

    def send_heartbeat(self) -> None:
        """Tell now how things stand; without effect while nobody listens."""
        if self.attached:
            self._outbox.send(self._heartbeat())

    # ------------------------------------------------------------------------------------------------------ one stream

    async def _converse(self) -> None:
        """One stream, from Hello to its end."""
        await self._steps.settle()
        residents = await self._steps.call(_residents)
        channel = connect(self._scheduler)
        call = self._call = scheduler_pb2_grpc.SchedulerServiceStub(channel).Attach()
        parts: list[asyncio.Task[None]] = []
        try:
            await self._introduce(call, residents)
            await self._steps.call(Executor.reset)
            self._outbox = Outbox()
            self.last_step = self._issued = 0
            self._set_attached(True)
            if self._draining:
                self._outbox.send(draining_to_proto())
            running = (
                self._read(call),
                write_until_closed(call.write, self._outbox),
                self._beat(),
                self._until_outranked(),
            )
            parts = [asyncio.ensure_future(part) for part in running]
            await until_one_ends(parts)
        except Outranked:
            self._outbox.send(leaving_to_proto())
            self._outbox.close()
            farewell = asyncio.ensure_future(_take_leave(call, channel, parts))
            self._farewells.add(farewell)
            farewell.add_done_callback(self._farewells.discard)
            self._call = None
            raise
        finally:
            self._steps.drop_queued()
            if self._call is call:
                self._call = None
                await _end(call, channel, parts)

    async def _introduce(self, call: grpc.aio.StreamStreamCall, residents: list[Resident]) -> None:
        """Hello and Welcome. Raises StreamEnded for a scheduler that is not the newest known."""
        worker_id, boot_id, model = self._identity
        hello = hello_to_proto(
            worker_id=worker_id,
            boot_id=boot_id,
            model=model,
            cell=self._leaders.cell,
            draining=self.to_be_relieved,
            fingerprint=self._fingerprint,
            limits=self._limits,
            highest_term=self._highest_term,
            residents=residents,
            step_times=self._step_times,
        )
        async with asyncio.timeout(WELCOME_TIMEOUT_S):
            await call.write(hello)
            first = await call.read()
        if first is grpc.aio.EOF:
            raise StreamEnded(f"refused: {await call.details() or (await call.code()).name}")
        if first.WhichOneof("message") != "welcome":
            raise StreamEnded("the scheduler's first message is no welcome")
        welcome = first.welcome
        if welcome.term < self._highest_term:
            raise StreamEnded(f"the scheduler's term {welcome.term} is below {self._highest_term}")
        self._term, self._epoch, self._highest_term = welcome.term, welcome.epoch, welcome.term
        self._leaders.welcomed()
        event(logger, "attached", scheduler=self._scheduler, term=self._term, epoch=self._epoch, offered=len(residents))

    async def _read(self, call: grpc.aio.StreamStreamCall) -> None:
        """Take steps and news until the stream ends or the worker is relieved."""
        while True:
            message: scheduler_pb2.AttachResponse = await call.read()
            if message is grpc.aio.EOF:
                code = await call.code()
                raise StreamEnded(await call.details() or f"the scheduler ended the stream ({code.name})")
            if call is not self._call:
                continue
            kind = message.WhichOneof("message")
            if kind == "step":
                self._take(message.step)
            elif kind == "draft_workers" and self._drafts is not None:
                self._drafts.longest_draft = message.draft_workers.max_draft_tokens
                self._drafts.set_addresses(list(message.draft_workers.addresses))
            elif kind == "drain":
                self.to_be_relieved = True
            elif kind == "drained":
                event(logger, "relieved")
                self._drained.set()
                return

    def _take(self, step: scheduler_pb2.Step) -> None:
        if (step.term, step.epoch) != (self._term, self._epoch) or step.number <= self._issued:
            event(logger, "stale step dropped", term=step.term, epoch=step.epoch, number=step.number)
            return
        self._issued = step.number
        self._steps.submit(step_from_proto(step))

    async def _until_outranked(self) -> None:
        address = await self._leaders.outranked(self._term)
        raise Outranked(f"{address} leads under a higher term")

    async def _beat(self) -> None:
        while True:
            self.send_heartbeat()
            await asyncio.sleep(HEARTBEAT_S)

    def _heartbeat(self) -> scheduler_pb2.AttachRequest:
        drafting = self._drafts is not None and self._drafts.drafting
        return heartbeat_to_proto(self.last_step, self._steps.running_step_s(), drafting)

    def _set_attached(self, attached: bool) -> None:
        if attached != self.attached:
            self.attached = attached
            self._on_attached(attached)


async def _take_leave(
    call: grpc.aio.StreamStreamCall, channel: grpc.aio.Channel, parts: list[asyncio.Task[None]]
) -> None:
    """Say so and close our side, so that the scheduler takes the end for no crash; the writer ends by itself.

    Neither reading nor writing is cancelled before that is done or has taken too long: that would break the call.
    """
    reading, writing, *others = parts
    for part in others:
        part.cancel()
    try:
        with contextlib.suppress(*STREAM_ERRORS):
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                await asyncio.wait([writing])
                await call.done_writing()
                await asyncio.wait([reading])
    finally:
        await _end(call, channel, parts)


async def _end(call: grpc.aio.StreamStreamCall, channel: grpc.aio.Channel, parts: list[asyncio.Task[None]]) -> None:
    await end_all(parts)
    abandon(call)
    await channel.close()


def _residents(executor: Executor) -> list[Resident]:
    return executor.sequences.residents()
