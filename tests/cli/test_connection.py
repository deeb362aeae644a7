"""Calls over a plain socket, against gRPC's own server; and against a peer that says what a server seldom does."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from cli import connection as connection_module
from cli.caller import Caller
from cli.connection import Connection, Status
from cli.frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PADDED,
    PING,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
)

PATH = "/test.Echo/Stream"
SERVER_OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.so_reuseport", 0))


class Echo:
    """Answers with the request, an empty message and the request again."""

    def __init__(self) -> None:
        self.running = self.most_running = 0
        self.cancelled = asyncio.Event()
        self.gate = asyncio.Event()
        self.remaining_s: float | None = None

    async def stream(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        self.remaining_s = context.time_remaining()
        try:
            if request == b"refuse":
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
            if request == b"wait":
                await self.gate.wait()
            yield request
            yield b""
            yield request
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        finally:
            self.running -= 1


@contextlib.asynccontextmanager
async def serving(echo: Echo, port: int = 0, **options: int) -> AsyncIterator[tuple[grpc.aio.Server, int]]:
    server = grpc.aio.server(options=[*SERVER_OPTIONS, *options.items()])
    stream = grpc.unary_stream_rpc_method_handler(echo.stream)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", {"Stream": stream}),))
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    assert bound
    await server.start()
    try:
        yield server, bound
    finally:
        await server.stop(None)


@contextlib.asynccontextmanager
async def calling(port: int) -> AsyncIterator[Caller]:
    caller = Caller(f"127.0.0.1:{port}")
    try:
        yield caller
    finally:
        caller.close()


async def test_messages_come_whole_whatever_their_size() -> None:
    """Larger than the windows and the frames of either side."""
    async with serving(Echo()) as (_, port), calling(port) as caller:
        for size in (0, 1, 16_384, 65_535, 3_000_000):
            request, answer = bytes(range(250)) * (size // 250) + b"x" * (size % 250), list[bytes]()
            assert await caller.call(PATH, request, answer.append, 30.0) == Status("OK")
            assert answer == [request, b"", request]


async def test_many_calls_share_a_connection() -> None:
    echo = Echo()
    async with serving(echo) as (_, port), calling(port) as caller:
        answers: list[list[bytes]] = [[] for _ in range(50)]
        calls = [asyncio.ensure_future(caller.call(PATH, b"wait", one.append)) for one in answers]
        async with asyncio.timeout(10):
            while echo.running < 50:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        echo.gate.set()
        assert {one.code for one in await asyncio.gather(*calls)} == {"OK"}
        assert answers == [[b"wait", b"", b"wait"]] * 50


async def test_errors_have_their_code_and_message() -> None:
    async with serving(Echo()) as (_, port), calling(port) as caller:
        assert await caller.call(PATH, b"refuse", lambda _: None) == Status("RESOURCE_EXHAUSTED", "full")
        assert (await caller.call("/test.Echo/Nothing", b"", lambda _: None)).code == "UNIMPLEMENTED"
        assert (await caller.call(PATH, b"fine", lambda _: None)).code == "OK"


async def test_a_deadline_ends_the_call_on_both_sides() -> None:
    echo = Echo()
    async with serving(echo) as (_, port), calling(port) as caller:
        assert (await caller.call(PATH, b"wait", lambda _: None, 0.2)).code == "DEADLINE_EXCEEDED"
        await asyncio.wait_for(echo.cancelled.wait(), 10)
        assert echo.remaining_s is not None
        assert echo.remaining_s <= 0.2


async def test_a_cancelled_call_is_cancelled_at_the_server() -> None:
    echo = Echo()
    async with serving(echo) as (_, port), calling(port) as caller:
        call = asyncio.ensure_future(caller.call(PATH, b"wait", lambda _: None))
        async with asyncio.timeout(10):
            while not echo.running:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        call.cancel()
        await asyncio.wait_for(echo.cancelled.wait(), 10)


async def test_a_server_that_ends_is_an_error_and_the_next_one_is_found() -> None:
    echo = Echo()
    async with serving(echo) as (server, port), calling(port) as caller:
        call = asyncio.ensure_future(caller.call(PATH, b"wait", lambda _: None))
        async with asyncio.timeout(10):
            while not echo.running:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await server.stop(None)
        assert (await asyncio.wait_for(call, 10)).code in ("UNAVAILABLE", "CANCELLED")
        assert (await caller.call(PATH, b"", lambda _: None)).code == "UNAVAILABLE"
        async with serving(Echo(), port):
            assert (await caller.call(PATH, b"", lambda _: None)).code == "OK"


# ------------------------------------------------------------------------------------------------- a scripted peer


class Wire(asyncio.Transport):
    """What a connection writes."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.aborted = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def abort(self) -> None:
        self.aborted = True

    def frames(self) -> list[tuple[int, int, int, bytes]]:
        """(kind, flags, stream, payload) of each, without the preface."""
        data, found = self.written.removeprefix(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), []
        while data:
            length, kind, flags, stream_id = int.from_bytes(data[:3]), data[3], data[4], int.from_bytes(data[5:9])
            found.append((kind, flags, stream_id, data[9 : 9 + length]))
            data = data[9 + length :]
        return found


async def begun(
    request: bytes = b"ask", on_message: Callable[[bytes], None] = lambda _: None
) -> tuple[Connection, Wire, asyncio.Task[Status]]:
    """A connection with one call, number 1."""
    connection, wire = Connection("peer:1"), Wire()
    connection.connection_made(wire)
    call = asyncio.ensure_future(connection.call(PATH, request, on_message, None))
    await asyncio.sleep(0)
    return connection, wire, call


def message(content: bytes) -> bytes:
    return struct.pack(">BL", 0, len(content)) + content


OK_HEADERS = b"\x88"
TRAILERS = b"\x00\x0bgrpc-status\x010"


async def test_frames_may_come_in_any_pieces() -> None:
    """Byte by byte; a message over two frames, two in one; padding; priority; headers that go on; a coded status."""
    got: list[bytes] = []
    connection, _, call = await begun(on_message=got.append)
    coded = bytes.fromhex("000b") + b"grpc-status" + b"\x01" + b"0"
    both = message(b"second") + message(b"third")
    answer = (
        frame(SETTINGS, 0, 0)
        + frame(HEADERS, END_HEADERS | PRIORITY | PADDED, 1, b"\x02" + bytes(5) + OK_HEADERS + bytes(2))
        + frame(DATA, 0, 1, message(b"first")[:7])
        + frame(DATA, PADDED, 1, b"\x03" + message(b"first")[7:] + bytes(3))
        + frame(DATA, 0, 1, both)
        + frame(0x77, 0, 1, b"unknown frames are ignored")
        + frame(HEADERS, END_STREAM, 1, coded[:5])
        + frame(CONTINUATION, 0, 1, coded[5:9])
        + frame(CONTINUATION, END_HEADERS, 1, coded[9:])
    )
    for byte in answer:
        connection.data_received(bytes([byte]))
    assert await call == Status("OK")
    assert got == [b"first", b"second", b"third"]


async def test_a_request_goes_out_as_far_as_the_windows_let_it() -> None:
    connection, wire, call = await begun(bytes(200_000))
    connection.data_received(frame(SETTINGS, 0, 0, struct.pack(">HLHL", 4, 70_000, 5, 20_000)))

    def sent() -> int:
        return sum(len(payload) for kind, _, _, payload in wire.frames() if kind == DATA)

    assert sent() == 65_535  # the connection's window
    connection.data_received(frame(WINDOW_UPDATE, 0, 0, struct.pack(">L", 10**6)))
    assert sent() == 70_000  # the stream's
    connection.data_received(frame(WINDOW_UPDATE, 0, 1, struct.pack(">L", 10**6)))
    assert sent() == 200_005
    datas = [(flags, len(payload)) for kind, flags, _, payload in wire.frames() if kind == DATA]
    assert [flags for flags, _ in datas] == [0] * (len(datas) - 1) + [END_STREAM]
    assert max(size for _, size in datas) == 20_000
    call.cancel()


async def test_no_more_calls_at_once_than_the_peer_takes() -> None:
    connection, wire, first = await begun()
    connection.data_received(frame(SETTINGS, 0, 0, struct.pack(">HL", 3, 2)))
    calls = [first, *(asyncio.ensure_future(connection.call(PATH, b"", lambda _: None, None)) for _ in range(4))]

    async def opened() -> list[int]:
        for _ in range(5):
            await asyncio.sleep(0)
        return [stream_id for kind, _, stream_id, _ in wire.frames() if kind == HEADERS]

    assert await opened() == [1, 3]
    connection.data_received(frame(HEADERS, END_HEADERS | END_STREAM, 3, TRAILERS))
    assert await opened() == [1, 3, 5]
    connection.data_received(frame(SETTINGS, 0, 0, struct.pack(">HL", 3, 100)))
    assert await opened() == [1, 3, 5, 7, 9]
    connection.close()
    assert [(await call).code for call in calls] == ["CANCELLED", "OK", "CANCELLED", "CANCELLED", "CANCELLED"]


@pytest.mark.parametrize(
    ("said", "code"),
    [
        (frame(RST_STREAM, 0, 1, struct.pack(">L", 7)), "UNAVAILABLE"),
        (frame(RST_STREAM, 0, 1, struct.pack(">L", 2)), "INTERNAL"),
        (frame(GOAWAY, 0, 0, struct.pack(">LL", 0, 0)), "UNAVAILABLE"),
        (frame(HEADERS, END_HEADERS | END_STREAM, 1, b"\x8d"), "UNKNOWN"),  # HTTP 404
        (frame(HEADERS, END_HEADERS, 1, b"\x8e"), "UNAVAILABLE"),  # HTTP 500
        (frame(DATA, END_STREAM, 1), "INTERNAL"),
        (frame(DATA, 0, 1, b"\x01\0\0\0\x01x"), "INTERNAL"),  # compressed
        (frame(HEADERS, END_HEADERS, 1, b"\xbe"), "INTERNAL"),
        (frame(RST_STREAM, 0, 1, b"x"), "INTERNAL"),
        (frame(HEADERS, END_HEADERS, 1, b"\x00\x0bgrpc-status\x0299"), "UNKNOWN"),
    ],
)
async def test_how_else_a_call_may_end(said: bytes, code: str) -> None:
    connection, _, call = await begun()
    connection.data_received(said)
    assert (await asyncio.wait_for(call, 5)).code == code


async def test_a_peer_that_goes_away_finishes_what_it_has() -> None:
    connection, _, call = await begun()
    connection.data_received(frame(GOAWAY, 0, 0, struct.pack(">LL", 1, 0)))
    assert not connection.usable
    connection.data_received(frame(HEADERS, END_HEADERS | END_STREAM, 1, TRAILERS))
    assert await call == Status("OK")


async def test_pings_are_answered_and_windows_widened() -> None:
    connection, wire, call = await begun()
    connection.data_received(frame(PING, 0, 0, b"12345678"))
    assert wire.frames()[-1] == (PING, 1, 0, b"12345678")
    connection._taken = 2**30
    connection.data_received(frame(DATA, 0, 1, message(b"x")))
    assert wire.frames()[-1] == (WINDOW_UPDATE, 0, 0, struct.pack(">L", 2**30 + 6))
    call.cancel()


async def test_a_silent_peer_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "KEEPALIVE_TIME_S", 0.02)
    monkeypatch.setattr(connection_module, "KEEPALIVE_TIMEOUT_S", 0.02)
    connection, wire, call = await begun()
    assert (await asyncio.wait_for(call, 10)).code == "UNAVAILABLE"
    assert PING in [kind for kind, *_ in wire.frames()]
    assert wire.aborted
    assert not connection.usable
