"""Tells the scheduler where this draft worker is, for as long as it is there."""

from __future__ import annotations

import asyncio
import logging

import grpc
from tandem.v1 import scheduler_pb2_grpc

from cluster.channel import STREAM_ERRORS, abandon, connect, end_all, end_if_cancelled, until_one_ends, why_ended
from cluster.leaders import Leaders
from cluster.logs import event
from draft_worker.convert import hello_to_proto, sign_of_life_to_proto

logger = logging.getLogger(__name__)

WELCOME_TIMEOUT_S = 5.0
HEARTBEAT_S = 1.0
MAX_BACKOFF_S = 2.0


class Refused(Exception):
    """The scheduler ended the stream, or is not the newest known."""


class Announcement:
    """One stream, renewed whenever it is lost or another leads. Everything happens on the event loop."""

    def __init__(self, *, leaders: Leaders, worker_id: str, model: str, address: str, proposer: str) -> None:
        self.announced = False
        self._drained = False
        self._leaders = leaders
        self._scheduler = ""
        self._worker_id = worker_id
        self._model = model
        self._address = address
        self._proposer = proposer
        self._highest_term = 0

    async def run(self) -> None:
        """Announce until cancelled, or until an operator wants the draft worker to end: then it returns.

        The end of the stream is what takes the announcement back.
        """
        attempt = 0
        self._leaders.start()
        try:
            while not self._drained:
                self._scheduler = await self._leaders.candidate()
                attempt = await self._announce(attempt)
                if not self._drained:
                    await self._leaders.pause(attempt, max_s=MAX_BACKOFF_S)
        finally:
            await self._leaders.close()

    async def _announce(self, attempt: int) -> int:
        """One stream and its end; the number of attempts in vain so far."""
        try:
            await self._converse()
        except (*STREAM_ERRORS, Refused) as error:
            self._leaders.refused(error)
            if self.announced or attempt == 0:
                event(logger, "no scheduler", level=logging.WARNING, at=self._scheduler, why=why_ended(error))
        end_if_cancelled()
        attempt = 0 if self.announced else attempt + 1
        self.announced = False
        return attempt

    async def _converse(self) -> None:
        channel = connect(self._scheduler)
        call = scheduler_pb2_grpc.SchedulerServiceStub(channel).Announce()
        parts: list[asyncio.Task[None]] = []
        try:
            hello = hello_to_proto(
                worker_id=self._worker_id,
                model=self._model,
                address=self._address,
                proposer=self._proposer,
                highest_term=self._highest_term,
                cell=self._leaders.cell,
            )
            async with asyncio.timeout(WELCOME_TIMEOUT_S):
                await call.write(hello)
                await self._take(await call.read(), call)
            self.announced = True
            self._leaders.welcomed()
            event(logger, "announced", scheduler=self._scheduler, address=self._address, term=self._highest_term)
            parts = [asyncio.ensure_future(part) for part in (self._read(call), _beat(call), self._until_outranked())]
            await until_one_ends(parts)
        finally:
            await end_all(parts)
            abandon(call)
            await channel.close()

    async def _read(self, call: grpc.aio.StreamStreamCall) -> None:
        while not self._drained:
            await self._take(await call.read(), call)

    async def _until_outranked(self) -> None:
        address = await self._leaders.outranked(self._highest_term)
        raise Refused(f"{address} leads under a higher term")

    async def _take(self, response: object, call: grpc.aio.StreamStreamCall) -> None:
        if response is grpc.aio.EOF:
            raise Refused(await call.details() or f"the scheduler ended the stream ({(await call.code()).name})")
        term: int = response.term  # type: ignore[attr-defined]
        if term < self._highest_term:
            raise Refused(f"the scheduler's term {term} is below {self._highest_term}")
        self._highest_term = term
        if response.drain:  # type: ignore[attr-defined]
            event(logger, "drained", scheduler=self._scheduler)
            self._drained = True


async def _beat(call: grpc.aio.StreamStreamCall) -> None:
    while True:
        await asyncio.sleep(HEARTBEAT_S)
        await call.write(sign_of_life_to_proto())
