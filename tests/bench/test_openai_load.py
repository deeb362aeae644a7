"""The OpenAI client against a scripted server: what it counts, times, and calls an error."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from bench import openai_load
from bench.openai_load import Endpoint
from cli.load import Record


@dataclass
class OpenAIServer:
    """Answers max_tokens tokens; what it does to the request with a given first prompt id is scripted."""

    per_delivery: int = 1
    says_usage: bool = True
    refuse: frozenset[int] = frozenset()
    cut_short: frozenset[int] = frozenset()
    break_off: frozenset[int] = frozenset()
    fail_inside: frozenset[int] = frozenset()
    say_nothing: frozenset[int] = frozenset()
    keeps_connections: bool = True
    bodies: list[dict[str, Any]] = field(default_factory=list)
    num_connections: int = 0
    running: int = 0
    most_running: int = 0
    all_here: int = 0
    """hold answers back until so many run at once"""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                assert head.startswith("POST /v1/completions HTTP/1.1\r\n")
                length = int(head.lower().split("content-length:")[1].split("\r\n")[0])
                body = json.loads(await reader.readexactly(length))
                self.bodies.append(body)
                self.running += 1
                self.most_running = max(self.most_running, self.running)
                while self.most_running < self.all_here:  # noqa: ASYNC110
                    await asyncio.sleep(0)
                try:
                    if not await self.answer(body, writer) or not self.keeps_connections:
                        break
                finally:
                    self.running -= 1
        writer.close()

    async def answer(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        first = body["prompt"][0]
        if first in self.say_nothing:
            return False
        if first in self.refuse:
            text = b'{"error": {"message": "prompt: no"}}'
            writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\n\r\n" % len(text) + text)
            return True
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: text/event-stream\r\n\r\n")
        total = body["max_tokens"] - (1 if first in self.cut_short else 0)
        for start in range(0, total, self.per_delivery):
            if first in self.break_off and start:
                return False
            if first in self.fail_inside and start:
                self.event(writer, {"error": {"message": "engine died"}})
                break
            text = "x" * min(self.per_delivery, total - start)
            self.event(writer, {"choices": [{"index": 0, "text": text}]})
            await writer.drain()
            await asyncio.sleep(0)
        if self.says_usage:
            self.event(writer, {"choices": [], "usage": {"completion_tokens": total}})
        self.chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        return True

    def event(self, writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
        """Cut in two, as a proxy might."""
        data = b"data: " + json.dumps(event).encode() + b"\n\n"
        self.chunk(writer, data[:9])
        self.chunk(writer, data[9:])

    def chunk(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(b"%x\r\n" % len(data) + data + b"\r\n")


@contextlib.asynccontextmanager
async def endpoint_of(server: OpenAIServer) -> AsyncIterator[Endpoint]:
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    async with listening:
        yield Endpoint("127.0.0.1", listening.sockets[0].getsockname()[1], {"model": "m", "ignore_eos": True})


async def run(server: OpenAIServer, count: int = 6, concurrency: int = 3, max_tokens: int = 5) -> list[Record]:
    async with endpoint_of(server) as endpoint:
        return await openai_load.run(endpoint, [[index, 7, 8] for index in range(count)], max_tokens, concurrency)


async def test_a_closed_loop_streams_and_keeps_its_connections() -> None:
    server = OpenAIServer(all_here=3)
    records = await run(server)
    assert [record.error for record in records] == [None] * 6
    assert [record.num_tokens for record in records] == [5] * 6
    assert [len(record.gaps_s) for record in records] == [4] * 6
    assert (server.most_running, server.num_connections) == (3, 3)
    for record in records:
        assert record.first_token_s is not None
        assert record.started_s <= record.first_token_s <= record.ended_s
        assert record.first_token_s + sum(record.gaps_s) <= record.ended_s
    body = server.bodies[0]
    assert sorted(one["prompt"][0] for one in server.bodies) == list(range(6))
    assert (body["max_tokens"], body["temperature"], body["stream"], body["ignore_eos"]) == (5, 0, True, True)


async def test_a_server_may_end_connections_after_an_answer() -> None:
    server = OpenAIServer(keeps_connections=False)
    records = await run(server)
    assert [(record.num_tokens, len(record.gaps_s), record.error) for record in records] == [(5, 4, None)] * 6
    assert server.num_connections == len(server.bodies) == 6


async def test_no_answer_over_a_new_connection_is_an_error() -> None:
    server = OpenAIServer(say_nothing=frozenset({1}))
    records = await run(server, count=3, concurrency=1)
    assert [record.error is None for record in records] == [True, False, True]
    # Over a kept connection it is asked once more, over a new one.
    assert [body["prompt"][0] for body in server.bodies] == [0, 1, 1, 2]


async def test_several_tokens_of_a_delivery_are_counted_by_the_server() -> None:
    records = await run(OpenAIServer(per_delivery=2))
    assert [(record.num_tokens, len(record.gaps_s), record.error) for record in records] == [(5, 2, None)] * 6


async def test_without_usage_every_delivery_is_a_token() -> None:
    assert [record.error for record in await run(OpenAIServer(says_usage=False))] == [None] * 6
    records = await run(OpenAIServer(says_usage=False, per_delivery=2))
    assert [record.error for record in records] == ["SHORT_ANSWER"] * 6


async def test_what_goes_wrong_is_an_error_and_the_rest_goes_on() -> None:
    server = OpenAIServer(
        refuse=frozenset({0}), cut_short=frozenset({1}), break_off=frozenset({2}), fail_inside=frozenset({3})
    )
    records = await run(server, count=8, concurrency=2)
    errors = [record.error or "" for record in records]
    assert sum(not error for error in errors) == 4
    assert sum(error == "SHORT_ANSWER" for error in errors) == 1
    assert sum("HTTP 400" in error and "prompt: no" in error for error in errors) == 1
    assert sum("engine died" in error for error in errors) == 1
    assert len(server.bodies) == 8


async def test_nobody_there_is_an_error_not_an_exception() -> None:
    records = await openai_load.run(Endpoint("127.0.0.1", 1, {}), [[1], [2]], 4, 2)
    assert all(record.error for record in records)
    assert all(record.ended_s >= record.started_s for record in records)
