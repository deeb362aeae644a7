"""What a scheduler holds is bounded by what is live and by its workers' memory, however much has passed through."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter

import pytest

from scheduler.config import SchedulerConfig
from scheduler.inspection import look
from tests.scheduler.peers import Gateway, Served, submit
from tests.scheduler.test_service import until


async def burst(gateway: Gateway, first: int, count: int) -> None:
    """So many unique prompts, each of another client, fifty at a time."""
    for base in range(first, first + count, 50):
        handles = range(base, base + 50)
        messages = [
            submit(handle, max_tokens=2, client=f"c{handle}", cache_salt=f"s{handle % 7}") for handle in handles
        ]
        for message in messages:
            message.prompt_token_ids.extend([message.handle % 997, message.handle // 997, 5, 6])
        await gateway.send(submits=messages)
        open_ones = set(handles)
        while open_ones:
            response = await gateway.read()
            open_ones -= {output.handle for output in response.outputs if output.finish_reason}
        gateway.responses.clear()


def objects() -> Counter[str]:
    gc.collect()
    return Counter(type(one).__name__ for one in gc.get_objects())


async def test_two_thousand_unique_prompts_leave_nothing_but_a_full_cache(served: Served) -> None:
    gateway, worker = await served.gateway(), await served.worker()
    await burst(gateway, 1, 500)
    worker.steps.clear()
    before, tasks = objects(), len(asyncio.all_tasks())
    await burst(gateway, 501, 1500)
    worker.steps.clear()
    await until(lambda: not served.cell.core.workers["w1"].in_flight)
    after = objects()
    grown = {name: count - before[name] for name, count in after.items() if count - before[name] > 100}
    assert not grown, "of these there are more with each prompt"
    assert len(asyncio.all_tasks()) <= tasks + 2, "a read or a write may be under way"
    holdings = await look(served.cell)
    gone = ("requests", "owners", "pending_outputs", "referenced_blocks")
    assert [holdings.counts[name] for name in gone] == [0, 0, 0, 0]
    pool = served.cell.core.workers["w1"].pool
    assert pool.num_free + pool.num_cached == 64
    assert len(pool.cache) == pool.num_cached > 32, "the cache should have filled up"
    assert served.cell.core.totals()["evictions"] > 1000


@pytest.mark.parametrize("settings", [SchedulerConfig(port=0, max_waiting=8, session_grace_s=0.1)])
async def test_what_is_refused_leaves_nothing(served: Served) -> None:
    gateway = await served.gateway()
    await gateway.send(submits=[submit(handle) for handle in range(1, 501)])
    refused: set[int] = set()
    while len(refused) < 492:
        refused |= {output.handle for output in (await gateway.read()).outputs if output.HasField("error")}
    assert len(served.cell.core.requests) == len(served.cell.gateways.owners) == 8
    gateway.call.cancel()
    await until(lambda: not served.cell.core.requests)
    assert len(served.cell.gateways.owners) == 0
    served.cell.gateways.expire()
    assert not served.cell.core.models, "a name that only requests have used is forgotten"
