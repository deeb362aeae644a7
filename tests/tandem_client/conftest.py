"""A scripted GenerationService on a real server, and a TCP proxy that can cut connections."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from tandem.v1 import generation_pb2, generation_pb2_grpc, types_pb2

from cluster import errors
from tandem_client import RetryPolicy

SEED = 2**63 + 12345
FAST_RETRY = RetryPolicy(max_attempts=6, initial_backoff_s=0.01, max_backoff_s=0.05)


def answer_token(choice: int, index: int) -> int:
    """The only right token at one place: all differ, so that a skipped or repeated one shows."""
    return (choice * 100_003 + index * 7_919 + 11) % 50_021


def answer_text(choice: int, index: int) -> str:
    return f"<{choice}.{index}>"


Break = Callable[[Any], Awaitable[None]]


async def draining(context: Any) -> None:
    """What a gateway says that is about to stop."""
    await errors.abort(context, errors.Unavailable("draining", retry_after_s=0.0))


async def ends_early(context: Any) -> None:
    """A stream that closes with OK although choices are running."""


@dataclass
class ScriptedGateway(generation_pb2_grpc.GenerationServiceServicer):
    """Answers as a gateway would, resumed requests too; `breaks[i]` ends call i after so many messages."""

    num_tokens: int = 12
    per_message: int = 1
    breaks: dict[int, tuple[int, Break]] = field(default_factory=dict)
    requests: list[Any] = field(default_factory=list)
    remaining_s: list[float | None] = field(default_factory=list)
    cancellations: queue.Queue[int] = field(default_factory=queue.Queue)
    hang_after: int | None = None

    async def GenerateStream(self, request: Any, context: Any) -> AsyncIterator[Any]:
        call = len(self.requests)
        self.requests.append(request)
        self.remaining_s.append(context.time_remaining())
        num_messages = 0
        try:
            for message in self._messages(request):
                if call in self.breaks and self.breaks[call][0] == num_messages:
                    await self.breaks[call][1](context)
                    return
                if self.hang_after == num_messages:
                    await asyncio.Event().wait()
                yield message
                num_messages += 1
        except (asyncio.CancelledError, GeneratorExit):
            self.cancellations.put(call)
            raise

    def _messages(self, request: Any) -> list[Any]:
        held = {choice.index: len(choice.token_ids) for choice in request.resume}
        for choice in request.resume:
            assert choice.seed == SEED
            assert list(choice.token_ids) == [answer_token(choice.index, i) for i in range(len(choice.token_ids))]
        num_choices = request.n if request.HasField("n") else 1
        messages = []
        for start in range(0, self.num_tokens, self.per_message):
            deltas = []
            for choice in range(num_choices):
                first = max(start, held.get(choice, 0))
                indexes = range(first, min(start + self.per_message, self.num_tokens))
                if not indexes:
                    continue
                is_last = indexes[-1] == self.num_tokens - 1
                deltas.append(
                    generation_pb2.ChoiceDelta(
                        index=choice,
                        text="".join(answer_text(choice, i) for i in indexes),
                        first_token_index=first,
                        token_ids=[answer_token(choice, i) for i in indexes],
                        finish_reason=types_pb2.FINISH_REASON_LENGTH if is_last else None,
                        prompt_text="PROMPT" if request.output.echo and indexes[0] == held.get(choice, 0) else "",
                    )
                )
            if deltas:
                messages.append(self._message(request, deltas=deltas))
        usage = types_pb2.Usage(prompt_tokens=3, completion_tokens=self.num_tokens * num_choices)
        messages.append(self._message(request, usage=usage))
        return messages

    @staticmethod
    def _message(request: Any, **values: Any) -> Any:
        return generation_pb2.GenerateStreamResponse(
            request_id=request.request_id, model="scripted", seed=SEED, **values
        )

    async def Tokenize(self, request: Any, context: Any) -> Any:
        call = len(self.requests)
        self.requests.append(request)
        if call in self.breaks:
            await self.breaks[call][1](context)
        text = request.text or "|".join(f"{message.role}:{message.content}" for message in request.chat.messages)
        return generation_pb2.TokenizeResponse(token_ids=list(text.encode()))

    async def Detokenize(self, request: Any, context: Any) -> Any:
        return generation_pb2.DetokenizeResponse(text=bytes(request.token_ids).decode())

    async def ListModels(self, request: Any, context: Any) -> Any:
        return generation_pb2.ListModelsResponse(models=[generation_pb2.Model(name="scripted", vocab_size=50_021)])


@contextlib.asynccontextmanager
async def serving(gateway: ScriptedGateway) -> AsyncIterator[tuple[str, grpc.aio.Server]]:
    """A real server on a free port."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(gateway, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}", server
    finally:
        await server.stop(None)


class CuttableProxy:
    """Forwards TCP to a server; `cut` resets every connection, as a killed process does."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._upstream = (host, int(port))
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._server: asyncio.Server | None = None
        self.num_connections = 0
        self.address = ""

    async def __aenter__(self) -> CuttableProxy:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        far_reader, far_writer = await asyncio.open_connection(*self._upstream)
        self._writers += [writer, far_writer]
        self._tasks += [
            asyncio.create_task(self._pump(reader, far_writer)),
            asyncio.create_task(self._pump(far_reader, writer)),
        ]

    @staticmethod
    async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()


@pytest.fixture
def scripted() -> Any:
    """This module: tests can't import it by name."""
    return sys.modules[__name__]
