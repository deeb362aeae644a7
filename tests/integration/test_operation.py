"""Cancellation, deadlines, fairness, log-probabilities and what is left behind, through the whole cluster."""

from __future__ import annotations

import asyncio
import os
import urllib.request
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from tandem.v1 import generation_pb2, types_pb2

from cli.fake_model import EOS_ID, SPECIAL_TOKENS
from tests.integration.harness import MODEL, Answer, Cluster, expected_tokens, receive, request, running

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: Any) -> AsyncIterator[Cluster]:
    options: dict[str, Any] = {
        "num_blocks": 512,
        "fake_step_ms": 2,
        "scheduler": {"metrics_port": 0, "speculation": "fixed"},
    }
    async with running(tmp_path_factory.mktemp("cluster"), draft="fake", **options) as started:
        yield started


async def first_tokens(call: Any, count: int) -> Answer:
    answer = Answer()
    async for response in call:
        answer.take(response)
        if len(answer.tokens.get(0, [])) >= count:
            return answer
    raise AssertionError("the stream ended early")


async def test_one_disconnect_changes_nothing_for_the_others(cluster: Cluster) -> None:
    stub = cluster.stub()
    before = (await cluster.status()).counters
    leaver = stub.GenerateStream(request("I leave", 2048))
    others = [receive(stub.GenerateStream(request(f"stay {index}", 150, temperature=0.5))) for index in range(3)]
    gathered = asyncio.gather(*others)
    await first_tokens(leaver, 3)
    leaver.cancel()
    for index, answer in enumerate(await gathered):
        assert answer.tokens[0] == expected_tokens(list(f"stay {index}".encode()), 150, temperature=0.5)
    await cluster.assert_baseline()
    after = (await cluster.status()).counters
    assert after.generated_tokens - before.generated_tokens < 2048, "it went on after the disconnect"
    assert after.requests_cancelled - before.requests_cancelled == 1


async def test_a_deadline_ends_a_waiting_request_on_time_and_a_running_one_too(cluster: Cluster) -> None:
    stub = cluster.stub()
    before = (await cluster.status()).counters.prefill_tokens
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await receive(stub.GenerateStream(request("endless", 3500), timeout=0.3))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await cluster.assert_baseline()
    assert (await cluster.status()).counters.prefill_tokens - before <= len("endless")


async def test_thirty_two_streams_of_one_client_do_not_starve_another(cluster: Cluster) -> None:
    """The greedy client's streams are 40 × as long; the other's must not wait for any of them to end."""
    greedy, modest = cluster.stub(), cluster.stub()
    many = [asyncio.ensure_future(receive(greedy.GenerateStream(request(f"greedy {i}", 400)))) for i in range(32)]
    await cluster.until_status(lambda status: status.running == 32)
    answer = await receive(modest.GenerateStream(request("modest", 10)))
    assert answer.tokens[0] == expected_tokens(list(b"modest"), 10)
    assert not any(task.done() for task in many)
    await asyncio.gather(*many)


async def test_logprobs_are_the_same_with_speculation_and_without(cluster: Cluster) -> None:
    async def answer(mode: int) -> Any:
        message = request("log", 60, temperature=0.8)
        message.output.top_logprobs = 3
        message.output.prompt_logprobs = 2
        message.speculation.mode = mode
        unary = generation_pb2.GenerateRequest.FromString(message.SerializeToString())
        return await cluster.stub().Generate(unary)

    off = await answer(types_pb2.SPECULATION_MODE_OFF)
    # On a busy machine a whole answer may be there before its first tail.
    async with asyncio.timeout(100):
        while not (on := await answer(types_pb2.SPECULATION_MODE_UNSPECIFIED)).usage.drafted_tokens:
            assert on.choices[0] == off.choices[0]
    assert off.usage.drafted_tokens == 0
    assert on.choices[0] == off.choices[0]
    assert on.prompt_logprobs == off.prompt_logprobs
    assert len(on.choices[0].logprobs) == 60
    assert len(on.prompt_logprobs) == 3
    assert not on.prompt_logprobs[0].HasField("chosen")
    for entry in on.choices[0].logprobs:
        assert len(entry.top) == 3
        assert all(-9999 <= token.logprob <= 0 for token in entry.top)
        assert [token.rank for token in entry.top] == [1, 2, 3]


async def test_prompt_logprobs_do_not_depend_on_the_cache(cluster: Cluster) -> None:
    message = request("exactly thirty-three byte tokens!", 4)
    message.output.prompt_logprobs = 1
    unary = generation_pb2.GenerateRequest.FromString(message.SerializeToString())
    first = await cluster.stub().Generate(unary)
    second = await cluster.stub().Generate(unary)
    assert len(first.prompt_logprobs) == 33
    assert first.prompt_logprobs == second.prompt_logprobs


async def test_a_repeated_prompt_is_a_prefix_hit_with_the_same_answer(cluster: Cluster) -> None:
    message = request("a prompt of forty-eight tokens, three blocks long...", 20, repetition_penalty=1.3)
    cold = await receive(cluster.stub().GenerateStream(message))
    warm = await receive(cluster.stub().GenerateStream(message))
    assert (cold.usage.cached_tokens, warm.usage.cached_tokens) == (0, 48)
    assert cold.tokens == warm.tokens
    salted = request("a prompt of forty-eight tokens, three blocks long...", 20, repetition_penalty=1.3)
    salted.cache_salt = "mine"
    assert (await receive(cluster.stub().GenerateStream(salted))).usage.cached_tokens == 0


async def test_gauges_return_to_baseline_when_everything_is_aborted(cluster: Cluster) -> None:
    stub = cluster.stub()
    calls = [stub.GenerateStream(request(f"abort {index}", 2000)) for index in range(8)]
    await asyncio.gather(*(first_tokens(call, 2) for call in calls))
    for call in calls:
        call.cancel()
    await cluster.assert_baseline()
    log = cluster.processes["scheduler"].log.read_text()
    port = next(word.split("=")[1] for word in log.split() if word.startswith("metrics_port="))
    page = await asyncio.to_thread(lambda: urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode())
    values = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    assert float(values["tandem_requests_running"]) == 0
    assert float(values["tandem_requests_waiting"]) == 0
    assert float(values['tandem_kv_blocks{state="referenced",worker="worker-0"}']) == 0


# Sent after the caches are full; TANDEM_UNIQUE_PROMPTS=20000 takes some minutes.
UNIQUE_PROMPTS = int(os.environ.get("TANDEM_UNIQUE_PROMPTS", "2000"))
# The allocators' own fluctuation was below 2 MiB over 20,000 prompts.
FLAT_MIB = 4.0


@pytest.mark.timeout(max(180, UNIQUE_PROMPTS // 10))
async def test_many_unique_prompts_leave_memory_and_maps_bounded(cluster: Cluster) -> None:
    """Flat once what is bounded is full: the prefix index, by the first prompts, and the tokenizer's words."""
    stub = cluster.stub()

    def resident_mib(name: str) -> float:
        pid = cluster.processes[name].child.pid
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    async def burst(start: int, count: int) -> None:
        for base in range(start, start + count, 100):
            prompts = (f"unique prompt number {index} of very many" for index in range(base, base + 100))
            await asyncio.gather(*(receive(stub.GenerateStream(request(prompt, 1))) for prompt in prompts))

    async def remember_words(text: int) -> None:
        """A hundred texts like the prompts; a special token parts one word from the next."""
        words = (f"unique prompt number {text}-{index} of very many" for index in range(100))
        await stub.Tokenize(generation_pb2.TokenizeRequest(model=MODEL, text=SPECIAL_TOKENS[EOS_ID].join(words)))

    await burst(0, 1000)
    # Two threads with 2,000 words each; which of them takes a text is theirs to say.
    for first in range(0, 240, 8):
        await asyncio.gather(*map(remember_words, range(first, first + 8)))
    before = {name: resident_mib(name) for name in ("gateway", "scheduler")}
    await burst(1000, UNIQUE_PROMPTS)
    after = {name: resident_mib(name) for name in before}
    print(f"RSS in MiB before and after {UNIQUE_PROMPTS} unique prompts: {before} {after}")
    for name, mib in before.items():
        assert after[name] < mib + FLAT_MIB, f"{name} grew"
    await cluster.assert_baseline()
