"""Processes killed, stopped and restarted at chosen output indices, under load.

Every stream must be what it would have been. One cluster serves all tests; each begins by restoring it.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
import pytest_asyncio

from tests.integration.harness import Answer, Cluster, expected_tokens, receive, request, running

pytestmark = pytest.mark.asyncio(loop_scope="module")

LENGTHS = (60, 75, 90, 105, 120, 64, 80, 96)


def crowd() -> list[tuple[list[int], int, dict[str, Any]]]:
    """Eight requests, greedy and sampled, some sharing a prefix."""
    shared = list(b"A shared beginning that fills a few blocks of sixteen tokens. ")
    cases = []
    for index, length in enumerate(LENGTHS):
        prompt = (shared if index % 2 else []) + list(f"number {index}".encode())
        cases.append((prompt, length, {"temperature": 0.8 if index % 3 else 0.0, "seed": index}))
    return cases


async def run_crowd(cluster: Cluster, strikes: dict[int, Callable[[], Any]]) -> list[Answer]:
    """Run the crowd; `strikes[i]` is called once, when the first stream holds i tokens. All answers are checked."""
    stub = cluster.stub()
    pending = dict(strikes)
    tasks: list[asyncio.Future[Any]] = []

    def watch(count: int) -> None:
        for index in sorted(pending):
            if count >= index:
                outcome = pending.pop(index)()
                if asyncio.iscoroutine(outcome):
                    tasks.append(asyncio.ensure_future(outcome))

    cases = crowd()
    streams = [
        receive(stub.GenerateStream(request(prompt, length, **params)), watch if not position else None)
        for position, (prompt, length, params) in enumerate(cases)
    ]
    async with asyncio.timeout(60):
        answers = await asyncio.gather(*streams)
        await asyncio.gather(*tasks)
    assert not pending, "a strike never came"
    for (prompt, length, params), answer in zip(cases, answers, strict=True):
        assert answer.tokens[0] == expected_tokens(prompt, length, **params)
        assert answer.usage.completion_tokens == length
        assert answer.usage.prompt_tokens == len(prompt)
    return answers


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: Any) -> AsyncIterator[Cluster]:
    options: dict[str, Any] = {"scheduler": {"speculation": "fixed"}, "fake_step_ms": 3}
    async with running(tmp_path_factory.mktemp("cluster"), workers=2, draft="fake", **options) as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def cluster(shared: Cluster) -> Cluster:
    """Two workers, a draft worker, a gateway and a scheduler, all alive."""
    await shared.restore(workers=2, draft="fake")
    return shared


@pytest.mark.parametrize("at", [1, 17, 40])
async def test_a_killed_worker_costs_nobody_a_token(cluster: Cluster, at: int) -> None:
    before = (await cluster.status()).counters.resumptions
    answers = await run_crowd(cluster, {at: cluster.processes["worker-0"].kill})
    assert sum(answer.usage.resumptions for answer in answers) > 0, "the kill struck nobody"
    status = await cluster.status()
    assert status.counters.resumptions > before
    assert [worker.worker_id for worker in status.workers] == ["worker-1"]
    await cluster.assert_baseline()


async def test_a_worker_and_the_draft_worker_killed_together(cluster: Cluster) -> None:
    def strike() -> None:
        cluster.processes["worker-1"].kill()
        cluster.processes["draft"].kill()

    answers = await run_crowd(cluster, {33: strike})
    assert sum(answer.usage.resumptions for answer in answers) > 0
    assert sum(answer.usage.accepted_tokens for answer in answers) > 0
    await cluster.assert_baseline()


async def test_streams_wait_for_a_new_worker_when_the_last_one_dies(cluster: Cluster) -> None:
    async def replace() -> None:
        for name in ("worker-0", "worker-1"):
            cluster.processes[name].kill()
        await cluster.add_worker("worker-0")

    answers = await run_crowd(cluster, {20: replace})
    assert all(answer.usage.resumptions for answer in answers)
    await cluster.assert_baseline()


async def test_a_stopped_worker_is_left_and_comes_back_harmless(cluster: Cluster) -> None:
    stopped = cluster.processes["worker-0"]
    answers = await run_crowd(cluster, {25: lambda: stopped.signal(signal.SIGSTOP)})
    assert sum(answer.usage.resumptions for answer in answers) > 0
    stopped.signal(signal.SIGCONT)
    await cluster.until_serving(2)
    await run_crowd(cluster, {})
    await cluster.assert_baseline()


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_dead_or_stopped_draft_worker_costs_only_its_drafts(cluster: Cluster, fault: int) -> None:
    draft = cluster.processes["draft"]
    answers = await run_crowd(cluster, {30: lambda: draft.signal(fault)})
    assert sum(answer.usage.accepted_tokens for answer in answers) > 0, "drafts were accepted before"
    assert not any(answer.usage.resumptions for answer in answers)
    again = await run_crowd(cluster, {})
    assert not any(answer.usage.drafted_tokens for answer in again), "and none came after"
    await cluster.assert_baseline()


async def test_a_restarted_scheduler_finds_everything_again(cluster: Cluster) -> None:
    old = cluster.processes["scheduler"]
    term = (await cluster.status()).term

    async def restart() -> None:
        old.kill()
        await old.child.wait()
        await cluster.add("scheduler", "scheduler", port=int(old.address.rpartition(":")[2]))

    await run_crowd(cluster, {30: restart})
    status = await cluster.until_status(lambda status: len(status.workers) == 2)
    assert status.term > term
    assert status.counters.resumptions == len(LENGTHS)
    assert status.counters.cached_tokens > 0, "what the workers still held was a prefix hit"
    await cluster.assert_baseline()


async def test_a_worker_told_to_stop_hands_over(cluster: Cluster) -> None:
    leaving = cluster.processes["worker-0"]
    answers = await run_crowd(cluster, {25: lambda: leaving.signal(signal.SIGTERM)})
    assert sum(answer.usage.resumptions for answer in answers) > 0
    async with asyncio.timeout(15):
        assert await leaving.child.wait() == 0
    await cluster.assert_baseline()


async def test_a_gateway_told_to_stop_finishes_its_streams_and_refuses_new_ones(cluster: Cluster) -> None:
    gateway = cluster.processes["gateway"]
    refused: list[Any] = []

    async def stop() -> None:
        gateway.signal(signal.SIGTERM)
        stub = cluster.stub()
        try:
            async with asyncio.timeout(10):
                while True:
                    await receive(stub.GenerateStream(request("late", 1)))
        except grpc.aio.AioRpcError as error:
            refused.append(error.code())

    await run_crowd(cluster, {3: stop})
    assert refused == [grpc.StatusCode.UNAVAILABLE]
    async with asyncio.timeout(15):
        assert await gateway.child.wait() == 0


async def test_tiny_pools_preempt_and_nobody_notices(cluster: Cluster, tmp_path: Any) -> None:
    async with running(tmp_path, workers=2, num_blocks=16, fake_step_ms=1) as tiny:
        await run_crowd(tiny, {})
        status = await tiny.status()
        assert status.counters.preemptions > 0
        assert status.counters.evictions > 0
        await tiny.assert_baseline()
