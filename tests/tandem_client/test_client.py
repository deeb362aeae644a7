"""The asynchronous client against scripted gateways on real connections."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import pytest

from cluster import errors
from tandem_client import (
    NO_RETRY,
    Chunk,
    FinishReason,
    Generation,
    Message,
    Request,
    RetryPolicy,
    TandemClient,
    collect,
)


async def gather(client: TandemClient, *args: Any, **options: Any) -> tuple[list[Chunk], Generation]:
    chunks = [chunk async for chunk in client.stream(*args, **options)]
    return chunks, collect(chunks)


def assert_whole(scripted: Any, answer: Generation, num_tokens: int, num_choices: int = 1) -> None:
    """Every token and every piece of text exactly once, in order."""
    assert [choice.index for choice in answer.choices] == list(range(num_choices))
    for choice in answer.choices:
        assert list(choice.token_ids) == [scripted.answer_token(choice.index, i) for i in range(num_tokens)]
        assert choice.text == "".join(scripted.answer_text(choice.index, i) for i in range(num_tokens))
        assert choice.finish_reason is FinishReason.LENGTH


async def test_an_unbroken_stream(scripted: Any) -> None:
    gateway = scripted.ScriptedGateway(per_message=5)
    async with scripted.serving(gateway) as (address, _), TandemClient(address) as client:
        chunks, answer = await gather(client, "hi", max_tokens=12, temperature=0.0)
    assert_whole(scripted, answer, 12)
    assert [len(delta.token_ids) for chunk in chunks for delta in chunk.deltas] == [5, 5, 2]
    assert (answer.seed, answer.model, answer.usage.completion_tokens) == (scripted.SEED, "scripted", 12)
    request = gateway.requests[0]
    # Unset differs from 0.
    assert request.sampling.HasField("temperature")
    assert request.sampling.temperature == 0.0
    assert not request.sampling.HasField("top_k")
    assert not request.HasField("n")
    assert len(request.request_id) == 32
    assert not request.resume


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [("text", "text"), ([1, 2, 3], "token_ids"), ([], "token_ids"), ([Message("user", "a")], "chat")],
)
async def test_each_kind_of_prompt(scripted: Any, prompt: Any, kind: str) -> None:
    gateway = scripted.ScriptedGateway()
    async with scripted.serving(gateway) as (address, _), TandemClient(address) as client:
        await client.generate(prompt)
    assert gateway.requests[0].WhichOneof("prompt") == kind


async def test_a_prompt_of_mixed_kinds_is_refused_before_it_travels() -> None:
    async with TandemClient("127.0.0.1:1") as client:
        with pytest.raises(ValueError, match="prompt"):
            await client.generate([Message("user", "a"), 5])  # type: ignore[arg-type]


@pytest.mark.parametrize("break_at", [0, 1, 5, 11, 12])
@pytest.mark.parametrize("way", ["draining", "ends_early"])
async def test_a_stream_goes_on_at_another_gateway(scripted: Any, break_at: int, way: str) -> None:
    first = scripted.ScriptedGateway(breaks={0: (break_at, getattr(scripted, way))})
    second = scripted.ScriptedGateway()
    async with (
        scripted.serving(first) as (first_address, _),
        scripted.serving(second) as (second_address, _),
        TandemClient(first_address, second_address, retry=scripted.FAST_RETRY) as client,
    ):
        _, answer = await gather(client, "hi")
    assert_whole(scripted, answer, 12)
    assert (len(first.requests), len(second.requests)) == (1, 1)
    assert second.requests[0].request_id == first.requests[0].request_id
    assert [len(choice.token_ids) for choice in second.requests[0].resume] == ([break_at] if break_at else [])
    assert answer.usage.resumptions == (1 if break_at else 0)


async def test_a_stream_goes_on_at_the_same_gateway_after_many_breaks(scripted: Any) -> None:
    """More breaks than max_attempts: progress starts the count anew."""
    gateway = scripted.ScriptedGateway(
        num_tokens=20, per_message=2, breaks=dict.fromkeys(range(9), (1, scripted.draining))
    )
    policy = RetryPolicy(max_attempts=3, initial_backoff_s=0.001)
    async with scripted.serving(gateway) as (address, _), TandemClient(address, retry=policy) as client:
        _, answer = await gather(client, "hi", n=3, echo=True)
    assert_whole(scripted, answer, 20, num_choices=3)
    assert [choice.prompt_text for choice in answer.choices] == ["PROMPT"] * 3
    assert answer.usage.resumptions == 9
    assert len(gateway.requests) == 10


async def test_a_reset_connection_is_resumed(scripted: Any) -> None:
    """Connections die without a word, mid-stream, as when the gateway's process is killed."""

    async def hang(context: Any) -> None:
        await asyncio.Event().wait()

    gateway = scripted.ScriptedGateway(num_tokens=6, breaks={0: (2, hang), 1: (1, hang)})
    async with scripted.serving(gateway) as (address, _), scripted.CuttableProxy(address) as proxy:
        chunks = []
        async with TandemClient(proxy.address, retry=scripted.FAST_RETRY) as client:
            async for chunk in client.stream("hi"):
                chunks.append(chunk)
                if len(chunks) in (2, 3):
                    proxy.cut()
        assert proxy.num_connections == 3
    assert_whole(scripted, collect(chunks), 6)
    assert [len(choice.token_ids) for request in gateway.requests for choice in request.resume] == [2, 3]


async def test_a_stopped_server_is_resumed_elsewhere(scripted: Any) -> None:
    first, second = scripted.ScriptedGateway(hang_after=4), scripted.ScriptedGateway()
    async with (
        scripted.serving(first) as (first_address, server),
        scripted.serving(second) as (second_address, _),
        TandemClient(first_address, second_address, retry=scripted.FAST_RETRY) as client,
    ):
        chunks = []
        async for chunk in client.stream("hi"):
            chunks.append(chunk)
            if len(chunks) == 4:
                await server.stop(None)
    assert_whole(scripted, collect(chunks), 12)
    assert len(second.requests[0].resume[0].token_ids) == 4


async def test_a_gateway_that_repeats_itself_is_filtered(scripted: Any) -> None:
    """A resumed stream that starts from the beginning again: repeated tokens are dropped, text with them."""

    class Forgetful(scripted.ScriptedGateway):
        def _messages(self, request: Any) -> list[Any]:
            del request.resume[:]
            return super()._messages(request)

    gateway = Forgetful(breaks={0: (5, scripted.draining)})
    async with (
        scripted.serving(gateway) as (address, _),
        TandemClient(address, retry=scripted.FAST_RETRY) as client,
    ):
        _, answer = await gather(client, "hi", echo=True)
    assert len(gateway.requests) == 2
    assert_whole(scripted, answer, 12)


async def test_errors_are_typed_and_not_tried_again(scripted: Any) -> None:
    async def refuse(context: Any) -> None:
        await errors.abort(context, errors.InvalidField("sampling.temperature", "must not be negative"))

    gateway = scripted.ScriptedGateway(breaks={0: (0, refuse)})
    async with scripted.serving(gateway) as (address, _), TandemClient(address) as client:
        with pytest.raises(errors.InvalidField, match="must not be negative") as caught:
            await client.generate("hi", temperature=-1.0)
    assert caught.value.field == "sampling.temperature"
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert len(gateway.requests) == 1


async def test_a_full_queue_is_not_tried_again(scripted: Any) -> None:
    async def refuse(context: Any) -> None:
        await errors.abort(context, errors.QueueFull("the queue is full", retry_after_s=2.5))

    gateway = scripted.ScriptedGateway(breaks={0: (0, refuse)})
    async with scripted.serving(gateway) as (address, _), TandemClient(address) as client:
        with pytest.raises(errors.QueueFull) as caught:
            await client.generate("hi")
    assert caught.value.retry_after_s == 2.5


async def test_retry_info_is_respected(scripted: Any) -> None:
    async def later(context: Any) -> None:
        await errors.abort(context, errors.Unavailable("no worker", retry_after_s=0.3))

    gateway = scripted.ScriptedGateway(breaks={0: (0, later)})
    async with scripted.serving(gateway) as (address, _), TandemClient(address, retry=scripted.FAST_RETRY) as client:
        start = time.monotonic()
        await client.tokenize("hi")
        assert time.monotonic() - start >= 0.3
    assert len(gateway.requests) == 2


async def test_a_duplicate_id_is_tried_again_only_after_a_break(scripted: Any) -> None:
    async def exists(context: Any) -> None:
        await errors.abort(context, errors.AlreadyExists("request", "r"))

    gateway = scripted.ScriptedGateway(breaks={0: (3, scripted.draining), 1: (0, exists)})
    async with scripted.serving(gateway) as (address, _), TandemClient(address, retry=scripted.FAST_RETRY) as client:
        _, answer = await gather(client, "hi", request_id="r")
        assert_whole(scripted, answer, 12)
        gateway.breaks[3] = (0, exists)
        with pytest.raises(errors.AlreadyExists):
            await client.generate("hi", request_id="r")
    assert len(gateway.requests) == 4


async def test_nobody_there_is_unavailable(scripted: Any) -> None:
    async with TandemClient("127.0.0.1:1", retry=RetryPolicy(max_attempts=2, initial_backoff_s=0.01)) as client:
        with pytest.raises(errors.Unavailable):
            await client.generate("hi")
        with pytest.raises(errors.Unavailable):
            await client.models()


async def test_the_deadline_bounds_all_attempts(scripted: Any) -> None:
    gateway = scripted.ScriptedGateway(breaks=dict.fromkeys(range(10_000), (0, scripted.draining)))
    policy = RetryPolicy(max_attempts=10_000, initial_backoff_s=0.02, max_backoff_s=0.02)
    async with scripted.serving(gateway) as (address, _), TandemClient(address, retry=policy) as client:
        start = time.monotonic()
        # All attempts would take minutes; a slow machine needs a longer deadline for a few of them.
        for timeout_s in (0.3, 3.0, 30.0):
            before = len(gateway.requests)
            with pytest.raises(errors.DeadlineExceeded):
                await client.generate("hi", timeout_s=timeout_s)
            if len(gateway.requests) - before > 3:
                break
        assert time.monotonic() - start > timeout_s * 0.8
    remaining = gateway.remaining_s[before:]
    assert len(remaining) > 3
    assert all(left is not None and left <= timeout_s + 0.05 for left in remaining)
    assert remaining[-1] < remaining[0]


async def test_the_deadline_reaches_the_gateway(scripted: Any) -> None:
    gateway = scripted.ScriptedGateway(hang_after=2)
    async with scripted.serving(gateway) as (address, _), TandemClient(address, timeout_s=0.3) as client:
        with pytest.raises(errors.DeadlineExceeded):
            await client.generate("hi")
        await asyncio.to_thread(gateway.cancellations.get, timeout=5)


async def test_leaving_the_stream_cancels_the_request(scripted: Any) -> None:
    gateway = scripted.ScriptedGateway(hang_after=3)
    async with scripted.serving(gateway) as (address, _), TandemClient(address) as client:
        stream = client.stream("hi")
        async for chunk in stream:
            if scripted.answer_text(0, 2) in chunk.text:
                break
        await stream.aclose()
        assert await asyncio.to_thread(gateway.cancellations.get, timeout=5) == 0
    assert gateway.cancellations.empty()


async def test_no_retry_shows_the_break(scripted: Any) -> None:
    gateway = scripted.ScriptedGateway(breaks={0: (4, scripted.draining)})
    async with scripted.serving(gateway) as (address, _), TandemClient(address, retry=NO_RETRY) as client:
        stream = client.stream(Request(prompt="hi", max_tokens=12))
        for _ in range(4):
            await anext(stream)
        with pytest.raises(errors.Unavailable, match="draining"):
            await anext(stream)


async def test_text_calls(scripted: Any) -> None:
    async with scripted.serving(scripted.ScriptedGateway()) as (address, _), TandemClient(address) as client:
        assert await client.tokenize("ab") == (97, 98)
        assert await client.tokenize([Message("user", "x")]) == tuple(b"user:x")
        assert await client.detokenize([97, 98]) == "ab"
        (model,) = await client.models()
        assert (model.name, model.vocab_size) == ("scripted", 50_021)
