"""Operation, with real processes: cases 72 and 74; and what requests leave behind: case 77."""

from __future__ import annotations

import asyncio
import gc
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tandem.v1 import generation_pb2

from cluster import errors
from cluster.channel import connect
from scheduler.config import SchedulerConfig
from tests.cases.cell import ForcedEngine, WholeCell, whole_cell
from tests.chaos.lag import measuring
from tests.integration.harness import MODEL, Cluster, expected_tokens, receive, request, running

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
CAPACITY_WAIT_S = 1.5
MACHINERY = ("asyncio", "_asyncio", "_contextvars", "grpc", "concurrent", "threading", "logging")
SERVICES = ("", MODEL, "tandem.v1.GenerationService")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    options: dict[str, Any] = {"fake_step_ms": 10, "scheduler": {"capacity_wait_s": CAPACITY_WAIT_S}}
    async with running(tmp_path_factory.mktemp("cluster"), workers=1, **options) as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def cluster(shared: Cluster) -> Cluster:
    """A gateway, a scheduler and one worker, all alive."""
    await shared.restore(workers=1)
    return shared


async def read_to_end(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def refusal(call: Any) -> errors.TandemError:
    """The error that ends a stream; it must come by itself."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(read_to_end(call), 60)
    return errors.from_rpc_error(caught.value)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("fault", "seconds"), [(signal.SIGKILL, 3.0), (signal.SIGSTOP, 6.0)], ids=["killed", "stopped"]
)
async def test_case_72_without_a_worker_health_says_so_and_streams_end_unavailable(
    cluster: Cluster, fault: int, seconds: float
) -> None:
    """A stopped worker's connection stands; only its heartbeats tell. Streams get their time to be taken up again."""
    stub = cluster.stub()
    channel = connect(cluster.processes["gateway"].address)
    health = health_pb2_grpc.HealthStub(channel)
    watch = health.Watch(health_pb2.HealthCheckRequest(service=MODEL))
    assert (await watch.read()).status == SERVING
    stream = stub.GenerateStream(request("a long one", 3000))
    assert (await stream.read()).deltas
    async with measuring() as lag:
        cluster.processes["worker-0"].signal(fault)
        began = time.monotonic()
        assert (await asyncio.wait_for(watch.read(), 60)).status == NOT_SERVING
        told = time.monotonic()
        assert told - began < seconds + lag.between(began, told)
        for service in SERVICES:
            assert (await health.Check(health_pb2.HealthCheckRequest(service=service))).status == NOT_SERVING
        assert (await stub.GetModel(generation_pb2.GetModelRequest(model=MODEL))).model.workers == 0
        late = asyncio.ensure_future(refusal(stub.GenerateStream(request("a late one", 10))))
        error = await refusal(stream)
        ended = time.monotonic()
        assert isinstance(error, errors.Unavailable)
        assert error.retry_after_s > 0
        assert ended - began > CAPACITY_WAIT_S - 0.1
        assert ended - told < CAPACITY_WAIT_S + 4.0 + lag.between(told, ended)
        assert isinstance(await late, errors.Unavailable)
    await cluster.assert_baseline()
    await cluster.restore(workers=1)
    assert (await asyncio.wait_for(watch.read(), 60)).status == SERVING
    assert (await receive(stub.GenerateStream(request("again", 5)))).tokens[0] == expected_tokens(list(b"again"), 5)
    watch.cancel()
    await channel.close()


def test_case_72_streams_wait_a_minute_unless_told_otherwise() -> None:
    assert SchedulerConfig().capacity_wait_s == 60.0


# A gateway's own turn is in tests/gateway/test_process.py. The scheduler comes last: the fixture doesn't bring it back.
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", ["worker-0", "scheduler"])
async def test_case_74_told_to_stop_at_the_third_token_it_delivers_all_fifty(cluster: Cluster, name: str) -> None:
    stub = cluster.stub()
    leaving = cluster.processes[name]
    refused: list[asyncio.Future[errors.TandemError]] = []

    async def ask_until_refused() -> errors.TandemError:
        while True:
            try:
                await receive(stub.GenerateStream(request("late", 1)))
            except grpc.aio.AioRpcError as error:
                return errors.from_rpc_error(error)

    def strike(count: int) -> None:
        if count >= 3 and not refused:
            leaving.signal(signal.SIGTERM)
            refused.append(asyncio.ensure_future(ask_until_refused()))

    prompt = list(b"fifty tokens")
    answer = await receive(stub.GenerateStream(request(prompt, 50)), strike)
    assert answer.tokens[0] == expected_tokens(prompt, 50)
    assert answer.usage.resumptions == 0
    error = await asyncio.wait_for(refused[0], 20)
    assert isinstance(error, errors.Unavailable), error
    assert error.retry_after_s > 0
    assert await asyncio.wait_for(leaving.child.wait(), 15) == 0


# ------------------------------------------------------------------------------------------- what requests leave behind


def reachable(*roots: object) -> int:
    """How many objects hang on the roots, whatever they are; the libraries' own machinery is left out."""
    seen: dict[int, object] = {}
    pending = list(roots)
    while pending:
        one = pending.pop()
        kind = type(one)
        if (
            id(one) in seen
            or not isinstance(kind.__module__, str)  # compiled ones that say it of their instances only
            or kind.__module__.startswith(MACHINERY)
            or isinstance(one, type | ModuleType | FunctionType)
        ):
            continue
        seen[id(one)] = one
        pending += gc.get_referents(one)
    return len(seen)


async def unique_prompts(cell: WholeCell, first: int, count: int) -> None:
    for base in range(first, first + count, 50):
        calls = [
            cell.stub.GenerateStream(request(f"unique prompt number {index} of so many", 2))
            for index in range(base, base + 50)
        ]
        await asyncio.gather(*(receive(call) for call in calls))
    await cell.until_idle()


async def test_case_77_requests_leave_nothing_behind(folder: Path) -> None:
    """Gateway, scheduler and worker live in this process. The pool is full of cached blocks when the count begins."""
    async with whole_cell(folder, ForcedEngine(num_blocks=128)) as cell:
        parts = (cell.gateway, cell.scheduler, cell.executor)
        await unique_prompts(cell, 0, 300)
        pool = cell.scheduler.core.workers["w"].pool
        assert pool.evictions > 0
        before = reachable(*parts)
        assert before > 800, "the parts are not found"
        await unique_prompts(cell, 300, 800)
        assert reachable(*parts) - before < 250, "something is kept of each request"
        assert pool.num_free + pool.num_cached == 128
