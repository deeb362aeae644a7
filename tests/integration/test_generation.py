"""The whole cluster, undisturbed: every stream is what one sequence in a plain loop gives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.integration.harness import OWN, Cluster, expected_tokens, receive, request, running

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module", params=[None, "fake", OWN], ids=["plain", "speculative", "own drafts"])
async def cluster(request: Any, tmp_path_factory: Any) -> AsyncIterator[Cluster]:
    options: dict[str, Any] = {"scheduler": {"speculation": "fixed"}, "fake_step_ms": 5}
    async with running(tmp_path_factory.mktemp("cluster"), workers=2, draft=request.param, **options) as started:
        yield started


async def test_one_stream(cluster: Cluster) -> None:
    prompt = list(b"Once upon a time")
    answer = await receive(cluster.stub().GenerateStream(request(prompt, 40)))
    assert answer.tokens[0] == expected_tokens(prompt, 40)
    assert answer.texts[0] == bytes(answer.tokens[0]).decode()
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (16, 40)


async def test_a_mixed_crowd_gives_what_each_gives_alone(cluster: Cluster) -> None:
    stub = cluster.stub()
    shared = list(b"The same long beginning of many prompts. " * 3)
    cases = []
    for index in range(48):
        prompt = (shared if index % 2 else []) + list(f"{index}: tell me".encode())
        params: dict[str, Any] = {"temperature": (0.0, 0.7, 1.3)[index % 3], "seed": 1000 + index}
        if index % 5 == 0:
            params |= {"top_k": 20, "frequency_penalty": 0.5}
        cases.append((prompt, 16 + index, params))
    calls = [stub.GenerateStream(request(prompt, length, **params)) for prompt, length, params in cases]
    answers = await asyncio.gather(*(receive(call) for call in calls))
    for (prompt, length, params), answer in zip(cases, answers, strict=True):
        seed = params.pop("seed")
        assert answer.tokens[0] == expected_tokens(prompt, length, seed=seed, **params)
        assert answer.usage.completion_tokens == length
    await cluster.assert_baseline()


async def test_three_choices(cluster: Cluster) -> None:
    prompt = list(b"Three of a kind, please, with a prompt that fills some blocks")
    answer = await receive(cluster.stub().GenerateStream(request(prompt, 24, n=3, temperature=1.0)))
    assert answer.tokens == {choice: expected_tokens(prompt, 24, choice=choice, temperature=1.0) for choice in range(3)}
    assert len(set(answer.texts.values())) == 3


async def test_unary_equals_stream(cluster: Cluster) -> None:
    from tandem.v1 import generation_pb2

    message = request("Twice the same", 30, temperature=0.9)
    streamed = await receive(cluster.stub().GenerateStream(message))
    whole = await cluster.stub().Generate(generation_pb2.GenerateRequest.FromString(message.SerializeToString()))
    assert list(whole.choices[0].token_ids) == streamed.tokens[0]
    assert whole.choices[0].text == streamed.texts[0]
    assert whole.usage.completion_tokens == streamed.usage.completion_tokens
    assert whole.seed == streamed.seed


async def test_drafts_are_proposed_accepted_and_rejected(cluster: Cluster) -> None:
    speculative = cluster.has_drafts
    stub = cluster.stub()
    answers = await asyncio.gather(
        *(receive(stub.GenerateStream(request(f"prompt {index}", 200))) for index in range(3))
    )
    drafted = sum(answer.usage.drafted_tokens for answer in answers)
    accepted = sum(answer.usage.accepted_tokens for answer in answers)
    if speculative:
        assert 0 < accepted < drafted
    else:
        assert drafted == 0
