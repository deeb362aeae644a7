"""Starts a gateway: `python -m gateway --model NAME=FOLDER --scheduler HOST:PORT`."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import sys
from collections.abc import Callable

import grpc

from cluster import event_loop, logs, server
from cluster.config import load
from cluster.health import Health
from cluster.leaders import follow
from cluster.logs import event
from cluster.server import CannotBind
from cluster.state import open_state
from cluster.telemetry import Telemetry
from gateway.catalog import Catalog
from gateway.cells import Cells, OnModels, Upstream
from gateway.config import GatewayConfig
from gateway.intake import Intake
from gateway.metrics import GatewayMetrics
from gateway.requests import RequestTable
from gateway.servicer import SERVICE_NAME, GenerationServicer, Limits, add_to_server
from gateway.session import Session
from gateway.text import ModelFolderError, ModelText
from gateway.text_workers import TextWorkers

logger = logging.getLogger(__name__)


class Gateway:
    """The gateway's parts, put together; one event loop owns them all."""

    def __init__(self, config: GatewayConfig, texts: dict[str, ModelText]) -> None:
        """`texts`: each served model's tokenizer. Must be called on the running event loop."""
        self.config = config
        self.telemetry = Telemetry("gateway")
        self.catalog = Catalog(texts)
        self.table = RequestTable()
        self.workers = TextWorkers()
        metrics = GatewayMetrics(self.telemetry, lambda: len(self.table), lambda: float(self.session.up))
        self._gateway_id = f"gateway-{secrets.token_hex(8)}"
        self._metrics = metrics
        self.stop = asyncio.Event()
        """set by an operator, by way of a scheduler; ends this process as a signal does"""
        self.session: Upstream
        if config.finds_cells:
            state = open_state(config.state, config.cluster)
            self.session = Cells(
                state, self._open_session, self.table, self._on_models, self._on_session_change, config.cell_loss_s
            )
        else:
            self.session = self._open_session("", self._on_models, self._on_session_change)
        intake = Intake(self.workers, draw_seed, max_prompt_bytes=round(config.max_prompt_mib * 2**20))
        limits = Limits(config.max_concurrent_requests, config.scheduler_wait_s)
        self.servicer = GenerationServicer(
            self.catalog, self.table, self.session, intake, self.workers, metrics, limits
        )
        self.server: grpc.aio.Server = server.create_server(max_message_mib=config.max_message_mib)
        add_to_server(self.servicer, self.server)
        self.health: Health = server.add_health(self.server)
        server.add_reflection(self.server, [SERVICE_NAME, "grpc.health.v1.Health"])
        self._report_health()

    def _open_session(self, cell: str, on_models: OnModels, on_change: Callable[[], None]) -> Session:
        config = self.config
        return Session(
            follow(config.schedulers(), config.state, config.cluster, cell or config.cell),
            gateway_id=self._gateway_id,
            table=self.table,
            metrics=self._metrics,
            on_models=on_models,
            on_change=on_change,
            loss_s=config.scheduler_loss_s,
            cell=cell,
            on_drain=self.stop.set,
        )

    async def start(self) -> int:
        """Listen and begin to connect to the scheduler; return the port. Raises CannotBind."""
        port = server.bind(self.server, self.config.host, self.config.port)
        await self.server.start()
        metrics_port = await self.telemetry.serve(self.config.host, self.config.metrics_port)
        self.session.start()
        event(logger, "serving", port=port, metrics_port=metrics_port, models=",".join(self.catalog.names))
        return port

    async def drain(self) -> None:
        """Refuse new requests, finish the old; at most drain_timeout_s."""
        self.session.begin_drain()
        try:
            async with asyncio.timeout(self.config.drain_timeout_s):
                await self.servicer.drain()
        except TimeoutError:
            event(logger, "drain timed out", live_requests=len(self.table))

    async def close(self) -> None:
        """Let go of everything; the server has been stopped."""
        await self.session.close()
        await self.telemetry.close()
        self.workers.close()

    def _on_models(self, models: object) -> None:
        self.catalog.update(models)  # type: ignore[arg-type]
        self._report_health()

    def _on_session_change(self) -> None:
        if not self.session.up:
            self.catalog.forget_workers()
        self._report_health()

    def _report_health(self) -> None:
        """A model serves while the session stands and a worker runs it; the service, while any model does."""
        up = self.session.up and not self.session.draining
        serving = {name: up and self.catalog.num_workers(name) > 0 for name in self.catalog.names}
        for name, state in serving.items():
            self.health.set(name, state)
        for name in ("", SERVICE_NAME):
            self.health.set(name, any(serving.values()))


def draw_seed() -> int:
    """A fresh 64-bit seed."""
    return int.from_bytes(os.urandom(8), "little")


async def serve(config: GatewayConfig, texts: dict[str, ModelText]) -> None:
    """Run a gateway until SIGTERM or SIGINT, then drain."""
    gateway = Gateway(config, texts)
    try:
        port = await gateway.start()
        ready = f"READY gateway {server.join_address(config.host, port)}"
        await server.run_until_signal(
            gateway.server, gateway.drain, health=gateway.health, stop=gateway.stop, ready=ready
        )
    finally:
        await gateway.server.stop(0)
        await gateway.close()


def main() -> int:
    """The process's exit status."""
    config = load(GatewayConfig, "python -m gateway")
    logs.setup("gateway")
    try:
        texts = {name: ModelText(name, folder) for name, folder in config.models().items()}
        event_loop.run(serve(config, texts))
    except (ModelFolderError, CannotBind) as error:
        print(f"gateway: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
