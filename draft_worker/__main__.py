"""The draft worker process: `python -m draft_worker --help`."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import uuid

from tandem.v1 import draft_pb2_grpc

from cluster import event_loop, logs
from cluster.config import load
from cluster.leaders import follow
from cluster.server import CannotBind, add_health, bind, create_server, join_address, reachable_host, run_until_signal
from cluster.telemetry import Telemetry
from draft_worker.announcement import Announcement
from draft_worker.config import DraftWorkerConfig
from draft_worker.drafting import Drafter, DraftThread
from draft_worker.loading import cores_of, options_of, worth_of
from draft_worker.servicer import DraftServicer
from drafting.loading import load_proposer
from drafting.mirrors import MirrorTable
from engine.errors import ModelError

logger = logging.getLogger("draft_worker")

SERVICE_NAME = "tandem.v1.DraftService"


async def serve(config: DraftWorkerConfig) -> int:
    """Load, listen, announce, draft until told to stop; the exit status."""
    servicer = DraftServicer(config.target, worth_of(config), cores_of(config))
    thread = DraftThread(servicer.deliver)
    servicer.inbox = thread.inbox
    server = create_server()
    health = add_health(server)
    draft_pb2_grpc.add_DraftServiceServicer_to_server(servicer, server)
    port = bind(server, config.host, config.port)
    address = join_address(config.host, port)
    await thread.start(lambda: _drafter(config))
    assert thread.drafter is not None
    await server.start()
    telemetry = await _telemetry(config, servicer, thread.drafter)
    announcement = Announcement(
        leaders=follow(config.schedulers(), config.state, config.cluster, config.cell),
        worker_id=config.worker_id or f"draft-{uuid.uuid4().hex[:8]}",
        model=config.target,
        address=config.advertise or join_address(reachable_host(config.host), port),
        proposer=thread.drafter.proposer.name,
    )
    announcing = asyncio.ensure_future(announcement.run())
    stop = asyncio.Event()
    for part in (announcing, thread.ended):
        part.add_done_callback(lambda _: stop.set())
    for name in ("", SERVICE_NAME):
        health.set(name, True)

    async def drain() -> None:
        # Workers need no notice: without tails they decode plainly from the next step.
        servicer.close()
        announcing.cancel()
        await asyncio.gather(announcing, return_exceptions=True)

    try:
        ready = f"READY draft_worker {address}"
        await run_until_signal(server, drain, health=health, grace_s=0.5, stop=stop, ready=ready)
    finally:
        crashed = thread.ended.done() or (
            announcing.done() and not announcing.cancelled() and announcing.exception() is not None
        )
        announcing.cancel()
        await thread.close()
        if telemetry is not None:
            await telemetry.close()
    return 1 if crashed else 0


def _drafter(config: DraftWorkerConfig) -> Drafter:
    proposer = load_proposer(options_of(config))
    mirrors = MirrorTable(config.max_mirrors, config.max_draft_tokens, proposer.sources)
    return Drafter(proposer, mirrors, config.branches)


async def _telemetry(config: DraftWorkerConfig, servicer: DraftServicer, drafter: Drafter) -> Telemetry | None:
    if config.metrics_port < 0:
        return None
    telemetry = Telemetry("draft_worker")
    telemetry.gauge("draft_workers_linked", "Workers linked.", read=lambda: servicer.num_streams)
    telemetry.gauge("draft_mirrors", "Sequences followed.", read=lambda: len(drafter.mirrors))
    telemetry.gauge("draft_tokens_guessed", "Tokens guessed so far.", read=lambda: drafter.num_guessed)
    telemetry.gauge(
        "draft_branches_won", "Branches that foresaw a rejection.", read=lambda: drafter.mirrors.num_branches_won
    )
    telemetry.gauge("draft_openings_refused", "Openings beyond max_mirrors.", read=lambda: drafter.mirrors.num_refused)
    port = await telemetry.serve(config.host, config.metrics_port)
    logs.event(logger, "metrics served", port=port)
    return telemetry


def main() -> int:
    """Entry point; the exit status."""
    config = load(DraftWorkerConfig, "draft_worker")
    event_loop.share_with_model()
    logs.setup("draft_worker")
    try:
        return event_loop.run(serve(config))
    except (CannotBind, ModelError) as error:
        # What the user can mend: a port in use, a model that can't be served, another vocabulary.
        logs.event(logger, "the draft worker can't start", level=logging.ERROR, why=str(error))
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: threads of the numeric libraries may still run, and finalising the interpreter under them aborts.
    os._exit(status)
