"""Inspection: open tasks by name, and what a process says that it holds."""

from __future__ import annotations

import asyncio

import pytest
from tandem.v1 import inspection_pb2, inspection_pb2_grpc

from cluster.channel import connect
from cluster.inspection import HeldBlocks, Holdings, add_inspection, open_tasks
from cluster.server import bind, create_server
from cluster.telemetry import Telemetry


async def forgotten(ended: asyncio.Event) -> None:
    await ended.wait()


async def test_a_task_that_was_never_ended_shows() -> None:
    ended, telemetry = asyncio.Event(), Telemetry("gateway")
    assert "forgotten" not in open_tasks()
    tasks = [asyncio.create_task(forgotten(ended)) for _ in range(3)]
    assert open_tasks()["forgotten"] == 3
    assert 'tandem_tasks{coroutine="forgotten"} 3.0' in telemetry.render().decode()
    ended.set()
    await asyncio.gather(*tasks)
    assert "forgotten" not in open_tasks()


def test_a_page_without_a_loop_has_no_tasks() -> None:
    with pytest.raises(RuntimeError):
        open_tasks()
    assert "tandem_tasks{" not in Telemetry("gateway").render().decode()


async def test_what_is_held_crosses_the_wire() -> None:
    tables = [HeldBlocks("w", 3, 41, 0, [7, 5]), HeldBlocks("w", 3, 42, None, [], ended=True)]

    async def look() -> Holdings:
        return Holdings({"requests": 2}, tables)

    server = create_server()
    add_inspection(server, look)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    try:
        async with connect(f"127.0.0.1:{port}") as channel:
            stub = inspection_pb2_grpc.InspectionServiceStub(channel)
            found = await stub.Inspect(inspection_pb2.InspectRequest())
    finally:
        await server.stop(0)
    assert dict(found.held) == {"requests": 2}
    assert sum(found.tasks.values()) >= 2, "the test's own and the call's"
    first, second = found.tables
    assert (first.worker_id, first.epoch, first.sequence_id, first.slot) == ("w", 3, 41, 0)
    assert list(first.block_ids) == [7, 5]
    assert first.HasField("slot")
    assert not second.HasField("slot")
    assert second.ended
