"""The worker process: `python -m worker --help`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import uuid

from cluster import event_loop, inspection, logs
from cluster.config import load
from cluster.health import Health
from cluster.leaders import follow
from cluster.server import CannotBind, add_health, bind, create_server, join_address, run_until_signal
from engine.errors import ModelError
from engine.noise import choice_seed
from worker.attachment import Attachment
from worker.config import WorkerConfig
from worker.draft_links import DraftLinks
from worker.executor import Executor, NoDrafting
from worker.inspection import look
from worker.loading import cores_of, load_engine, load_own_proposer
from worker.own_drafts import OwnDrafts
from worker.profile import StepTimes, measure_step_times
from worker.sequences import SequenceTable, limits_of
from worker.stepping import CLOSE_TIMEOUT_S, StepThread
from worker.steps import StepOutcome

logger = logging.getLogger("worker")

HEALTH_PERIOD_S = 0.25
GIVE_UP_TIMES = 4.0
"""a step that has hung for so many times as long as makes it count as hung won't end: only a new process has the device
again, and a supervisor starts one"""


async def serve(config: WorkerConfig) -> int:
    """Load, attach, execute until relieved or told to stop; the exit status."""
    server = create_server()
    health = add_health(server)
    address = "-"
    if config.port >= 0:
        address = join_address(config.host, bind(server, config.host, config.port))
    worker = Worker(config)
    inspection.add_inspection(server, worker.look)
    await server.start()
    await _build(worker)
    worker.address = address
    stop = asyncio.Event()
    parts = [asyncio.ensure_future(worker.attachment.run()), asyncio.ensure_future(worker.report_health(health))]
    if isinstance(worker.drafts, DraftLinks):
        parts.append(asyncio.ensure_future(worker.drafts.run()))
    for part in parts:
        part.add_done_callback(lambda _: stop.set())
    worker.steps.failed.add_done_callback(lambda _: stop.set())
    try:
        await run_until_signal(server, worker.drain, health=health, stop=stop)
    finally:
        for part in parts:
            part.cancel()
        results = await asyncio.gather(*parts, return_exceptions=True)
        # A step that hangs won't end while one waits for it either.
        await worker.steps.close(0.0 if worker.steps.hung(GIVE_UP_TIMES) else CLOSE_TIMEOUT_S)
    crashes = [error for error in results if isinstance(error, Exception)]
    for error in crashes:
        logs.event(logger, "a part of the worker crashed", level=logging.ERROR, error=error)
    return 1 if crashes or worker.steps.failed.done() else 0


class StepHangs(Exception):
    """A step that won't end keeps the device."""


class Worker:
    """The parts of one worker process, wired together."""

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self.steps = StepThread(self.send_outcome, config.hung_step_s)
        self.address = "-"
        self.drafts: DraftLinks | OwnDrafts | None = None
        self.attachment: Attachment
        self.worker_id = config.worker_id or f"worker-{uuid.uuid4().hex[:8]}"
        self._ready = False
        self._loop = asyncio.get_running_loop()

    async def look(self) -> inspection.Holdings:
        """What the worker holds; while it loads: nothing."""
        if not self._ready:
            return inspection.Holdings({})
        return await look(self.worker_id, self.attachment.epoch, self.steps)

    def send_outcome(self, outcome: StepOutcome) -> None:
        """From the step thread, by way of the loop, to the scheduler."""
        self.attachment.send_outcome(outcome)

    def send_heartbeat(self) -> None:
        """The scheduler should know at once that drafts can, or can't, be had."""
        self.attachment.send_heartbeat()

    def send_heartbeat_soon(self) -> None:
        """The same, from the step thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process is about to end
            self._loop.call_soon_threadsafe(self.send_heartbeat)

    def note_attached(self, attached: bool) -> None:
        """Say once on stdout that the worker serves."""
        if attached and not self._ready:
            self._ready = True
            print(f"READY worker {self.address}", flush=True)

    async def drain(self) -> None:
        """Finish or hand over what runs."""
        if not self.steps.failed.done():
            await self.attachment.drain(self.config.drain_timeout_s)

    async def report_health(self, health: Health) -> None:
        """Alive while no step hangs, SERVING while it also takes new work. Raises StepHangs where a step won't end."""
        while True:
            alive = not self.steps.hung()
            serving = alive and self.attachment.attached and not self.attachment.to_be_relieved
            health.set_alive(alive)
            health.set("", serving)
            health.set(self.config.model_name, serving)
            if self.steps.hung(GIVE_UP_TIMES):
                raise StepHangs(f"a step has run for {self.steps.running_step_s():.0f} s")
            await asyncio.sleep(HEALTH_PERIOD_S)


async def _build(worker: Worker) -> None:
    """Load the engine and wire everything up."""
    config, worker_id = worker.config, worker.worker_id
    engine = await worker.steps.load(lambda: load_engine(config))
    limits = limits_of(engine.info)
    step_times: StepTimes = []
    if config.profile_s > 0 and config.engine != "fake":
        step_times = await worker.steps.load(lambda: measure_step_times(engine, config.profile_s))
        logs.event(logger, "step times", ms={size: round(1e3 * seconds, 3) for size, seconds in step_times})
    if config.draft == "own":
        proposer = await worker.steps.load(lambda: load_own_proposer(config))
        worker.drafts = OwnDrafts(proposer, limits.max_sequences, worker.send_heartbeat_soon)
    elif config.draft == "on":
        worker.drafts = DraftLinks(
            worker_id=worker_id,
            model=config.model_name,
            vocab_size=limits.vocab_size,
            cores=cores_of(config),
            stall_s=config.draft_stall_s,
            on_change=worker.send_heartbeat,
        )
        worker.drafts.step_times = step_times
    executor = Executor(engine, SequenceTable(limits, choice_seed), worker.drafts or NoDrafting())
    worker.steps.adopt(executor)
    worker.attachment = Attachment(
        leaders=follow(config.schedulers(), config.state, config.cluster, config.cell),
        worker_id=worker_id,
        boot_id=uuid.uuid4().hex,
        model=config.model_name,
        steps=worker.steps,
        executor=executor,
        drafts=worker.drafts,
        step_times=step_times,
        on_attached=worker.note_attached,
    )


def main() -> int:
    """Entry point; the exit status."""
    config = load(WorkerConfig, "worker")
    event_loop.share_with_model()
    logs.setup("worker")
    try:
        return event_loop.run(serve(config))
    except (CannotBind, ModelError) as error:
        # What the user can mend: a port in use, a model that can't be served, not enough memory for it.
        logs.event(logger, "the worker can't start", level=logging.ERROR, why=str(error))
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: threads of the numeric libraries may still run, and finalising the interpreter under them aborts.
    os._exit(status)
