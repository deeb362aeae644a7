"""Streams through the published port of a stack, received without any retry of the client's own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from tandem.v1 import generation_pb2, generation_pb2_grpc, types_pb2

from tests.containers.stack import PATIENCE_S
from tests.integration.harness import Answer, expected_tokens, receive, request

FAKE_PROMPTS = [[65 + index, 66, 67 + 3 * index, 68] for index in range(6)]
REAL_PROMPTS = ("The capital of France is", "One two three four five six one two three", "def fibonacci(n):", "Why?")
STRUCK_AT = 5
"""Tokens that each stream has received when the fault strikes"""


@dataclass(frozen=True)
class Load:
    """Requests whose tokens are known."""

    requests: list[Any]
    expected: list[list[int]]


def fake_load() -> Load:
    """Several seconds of the fake engine; the expected tokens come from a plain loop, without the cluster's code."""
    requests = [request(prompt, 200, temperature=0.8) for prompt in FAKE_PROMPTS]
    return Load(requests, [expected_tokens(prompt, 200, temperature=0.8) for prompt in FAKE_PROMPTS])


async def real_load(address: str, model: str) -> Load:
    """Real weights: what the undisturbed stack answers without drafts."""
    requests = []
    for prompt in REAL_PROMPTS:
        message = request(prompt, 64, temperature=0.8)
        message.model = model
        requests.append(message)
    plain = [generation_pb2.GenerateStreamRequest.FromString(one.SerializeToString()) for one in requests]
    for message in plain:
        message.speculation.mode = types_pb2.SPECULATION_MODE_OFF
    async with gateway(address) as stub:
        answers = [await asyncio.wait_for(receive(stub.GenerateStream(one)), PATIENCE_S) for one in plain]
    return Load(requests, [answer.tokens[0] for answer in answers])


@contextlib.asynccontextmanager
async def gateway(address: str) -> AsyncIterator[Any]:
    """A stub without keepalive: a busy machine is no dead one."""
    async with grpc.aio.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        yield generation_pb2_grpc.GenerationServiceStub(channel)


async def run(address: str, load: Load, strike: Callable[[], None] | None = None) -> list[Answer]:
    """All streams to their ends; `strike` is called, on a thread, once each has begun. Tokens are compared."""
    begun = [asyncio.Event() for _ in load.requests]

    def noting(event: asyncio.Event) -> Callable[[int], None]:
        return lambda count: event.set() if count >= STRUCK_AT else None

    async with gateway(address) as stub:
        streams = [
            asyncio.ensure_future(receive(stub.GenerateStream(message), noting(event)))
            for message, event in zip(load.requests, begun, strict=True)
        ]
        try:
            if strike is not None:
                await asyncio.wait_for(asyncio.gather(*(event.wait() for event in begun)), PATIENCE_S)
                assert not any(stream.done() for stream in streams), "too late to disturb anything"
                await asyncio.to_thread(strike)
            answers = await asyncio.wait_for(asyncio.gather(*streams), PATIENCE_S)
        finally:
            for stream in streams:
                stream.cancel()
    assert [answer.tokens[0] for answer in answers] == load.expected
    assert [answer.usage.completion_tokens for answer in answers] == [len(tokens) for tokens in load.expected]
    return list(answers)
