"""Tells the scheduler where this draft worker is, for as long as it is there."""

from __future__ import annotations

import asyncio
import logging

import grpc
from tandem.v1 import scheduler_pb2_grpc

from cluster.channel import backoff_delay_s, connect
from cluster.logs import event
from draft_worker.convert import hello_to_proto, sign_of_life_to_proto

logger = logging.getLogger(__name__)

WELCOME_TIMEOUT_S = 5.0
HEARTBEAT_S = 1.0
MAX_BACKOFF_S = 2.0
# A write to a stream that has just ended raises InvalidStateError.
STREAM_ERRORS = (grpc.RpcError, asyncio.InvalidStateError, TimeoutError)


class Refused(Exception):
    """The scheduler ended the stream, or is not the newest known."""


class Announcement:
    """One stream that is renewed whenever it is lost. Everything happens on the event loop."""

    def __init__(self, *, scheduler: str, worker_id: str, model: str, address: str, proposer: str) -> None:
        self.announced = False
        self._scheduler = scheduler
        self._worker_id = worker_id
        self._model = model
        self._address = address
        self._proposer = proposer
        self._highest_term = 0

    async def run(self) -> None:
        """Announce until cancelled; the end of the stream is what takes the announcement back."""
        attempt = 0
        while True:
            try:
                await self._converse()
            except (*STREAM_ERRORS, Refused) as error:
                if self.announced or attempt == 0:
                    event(logger, "no scheduler", level=logging.WARNING, at=self._scheduler, why=_reason(error))
            attempt = 0 if self.announced else attempt + 1
            self.announced = False
            await asyncio.sleep(backoff_delay_s(attempt, max_s=MAX_BACKOFF_S))

    async def _converse(self) -> None:
        channel = connect(self._scheduler)
        call = scheduler_pb2_grpc.SchedulerServiceStub(channel).Announce()
        beating: asyncio.Task[None] | None = None
        try:
            hello = hello_to_proto(
                worker_id=self._worker_id,
                model=self._model,
                address=self._address,
                proposer=self._proposer,
                highest_term=self._highest_term,
            )
            async with asyncio.timeout(WELCOME_TIMEOUT_S):
                await call.write(hello)
                await self._take(await call.read(), call)
            self.announced = True
            event(logger, "announced", scheduler=self._scheduler, address=self._address, term=self._highest_term)
            beating = asyncio.ensure_future(_beat(call))
            while True:
                await self._take(await call.read(), call)
        finally:
            if beating is not None:
                beating.cancel()
                await asyncio.gather(beating, return_exceptions=True)
            call.cancel()
            await channel.close()

    async def _take(self, response: object, call: grpc.aio.StreamStreamCall) -> None:
        if response is grpc.aio.EOF:
            raise Refused(await call.details() or f"the scheduler ended the stream ({(await call.code()).name})")
        term: int = response.term  # type: ignore[attr-defined]
        if term < self._highest_term:
            raise Refused(f"the scheduler's term {term} is below {self._highest_term}")
        self._highest_term = term


async def _beat(call: grpc.aio.StreamStreamCall) -> None:
    while True:
        await asyncio.sleep(HEARTBEAT_S)
        await call.write(sign_of_life_to_proto())


def _reason(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return error.details() or error.code().name
    return str(error) or type(error).__name__
