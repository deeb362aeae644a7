"""The cell's event loop: streams in, decisions from the core, streams out.

Everything here runs on one asyncio loop and never awaits: messages of gateways and workers come in as method calls, the
core decides, and what follows is put into outboxes. Writing from them begins at once where the last write has ended,
and otherwise when it has (`cluster.outgoing`). So the step loop waits neither for a gateway nor for a worker, and needs
no lock.

Planning is coalesced: whatever arrives in one turn of the loop is planned together at its end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from math import inf
from typing import Any

from tandem.v1 import scheduler_pb2

from cluster import errors
from cluster.health import Progress
from cluster.logs import event
from scheduler import convert
from scheduler.config import SchedulerConfig
from scheduler.core.config import CoreConfig, SpeculationMode
from scheduler.core.scheduler import Scheduler
from scheduler.core.step import ProtocolViolation
from scheduler.gateways import Gateways
from scheduler.sessions import Session
from scheduler.workers import DraftLink, WorkerLink

logger = logging.getLogger(__name__)

TICK_S = 0.25
MIN_TICK_S = 0.005


class Cell:
    """One scheduler's whole state, and what happens to it."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.core = Scheduler(
            CoreConfig(
                token_budget=config.token_budget,
                max_waiting=config.max_waiting,
                speculation=SpeculationMode(config.speculation),
                max_draft_tokens=config.max_draft_tokens,
                draft_token_budget=config.draft_token_budget,
                capacity_wait_s=config.capacity_wait_s,
            )
        )
        self.links: dict[str, WorkerLink] = {}
        self.drafters: dict[str, DraftLink] = {}
        self.term = 0
        """of the current leadership; 0: a standby, whom nobody may be connected to (see `scheduler.leadership`)"""
        self._epoch = 0
        self._planning = False
        self._last_tick: float | None = None
        self._blameless_until = 0.0
        self._loop = asyncio.get_running_loop()
        self.started_at = self._loop.time()
        self.gateways = Gateways(self.core, config, self.schedule_planning)

    # ------------------------------------------------------------------------------------------------- gateways

    def open_session(self, gateway_id: str) -> Session:
        """A gateway connects; an older session of the same gateway ends."""
        return self.gateways.open(gateway_id)

    def drain(self) -> None:
        """No new requests for the whole cell; live ones finish."""
        self.gateways.draining = True
        self.gateways.models_changed()

    # -------------------------------------------------------------------------------------------------- workers

    def attach(self, hello: Any) -> WorkerLink:
        """A worker connects. Raises errors.InvalidField for a Hello that can't work."""
        spec = convert.worker_spec(hello)
        now = self._loop.time()
        self._epoch += 1
        old = self.links.pop(hello.worker_id, None)
        if old is not None:
            old.close()
        self.gateways.tell(self.core.attach(hello.worker_id, spec, now))
        progress = Progress(self.config.hung_step_s)
        link = WorkerLink(hello.worker_id, hello.boot_id, self._epoch, now, progress=progress)
        self.links[hello.worker_id] = link
        event(
            logger, "worker attached", worker=hello.worker_id, model=spec.model, blocks=spec.num_blocks,
            epoch=link.epoch, fingerprint=spec.fingerprint, residents=len(spec.residents),
        )  # fmt: skip
        self._send_draft_workers(spec.model, [link])
        if hello.draining:
            self.drain_worker(hello.worker_id)
        self.gateways.models_changed()
        self.schedule_planning()
        return link

    def stream_ended(self, link: WorkerLink) -> None:
        """A worker's stream ended, by its own will or not. Idempotent."""
        if link.leaving or link.draining:
            self.detach(link, crashed=False, why="it left")
        elif link.is_cut_off(self._loop.time()):
            self.detach(link, crashed=False, why="it was cut off, or stood still")
        else:
            self.detach(link, crashed=True, why="its stream broke")

    def detach(self, link: WorkerLink, crashed: bool, why: str) -> None:
        """What a worker ran goes on elsewhere. Idempotent."""
        link.close()
        if self.links.get(link.worker_id) is not link:
            return
        del self.links[link.worker_id]
        moved = len(self.core.workers[link.worker_id].running)
        now = self._loop.time()
        crashed = crashed and not (link.draining or self._note_pause(now) or now < self._blameless_until)
        self.gateways.tell(self.core.detach(link.worker_id, now, crashed))
        event(
            logger, "worker detached", level=logging.INFO if link.draining else logging.WARNING,
            worker=link.worker_id, why=why, sequences=moved, crashed=crashed,
        )  # fmt: skip
        self.gateways.models_changed()
        self.schedule_planning()

    def heartbeat(self, link: WorkerLink, message: Any) -> None:
        """A sign of life."""
        link.hear(self._loop.time())
        self.core.workers[link.worker_id].drafting = message.drafting

    def result(self, link: WorkerLink, message: Any) -> None:
        """The outcome of a step."""
        if self.links.get(link.worker_id) is not link or (message.term, message.epoch) != (self.term, link.epoch):
            return  # of an old attachment: its sequences went on elsewhere
        now = self._loop.time()
        link.hear(now)
        link.last_step_s = message.duration_s
        try:
            updates = self.core.apply(link.worker_id, convert.step_outcome(message))
        except ProtocolViolation as violation:
            self.detach(link, crashed=True, why=str(violation))
            return
        link.note_progress(now, bool(self.core.workers[link.worker_id].in_flight))
        self.schedule_planning()  # first: the worker's next step goes out before the gateways' news
        self.gateways.tell(updates)

    def drain_worker(self, worker_id: str) -> None:
        """No new work for a worker; its sequences move, or end there if nobody else can take them. Idempotent."""
        link = self.links.get(worker_id)
        if link is None:
            raise errors.NotFound("worker", worker_id)
        if link.draining:
            return
        link.draining = True
        link.send(scheduler_pb2.AttachResponse(drain=scheduler_pb2.WorkerDrain()))
        self.core.drain(worker_id)
        event(logger, "worker draining", worker=worker_id)
        self.gateways.models_changed()
        self.schedule_planning()

    # --------------------------------------------------------------------------------------------- draft workers

    def announce(self, hello: Any) -> DraftLink:
        """A draft worker connects."""
        old = self.drafters.get(hello.worker_id)
        if old is not None:
            old.closed.set()
        link = DraftLink(hello.worker_id, hello.model, hello.address, hello.proposer, self._loop.time())
        self.drafters[link.worker_id] = link
        event(logger, "draft worker announced", worker=link.worker_id, model=link.model, address=link.address)
        self._send_draft_workers(link.model)
        return link

    def withdraw(self, link: DraftLink) -> None:
        """A draft worker's stream ended. Idempotent."""
        link.closed.set()
        if self.drafters.get(link.worker_id) is link:
            del self.drafters[link.worker_id]
            event(logger, "draft worker gone", worker=link.worker_id)
            self._send_draft_workers(link.model)

    def drain_draft_worker(self, worker_id: str) -> None:
        """Workers leave a draft worker, and it ends. Idempotent. Raises errors.NotFound."""
        link = self.drafters.get(worker_id)
        if link is None:
            raise errors.NotFound("draft worker", worker_id)
        link.draining.set()
        event(logger, "draft worker draining", worker=worker_id)
        self._send_draft_workers(link.model)

    def _send_draft_workers(self, model: str, links: Iterable[WorkerLink] | None = None) -> None:
        drafters = [link for link in self.drafters.values() if link.model == model and not link.draining.is_set()]
        addresses = sorted(link.address for link in drafters)
        told = scheduler_pb2.DraftWorkerList(addresses=addresses, max_draft_tokens=self.config.max_draft_tokens)
        message = scheduler_pb2.AttachResponse(draft_workers=told)
        for link in self.links.values() if links is None else links:
            if self.core.workers[link.worker_id].spec.model == model:
                link.send(message)

    # ------------------------------------------------------------------------------------------------- planning

    def schedule_planning(self) -> None:
        """Plan at the end of this turn of the loop, once."""
        if not self._planning:
            self._planning = True
            self._loop.call_soon(self._plan)

    def _plan(self) -> None:
        self._planning = False
        for name in list(self.core.models):
            self.gateways.tell_failures(self.core.place(name))
            for worker_id in list(self.core.models[name].workers):
                link = self.links[worker_id]
                while (step := self.core.plan(worker_id)) is not None:
                    link.send(convert.step_message(step, self.term, link.epoch))
                    link.note_issued(self._loop.time())
                if link.draining and not link.drained_sent and self.core.is_drained(worker_id):
                    link.drained_sent = True
                    link.send(scheduler_pb2.AttachResponse(drained=scheduler_pb2.WorkerDrained()))

    # ----------------------------------------------------------------------------------------------------- time

    async def watch(self) -> None:
        """Once a tick: frozen peers and waiting that is over. Runs until cancelled."""
        self._last_tick = self._loop.time()
        while True:
            await asyncio.sleep(self._until_next_look())
            now = self._loop.time()
            paused = self._note_pause(now)
            self._last_tick = now
            self.tick(now, paused)

    def _until_next_look(self) -> float:
        """A tick, or less where the next worker would be too silent before that: models are told of at that moment."""
        deadline = min((link.last_heard for link in self.links.values()), default=inf) + self.config.heartbeat_timeout_s
        return min(TICK_S, max(MIN_TICK_S, deadline - self._loop.time()))

    def _note_pause(self, now: float) -> bool:
        """Whether this process itself stood still: then silence and broken streams say nothing about the others."""
        paused = self._last_tick is not None and now - self._last_tick > TICK_S + 1.0
        if paused:
            self._blameless_until = now + self.config.heartbeat_timeout_s
        return paused

    def tick(self, now: float, paused: bool = False) -> None:
        """What only time brings about."""
        timeout_s = self.config.heartbeat_timeout_s
        for link in list(self.links.values()):
            if paused:
                link.last_heard = now
                link.note_progress(now, link.progress.running_s(now) > 0)
            elif link.is_frozen(now, timeout_s):
                self.detach(link, crashed=False, why=f"silent for {timeout_s} s")
            elif self._is_hung(link, now):
                self.detach(link, crashed=True, why=f"its step has run for {link.progress.running_s(now):.0f} s")
        for drafter in list(self.drafters.values()):
            if paused:
                drafter.last_heard = now
            elif drafter.is_frozen(now, timeout_s):
                self.withdraw(drafter)
        self.gateways.expire()

    def _is_hung(self, link: WorkerLink, now: float) -> bool:
        if not link.progress.hung(now):
            return False
        return link.progress.hung(now, max(link.last_step_s, self.core.workers[link.worker_id].expected_step_s))

    # ---------------------------------------------------------------------------------------------------- terms

    def lead(self, term: int) -> None:
        """Lead under this term from now on; whoever is connected must come again, and is told the new one."""
        self.term = term
        self._disconnect_all("new term")

    def step_down(self) -> None:
        """Another scheduler leads: gateways take their requests there, and workers what they hold."""
        self.term = 0
        self._disconnect_all("no longer leading")

    def _disconnect_all(self, why: str) -> None:
        for link in list(self.links.values()):
            self.detach(link, crashed=False, why=why)
        for session in list(self.gateways.sessions.values()):
            session.close()
        for drafter in list(self.drafters.values()):
            self.withdraw(drafter)
