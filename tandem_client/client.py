"""The asynchronous client: typed calls, deadlines, retries, several gateways, streams that survive a lost gateway."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Unpack

import grpc
from tandem.v1 import generation_pb2, generation_pb2_grpc

from cluster.errors import DETAILS_KEY, DeadlineExceeded, Internal, TandemError, Unavailable, from_rpc_error
from tandem_client import convert
from tandem_client.resume import BrokenStream, Collector, StreamProgress
from tandem_client.retry import RetryPolicy, Targets
from tandem_client.types import Chunk, Generation, Model, Options, Prompt, Request

DEFAULT_TARGET = "127.0.0.1:50051"

# A gateway that comes back is found within a second, not after gRPC's default of up to two minutes; each client has
# connections of its own, so that one client's trouble isn't another's.
_CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.use_local_subchannel_pool", 1),
]

# How a connection that breaks can surface besides UNAVAILABLE, where the peer sent no ErrorInfo of ours.
_BROKEN_CONNECTION_CODES = frozenset({grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED})
_BROKEN_CONNECTION_SIGNS = ("rst_stream", "stream removed", "connection reset", "socket closed", "goaway", "cancelled")


@dataclass(frozen=True, slots=True)
class _Deadline:
    """Loop time at which a call ends; None: never."""

    at: float | None

    @classmethod
    def after(cls, timeout_s: float | None) -> _Deadline:
        return cls(None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s)

    def remaining_s(self) -> float | None:
        """Seconds left; raise DeadlineExceeded when none are."""
        if self.at is None:
            return None
        remaining = self.at - asyncio.get_running_loop().time()
        if remaining <= 0:
            raise DeadlineExceeded("the deadline has passed")
        return remaining


class TandemClient:
    """Calls a cluster through one or more gateways, given as HOST:PORT.

    `timeout_s` bounds a whole call, its retries included; None means no deadline. Errors are `TandemError`s: see
    `cluster.errors` for the classes, among them InvalidField with the field's name.

    UNAVAILABLE is tried again with back-off, at another gateway first; so is a stream that broke, from what was
    delivered: the caller sees a pause, never a gap or a repeated token. Nothing else is tried again.

        async with TandemClient("127.0.0.1:50051") as client:
            async for chunk in client.stream("Once upon a time", max_tokens=64):
                print(chunk.text, end="", flush=True)
    """

    def __init__(
        self,
        *targets: str,
        retry: RetryPolicy | None = None,
        timeout_s: float | None = None,
        metadata: Sequence[tuple[str, str]] = (),
        jitter: random.Random | None = None,
    ) -> None:
        self._targets = Targets(targets or (DEFAULT_TARGET,))
        self._policy = retry or RetryPolicy()
        self._timeout_s = timeout_s
        self._metadata = tuple(metadata)
        self._jitter = jitter or random.Random()
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def __aenter__(self) -> TandemClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections; calls still running end as cancelled."""
        channels, self._channels = list(self._channels.values()), {}
        await asyncio.gather(*(channel.close() for channel in channels))

    async def generate(
        self, prompt: Prompt | Request, *, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> Generation:
        """The whole answer. It travels as a stream, so that a lost gateway doesn't cost what was computed."""
        collector = Collector()
        async for chunk in self.stream(prompt, timeout_s=timeout_s, **options):
            collector.add(chunk)
        return collector.generation()

    async def stream(
        self, prompt: Prompt | Request, *, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> AsyncGenerator[Chunk, None]:
        """The answer as it comes. Leaving the loop early and closing the iterator cancels the request."""
        request = as_request(prompt, options)
        progress = StreamProgress(request)
        attempts = _Attempts(self, _Deadline.after(self._timeout_s if timeout_s is None else timeout_s))
        while not progress.complete:
            stub, remaining_s = await attempts.next()
            message = convert.stream_request(request, progress.delivered, progress.seed)
            call = stub.GenerateStream(message, timeout=remaining_s, metadata=self._metadata)
            try:
                async for response in call:
                    chunk = progress.accept(convert.chunk(response))
                    attempts.succeeded()
                    if chunk is not None:
                        yield chunk
                if not progress.complete:
                    raise Unavailable("the stream ended before the answer did", retry_after_s=0.0)
            except (grpc.aio.AioRpcError, BrokenStream, TandemError) as error:
                if progress.complete:
                    return
                progress.stream_lost()
                attempts.failed(error)
            finally:
                call.cancel()

    async def tokenize(
        self,
        prompt: str | Sequence[Any],
        *,
        model: str = "",
        add_special_tokens: bool | None = None,
        timeout_s: float | None = None,
    ) -> tuple[int, ...]:
        """The ids that a text or a conversation becomes."""
        message = convert.tokenize_request(prompt, model, add_special_tokens)
        return tuple((await self._call("Tokenize", message, timeout_s)).token_ids)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        skip_special_tokens: bool | None = None,
        timeout_s: float | None = None,
    ) -> str:
        """The text of ids."""
        message = generation_pb2.DetokenizeRequest(
            model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens
        )
        return (await self._call("Detokenize", message, timeout_s)).text

    async def models(self, *, timeout_s: float | None = None) -> tuple[Model, ...]:
        """Every model served."""
        answer = await self._call("ListModels", generation_pb2.ListModelsRequest(), timeout_s)
        return tuple(convert.model(model) for model in answer.models)

    async def model(self, name: str, *, timeout_s: float | None = None) -> Model:
        """One model; raise NotFound for an unknown name."""
        answer = await self._call("GetModel", generation_pb2.GetModelRequest(model=name), timeout_s)
        return convert.model(answer.model)

    async def _call(self, method: str, message: Any, timeout_s: float | None) -> Any:
        attempts = _Attempts(self, _Deadline.after(self._timeout_s if timeout_s is None else timeout_s))
        while True:
            stub, remaining_s = await attempts.next()
            try:
                answer = await getattr(stub, method)(message, timeout=remaining_s, metadata=self._metadata)
            except grpc.aio.AioRpcError as error:
                attempts.failed(error)
            else:
                attempts.succeeded()
                return answer

    def _stub(self, address: str) -> generation_pb2_grpc.GenerationServiceStub:
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = grpc.aio.insecure_channel(address, options=_channel_options(address))
        return generation_pb2_grpc.GenerationServiceStub(channel)


class _Attempts:
    """The tries of one call."""

    def __init__(self, client: TandemClient, deadline: _Deadline) -> None:
        self._client = client
        self._deadline = deadline
        self._address = ""
        self._num_failures = 0
        self._num_tries = 0
        self._has_progress = False

    async def next(self) -> tuple[generation_pb2_grpc.GenerationServiceStub, float | None]:
        """Wait as long as the targets ask for; then where to call, and the seconds left."""
        self._address, wait_s = self._client._targets.choose(_now())
        remaining_s = self._deadline.remaining_s()
        if remaining_s is not None and wait_s >= remaining_s:
            await asyncio.sleep(remaining_s)
            raise DeadlineExceeded("the deadline passed while no gateway was available")
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        self._num_tries += 1
        return self._client._stub(self._address), self._deadline.remaining_s()

    def succeeded(self) -> None:
        """The target answered."""
        self._num_failures = 0
        self._has_progress = True
        self._client._targets.succeeded(self._address)

    def failed(self, error: Exception) -> None:
        """Return if the call is worth another try; raise the error as the caller should see it otherwise."""
        shown = _shown(error)
        self._num_failures += 1
        policy = self._client._policy
        limit = policy.limit(has_progress=self._has_progress)
        if self._num_failures >= limit or not self._is_retryable(error, shown):
            raise shown from error
        jitter = self._client._jitter.random()
        self._client._targets.failed(self._address, _now(), policy, jitter, _retry_after_s(error, shown))

    def _is_retryable(self, error: Exception, shown: TandemError) -> bool:
        if isinstance(error, BrokenStream) or shown.code is grpc.StatusCode.UNAVAILABLE:
            return True
        # The gateway hasn't noticed yet that the stream before this one is gone.
        if shown.code is grpc.StatusCode.ALREADY_EXISTS:
            return self._num_tries > 1
        return _is_broken_connection(error)


def _channel_options(address: str) -> list[tuple[str, Any]]:
    # A proxy from the environment has no way to this machine's own loopback.
    is_local = address.startswith(("127.", "localhost:", "[::1]:"))
    return [*_CHANNEL_OPTIONS, ("grpc.enable_http_proxy", int(not is_local))]


def _now() -> float:
    return asyncio.get_running_loop().time()


def _shown(error: Exception) -> TandemError:
    if isinstance(error, TandemError):
        return error
    if isinstance(error, grpc.RpcError):
        return from_rpc_error(error)
    return Internal(f"the answer contradicts itself: {error}")


def _has_details(error: Exception) -> bool:
    """Whether the gateway itself spoke, and not the library about a connection."""
    return isinstance(error, grpc.aio.AioRpcError) and any(
        key == DETAILS_KEY for key, _ in error.trailing_metadata() or ()
    )


def _retry_after_s(error: Exception, shown: TandemError) -> float:
    """The pause that the gateway asked for; 0 where it asked for none."""
    return getattr(shown, "retry_after_s", 0.0) if _has_details(error) else 0.0


def _is_broken_connection(error: Exception) -> bool:
    if not isinstance(error, grpc.aio.AioRpcError) or error.code() not in _BROKEN_CONNECTION_CODES:
        return False
    if _has_details(error):
        return False
    details = (error.details() or "").lower()
    return any(sign in details for sign in _BROKEN_CONNECTION_SIGNS)


def as_request(prompt: Prompt | Request, options: Options) -> Request:
    """The request of a call's arguments, with an id of its own."""
    if isinstance(prompt, Request):
        request = replace(prompt, **options) if options else prompt
    else:
        request = Request(prompt=prompt, **options)
    if not request.request_id:
        request = replace(request, request_id=uuid.uuid4().hex)
    return request
