"""What must be gone once nobody asks for anything: judged by what processes hold, not by what they count.

A scheduler's block tables are compared with the workers' own inventories, at rest (both empty, every block free or
cached) and while streams run: what a worker has of a sequence is the beginning of what the scheduler assigned to it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from tests.chaos.cluster import DRAFT, GATEWAYS, PATIENCE_S, POLL_S, SCHEDULERS, WORKERS, Cluster
from tests.chaos.switchboard import Unreachable, sockets

MORE_SOCKETS = 2
"""a connection that is about to be closed or has just been made anew"""
# The question itself, and what answers it.
_ASKING = {"_schedule_rpc_coro", "_handle_exceptions", "_handle_rpc", "Telemetry._answer"}


@dataclass(frozen=True, slots=True)
class Rest:
    """A process at rest."""

    tasks: Counter[str]
    num_sockets: int


async def at_rest(cluster: Cluster) -> dict[str, Rest]:
    """By name, and for schedulers by role: `leader`, `standby`. To be taken when nothing has been struck yet."""
    leader, _ = await cluster.settled()
    roles = {name: ("leader" if name == leader else "standby") for name in SCHEDULERS}
    return {roles.get(name, name): await _rest_of(cluster, name) for name in cluster.names}


async def _rest_of(cluster: Cluster, name: str) -> Rest:
    if name in GATEWAYS or name == DRAFT:
        start, end = 'tandem_tasks{coroutine="', '"}'
        page = await cluster.metrics(name)
        tasks = {key.removeprefix(start).removesuffix(end): int(value) for key, value in page.items() if start in key}
    else:
        tasks = dict((await cluster.inspect(name)).tasks)
    for one in _ASKING:
        tasks.pop(one, None)
    return Rest(Counter(tasks), len(sockets(cluster.pid(name))))


async def until_at_rest(cluster: Cluster, before: dict[str, Rest]) -> None:
    """Wait until every process holds what it held before and nothing of any request. AssertionError says what stays."""
    leftovers: dict[str, Any] = {"everything": "not looked at"}
    try:
        async with asyncio.timeout(PATIENCE_S):
            while leftovers:
                with contextlib.suppress(grpc.aio.AioRpcError, OSError, Unreachable):
                    leftovers = await find_leftovers(cluster, before)
                if leftovers:
                    await asyncio.sleep(2 * POLL_S)
    except TimeoutError:
        raise AssertionError(f"left behind: {leftovers}") from None


async def find_leftovers(cluster: Cluster, before: dict[str, Rest]) -> dict[str, Any]:
    """What is there that should not be, by process."""
    leader, standby = await cluster.settled()
    found: dict[str, Any] = {}
    status = await cluster.status_of(leader)
    for worker in status.workers:
        if worker.free_blocks + worker.cached_blocks != worker.total_blocks or worker.steps_in_flight or worker.running:
            found[f"{worker.worker_id} at the leader"] = str(worker)
    wanted = {"sessions": len(GATEWAYS), "workers": len(WORKERS), "draft_workers": 1}
    for role, name, present in (("leader", leader, wanted), ("standby", standby, {})):
        found |= await _look_at_inspected(cluster, name, role, before, present)
    for name in WORKERS:
        found |= await _look_at_inspected(cluster, name, name, before, {})
    for name, gauge in (
        *((name, "tandem_gateway_requests_running") for name in GATEWAYS),
        (DRAFT, "tandem_draft_mirrors"),
    ):
        if held := (await cluster.metrics(name))[gauge]:
            found[f"{name}: {gauge}"] = held
        found |= compare(name, before[name], await _rest_of(cluster, name))
    return found


async def _look_at_inspected(
    cluster: Cluster, name: str, role: str, before: dict[str, Rest], present: dict[str, int]
) -> dict[str, Any]:
    inspected = await cluster.inspect(name)
    found: dict[str, Any] = {
        f"{name}: {what}": count for what, count in inspected.held.items() if count != present.get(what, 0)
    }
    if inspected.tables:
        found[f"{name}: block tables"] = len(inspected.tables)
    return found | compare(f"{name} ({role})", before[role], await _rest_of(cluster, name))


def compare(name: str, before: Rest, now: Rest) -> dict[str, Any]:
    """What a process has more than before, by what it is."""
    found: dict[str, Any] = {}
    if more := now.tasks - before.tasks:
        found[f"{name}: tasks"] = dict(more)
    if now.num_sockets > before.num_sockets + MORE_SOCKETS:
        found[f"{name}: sockets"] = (before.num_sockets, now.num_sockets)
    return found


async def compare_tables(cluster: Cluster) -> int:
    """Check what workers have of running sequences against what the leader assigned; how many could be compared.

    The leader is asked before and after the workers: a sequence that it had at one place both times was there
    meanwhile, and its table has only grown.
    """
    leader, _ = await cluster.leader()
    if not leader:
        return 0
    earlier = _by_place(await cluster.inspect(leader))
    inventories = [await cluster.inspect(name) for name in WORKERS]
    later = _by_place(await cluster.inspect(leader))
    compared = 0
    for inventory in inventories:
        for place, blocks in _by_place(inventory).items():
            if place not in earlier or place not in later:
                continue
            least, most = earlier[place], later[place]
            assert most[: len(least)] == least, f"{place}: the leader's table changed from {least} to {most}"
            assert most[: len(blocks)] == blocks, f"{place}: the worker has {blocks}, the leader assigned {most}"
            compared += 1
    return compared


def _by_place(inspected: Any) -> dict[tuple[str, int, int, int], list[int]]:
    return {
        (table.worker_id, table.epoch, table.sequence_id, table.slot): list(table.block_ids)
        for table in inspected.tables
        if table.HasField("slot") and not table.ended
    }


def resident_mib(pid: int) -> float:
    """Memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 / 2**20
