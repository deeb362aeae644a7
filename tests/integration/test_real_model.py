"""SmolLM2 in float32 through the whole cluster: transformers' own greedy tokens, with speculation, load and a kill."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from engine.default_model import fetch_default_model
from tests.integration.harness import Cluster, receive, request, running

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.real_model, pytest.mark.timeout(300)]

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "One two three four five six seven one two three four five six seven one two",
)
LENGTH = 32


@pytest.fixture(scope="module")
def folder() -> Path:
    return fetch_default_model()


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """transformers' own greedy continuation of each prompt."""
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None  # the requests ignore it too
    answers = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=LENGTH, do_sample=False)
        answers.append(output[0, ids.shape[1] :].tolist())
    return answers


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(folder: Path, tmp_path_factory: Any) -> AsyncIterator[Cluster]:
    options: dict[str, Any] = {"model": folder, "dtype": "float32", "num_blocks": 64, "max_model_len": 512}
    options["scheduler"] = {"speculation": "fixed"}
    async with running(tmp_path_factory.mktemp("cluster"), workers=2, draft="ngram", **options) as started:
        yield started


async def answers(cluster: Cluster, mode: int = 0, **params: Any) -> list[Any]:
    messages = [request(prompt, LENGTH, **params) for prompt in PROMPTS]
    for message in messages:
        message.speculation.mode = mode
    stub = cluster.stub()
    return await asyncio.gather(*(receive(stub.GenerateStream(message)) for message in messages))


async def test_greedy_tokens_are_transformers_own(cluster: Cluster, expected: list[list[int]]) -> None:
    plain = await answers(cluster, mode=1)
    assert [answer.tokens[0] for answer in plain] == expected
    speculative = await answers(cluster)
    assert [answer.tokens[0] for answer in speculative] == expected
    assert sum(answer.usage.drafted_tokens for answer in plain) == 0
    assert sum(answer.usage.accepted_tokens for answer in speculative) > 0


async def test_a_kill_changes_no_sampled_token(cluster: Cluster) -> None:
    undisturbed = await answers(cluster, mode=1, temperature=0.8)

    struck = False

    def strike(count: int) -> None:
        nonlocal struck
        if count >= 5 and not struck:
            struck = True
            for worker in status.workers:
                if worker.running:
                    cluster.processes[worker.worker_id].kill()
                    return

    messages = [request(prompt, LENGTH, temperature=0.8) for prompt in PROMPTS]
    stub = cluster.stub()
    running_streams = [asyncio.ensure_future(receive(stub.GenerateStream(messages[0]), strike))]
    running_streams += [asyncio.ensure_future(receive(stub.GenerateStream(message))) for message in messages[1:]]
    status = await cluster.until_status(lambda status: status.running > 0)
    disturbed = await asyncio.gather(*running_streams)
    assert [answer.tokens[0] for answer in disturbed] == [answer.tokens[0] for answer in undisturbed]
    assert sum(answer.usage.resumptions for answer in disturbed) > 0
    await cluster.assert_baseline()
