"""Health over a real connection, and the progress that readiness follows."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.channel import connect
from cluster.health import Health, Progress
from cluster.server import add_health, bind, create_server

KINDS = health_pb2.HealthCheckResponse


@pytest.fixture
async def served() -> AsyncIterator[tuple[Health, health_pb2_grpc.HealthStub]]:
    server = create_server()
    health = add_health(server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    async with connect(f"127.0.0.1:{port}") as channel:
        yield health, health_pb2_grpc.HealthStub(channel)
    await server.stop(0)


async def check(stub: health_pb2_grpc.HealthStub, service: str) -> int:
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)).status


async def test_check(served) -> None:
    health, stub = served
    assert await check(stub, "") == KINDS.NOT_SERVING, "a process is not ready before it says so"
    health.set("", True)
    health.set("smollm2", True)
    assert await check(stub, "") == KINDS.SERVING
    assert health.services() == ["", "liveness", "readiness", "smollm2"]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await check(stub, "unknown")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    health.clear("smollm2")
    assert not health.serving("smollm2")
    with pytest.raises(grpc.aio.AioRpcError):
        await check(stub, "smollm2")


async def test_watch_tells_changes_and_stays_open_for_an_unknown_service(served) -> None:
    health, stub = served
    watch = stub.Watch(health_pb2.HealthCheckRequest(service="m"), timeout=10)
    assert (await watch.read()).status == KINDS.SERVICE_UNKNOWN
    health.set("m", False)
    assert (await watch.read()).status == KINDS.NOT_SERVING
    health.set("other", True)
    health.set("m", False)
    health.set("m", True)
    assert (await watch.read()).status == KINDS.SERVING
    health.clear("m")
    assert (await watch.read()).status == KINDS.SERVICE_UNKNOWN


async def test_a_watcher_that_leaves_takes_no_other_with_it(served) -> None:
    """grpcio-health-checking forgets all watchers of the service here."""
    health, stub = served
    leaving, staying = (stub.Watch(health_pb2.HealthCheckRequest(service=""), timeout=10) for _ in range(2))
    assert (await leaving.read()).status == (await staying.read()).status == KINDS.NOT_SERVING
    leaving.cancel()
    # The cancellation and this check travel on one connection, in order.
    assert await check(stub, "") == KINDS.NOT_SERVING
    health.set("", True)
    assert (await staying.read()).status == KINDS.SERVING
    health.close()
    assert await staying.read() is grpc.aio.EOF


async def test_shutdown_is_for_good(served) -> None:
    health, stub = served
    health.set("m", True)
    health.enter_graceful_shutdown()
    health.set("m", True)
    health.set("new", True)
    assert await check(stub, "m") == KINDS.NOT_SERVING
    assert not health.serving("m")
    assert not health.serving("new")


async def test_the_process_is_alive_before_during_and_after_it_takes_work(served) -> None:
    health, stub = served
    assert (await check(stub, "liveness"), await check(stub, "readiness")) == (KINDS.SERVING, KINDS.NOT_SERVING)
    health.set("", True)
    assert (await check(stub, "liveness"), await check(stub, "readiness")) == (KINDS.SERVING, KINDS.SERVING)
    health.enter_graceful_shutdown()
    assert (await check(stub, "liveness"), await check(stub, "readiness")) == (KINDS.SERVING, KINDS.NOT_SERVING)
    health.set_alive(False)
    assert await check(stub, "liveness") == KINDS.NOT_SERVING


async def test_a_change_while_the_last_one_is_written_is_still_told() -> None:
    health = Health()
    health.set("", True)
    watch = health.Watch(health_pb2.HealthCheckRequest(), None)
    assert (await anext(watch)).status == KINDS.SERVING
    health.enter_graceful_shutdown()
    health.close()
    assert [answer.status async for answer in watch] == [KINDS.NOT_SERVING]


def test_progress() -> None:
    progress = Progress(stalled_after_s=30.0)
    assert not progress.hung(1e9), "idle is never hung"
    progress.began(100.0)
    assert progress.running_s(104.0) == 4.0
    assert not progress.hung(130.0)
    assert progress.hung(130.1)
    assert not progress.hung(149.9, expected_s=5.0), "10 times what it should take"
    assert progress.hung(150.1, expected_s=5.0)
    progress.began(130.0)
    assert not progress.hung(150.0)
    progress.ended()
    assert progress.running_s(1e9) == 0.0
    assert progress.running_s(-1.0) == 0.0
