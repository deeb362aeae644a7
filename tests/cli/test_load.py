"""The load generator against a scripted gateway."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import statistics
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
from tandem.v1 import generation_pb2, generation_pb2_grpc, types_pb2

from cli import load
from cli.load import Record, Workload

WORKLOAD = Workload(model="m", num_requests=12, concurrency=3, input_tokens=6, output_tokens=4, vocab_size=50)


@dataclass
class Gateway(generation_pb2_grpc.GenerationServiceServicer):
    """Answers max_tokens tokens, one a message; misbehaves for the request numbers named."""

    refuse: set[int] = field(default_factory=set)
    cut_short: set[int] = field(default_factory=set)
    skip: set[int] = field(default_factory=set)
    requests: list[Any] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    gate: asyncio.Event | None = None
    """with a gate, streams wait for it before their first token"""

    async def GenerateStream(self, request: Any, context: Any) -> AsyncIterator[Any]:
        number = request.sampling.seed
        self.requests.append(request)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            if number in self.refuse:
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
            if self.gate is not None:
                await self.gate.wait()
            total = request.stop.max_tokens - (1 if number in self.cut_short else 0)
            for index in range(total):
                first = index + (1 if number in self.skip and index == 2 else 0)
                finish = types_pb2.FINISH_REASON_LENGTH if index == total - 1 else None
                delta = generation_pb2.ChoiceDelta(first_token_index=first, token_ids=[1], finish_reason=finish)
                yield generation_pb2.GenerateStreamResponse(deltas=[delta])
            yield generation_pb2.GenerateStreamResponse(usage=types_pb2.Usage(cached_tokens=2, drafted_tokens=3))
        finally:
            self.running -= 1


@contextlib.asynccontextmanager
async def stub_of(gateway: Gateway) -> AsyncIterator[load.Stub]:
    server = grpc.aio.server()
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(gateway, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield generation_pb2_grpc.GenerationServiceStub(channel)
    finally:
        await server.stop(None)


async def run(gateway: Gateway, workload: Workload) -> list[Record]:
    done: list[Record] = []
    async with stub_of(gateway) as stub:
        records = await load.run(workload, [stub], done.append)
    assert records == done
    assert len(records) == workload.num_requests
    return records


async def test_a_closed_loop_keeps_so_many_running() -> None:
    gateway = Gateway()
    records = await run(gateway, WORKLOAD)
    assert gateway.most_running == 3
    assert [record.error for record in records] == [None] * 12
    assert {record.num_tokens for record in records} == {4}
    assert {len(record.gaps_s) for record in records} == {3}
    assert sum(record.cached_tokens for record in records) == 24
    for record in records:
        assert record.first_token_s is not None
        assert record.due_s <= record.started_s <= record.first_token_s <= record.ended_s
    assert all(request.stop.ignore_eos and len(request.token_ids.ids) == 6 for request in gateway.requests)


async def test_an_open_loop_waits_for_nobody() -> None:
    """All requests arrive although none is answered."""
    gateway = Gateway(gate=asyncio.Event())
    async with stub_of(gateway) as stub:
        running = asyncio.create_task(load.run(replace(WORKLOAD, rate=2000.0, concurrency=1), [stub], lambda _: None))
        async with asyncio.timeout(10):
            while gateway.running < 12:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert gateway.gate is not None
        gateway.gate.set()
        records = await running
    assert [record.error for record in records] == [None] * 12


async def test_what_goes_wrong_is_an_error() -> None:
    records = await run(Gateway(refuse={0, 1}, cut_short={2}, skip={3, 4}), WORKLOAD)
    errors = sorted(record.error for record in records if record.error is not None)
    assert errors == ["GAP_OR_REPETITION"] * 2 + ["RESOURCE_EXHAUSTED"] * 2 + ["SHORT_ANSWER"]


async def test_nobody_there_is_an_error_not_an_exception() -> None:
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        record = await load.measure(stub, load.request(WORKLOAD, 0), WORKLOAD, due_s=0.0)
    assert record.error == "UNAVAILABLE"


def test_prompts_are_seeded_and_differ() -> None:
    prompts = [load.prompt(WORKLOAD, index) for index in range(20)]
    assert prompts == [load.prompt(WORKLOAD, index) for index in range(20)]
    assert len({tuple(prompt) for prompt in prompts}) == 20
    assert all(0 <= token < 50 for prompt in prompts for token in prompt)
    assert load.prompt(replace(WORKLOAD, seed=1), 0) != prompts[0]


def test_a_shared_prefix_is_shared() -> None:
    workload = replace(WORKLOAD, input_tokens=40, shared_prefix_tokens=30)
    first, second = load.prompt(workload, 0), load.prompt(workload, 1)
    assert first[:30] == second[:30]
    assert first[30:] != second[30:]
    assert len(first) == 40


def test_arrivals_are_a_poisson_process() -> None:
    """Gaps of an exponential distribution: their mean is 1 / rate, and so is their standard deviation."""
    times = load.arrivals(rate=50.0, num_requests=20_000, seed=1)
    assert times == sorted(times)
    gaps = [late - early for early, late in itertools.pairwise(times)]
    assert abs(statistics.mean(gaps) * 50 - 1) < 0.03
    assert abs(statistics.stdev(gaps) * 50 - 1) < 0.03
