"""Bytes that are no protobuf, sent to each kind of method."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from cluster.channel import connect
from cluster.errors import from_rpc_error
from cluster.server import add_health, bind, create_server

NO_MESSAGE = b"\xff\xff\xff"


class Writes:
    """A method whose handler writes to its context, as the gateway's do."""

    async def stream(self, request: Any, context: Any) -> None:
        await context.write(request)
        await context.write(request)


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    server = create_server()
    health = add_health(server)
    health.set("", True)
    kind = health_pb2.HealthCheckRequest
    writes = grpc.unary_stream_rpc_method_handler(Writes().stream, kind.FromString, kind.SerializeToString)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Writes", {"Stream": writes}),))
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    async with connect(f"127.0.0.1:{port}") as channel:
        yield channel
    health.close()
    await server.stop(0)


def call(channel: grpc.aio.Channel, method: str, data: bytes) -> Any:
    answer = channel.unary_unary if method.endswith("Check") else channel.unary_stream
    return answer(method)(data, timeout=10)


METHODS = ["/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch", "/test.Writes/Stream"]


@pytest.mark.parametrize("method", METHODS)
async def test_no_message_is_the_callers_error(
    channel: grpc.aio.Channel, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    asked = call(channel, method, NO_MESSAGE)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (asked if method.endswith("Check") else asked.read())
    error = from_rpc_error(caught.value)
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert "its 3 bytes" in error.message
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING or record.exc_info]


@pytest.mark.parametrize("method", METHODS)
async def test_messages_pass(channel: grpc.aio.Channel, method: str) -> None:
    asked = call(channel, method, b"")
    if method.endswith("Check"):
        assert health_pb2.HealthCheckResponse.FromString(await asked).status == 1
    elif method.endswith("Watch"):
        assert health_pb2.HealthCheckResponse.FromString(await asked.read()).status == 1
        asked.cancel()
    else:
        assert [message async for message in asked] == [b"", b""]
