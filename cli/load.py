"""The load generator of `tandem bench`: requests over gRPC, timed where they arrive.

    closed loop   `concurrency` clients, each sends its next request when its last one has ended
    open loop     requests arrive at random times (Poisson, `rate` a second), whether or not earlier ones have ended

Times of an open-loop request count from the moment it was due, not from when the generator got round to it, so that a
slow generator or server can't hide the wait. Nothing is tried again: an error is an error.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import grpc
from tandem.v1 import generation_pb2, generation_pb2_grpc, types_pb2

from tandem_client.convert import speculation_mode


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What to send."""

    model: str
    num_requests: int
    concurrency: int
    input_tokens: int
    output_tokens: int
    vocab_size: int
    rate: float | None = None
    """requests per second; None: closed loop"""
    temperature: float = 0.0
    seed: int = 0
    shared_prefix_tokens: int = 0
    """leading prompt tokens that all requests have in common"""
    speculation: str | None = None
    """who drafts, see tandem_client.Speculation; None: the cluster's choice"""
    max_draft_tokens: int | None = None
    timeout_s: float | None = None


@dataclass(slots=True)
class Record:
    """What became of one request. Times in seconds of time.perf_counter()."""

    due_s: float
    started_s: float
    first_token_s: float | None = None
    ended_s: float = 0.0
    num_tokens: int = 0
    gaps_s: list[float] = field(default_factory=list)
    """between successive messages that brought tokens"""
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    error: str | None = None
    """code of the status, or what is wrong with the answer"""


Stub = generation_pb2_grpc.GenerationServiceStub


def prompt(workload: Workload, index: int) -> list[int]:
    """The token ids of request number `index`; the same for the same seed."""
    shared = random.Random(f"{workload.seed} shared").choices(
        range(workload.vocab_size), k=min(workload.shared_prefix_tokens, workload.input_tokens)
    )
    own = random.Random(f"{workload.seed} {index}")
    return shared + own.choices(range(workload.vocab_size), k=workload.input_tokens - len(shared))


def request(workload: Workload, index: int) -> generation_pb2.GenerateStreamRequest:
    """Request number `index`: exactly `output_tokens` tokens long, whatever the model says."""
    return generation_pb2.GenerateStreamRequest(
        model=workload.model,
        token_ids=types_pb2.TokenIds(ids=prompt(workload, index)),
        sampling=generation_pb2.SamplingParams(temperature=workload.temperature, seed=workload.seed + index),
        stop=generation_pb2.StopCriteria(max_tokens=workload.output_tokens, ignore_eos=True),
        speculation=types_pb2.Speculation(
            mode=speculation_mode(workload.speculation), max_draft_tokens=workload.max_draft_tokens
        ),
    )


def arrivals(rate: float, num_requests: int, seed: int) -> list[float]:
    """Seconds from the start at which requests arrive: a Poisson process."""
    chance = random.Random(f"{seed} arrivals")
    return list(itertools.accumulate(chance.expovariate(rate) for _ in range(num_requests)))


async def run(workload: Workload, stubs: Sequence[Stub], on_done: Callable[[Record], None]) -> list[Record]:
    """Send the whole load, spread over the stubs in turn; `on_done` is called as each request ends."""
    # Made before the clock starts: they are not part of what is measured.
    requests = [request(workload, index) for index in range(workload.num_requests)]
    records: list[Record] = []

    async def one(index: int, due_s: float) -> None:
        record = await measure(stubs[index % len(stubs)], requests[index], workload, due_s)
        records.append(record)
        on_done(record)

    if workload.rate is None:
        indexes = iter(range(workload.num_requests))

        async def client() -> None:
            for index in indexes:
                await one(index, time.perf_counter())

        await asyncio.gather(*(client() for _ in range(min(workload.concurrency, workload.num_requests))))
        return records
    start = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for index, offset_s in enumerate(arrivals(workload.rate, workload.num_requests, workload.seed)):
            await asyncio.sleep(max(start + offset_s - time.perf_counter(), 0.0))
            tasks.create_task(one(index, start + offset_s))
    return records


async def measure(
    stub: Stub, message: generation_pb2.GenerateStreamRequest, workload: Workload, due_s: float
) -> Record:
    """Send one request and time its answer; never raises for what the server does."""
    record = Record(due_s=due_s, started_s=time.perf_counter())
    last_s = record.started_s
    finished = False
    try:
        async for response in stub.GenerateStream(message, timeout=workload.timeout_s):
            now_s = time.perf_counter()
            num_new = 0
            for delta in response.deltas:
                if delta.token_ids and delta.first_token_index != record.num_tokens + num_new:
                    record.error = "GAP_OR_REPETITION"
                num_new += len(delta.token_ids)
                finished |= delta.finish_reason != types_pb2.FINISH_REASON_UNSPECIFIED
            if num_new:
                if record.first_token_s is None:
                    record.first_token_s = now_s
                else:
                    record.gaps_s.append(now_s - last_s)
                last_s = now_s
                record.num_tokens += num_new
            if response.HasField("usage"):
                record.cached_tokens = response.usage.cached_tokens
                record.drafted_tokens = response.usage.drafted_tokens
                record.accepted_tokens = response.usage.accepted_tokens
        if record.error is None and (not finished or record.num_tokens != workload.output_tokens):
            record.error = "SHORT_ANSWER"
    except grpc.aio.AioRpcError as error:
        record.error = error.code().name
    record.ended_s = time.perf_counter()
    return record
