"""The scheduler's gRPC doors: thin; each stream has a reader that calls the cell, and is written as news come up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import grpc
from tandem.v1 import admin_pb2, admin_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc

from cluster import channel, errors
from cluster.logs import event
from cluster.outgoing import write_until_closed
from scheduler import convert, sessions
from scheduler.leadership import Leadership
from scheduler.loop import Cell
from scheduler.workers import DraftLink, WorkerLink

logger = logging.getLogger(__name__)


async def _first(context: Any) -> Any:
    """A stream's first message, which must carry hello."""
    message = await context.read()
    if message is grpc.aio.EOF or not message.HasField("hello"):
        await errors.abort(context, errors.InvalidField("hello", "the first message must carry it"))
    return message.hello


async def _read_until_end(context: Any, on_message: Callable[[Any], None]) -> None:
    while (message := await context.read()) is not grpc.aio.EOF:
        on_message(message)


async def _converse(*directions: Any) -> None:
    """Run a reader and a writer; when either ends, end the other."""
    tasks = [asyncio.ensure_future(direction) for direction in directions]
    try:
        await channel.until_one_ends(tasks)
    finally:
        await channel.end_all(tasks)


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Session, Attach and Announce, which only a leader answers, and WatchLeader, which tells who that is."""

    def __init__(self, cell: Cell, leadership: Leadership) -> None:
        self._cell = cell
        self._leadership = leadership

    async def _lead(self, hello: Any, context: Any) -> None:
        """Go on only in the cell that the peer means, as its leader, and above the term that the peer has seen."""
        try:
            convert.check_cell(hello.cell, self._leadership.view.cell)
            await self._leadership.heard(hello.highest_term)
            self._leadership.require()
        except errors.TandemError as error:
            await errors.abort(context, error)

    async def Session(self, request_iterator: Any, context: Any) -> None:
        hello = await _first(context)
        await self._lead(hello, context)
        session = self._cell.open_session(hello.gateway_id)
        try:
            await context.write(
                scheduler_pb2.SessionResponse(welcome=scheduler_pb2.SessionWelcome(term=self._cell.term))
            )
            await _converse(
                _read_until_end(context, lambda message: self._on_session_message(session, message)),
                write_until_closed(context.write, session),
            )
        finally:
            self._cell.gateways.close(session)

    def _on_session_message(self, session: sessions.Session, message: Any) -> None:
        if session.closed:
            return
        session.gateway_draining = session.gateway_draining or message.draining
        # Cancellations first: they are of earlier submissions, whose ids the new ones may use again.
        for cancel in message.cancels:
            self._cell.gateways.cancel(session, cancel)
        for submit in message.submits:
            self._cell.gateways.submit(session, submit)

    async def Attach(self, request_iterator: Any, context: Any) -> None:
        message = await context.read()
        if message is grpc.aio.EOF or message.WhichOneof("message") != "hello":
            await errors.abort(context, errors.InvalidField("hello", "the first message must carry it"))
        await self._lead(message.hello, context)
        try:
            link = self._cell.attach(message.hello)
        except errors.TandemError as error:
            await errors.abort(context, error)
        try:
            welcome = scheduler_pb2.AttachWelcome(term=self._cell.term, epoch=link.epoch)
            await context.write(scheduler_pb2.AttachResponse(welcome=welcome))
            await _converse(
                _read_until_end(context, lambda message: self._on_worker_message(link, message)),
                write_until_closed(context.write, link.outbox),
            )
        finally:
            self._cell.stream_ended(link)

    def _on_worker_message(self, link: WorkerLink, message: Any) -> None:
        if link.closed:
            return
        kind = message.WhichOneof("message")
        if kind == "result":
            self._cell.result(link, message.result)
        elif kind == "heartbeat":
            self._cell.heartbeat(link, message.heartbeat)
        elif kind == "draining":
            self._cell.drain_worker(link.worker_id)
        elif kind == "leaving":
            link.leaving = True

    async def Announce(self, request_iterator: Any, context: Any) -> None:
        hello = await _first(context)
        await self._lead(hello, context)
        link = self._cell.announce(hello)

        def heard(_: Any) -> None:
            link.last_heard = asyncio.get_running_loop().time()

        try:
            await context.write(scheduler_pb2.AnnounceResponse(term=self._cell.term))
            await _converse(_read_until_end(context, heard), link.closed.wait(), self._ask_to_end(link, context))
        finally:
            self._cell.withdraw(link)

    async def _ask_to_end(self, link: DraftLink, context: Any) -> None:
        """Tell a draft worker that is drained; it closes the stream itself."""
        await link.draining.wait()
        await context.write(scheduler_pb2.AnnounceResponse(term=self._cell.term, drain=True))
        await link.closed.wait()

    async def WatchLeader(self, request: Any, context: Any) -> None:
        async for view in self._leadership.watch():
            await context.write(
                scheduler_pb2.WatchLeaderResponse(
                    cell=view.cell, leading=view.leading, term=view.term, leader=view.leader, schedulers=view.schedulers
                )
            )


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """GetStatus and Drain."""

    def __init__(self, cell: Cell, leadership: Leadership, stop: Callable[[], None] = lambda: None) -> None:
        """`stop` ends this process as a signal does."""
        self._cell = cell
        self._leadership = leadership
        self._stop = stop

    async def GetStatus(self, request: Any, context: Any) -> Any:
        cell, core = self._cell, self._cell.core
        response = admin_pb2.GetStatusResponse(
            term=cell.term,
            uptime_s=asyncio.get_running_loop().time() - cell.started_at,
            gateways=sorted(cell.gateways.sessions),
            waiting=core.num_waiting,
            running=core.num_running,
            draining=cell.gateways.draining,
            cell=self._leadership.view.cell,
            leading=self._leadership.view.leading,
            leader=self._leadership.view.leader,
        )
        for link in sorted(cell.links.values(), key=lambda one: one.worker_id):
            worker = core.workers[link.worker_id]
            response.workers.append(convert.worker_status(worker, link.epoch, link.last_step_s))
        for drafter in sorted(cell.drafters.values(), key=lambda one: one.worker_id):
            response.draft_workers.add(
                worker_id=drafter.worker_id, model=drafter.model, address=drafter.address, proposer=drafter.proposer
            )
        for gateway_id, session in sorted(cell.gateways.sessions.items()):
            response.gateway_sessions.add(
                gateway_id=gateway_id,
                live_requests=len(cell.gateways.owners.of_gateway(gateway_id)),
                draining=session.gateway_draining or session.asked_to_drain,
            )
        for name, value in core.totals().items():
            setattr(response.counters, name, value)
        return response

    async def Drain(self, request: Any, context: Any) -> Any:
        try:
            what = await self._drain(request)
        except errors.TandemError as error:
            await errors.abort(context, error)
        event(logger, "drain asked", of=what)
        return admin_pb2.DrainResponse()

    async def _drain(self, request: Any) -> str:
        """What is draining now, for the log."""
        names = (request.worker_id, request.draft_worker_id, request.gateway_id)
        if sum((*map(bool, names), request.scheduler)) > 1:
            message = "at most one of worker_id, draft_worker_id, gateway_id and scheduler can be set"
            raise errors.InvalidField("worker_id", message)
        if request.scheduler:
            await self._leadership.require_standby()
            self._stop()
            return "this scheduler"
        self._leadership.require()
        if request.worker_id:
            self._cell.drain_worker(request.worker_id)
        elif request.draft_worker_id:
            self._cell.drain_draft_worker(request.draft_worker_id)
        elif request.gateway_id:
            self._cell.gateways.drain_gateway(request.gateway_id)
        else:
            self._cell.drain()
        return next(filter(None, names), "the whole cell")
