"""Requests that are no protobuf: refused as the caller's error.

gRPC tells the caller UNKNOWN, and logs a traceback for each, so that anybody can fill the log. Here they become
INVALID_ARGUMENT, without a word in the log. Streams of requests, which only the cluster itself sends, are left alone.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple

import grpc
from google.protobuf.message import DecodeError

from cluster.errors import InvalidField, abort


class _Undecodable(NamedTuple):
    """Stands for a request that could not be read."""

    num_bytes: int


class RefuseUndecodable(grpc.aio.ServerInterceptor):
    """Wraps every method that takes one request."""

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler
        if handler.response_streaming:
            guarded = _guarded_stream(handler.unary_stream)
            return handler._replace(request_deserializer=_tolerant(handler.request_deserializer), unary_stream=guarded)
        return handler._replace(
            request_deserializer=_tolerant(handler.request_deserializer), unary_unary=_guarded(handler.unary_unary)
        )


def _tolerant(decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def decoded(data: bytes) -> Any:
        try:
            return decode(data)
        except DecodeError:
            return _Undecodable(len(data))

    return decoded


def _guarded(answer: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
    async def guarded(request: Any, context: Any) -> Any:
        if isinstance(request, _Undecodable):
            await _refuse(request, context)
        return await answer(request, context)

    return guarded


def _guarded_stream(answer: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Of the same kind as what it wraps, which is how gRPC tells handlers that yield from those that write."""
    if not inspect.isasyncgenfunction(answer):
        return _guarded(answer)

    async def guarded(request: Any, context: Any) -> AsyncIterator[Any]:
        if isinstance(request, _Undecodable):
            await _refuse(request, context)
        async for message in answer(request, context):
            yield message

    return guarded


async def _refuse(request: _Undecodable, context: Any) -> None:
    await abort(context, InvalidField("request", f"its {request.num_bytes} bytes are no message of the method's type"))
