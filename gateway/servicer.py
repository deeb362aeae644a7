"""The public service: what clients call. Thin: it opens requests, sends what they yield, and lets them go."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from tandem.v1 import generation_pb2, generation_pb2_grpc

from cluster.errors import DeadlineExceeded, InvalidField, QueueFull, TandemError, Unavailable, abort, as_tandem_error
from cluster.outgoing import Outgoing
from gateway import admission, convert
from gateway.admission import Ask, Refusal
from gateway.catalog import Catalog
from gateway.cells import Upstream
from gateway.intake import Caller, Intake
from gateway.metrics import GatewayMetrics
from gateway.requests import LiveRequest, RequestTable
from gateway.streams import FinishReason
from gateway.text import ModelText
from gateway.text_workers import TextWorkers

logger = logging.getLogger(__name__)

SERVICE_NAME = "tandem.v1.GenerationService"
TENANT_KEY = "x-tenant-id"
_RETRY_AFTER_S = 1.0
_TOKENS_PER_PART = 16_384

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Limits:
    """What this gateway takes on."""

    max_concurrent_requests: int
    scheduler_wait_s: float


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """tandem.v1.GenerationService."""

    def __init__(
        self,
        catalog: Catalog,
        table: RequestTable,
        session: Upstream,
        intake: Intake,
        workers: TextWorkers,
        metrics: GatewayMetrics,
        limits: Limits,
    ) -> None:
        self._catalog = catalog
        self._table = table
        self._session = session
        self._intake = intake
        self._workers = workers
        self._metrics = metrics
        self._limits = limits
        self._draining = False

    async def drain(self) -> None:
        """Refuse new requests from now on; return once the old ones have ended."""
        self._draining = True
        await self._table.wait_idle()

    # ---------------------------------------------------------------------------------------------- generation

    async def GenerateStream(
        self, request: generation_pb2.GenerateStreamRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """Tokens as they come. Headers go out with the first message, so that until then a client may retry.

        While a client is slow in taking a message, what comes for it merges into the next ones, each of which stays
        below what clients take unless told otherwise.
        """
        try:
            async with _Live(self, request, context) as live:
                outgoing = Outgoing(
                    context.write, lambda: _next_message(live, outgoing), has_more=lambda: live.held_back
                )
                await outgoing.follow(live)
                if live.error is not None:
                    raise live.error
        except Exception as error:
            await abort(context, _told(error))

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> generation_pb2.GenerateResponse:
        """The whole answer at once."""
        try:
            async with _Live(self, request, context) as live:
                changed = asyncio.Event()
                live.on_news = changed.set
                while not live.finished:
                    await changed.wait()
                    changed.clear()
                if live.error is not None:
                    raise live.error
                spec, choices = live.spec, live.take(bounded=False)
                return convert.response(
                    spec.request_id, spec.model, spec.seed, choices, live.take_prompt_logprobs(), live.usage()
                )
        except Exception as error:
            return await abort(context, _told(error))

    async def open(self, ask: Ask, request_id: str, context: grpc.aio.ServicerContext) -> LiveRequest:
        """A registered and submitted request; its id is reserved already."""
        loop = asyncio.get_running_loop()
        arrived, remaining = loop.time(), context.time_remaining()
        deadline = None if remaining is None else arrived + remaining
        text = self._catalog.find(ask.model)
        admission.check(ask, self._catalog.facts(text.name))
        await self._wait_for_scheduler(remaining)
        caller = Caller(_client(context), deadline, arrived)
        live = await self._intake.open(ask, request_id, text, self._catalog.facts(text.name), caller)
        self._table.add(live)
        if not live.finished:
            self._session.submit(live)
        return live

    def reserve(self, ask: Ask) -> str:
        """The id under which the request will be live. Raises where it is taken, or no request can be taken on."""
        if self._draining:
            raise Unavailable(
                "this gateway is shutting down; another one may answer", _RETRY_AFTER_S, reason="DRAINING"
            )
        if len(self._table) >= self._limits.max_concurrent_requests:
            raise QueueFull(
                "this gateway has as many live requests as it takes",
                _RETRY_AFTER_S,
                max_concurrent_requests=self._limits.max_concurrent_requests,
            )
        admission.check_names(ask)
        request_id = ask.request_id or uuid.uuid4().hex
        self._table.reserve(request_id)
        return request_id

    def close(self, request_id: str, live: LiveRequest | None, error: BaseException | None) -> None:
        """The client has been served, or is gone, or was refused: nothing more runs for it."""
        if live is not None:
            self._session.cancel(live)
            self._metrics.request_ended(live, _outcome(live, error), asyncio.get_running_loop().time())
        elif error is not None:
            self._metrics.request_refused(as_tandem_error(_told(error)).code.name)
        self._table.release(request_id, live)

    async def _wait_for_scheduler(self, remaining_s: float | None) -> None:
        wait_s = self._limits.scheduler_wait_s
        if self._session.up:
            return
        if not await self._session.wait_up(wait_s if remaining_s is None else min(wait_s, remaining_s)):
            if remaining_s is not None and remaining_s < wait_s:
                raise DeadlineExceeded("the deadline passed before a scheduler was there")
            raise Unavailable("no scheduler can be reached", _RETRY_AFTER_S, reason="NO_SCHEDULER")

    # -------------------------------------------------------------------------------------------------- text

    async def Tokenize(self, request: generation_pb2.TokenizeRequest, context: grpc.aio.ServicerContext) -> bytes:
        """The ids that a prompt becomes: a TokenizeResponse, serialised already (see `add_to_server`)."""
        return await self._answer(context, lambda: self._tokenize(request))

    async def Detokenize(
        self, request: generation_pb2.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> generation_pb2.DetokenizeResponse:
        """The text of ids."""
        return await self._answer(context, lambda: self._detokenize(request))

    async def _tokenize(self, request: generation_pb2.TokenizeRequest) -> bytes:
        text = self._catalog.find(request.model)
        kind = request.WhichOneof("prompt")
        special = request.add_special_tokens if request.HasField("add_special_tokens") else True
        if kind == "chat":
            messages = convert.messages(request.chat)
            admission.check_messages(messages)
            ask = Ask(messages=messages, add_generation_prompt=convert.generation_prompt(request.chat))
        elif kind == "text":
            ask = Ask(text=request.text)
        else:
            raise Refusal("prompt", "one of text and chat must be given")
        self._intake.check_size(ask)
        size = len(ask.text or "") + sum(len(content) for _, content in ask.messages or ())
        return await self._workers.run(size, _tokenized, text, ask, special)

    async def _detokenize(self, request: generation_pb2.DetokenizeRequest) -> generation_pb2.DetokenizeResponse:
        text = self._catalog.find(request.model)
        admission.check_token_ids("token_ids", request.token_ids, self._catalog.facts(text.name).vocab_size)
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        size = len(request.token_ids)
        found = await self._workers.run(size, lambda: text.detokenize(list(request.token_ids), skip))
        return generation_pb2.DetokenizeResponse(text=found)

    # ------------------------------------------------------------------------------------------------ models

    async def ListModels(
        self, request: generation_pb2.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> generation_pb2.ListModelsResponse:
        """Every served model."""
        return generation_pb2.ListModelsResponse(models=[self._model(name) for name in self._catalog.names])

    async def GetModel(
        self, request: generation_pb2.GetModelRequest, context: grpc.aio.ServicerContext
    ) -> generation_pb2.GetModelResponse:
        """One served model."""

        async def find() -> generation_pb2.GetModelResponse:
            return generation_pb2.GetModelResponse(model=self._model(self._catalog.find(request.model).name))

        return await self._answer(context, find)

    def _model(self, name: str) -> generation_pb2.Model:
        text, facts = self._catalog.find(name), self._catalog.facts(name)
        return convert.model(
            name=name,
            max_model_len=facts.max_model_len,
            vocab_size=facts.vocab_size,
            chat=text.has_chat_template,
            workers=self._catalog.num_workers(name),
            fingerprints=self._catalog.fingerprints(name),
            max_sequence_tokens=facts.max_sequence_tokens or 0,
        )

    async def _answer(self, context: grpc.aio.ServicerContext, find: Callable[[], Awaitable[T]]) -> T:
        try:
            return await find()
        except Exception as error:
            return await abort(context, _told(error))


class _Live:
    """A request for as long as its client is served; leaves nothing behind, however that ends."""

    def __init__(self, servicer: GenerationServicer, request: Any, context: grpc.aio.ServicerContext) -> None:
        self._servicer = servicer
        self._request = request
        self._context = context
        self._request_id = ""
        self._live: LiveRequest | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> LiveRequest:
        ask = convert.ask(self._request)
        self._request_id = self._servicer.reserve(ask)
        try:
            live = await self._servicer.open(ask, self._request_id, self._context)
        except BaseException as error:
            self._servicer.close(self._request_id, None, error)
            raise
        if live.spec.deadline is not None:
            late = DeadlineExceeded("the client's deadline passed")
            self._timer = asyncio.get_running_loop().call_at(live.spec.deadline, live.fail, late)
        self._live = live
        return live

    async def __aexit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._servicer.close(self._request_id, self._live, error)


def _next_message(live: LiveRequest, outgoing: Outgoing) -> generation_pb2.GenerateStreamResponse | None:
    """What the client hasn't been told, as far as it goes into a message; after the last of it the stream ends."""
    deltas = live.take()
    last = live.finished and not live.held_back
    if last:
        outgoing.end()
    if not deltas:
        return None
    spec, logprobs = live.spec, live.take_prompt_logprobs()
    usage = live.usage() if last and live.error is None else None
    return convert.stream_response(spec.request_id, spec.model, spec.seed, deltas, logprobs, usage)


def add_to_server(servicer: GenerationServicer, server: grpc.aio.Server) -> None:
    """Register the service. `Tokenize` comes first and answers in bytes: a message of a million pieces is serialised on
    a text thread, bit by bit, while the generated registration would do it in one go on the event loop.
    """
    tokenize = grpc.unary_unary_rpc_method_handler(
        servicer.Tokenize, request_deserializer=generation_pb2.TokenizeRequest.FromString, response_serializer=bytes
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, {"Tokenize": tokenize}),))
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)


def _tokenized(text: ModelText, ask: Ask, special: bool) -> bytes:
    """Runs on a text thread; no single call in it keeps the interpreter's lock for long."""
    if ask.messages is not None:
        token_ids = text.encode_chat(ask.messages, ask.add_generation_prompt).token_ids
    else:
        token_ids = text.encode_text(ask.text or "", special)
    # Protobuf messages of one type, one after the other, are the message with all of their repeated fields.
    parts = []
    for begin in range(0, len(token_ids), _TOKENS_PER_PART):
        part = token_ids[begin : begin + _TOKENS_PER_PART]
        parts.append(convert.tokenize_response(part, text.pieces(part)).SerializeToString())
    return b"".join(parts)


def _client(context: grpc.aio.ServicerContext) -> str:
    """Whose request it is: the tenant that the client names, or else its connection."""
    for key, value in context.invocation_metadata() or ():
        if key == TENANT_KEY and value:
            return str(value)[: admission.MAX_NAME_LENGTH]
    return context.peer()


def _told(error: BaseException) -> BaseException:
    if isinstance(error, Refusal):
        return InvalidField(error.field, error.description, reason=error.reason, **error.limits)
    return error


def _outcome(live: LiveRequest, error: BaseException | None) -> str:
    if isinstance(error, TandemError):
        return "failed"
    if error is not None or not live.finished:
        return "cancelled"
    ends = {choice.finish.reason for choice in live.choices if choice.finish is not None}
    return FinishReason.STOP.value if FinishReason.STOP in ends else FinishReason.LENGTH.value
