"""Two cells, each a scheduler and a worker, and two gateways that find them in Redis; a cell is lost under load."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from tandem.v1 import admin_pb2, admin_pb2_grpc, generation_pb2

from cli.fake_model import write_fake_model
from cluster.channel import connect
from tests.integration.harness import MODEL, Cluster, expected_tokens, receive, request
from tests.integration.test_failures import run_crowd
from tests.redis_server import RedisServer, redis_server

pytestmark = pytest.mark.asyncio(loop_scope="module")

CELLS = ("a", "b")


class TwoCells(Cluster):
    """The processes of both cells: scheduler-a, worker-a, …"""

    redis: RedisServer

    async def add_cell(self, cell: str) -> None:
        flags = {"state": self.redis.url, "cell": cell}
        await self.add(f"scheduler-{cell}", "scheduler", port=0, **flags)
        await self.add_worker(f"worker-{cell}", scheduler="", **flags)

    async def cell_status(self, cell: str) -> Any:
        channel = connect(self.processes[f"scheduler-{cell}"].address)
        try:
            return await admin_pb2_grpc.AdminServiceStub(channel).GetStatus(admin_pb2.GetStatusRequest(), timeout=10)
        finally:
            await channel.close()

    async def accepted(self) -> dict[str, int]:
        return {cell: (await self.cell_status(cell)).counters.requests_accepted for cell in CELLS}

    async def until_workers(self, gateway: str, count: int) -> None:
        """Wait until a gateway counts so many workers, of all cells together."""
        stub = self.stub(gateway)
        async with asyncio.timeout(30):
            while True:
                response = await stub.GetModel(generation_pb2.GetModelRequest(model=MODEL))
                if response.model.workers == count:
                    return
                await asyncio.sleep(0.02)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TwoCells]:
    folder = tmp_path_factory.mktemp("cells")
    write_fake_model(folder / MODEL)
    flags = {"engine": "fake", "num_blocks": 256, "block_size": 16, "threads": 1, "fake_step_ms": 3, "draft": "off"}
    with redis_server(folder) as redis:
        cluster = TwoCells(folder, folder / MODEL, flags)
        cluster.redis = redis
        cluster.discovery = {"scheduler": "", "state": redis.url}
        async with cluster:
            await asyncio.gather(
                *(cluster.add_cell(cell) for cell in CELLS),
                *(cluster.add_gateway(name, cell_loss_s=0.5) for name in ("gateway", "gateway-1")),
            )
            for name in ("gateway", "gateway-1"):
                await cluster.until_workers(name, 2)
            yield cluster
            cluster.print_logs()


async def test_load_is_spread_and_prefixes_meet(cluster: TwoCells) -> None:
    stubs = [cluster.stub("gateway"), cluster.stub("gateway-1")]
    before = await cluster.accepted()
    for index in range(16):
        prompt = list(f"a beginning of its own: {index}".encode())
        answer = await receive(stubs[index % 2].GenerateStream(request(prompt, 8)))
        assert answer.tokens[0] == expected_tokens(prompt, 8)
    after = await cluster.accepted()
    assert all(after[cell] > before[cell] for cell in CELLS), "both cells have work"

    shared = list(b"one long beginning that many requests share, of well over sixty-four tokens in all; then: ")
    cached = []
    for index in range(6):
        answer = await receive(stubs[index % 2].GenerateStream(request([*shared, index], 8)))
        cached.append(answer.usage.cached_tokens)
    assert cached[0] == 0
    assert all(cached[1:]), "whichever gateway it came by, it found its beginning computed"


async def test_a_lost_cell_costs_nobody_a_token(cluster: TwoCells) -> None:
    def strike() -> None:
        for name in ("scheduler-a", "worker-a"):
            cluster.processes[name].kill()

    answers = await run_crowd(cluster, {25: strike})
    resumed = [bool(answer.usage.resumptions) for answer in answers]
    assert any(resumed), "the loss struck nobody"
    assert not all(resumed), "the other cell's streams noticed nothing"
    await cluster.until_workers("gateway", 1)
    await run_crowd(cluster, {})

    # It comes back, elsewhere, and is used again.
    await cluster.add_cell("a")
    await cluster.until_workers("gateway", 2)
    await run_crowd(cluster, {})
    assert all((await cluster.accepted()).values())


async def test_without_any_cell_requests_wait_and_go_on(cluster: TwoCells) -> None:
    async def strike() -> None:
        for cell in CELLS:
            cluster.processes[f"scheduler-{cell}"].kill()
            cluster.processes[f"worker-{cell}"].kill()
        await cluster.until_workers("gateway", 0)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await receive(cluster.stub().GenerateStream(request("late", 1), timeout=1))
        assert refused.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        await cluster.add_cell("b")

    answers = await run_crowd(cluster, {25: strike})
    assert all(answer.usage.resumptions for answer in answers)
    status = await cluster.cell_status("b")
    assert (status.waiting, status.running) == (0, 0)
