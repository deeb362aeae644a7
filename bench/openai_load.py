"""Closed-loop load on an OpenAI-compatible server, timed as `cli.load` times Tandem's.

One connection per client, kept alive as long as the server keeps it (llama.cpp's ends each after a streamed answer,
whatever it says); completions are streamed as server-sent events:

    POST /v1/completions ──▶ data: {"choices": [{"text": " a"}]}      a delivery, with one token or more
                             data: {"choices": [], "usage": {…}}      how many tokens there were
                             data: [DONE]

HTTP is spoken directly over asyncio's streams: a load generator on the server's own cores should take as little of
them as it can. The same `Record` comes out as for gRPC, so that both are summed up by the same code.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cli.load import Record

_LONGEST_LINE = 2**20


class BadAnswer(Exception):
    """The server answered something else than a stream of completions; the text is for a person."""


class _NotKept(Exception):
    """The server ended a connection after an earlier answer: no fault, the request goes over a new one."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where to send requests, and what each carries besides its prompt."""

    host: str
    port: int
    fields: Mapping[str, Any]
    """model, and how this server is told to ignore the end of sequence"""


async def run(
    endpoint: Endpoint, prompts: Sequence[Sequence[int] | str], max_tokens: int, concurrency: int
) -> list[Record]:
    """Send every prompt, `concurrency` at a time; each answer must have `max_tokens` tokens."""
    bodies = [_body(endpoint, prompt, max_tokens) for prompt in prompts]
    upcoming = iter(bodies)
    records: list[Record] = []

    async def client() -> None:
        connection: _Connection | None = None
        for body in upcoming:
            record = Record(due_s=(now := time.perf_counter()), started_s=now)
            records.append(record)
            try:
                if connection is not None:
                    try:
                        await _measure(connection, body, record)
                    except _NotKept:
                        connection.close()
                        connection = None
                if connection is None:
                    connection = await _Connection.open(endpoint)
                    await _measure(connection, body, record)
                if record.error is None and record.num_tokens != max_tokens:
                    record.error = "SHORT_ANSWER"
            except (OSError, BadAnswer, asyncio.IncompleteReadError, ValueError, KeyError) as error:
                record.error = str(error) or type(error).__name__
            record.ended_s = time.perf_counter()
            if record.error is not None and connection is not None:
                connection.close()
                connection = None
        if connection is not None:
            connection.close()

    await asyncio.gather(*(client() for _ in range(min(concurrency, len(bodies)))))
    return records


def _body(endpoint: Endpoint, prompt: Sequence[int] | str, max_tokens: int) -> bytes:
    fields = {
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **endpoint.fields,
    }
    return json.dumps(fields).encode()


async def _measure(connection: _Connection, body: bytes, record: Record) -> None:
    last_s = record.started_s
    usage: Mapping[str, Any] | None = None
    deliveries = 0
    async for event in connection.post("/v1/completions", body):
        now_s = time.perf_counter()
        if event.get("error"):
            raise BadAnswer(str(event["error"]))
        usage = event.get("usage") or usage
        if not event.get("choices"):
            continue
        deliveries += 1
        if record.first_token_s is None:
            record.first_token_s = now_s
        else:
            record.gaps_s.append(now_s - last_s)
        last_s = now_s
    # A server that counts nothing is believed to send one token at a time.
    record.num_tokens = deliveries if usage is None else int(usage["completion_tokens"])


class _Connection:
    """One kept-alive HTTP/1.1 connection; one request at a time."""

    def __init__(self, endpoint: Endpoint, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._host = f"{endpoint.host}:{endpoint.port}"
        self._reader = reader
        self._writer = writer
        self._has_answered = False

    @classmethod
    async def open(cls, endpoint: Endpoint) -> _Connection:
        return cls(endpoint, *await asyncio.open_connection(endpoint.host, endpoint.port, limit=_LONGEST_LINE))

    def close(self) -> None:
        self._writer.close()

    async def post(self, path: str, body: bytes) -> AsyncIterator[dict[str, Any]]:
        """The events of the answer, decoded. Raises BadAnswer for another status than 200, _NotKept for none at all
        where there was an earlier answer.
        """
        head = f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
        self._writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        try:
            status, headers = await self._head()
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            if self._has_answered and not getattr(error, "partial", b""):
                raise _NotKept from error
            raise
        self._has_answered = True
        chunks = self._chunks(headers)
        if status != 200:
            text = b"".join([chunk async for chunk in chunks]).decode("utf-8", "replace")
            raise BadAnswer(f"HTTP {status}: {text[:300]}")
        rest = b""
        async for chunk in chunks:
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                data = line.removeprefix(b"data:").strip()
                if line.startswith(b"data:") and data != b"[DONE]":
                    yield json.loads(data)

    async def _head(self) -> tuple[int, dict[str, str]]:
        lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        first, *others = lines
        headers = dict(line.lower().split(":", 1) for line in others if ":" in line)
        return int(first.split()[1]), {name: value.strip() for name, value in headers.items()}

    async def _chunks(self, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
        if headers.get("transfer-encoding") != "chunked":
            yield await self._reader.readexactly(int(headers.get("content-length", "0")))
            return
        while size := int((await self._reader.readuntil(b"\r\n")).split(b";")[0], 16):
            chunk = await self._reader.readexactly(size + 2)
            yield chunk[:-2]
        await self._reader.readuntil(b"\r\n")
