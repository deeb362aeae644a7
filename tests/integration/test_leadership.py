"""Two schedulers and a real Redis: the leader killed, stopped or told to stop, Redis killed, stopped or emptied.

Every stream must be what it would have been. The gateway finds schedulers in Redis, workers and the draft worker know
their addresses. One cluster serves all tests; each begins by restoring it.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from tandem.v1 import admin_pb2, admin_pb2_grpc

from cli.fake_model import write_fake_model
from cluster.channel import connect
from tests.integration.harness import MODEL, Cluster, Process, receive, request
from tests.integration.test_failures import LENGTHS, run_crowd
from tests.redis_server import RedisServer, redis_server

pytestmark = pytest.mark.asyncio(loop_scope="module")

SCHEDULERS = ("scheduler-0", "scheduler-1")


class Pair(Cluster):
    """A cluster whose scheduler has a standby."""

    redis: RedisServer

    async def status_of(self, name: str) -> Any:
        """One scheduler's account; None if it gives none."""
        channel = connect(self.processes[name].address)
        try:
            with contextlib.suppress(grpc.aio.AioRpcError):
                return await admin_pb2_grpc.AdminServiceStub(channel).GetStatus(admin_pb2.GetStatusRequest(), timeout=5)
        finally:
            await channel.close()
        return None

    async def accounts(self) -> dict[str, Any]:
        found = await asyncio.gather(*(self.status_of(name) for name in SCHEDULERS))
        return {name: status for name, status in zip(SCHEDULERS, found, strict=True) if status is not None}

    async def status(self) -> Any:
        """The leader's account."""
        leading = [status for status in (await self.accounts()).values() if status.leading]
        return max(leading, key=lambda status: status.term) if leading else admin_pb2.GetStatusResponse()

    async def roles(self) -> tuple[Process, Process]:
        """Leader and standby, once each knows its place."""
        async with asyncio.timeout(20):
            while True:
                accounts = await self.accounts()
                leaders = {status.leader for status in accounts.values()}
                roles = {name: status.leading for name, status in accounts.items()}
                if sorted(roles.values()) == [False, True] and len(leaders) == 1 and leaders != {""}:
                    leader, standby = sorted(roles, key=lambda name: not roles[name])
                    return self.processes[leader], self.processes[standby]
                await asyncio.sleep(0.02)

    async def add_scheduler(self, name: str, port: int = 0) -> None:
        await self.add(name, "scheduler", port=port, state=self.redis.url)

    async def ready(self) -> tuple[Process, Process]:
        """Everything that was killed, stopped or lost is back; the leader and the standby."""
        if self.redis.command("PING") != "+PONG":
            raise AssertionError("Redis is not back")
        for name in SCHEDULERS:
            process = self.processes[name]
            if process.child.returncode is None:
                process.signal(signal.SIGCONT)
            else:
                await self.add_scheduler(name, int(process.address.rpartition(":")[2]))
        await self.restore(workers=2, draft="fake")
        return await self.roles()


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(redis: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    folder: Path = tmp_path_factory.mktemp("cluster")
    write_fake_model(folder / MODEL)
    flags = {"engine": "fake", "num_blocks": 256, "block_size": 16, "threads": 1, "fake_step_ms": 3}
    cluster = Pair(folder, folder / MODEL, flags)
    cluster.redis = redis
    async with cluster:
        await asyncio.gather(*(cluster.add_scheduler(name) for name in SCHEDULERS))
        cluster.discovery = {"scheduler": ",".join(cluster.processes[name].address for name in SCHEDULERS)}
        await asyncio.gather(
            cluster.add_worker("worker-0"),
            cluster.add_worker("worker-1"),
            cluster.add_draft_worker("draft", "fake"),
            cluster.add_gateway("gateway", scheduler="", state=redis.url),
        )
        await cluster.until_serving(2)
        yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def cluster(pair: Pair) -> AsyncIterator[Pair]:
    """Everything alive; on failure the ends of the logs are shown."""
    await pair.ready()
    try:
        yield pair
    finally:
        pair.print_logs()


async def test_a_killed_leader_is_a_pause(cluster: Pair) -> None:
    leader, standby = await cluster.roles()
    term = (await cluster.status()).term
    answers = await run_crowd(cluster, {25: leader.kill})
    assert all(answer.usage.resumptions for answer in answers), "the kill struck nobody"
    status = await cluster.until_status(lambda status: len(status.workers) == 2)
    assert status.leader == standby.address
    assert status.term > term
    assert status.counters.resumptions == len(LENGTHS)
    assert status.counters.cached_tokens > 0, "what the workers still held was a prefix hit"
    await cluster.assert_baseline()

    await cluster.ready()
    assert (await cluster.status()).term == status.term, "who comes back stands by"


async def test_an_old_leader_that_stood_still_changes_nothing(cluster: Pair) -> None:
    leader, standby = await cluster.roles()
    term = (await cluster.status()).term
    answers = await run_crowd(cluster, {25: lambda: leader.signal(signal.SIGSTOP)})
    assert all(answer.usage.resumptions for answer in answers)
    new = await cluster.status_of(standby.name)
    assert new.leading
    assert new.term > term

    # It wakes up in the middle of the next crowd, and still believes that it leads.
    again = await run_crowd(cluster, {25: lambda: leader.signal(signal.SIGCONT)})
    assert not any(answer.usage.resumptions for answer in again)
    assert await cluster.roles() == (standby, leader)
    status = await cluster.status()
    assert (status.term, len(status.workers)) == (new.term, 2)
    await cluster.assert_baseline()


async def test_a_leader_told_to_stop_hands_over(cluster: Pair) -> None:
    leader, standby = await cluster.roles()
    await run_crowd(cluster, {25: lambda: leader.signal(signal.SIGTERM)})
    async with asyncio.timeout(15):
        assert await leader.child.wait() == 0
    assert (await cluster.status()).leader == standby.address
    await cluster.assert_baseline()


@pytest.mark.parametrize("fault", ["killed", "stopped"])
async def test_nobody_notices_that_redis_is_away(cluster: Pair, fault: str) -> None:
    await cluster.roles()
    before = await cluster.status()
    strike = cluster.redis.kill if fault == "killed" else cluster.redis.pause
    answers = await run_crowd(cluster, {25: strike})
    assert not any(answer.usage.resumptions for answer in answers)
    # New requests are served, by an old gateway and with a worker that comes only now.
    cluster.processes["worker-1"].kill()
    await cluster.add_worker("worker-1")
    await cluster.until_serving(2)
    await run_crowd(cluster, {})
    assert (await cluster.status()).term == before.term
    if fault == "killed":
        cluster.redis.restart()
    else:
        cluster.redis.resume()
    await cluster.roles()
    await run_crowd(cluster, {})
    if fault == "killed":
        assert (await cluster.status()).term == before.term, "the leader put its lease back into the empty store"
    await cluster.assert_baseline()


async def test_an_emptied_redis_costs_no_token(cluster: Pair) -> None:
    await cluster.roles()
    term = (await cluster.status()).term
    await run_crowd(cluster, {10: cluster.redis.empty, 35: cluster.redis.empty})
    await cluster.roles()
    assert (await cluster.status()).term >= term
    await cluster.assert_baseline()


async def test_leadership_waits_for_redis(cluster: Pair) -> None:
    leader, standby = await cluster.roles()

    async def strike() -> None:
        cluster.redis.pause()
        leader.kill()
        # The gateway has lost its session, and nobody can lead.
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await receive(cluster.stub().GenerateStream(request("late", 1), timeout=2))
        assert refused.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        assert not (await cluster.status_of(standby.name)).leading
        cluster.redis.resume()

    answers = await run_crowd(cluster, {25: strike})
    assert all(answer.usage.resumptions for answer in answers)
    assert (await cluster.status()).leader == standby.address
    await cluster.assert_baseline()


async def test_killing_one_leader_after_the_other(cluster: Pair) -> None:
    """The second falls once the streams go on under it, when the first is back as its standby."""
    first, second = await cluster.roles()

    async def revive() -> None:
        first.kill()
        await first.child.wait()
        await cluster.add_scheduler(first.name, int(first.address.rpartition(":")[2]))

    async def strike_again() -> None:
        await cluster.roles()
        second.kill()

    answers = await run_crowd(cluster, {10: revive, 20: strike_again})
    assert all(answer.usage.resumptions for answer in answers)
    assert (await cluster.status()).leader == cluster.processes[first.name].address
    await cluster.assert_baseline()
