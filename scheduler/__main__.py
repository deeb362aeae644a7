"""The scheduler process: `python -m scheduler --help`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import uuid

from tandem.v1 import admin_pb2_grpc, scheduler_pb2_grpc

from cluster import config, event_loop, health, inspection, logs
from cluster.server import (
    CannotBind,
    add_health,
    add_reflection,
    bind,
    create_server,
    join_address,
    reachable_host,
    run_until_signal,
)
from cluster.state import open_state
from cluster.telemetry import Telemetry
from scheduler.config import SchedulerConfig
from scheduler.inspection import look
from scheduler.leadership import Leadership
from scheduler.loop import Cell
from scheduler.metrics import CellCollector
from scheduler.servicer import AdminServicer, SchedulerServicer

SERVICES = ("tandem.v1.SchedulerService", "tandem.v1.AdminService")
REFLECTED = (*SERVICES, health.SERVICE_NAME)
HAND_OVER_TIMEOUT_S = 3.0
logger = logging.getLogger(__name__)


async def serve(settings: SchedulerConfig) -> None:
    """Serve until told to stop. Raises CannotBind."""
    cell = Cell(settings)
    server = create_server()
    port = bind(server, settings.host, settings.port)
    leadership = Leadership(
        cell,
        open_state(settings.state, settings.cluster),
        cell_name=settings.cell,
        scheduler_id=uuid.uuid4().hex,
        address=settings.advertise or join_address(reachable_host(settings.host), port),
        ttl_s=settings.lease_ttl_s,
    )
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(SchedulerServicer(cell, leadership), server)
    stop = asyncio.Event()
    admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminServicer(cell, leadership, stop.set), server)
    inspection.add_inspection(server, lambda: look(cell))
    serving = add_health(server)
    cell.gateways.on_models = lambda models: _report_models(serving, models)
    add_reflection(server, REFLECTED)
    telemetry = Telemetry("scheduler")
    telemetry.registry.register(CellCollector(cell))
    metrics_port = await telemetry.serve(settings.host, settings.metrics_port)
    await leadership.start()
    await server.start()
    tasks = [asyncio.create_task(cell.watch()), asyncio.create_task(_report_health(serving, leadership))]
    logs.event(logger, "serving", address=join_address(settings.host, port), term=cell.term, metrics_port=metrics_port)

    async def drain() -> None:
        if not await leadership.hand_over(HAND_OVER_TIMEOUT_S):
            cell.drain()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(cell.gateways.idle.wait(), settings.drain_timeout_s)
        await leadership.close()

    try:
        ready = f"READY scheduler {join_address(settings.host, port)}"
        await run_until_signal(server, drain, health=serving, grace_s=1.0, stop=stop, ready=ready)
    finally:
        for task in tasks:
            task.cancel()
        await leadership.close()
        await telemetry.close()


async def _report_health(serving: health.Health, leadership: Leadership) -> None:
    """The process serves; the service that gateways and workers call does while this scheduler leads."""
    for name in ("", "tandem.v1.AdminService"):
        serving.set(name, True)
    async for view in leadership.watch():
        serving.set("tandem.v1.SchedulerService", view.leading)


def _report_models(serving: health.Health, models: dict[str, bool]) -> None:
    for name, takes_requests in models.items():
        serving.set(name, takes_requests)


def main() -> int:
    """Entry point; returns the exit status."""
    settings = config.load(SchedulerConfig, "scheduler")
    logs.setup("scheduler")
    try:
        event_loop.run(serve(settings))
    except CannotBind as error:
        print(f"scheduler: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
