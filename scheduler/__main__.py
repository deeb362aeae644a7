"""The scheduler process: `python -m scheduler --help`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys

from tandem.v1 import admin_pb2_grpc, scheduler_pb2_grpc

from cluster import config, health, logs
from cluster.server import CannotBind, add_health, add_reflection, bind, create_server, join_address, run_until_signal
from cluster.telemetry import Telemetry
from scheduler.config import SchedulerConfig
from scheduler.loop import Cell
from scheduler.metrics import CellCollector
from scheduler.servicer import AdminServicer, SchedulerServicer

SERVICES = ("tandem.v1.SchedulerService", "tandem.v1.AdminService")
REFLECTED = (*SERVICES, health.SERVICE_NAME)
logger = logging.getLogger(__name__)


async def serve(settings: SchedulerConfig) -> None:
    """Serve until told to stop. Raises CannotBind."""
    cell = Cell(settings)
    server = create_server()
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(SchedulerServicer(cell), server)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminServicer(cell), server)
    serving = add_health(server)
    add_reflection(server, REFLECTED)
    port = bind(server, settings.host, settings.port)
    telemetry = Telemetry("scheduler")
    telemetry.registry.register(CellCollector(cell))
    metrics_port = await telemetry.serve(settings.host, settings.metrics_port)
    await server.start()
    for name in ("", *SERVICES):
        serving.set(name, True)
    watch = asyncio.create_task(cell.watch())
    logs.event(logger, "serving", address=join_address(settings.host, port), term=cell.term, metrics_port=metrics_port)

    async def drain() -> None:
        cell.drain()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(cell.gateways.idle.wait(), settings.drain_timeout_s)

    try:
        ready = f"READY scheduler {join_address(settings.host, port)}"
        await run_until_signal(server, drain, health=serving, grace_s=1.0, ready=ready)
    finally:
        watch.cancel()
        await telemetry.close()


def main() -> int:
    """Entry point; returns the exit status."""
    settings = config.load(SchedulerConfig, "scheduler")
    logs.setup("scheduler")
    try:
        asyncio.run(serve(settings))
    except CannotBind as error:
        print(f"scheduler: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
