"""Health of real processes: a worker that is stopped costs its model the readiness, and no other one anything."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.channel import connect
from tests.integration.harness import Cluster, receive, request, running

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


class Watcher:
    """One name on one server, and each change of it."""

    def __init__(self, address: str, service: str) -> None:
        self._name = service
        self._channel = connect(address)
        self._call = health_pb2_grpc.HealthStub(self._channel).Watch(health_pb2.HealthCheckRequest(service=service))
        self.last: Any = None

    async def until(self, status: Any, timeout_s: float = 60.0) -> None:
        async with asyncio.timeout(timeout_s):
            while self.last != status:
                self.last = (await self._call.read()).status

    async def now(self) -> Any:
        """The state at this moment, asked anew."""
        request = health_pb2.HealthCheckRequest(service=self._name)
        return (await health_pb2_grpc.HealthStub(self._channel).Check(request, timeout=60)).status

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close()


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with running(tmp_path, workers=1, fake_step_ms=2) as started:
        yield started


@pytest.mark.timeout(600)
async def test_a_stopped_worker_takes_its_model_out_and_no_other(cluster: Cluster) -> None:
    await cluster.add_worker("other-0", served_model_name="other")
    scheduler, gateway = cluster.scheduler, cluster.processes["gateway"].address
    watchers = {
        (where, name): Watcher(where, name)
        for where, name in [
            (scheduler, "fake"), (scheduler, "other"), (scheduler, "readiness"), (scheduler, "liveness"),
            (gateway, "fake"), (gateway, "readiness"), (gateway, "liveness"),
        ]
    }  # fmt: skip
    try:
        await asyncio.gather(*(watcher.until(SERVING) for watcher in watchers.values()))
        worker = cluster.processes["worker-0"]
        call = cluster.stub().GenerateStream(request(list(b"a stream that waits"), 400))
        receiving = asyncio.ensure_future(receive(call))
        await cluster.until_status(lambda status: status.running == 1, 60)
        began = asyncio.get_running_loop().time()
        worker.signal(signal.SIGSTOP)
        await watchers[scheduler, "fake"].until(NOT_SERVING)
        print(f"NOT_SERVING at the scheduler after {asyncio.get_running_loop().time() - began:.2f} s")
        await asyncio.gather(*(watchers[gateway, name].until(NOT_SERVING) for name in ("fake", "readiness")))
        print(f"NOT_SERVING at the gateway after {asyncio.get_running_loop().time() - began:.2f} s")
        still = [(scheduler, "other"), (scheduler, "readiness"), (scheduler, "liveness"), (gateway, "liveness")]
        assert [await watchers[one].now() for one in still] == [SERVING] * 4
        worker.signal(signal.SIGCONT)
        await asyncio.gather(*(watcher.until(SERVING) for watcher in watchers.values()))
        answer = await receiving
        assert answer.usage.completion_tokens == 400
    finally:
        await asyncio.gather(*(watcher.close() for watcher in watchers.values()))
