"""A real scheduler server on port 0."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tandem.v1 import admin_pb2_grpc, scheduler_pb2_grpc

from cluster.channel import connect
from cluster.server import bind, create_server
from scheduler.config import SchedulerConfig
from scheduler.loop import Cell
from scheduler.servicer import AdminServicer, SchedulerServicer
from tests.scheduler.peers import Served, leading


@pytest.fixture
def settings() -> SchedulerConfig:
    return SchedulerConfig(port=0, session_grace_s=0.2)


@pytest.fixture
async def served(settings: SchedulerConfig) -> AsyncIterator[Served]:
    cell = Cell(settings)
    leadership = await leading(cell)
    server = create_server()
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(SchedulerServicer(cell, leadership), server)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminServicer(cell, leadership), server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    channel = connect(f"127.0.0.1:{port}")
    running = Served(cell, f"127.0.0.1:{port}", channel)
    yield running
    cell.core.check_integrity()
    for task in running.tasks:
        task.cancel()
    await channel.close()
    await leadership.close()
    await server.stop(0)
