"""Every process drained and started again, one after the other, while clients ask: nobody loses a token."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tandem.v1 import admin_pb2, admin_pb2_grpc

from cli.fake_model import write_fake_model
from cluster.channel import connect
from tandem_client import TandemClient
from tests.integration.harness import MODEL, Process, expected_tokens
from tests.integration.test_leadership import SCHEDULERS, Pair
from tests.redis_server import redis_server

GATEWAYS = ("gateway", "gateway-1")
CASES: list[tuple[list[int], int, dict[str, Any]]] = [
    (list(b"the first of them"), 150, {"temperature": 0.8, "seed": 1}),
    (list(b"a second one, greedy and longer than the first"), 200, {"temperature": 0.0, "seed": 2}),
    (list(b"three"), 120, {"temperature": 1.0, "seed": 3}),
]


@dataclass
class Traffic:
    """Clients that ask again and again, each answer compared with what it must be."""

    addresses: list[str]
    expected: list[dict[int, list[int]]]
    over: asyncio.Event = field(default_factory=asyncio.Event)
    answers: int = 0
    resumptions: int = 0

    async def client(self, case: int) -> None:
        prompt, length, params = CASES[case]
        async with TandemClient(*self.addresses[case % 2 :], *self.addresses[: case % 2], timeout_s=300) as client:
            while not self.over.is_set():
                answer = await client.generate(prompt, max_tokens=length, n=3, ignore_eos=True, **params)
                assert {choice.index: list(choice.token_ids) for choice in answer.choices} == self.expected[case]
                assert answer.usage.completion_tokens == 3 * length
                self.answers += 1
                self.resumptions += answer.usage.resumptions


async def drain(address: str, **fields: Any) -> None:
    """Asked of the scheduler there."""
    async with connect(address) as channel:
        await admin_pb2_grpc.AdminServiceStub(channel).Drain(admin_pb2.DrainRequest(**fields), timeout=10)


async def ended(*processes: Process) -> Process:
    """The first of them to end, which it does in order."""
    waits = {asyncio.ensure_future(process.child.wait()): process for process in processes}
    done, others = await asyncio.wait(waits, timeout=120, return_when=asyncio.FIRST_COMPLETED)
    for other in others:
        other.cancel()
    assert len(done) == 1, f"{len(done)} of {[process.name for process in processes]} ended"
    (first,) = done
    assert first.result() == 0, waits[first].tail()
    return waits[first]


async def restart(cluster: Pair, process: Process, start: Callable[[str, int], Awaitable[Any]]) -> None:
    """The same name at the same port."""
    await start(process.name, int(process.address.rpartition(":")[2]))


async def roll(cluster: Pair) -> None:
    """All processes, one after the other; both workers at once would leave nobody, and so they do for a moment."""
    leader, standby = await cluster.roles()
    for name in ("worker-0", "worker-1"):
        await drain(leader.address, worker_id=name)
        await ended(cluster.processes[name])  # the second one alone: what has started ends there
    await asyncio.gather(cluster.add_worker("worker-0"), cluster.add_worker("worker-1"))
    await cluster.until_status(lambda status: len(status.workers) == 2)

    cluster.processes["draft"].signal(signal.SIGTERM)
    await ended(cluster.processes["draft"])
    await cluster.add_draft_worker("draft", "fake")

    for process in (standby, leader):
        await drain(process.address, scheduler=True)
        await ended(process)
        await restart(cluster, process, cluster.add_scheduler)
        await cluster.roles()
    await cluster.until_status(lambda status: len(status.workers) == 2 and len(status.gateways) == 2)

    leader, _ = await cluster.roles()
    for gateway_id in (await cluster.status()).gateways:
        await drain(leader.address, gateway_id=gateway_id)
        shown = await cluster.until_status(
            lambda status, name=gateway_id: name not in status.gateways or any_draining(status, name)  # type: ignore[misc]
        )
        assert len(shown.gateways) >= 1
        gone = await ended(*(cluster.processes[name] for name in GATEWAYS))
        await restart(cluster, gone, lambda name, port: cluster.add_gateway(name, port=port))
        await cluster.until_status(lambda status: len(status.gateways) == 2)


def any_draining(status: Any, gateway_id: str) -> bool:
    return any(one.gateway_id == gateway_id and one.draining for one in status.gateway_sessions)


@pytest.mark.timeout(600)
async def test_a_rolling_restart_loses_nothing(tmp_path: Path) -> None:
    write_fake_model(tmp_path / MODEL)
    flags = {"engine": "fake", "num_blocks": 256, "block_size": 16, "threads": 1, "fake_step_ms": 3}
    cluster = Pair(tmp_path, tmp_path / MODEL, flags)
    expected = [
        {choice: expected_tokens(prompt, length, choice, **params) for choice in range(3)}
        for prompt, length, params in CASES
    ]
    with redis_server(tmp_path) as cluster.redis:
        async with cluster:
            await asyncio.gather(*(cluster.add_scheduler(name) for name in SCHEDULERS))
            cluster.discovery = {"scheduler": ",".join(cluster.processes[name].address for name in SCHEDULERS)}
            starts = [cluster.add_worker("worker-0"), cluster.add_worker("worker-1")]
            starts += [cluster.add_gateway(name) for name in GATEWAYS]
            await asyncio.gather(*starts, cluster.add_draft_worker("draft", "fake"))
            await cluster.until_serving(2)
            traffic = Traffic([cluster.processes[name].address for name in GATEWAYS], expected)
            clients = [asyncio.ensure_future(traffic.client(case)) for case in range(len(CASES))]
            rolling = asyncio.ensure_future(roll(cluster))
            await asyncio.wait([rolling, *clients], return_when=asyncio.FIRST_COMPLETED)
            traffic.over.set()
            await asyncio.gather(*clients)
            await rolling
            assert traffic.answers >= len(CASES)
            assert traffic.resumptions > 0, "nobody had to move"
            await cluster.assert_baseline()
