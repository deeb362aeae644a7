"""A connection of the load generator: gRPC's streaming calls over a plain socket, at a third of the library's CPU time.

The generator shares its machine with what it measures, and a library made for everything spends more on a token than
anybody does on the way to it. What a call needs of HTTP/2 (RFC 9113) is little:

    ──▶  HEADERS  path, timeout      ──▶  DATA  the request, as far as the peer's windows let it
    ◀──  HEADERS  status 200         ◀──  DATA  messages: flag, length, bytes      ◀──  HEADERS  grpc-status

All that came in one go is taken in one turn of the event loop, and each message goes straight to whoever counts it. The
windows for what comes are as wide as they can be, and are widened again. A peer that is silent for `KEEPALIVE_TIME_S`
while calls run is pinged, and lost if that isn't answered, as on the cluster's own channels.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import grpc

from cli import frames, headers
from cli.frames import Setting, frame
from cluster.channel import KEEPALIVE_TIME_S, KEEPALIVE_TIMEOUT_S

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_WIDEST = 2**31 - 1
_DEFAULT_WINDOW = 2**16 - 1
_CANCEL = 8
_RESETS = {7: "UNAVAILABLE", 8: "CANCELLED", 11: "RESOURCE_EXHAUSTED", 12: "PERMISSION_DENIED"}
"""codes of RST_STREAM that aren't INTERNAL, as gRPC reads them"""
_NAMES = {code.value[0]: code.name for code in grpc.StatusCode}
_prefix = struct.Struct(">BL")
"""of a message: whether it is compressed, its length"""


class Status(NamedTuple):
    """How a call ended."""

    code: str
    """a name of grpc.StatusCode"""
    message: str = ""


class _Call:
    """One running call."""

    def __init__(self, on_message: Callable[[bytes], None], request: bytes, ended: asyncio.Future[Status]) -> None:
        self.on_message = on_message
        self.ended = ended
        self.unsent = request
        """what the windows have not let through"""
        self.window = 0
        self.rest = b""
        """the beginning of a message"""
        self.timer: asyncio.TimerHandle | None = None


class Connection(asyncio.Protocol):
    """Everything happens on one event loop."""

    def __init__(self, authority: str) -> None:
        self.usable = True
        """new calls may begin here"""
        self._authority = authority
        self._transport: asyncio.Transport
        self._calls: dict[int, _Call] = {}
        self._next_id = 1
        self._rest = b""
        self._block: tuple[int, int, bytes] | None = None
        """stream, flags and beginning of headers that go on in the next frame"""
        self._window = self._initial_window = _DEFAULT_WINDOW
        self._max_frame = 2**14
        self._max_streams = _WIDEST
        self._queue: deque[asyncio.Future[None]] = deque()
        """calls that wait until there may be more"""
        self._taken = 0
        self._heard = self._pinged = False
        self._keepalive: asyncio.TimerHandle | None = None

    async def call(
        self, path: str, request: bytes, on_message: Callable[[bytes], None], timeout_s: float | None
    ) -> Status:
        """Call, pass each message of the answer to `on_message`, and return how it ended."""
        loop = asyncio.get_running_loop()
        while self.usable and len(self._calls) >= self._max_streams:
            free: asyncio.Future[None] = loop.create_future()
            self._queue.append(free)
            await free
        if not self.usable:
            return Status("UNAVAILABLE", "the connection is lost")
        stream_id, self._next_id = self._next_id, self._next_id + 2
        one = _Call(on_message, _prefix.pack(0, len(request)) + request, loop.create_future())
        one.window = self._initial_window
        self._calls[stream_id] = one
        self._let_in()
        fields = [
            *((":method", "POST"), (":scheme", "http"), (":path", path), (":authority", self._authority)),
            *(("te", "trailers"), ("content-type", "application/grpc"), ("user-agent", "tandem-bench")),
        ]
        if timeout_s is not None:
            fields.append(("grpc-timeout", f"{min(99_999_999, max(1, round(timeout_s * 1000)))}m"))
            late = Status("DEADLINE_EXCEEDED", "the deadline has passed")
            one.timer = loop.call_later(timeout_s, self._cancel, stream_id, late)
        self._transport.write(frame(frames.HEADERS, frames.END_HEADERS, stream_id, headers.encode(fields)))
        self._send(stream_id, one)
        try:
            return await one.ended
        finally:
            self._cancel(stream_id, Status("CANCELLED"))

    def close(self) -> None:
        """End the connection, and its calls as cancelled."""
        self._lose(Status("CANCELLED", "the connection was closed"))

    # --------------------------------------------------------------------------------------------- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Say what is ours to say: no table for headers, no pushing, windows as wide as can be."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        ours = ((Setting.HEADER_TABLE_SIZE, 0), (Setting.ENABLE_PUSH, 0), (Setting.INITIAL_WINDOW_SIZE, _WIDEST))
        settings = b"".join(struct.pack(">HL", *one) for one in ours)
        widen = struct.pack(">L", _WIDEST - _DEFAULT_WINDOW)
        transport.write(_PREFACE + frame(frames.SETTINGS, 0, 0, settings) + frame(frames.WINDOW_UPDATE, 0, 0, widen))
        self._keepalive = asyncio.get_running_loop().call_later(KEEPALIVE_TIME_S, self._look)

    def connection_lost(self, error: Exception | None) -> None:
        """Calls end; the next ones need another connection."""
        self._lose(Status("UNAVAILABLE", str(error) if error else "the peer ended the connection"))

    def data_received(self, data: bytes) -> None:
        """Take in all whole frames."""
        self._heard = True
        if self._rest:
            data = self._rest + data
        at, end = 0, len(data)
        try:
            while end - at >= 9:
                high, low, kind, flags, stream_id = frames.head.unpack_from(data, at)
                begin = at + 9
                after = begin + (high << 8 | low)
                if after > end:
                    break
                if kind == frames.DATA:
                    self._take_data(flags, stream_id, data, begin, after)
                else:
                    self._take(kind, flags, stream_id & _WIDEST, data[begin:after])
                at = after
        except (headers.HeaderError, struct.error, IndexError) as error:
            self._lose(Status("INTERNAL", f"the peer doesn't speak HTTP/2: {error}"))
        self._rest = data[at:]

    # ---------------------------------------------------------------------------------------------------- frames

    def _take_data(self, flags: int, stream_id: int, data: bytes, begin: int, end: int) -> None:
        self._taken += end - begin
        if self._taken > _WIDEST // 2:
            self._transport.write(frame(frames.WINDOW_UPDATE, 0, 0, struct.pack(">L", self._taken)))
            self._taken = 0
        one = self._calls.get(stream_id)
        if one is None:
            return  # it was cancelled
        if flags & frames.PADDED:
            end -= data[begin]
            begin += 1
        part = one.rest + data[begin:end] if one.rest else data[begin:end]
        at = 0
        while len(part) - at >= 5:
            compressed, size = _prefix.unpack_from(part, at)
            if len(part) - at - 5 < size:
                break
            if compressed:
                self._cancel(stream_id, Status("INTERNAL", "a compressed message, which was not asked for"))
                return
            at += 5 + size
            one.on_message(part[at - size : at])
        one.rest = part[at:]
        if flags & frames.END_STREAM:
            self._end(stream_id, Status("INTERNAL", "the stream ended without a status"))

    def _take(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        """Any other frame."""
        if kind == frames.HEADERS:
            pad = payload[0] if flags & frames.PADDED else 0
            begin = (1 if flags & frames.PADDED else 0) + (5 if flags & frames.PRIORITY else 0)
            self._take_headers(stream_id, flags, payload[begin : len(payload) - pad])
        elif kind == frames.CONTINUATION and self._block is not None:
            stream_id, earlier, block = self._block
            self._take_headers(stream_id, earlier | flags, block + payload)
        elif kind == frames.RST_STREAM:
            (code,) = struct.unpack(">L", payload)
            self._end(stream_id, Status(_RESETS.get(code, "INTERNAL"), f"the peer reset the stream ({code})"))
        elif kind == frames.SETTINGS and not flags & frames.ACK:
            self._take_settings(payload)
        elif kind == frames.PING:
            if flags & frames.ACK:
                self._pinged = False
            else:
                self._transport.write(frame(frames.PING, frames.ACK, 0, payload))
        elif kind == frames.GOAWAY:
            last, code = struct.unpack_from(">LL", payload)
            self.usable = False
            for lost in [one for one in self._calls if one > last & _WIDEST]:
                self._end(lost, Status("UNAVAILABLE", f"the peer goes away ({code})"))
            self._let_in()
        elif kind == frames.WINDOW_UPDATE:
            (more,) = struct.unpack(">L", payload)
            if stream_id == 0:
                self._window += more
            elif stream_id in self._calls:
                self._calls[stream_id].window += more
            self._send_all()

    def _take_headers(self, stream_id: int, flags: int, block: bytes) -> None:
        if not flags & frames.END_HEADERS:
            self._block = stream_id, flags, block
            return
        self._block = None
        fields = dict(headers.decode(block))
        status = fields.get(":status", "200")
        if "grpc-status" in fields:
            code = fields["grpc-status"]
            name = _NAMES.get(int(code), "UNKNOWN") if code.isdecimal() else "UNKNOWN"
            self._end(stream_id, Status(name, fields.get("grpc-message", "")))
        elif flags & frames.END_STREAM or status != "200":
            self._cancel(stream_id, Status("UNAVAILABLE" if status[0] == "5" else "UNKNOWN", f"HTTP {status}"))

    def _take_settings(self, payload: bytes) -> None:
        for number, value in struct.iter_unpack(">HL", payload):
            if number == Setting.INITIAL_WINDOW_SIZE:
                for one in self._calls.values():
                    one.window += value - self._initial_window
                self._initial_window = value
            elif number == Setting.MAX_FRAME_SIZE:
                self._max_frame = value
            elif number == Setting.MAX_CONCURRENT_STREAMS:
                self._max_streams = value
        self._transport.write(frame(frames.SETTINGS, frames.ACK, 0))
        self._send_all()
        self._let_in()

    # --------------------------------------------------------------------------------------------------- sending

    def _send_all(self) -> None:
        for stream_id, one in self._calls.items():
            self._send(stream_id, one)

    def _send(self, stream_id: int, one: _Call) -> None:
        """What is left of a request, as far as the windows let it."""
        while one.unsent:
            size = min(len(one.unsent), self._max_frame, one.window, self._window)
            if size <= 0:
                return
            part, one.unsent = one.unsent[:size], one.unsent[size:]
            one.window -= size
            self._window -= size
            self._transport.write(frame(frames.DATA, 0 if one.unsent else frames.END_STREAM, stream_id, part))

    # ---------------------------------------------------------------------------------------------------- endings

    def _end(self, stream_id: int, status: Status) -> None:
        """A call is over; without effect on one that is already."""
        one = self._calls.pop(stream_id, None)
        if one is None:
            return
        if one.timer is not None:
            one.timer.cancel()
        if not one.ended.done():
            one.ended.set_result(status)
        self._let_in()

    def _cancel(self, stream_id: int, status: Status) -> None:
        """End a call, and tell the peer."""
        if stream_id in self._calls:
            self._transport.write(frame(frames.RST_STREAM, 0, stream_id, struct.pack(">L", _CANCEL)))
            self._end(stream_id, status)

    def _let_in(self) -> None:
        while self._queue and (not self.usable or len(self._calls) < self._max_streams):
            free = self._queue.popleft()
            if not free.done():
                free.set_result(None)
                return  # it takes its place in the next turn of the loop, and lets in the next one

    def _lose(self, status: Status) -> None:
        self.usable = False
        if self._keepalive is not None:
            self._keepalive.cancel()
        self._transport.abort()
        for stream_id in list(self._calls):
            self._end(stream_id, status)
        while self._queue:
            self._let_in()

    def _look(self) -> None:
        """Whether the peer is still there, once in a while."""
        if self._pinged and not self._heard:
            self._lose(Status("UNAVAILABLE", "the peer doesn't answer"))
            return
        wait_s = KEEPALIVE_TIME_S
        self._pinged = bool(self._calls) and not self._heard
        if self._pinged:
            self._transport.write(frame(frames.PING, 0, 0, bytes(8)))
            wait_s = KEEPALIVE_TIMEOUT_S
        self._heard = False
        self._keepalive = asyncio.get_running_loop().call_later(wait_s, self._look)
