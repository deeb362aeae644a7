"""What is done to whom, how it is noticed, and how it ends.

    strike (at an output index) ──▶ noticed (observed) ──▶ lifted ──▶ everything settled

Nothing here waits for a time: a fault lasts until the cluster has visibly reacted to it, or for a few tokens where
nothing should react. A process that was killed or told to stop is started again by its supervisor.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.cluster import GATEWAYS, PATIENCE_S, POLL_S, REDIS, WORKERS, Cluster

FAULTS = ("kill", "term", "stop", "cut", "slow")
"""SIGKILL; SIGTERM; SIGSTOP, later SIGCONT; all links a black hole; every message 200 ms late"""
TARGETS = ("worker", "draft", "leader", "gateway", "redis")
SLOW_S = 0.2
SLOW_TOKENS = 8
"""a slowed process stays so until a stream has got so many tokens more"""


@dataclass(frozen=True, slots=True)
class Strike:
    """One fault of one process, when a stream that is watched holds `index` tokens."""

    fault: str
    target: str
    index: int

    def __str__(self) -> str:
        return f"{self.fault} {self.target} at {self.index}"


@dataclass
class Struck:
    """A strike that happened."""

    strike: Strike
    name: str
    """of the process"""
    at: float
    noticed_s: float = 0.0
    """from the strike until the cluster was seen to react"""
    lifted_at: float = 0.0
    settled_s: float = 0.0
    before: dict[str, Any] = field(default_factory=dict)
    """what was so before, to be compared with"""


async def name_of(cluster: Cluster, target: str, index: int = 0) -> str:
    """The process that a target is at this moment; of two that are alike, `index` chooses. A link is two names."""
    if target.startswith("leader"):
        return target.replace("leader", (await cluster.settled())[0])
    alike = {"worker": WORKERS[index % len(WORKERS)], "gateway": GATEWAYS[index % len(GATEWAYS)]}
    return alike.get(target, target)


async def busy_name_of(cluster: Cluster, target: str, index: int) -> str:
    """The same, but the busiest worker where that one has little: who has a prompt in its cache gets it again."""
    name = await name_of(cluster, target, index)
    if name not in WORKERS:
        return name
    async with asyncio.timeout(PATIENCE_S):
        while not (running := await _running(cluster)):  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
    busiest = max(running, key=running.__getitem__)
    return name if 2 * running.get(name, 0) >= running[busiest] else busiest


async def _running(cluster: Cluster) -> dict[str, int]:
    """Sequences of each worker that has any."""
    _, status = await cluster.leader()
    return {} if status is None else {worker.worker_id: worker.running for worker in status.workers if worker.running}


async def look_before(cluster: Cluster, name: str) -> dict[str, Any]:
    """What `noticed` compares with. Waits for a leader that answers: a change is only one from a known state."""
    async with asyncio.timeout(PATIENCE_S):
        while (found := await cluster.leader())[1] is None:  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
    leader, status = found
    return {
        "leader": leader,
        "term": status.term,
        "restarts": cluster.restarts(name) if name in cluster.names else 0,
        "away": sum(cluster.said(one, "the shared state is away") for one in ("scheduler-0", "scheduler-1")),
        "held": cluster.board.held[name],
    }


def apply(cluster: Cluster, fault: str, name: str) -> None:
    """Strike now; synchronous, so that it is this very index."""
    if fault == "cut":
        cluster.board.cut(*name.split())
    elif fault == "slow":
        cluster.board.slow(*name.split(), delay_s=SLOW_S)
    elif name == REDIS:
        {"kill": cluster.redis.kill, "term": cluster.redis.terminate, "stop": cluster.redis.pause}[fault]()
    else:
        signals = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}
        cluster.signal(name, signals[fault])


def lift(cluster: Cluster, fault: str, name: str) -> None:
    """End it. What was killed is the supervisor's, except for Redis."""
    if fault in ("cut", "slow"):
        cluster.board.heal(*name.split())
    elif name == REDIS:
        if fault == "stop":
            cluster.redis.resume()
        else:
            cluster.redis.restart()
    elif fault == "stop":
        cluster.signal(name, signal.SIGCONT)


async def noticed(cluster: Cluster, struck: Struck) -> None:
    """Return once the cluster has reacted, or the process is back; AssertionError if it never does."""
    check = _check_for(struck)
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not await check(cluster, struck):  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise AssertionError(f"nobody noticed: {struck.strike} ({struck.name})") from None
    struck.noticed_s = time.monotonic() - struck.at


_Check = Callable[[Cluster, Struck], Awaitable[bool]]


def _check_for(struck: Struck) -> _Check:
    fault, target = struck.strike.fault, struck.strike.target
    if fault == "slow":
        return _was_held
    if target == "redis":
        return _redis_is_away
    if target.startswith("leader"):
        return _another_leads
    if fault in ("kill", "term"):
        return _is_back
    return {"worker": _worker_is_left, "draft": _drafts_are_gone, "gateway": _session_is_gone}[target]


async def _was_held(cluster: Cluster, struck: Struck) -> bool:
    return cluster.board.held[struck.name] > struck.before["held"]


async def _redis_is_away(cluster: Cluster, struck: Struck) -> bool:
    said = sum(cluster.said(one, "the shared state is away") for one in ("scheduler-0", "scheduler-1"))
    return said > struck.before["away"]


async def _another_leads(cluster: Cluster, struck: Struck) -> bool:
    leader, status = await cluster.leader()
    # The same process leads anew where it was started again before its standby looked.
    return status is not None and status.term > struck.before["term"] and len(status.workers) > 0 and bool(leader)


async def _is_back(cluster: Cluster, struck: Struck) -> bool:
    return cluster.restarts(struck.name) > struck.before["restarts"]


async def _worker_is_left(cluster: Cluster, struck: Struck) -> bool:
    _, status = await cluster.leader()
    return status is not None and struck.name not in [one.worker_id for one in status.workers]


async def _drafts_are_gone(cluster: Cluster, struck: Struck) -> bool:
    _, status = await cluster.leader()
    return status is not None and not any(one.drafting for one in status.workers)


async def _session_is_gone(cluster: Cluster, struck: Struck) -> bool:
    _, status = await cluster.leader()
    return status is not None and len(status.gateways) < len(GATEWAYS)
