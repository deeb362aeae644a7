"""What the scheduler owes its gateways: sessions, whose request is whose, deadlines, and the news of all of these.

Called on the cell's loop only; never awaits. What is to be said waits in each session until its own writer takes it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from tandem.v1 import scheduler_pb2

from cluster import errors
from cluster.logs import event
from scheduler import convert
from scheduler.config import SchedulerConfig
from scheduler.core.scheduler import Scheduler
from scheduler.core.step import Failure, Refusal, RefusalKind, Update
from scheduler.sessions import Owner, Ownership, Session

logger = logging.getLogger(__name__)


class Gateways:
    """All sessions of one cell, and all live requests."""

    def __init__(self, core: Scheduler, config: SchedulerConfig, schedule_planning: Callable[[], None]) -> None:
        self.sessions: dict[str, Session] = {}
        self.owners = Ownership()
        self.draining = False
        self.idle = asyncio.Event()
        """no request is live"""
        self.idle.set()
        self._core = core
        self._config = config
        self._schedule_planning = schedule_planning
        self.on_models: Callable[[dict[str, bool]], None] = lambda serving: None
        """told of each known model whether it takes new requests, after each change"""
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    def open(self, gateway_id: str) -> Session:
        """A gateway connects; an older session of the same gateway ends."""
        old = self.sessions.get(gateway_id)
        if old is not None:
            old.close()
            self._keep_for_grace(gateway_id)
        session = Session(gateway_id)
        session.set_models(self._model_list(), self.draining)
        self.sessions[gateway_id] = session
        event(logger, "gateway connected", gateway=gateway_id)
        return session

    def close(self, session: Session) -> None:
        """A gateway's stream ended: its requests are kept for the grace, then cancelled."""
        session.close()
        if self.sessions.get(session.gateway_id) is not session:
            return
        del self.sessions[session.gateway_id]
        event(logger, "gateway disconnected", gateway=session.gateway_id)
        self._keep_for_grace(session.gateway_id)

    def _keep_for_grace(self, gateway_id: str) -> None:
        """A gateway's session is over: what is neither resubmitted nor taken over in time ends."""
        orphans = self.owners.of_gateway(gateway_id)
        if orphans:
            self._loop.call_later(self._config.session_grace_s, self._cancel_orphans, orphans)

    def submit(self, session: Session, message: Any) -> None:
        """A request arrives. A refusal is told on the session, and touches nothing else."""
        now = self._loop.time()
        spec = convert.request_spec(message, session.gateway_id, now)
        owner = Owner((session.gateway_id, message.handle), message.request_id, message.attempt)
        try:
            crashes = self._settle_ownership(owner)
            if crashes > spec.crashes:
                spec = replace(spec, crashes=crashes)
            if self.draining and not spec.resumed:
                raise Refusal(RefusalKind.DRAINING, "the cell is draining")
            self._core.submit(spec, now)
        except Refusal as refusal:
            session.add_failure(message.handle, convert.refusal_status(refusal))
            return
        except errors.TandemError as error:
            session.add_failure(message.handle, errors.to_status(error))
            return
        self.owners.add(owner)
        self.idle.clear()
        if spec.deadline is not None:
            self._arm_deadline(spec.deadline)
        self._schedule_planning()

    def cancel(self, session: Session, message: Any) -> None:
        """Nobody waits for a request, or one choice of it, any more."""
        key = (session.gateway_id, message.handle)
        choice = message.choice if message.HasField("choice") else None
        self._core.cancel(key, choice)
        session.forget(message.handle, choice)
        self._forget_ended(key)
        self._schedule_planning()

    def _settle_ownership(self, owner: Owner) -> int:
        """A higher attempt supersedes; another gateway's is taken over unless that gateway is healthy.

        Returns how many crashes in a row the earlier one was part of: what kills workers doesn't begin anew with each
        gateway.
        """
        held = self.owners.find(owner.request_id)
        if held is None:
            return 0
        same_gateway = held.key[0] == owner.key[0]
        if same_gateway and owner.attempt <= held.attempt:
            raise errors.AlreadyExists("request_id", owner.request_id)
        if not same_gateway and held.key[0] in self.sessions:
            raise errors.AlreadyExists("request_id", owner.request_id)
        crashes = self._core.crashes_of(held.key)
        self._drop(held)
        return crashes

    def _drop(self, owner: Owner) -> None:
        self._core.cancel(owner.key)
        self.owners.remove(owner.key)
        session = self.sessions.get(owner.key[0])
        if session is not None:
            session.forget(owner.key[1])

    def _cancel_orphans(self, orphans: list[Owner]) -> None:
        """The grace is over: what was not taken over meanwhile ends."""
        live = [owner for owner in orphans if self.owners.find(owner.request_id) is owner]
        for owner in live:
            self._drop(owner)
        if live:
            event(logger, "orphaned requests cancelled", gateway=live[0].key[0], requests=len(live))
        self._note_idle()
        self._schedule_planning()

    def drain_gateway(self, gateway_id: str) -> None:
        """Have a gateway take no new requests, and end with its last one. Raises errors.NotFound."""
        session = self.sessions.get(gateway_id)
        if session is None:
            raise errors.NotFound("gateway", gateway_id)
        session.asked_to_drain = True
        session.set_models(self._model_list(), self.draining)
        event(logger, "gateway draining", gateway=gateway_id)

    def tell(self, news: Iterable[Update | Failure]) -> None:
        """Put news of choices and ends of requests where their gateways will find them."""
        for item in news:
            if isinstance(item, Failure):
                self.tell_failures([item])
                continue
            key: Any = item.sequence.request.spec.key
            session = self.sessions.get(key[0])
            if session is not None:
                session.add_update(key[1], item)
            if item.finish:
                self._forget_ended(key)

    def tell_failures(self, failures: Iterable[Failure]) -> None:
        """Put ends of requests where their gateways will find them."""
        for failure in failures:
            key: Any = failure.request.spec.key
            session = self.sessions.get(key[0])
            if session is not None:
                session.add_failure(key[1], convert.refusal_status(failure.refusal))
            self._forget_ended(key)

    def _forget_ended(self, key: Any) -> None:
        if key not in self._core.requests:
            self.owners.remove(key)
            self._note_idle()

    def _note_idle(self) -> None:
        if not self._core.requests:
            self.idle.set()

    def expire(self) -> None:
        """Fail what has passed its deadline or waited too long for a worker, and say so."""
        failures = self._core.expire(self._loop.time())
        if failures:
            self.tell_failures(failures)
            self._schedule_planning()

    def _arm_deadline(self, deadline: float) -> None:
        """Deadlines are kept to the millisecond, not to the tick."""
        if self._deadline_timer is None or deadline < self._deadline_timer.when():
            if self._deadline_timer is not None:
                self._deadline_timer.cancel()
            self._deadline_timer = self._loop.call_at(deadline, self._on_deadline)

    def _on_deadline(self) -> None:
        self._deadline_timer = None
        self.expire()
        deadlines = [one.spec.deadline for one in self._core.requests.values() if one.spec.deadline is not None]
        if deadlines:
            self._arm_deadline(min(deadlines))

    def _model_list(self) -> Any:
        models = scheduler_pb2.ModelList()
        for name, pool in self._core.models.items():
            if pool.seen:
                models.models.append(convert.model_state(name, [worker.spec for worker in pool.serving]))
        return models

    def models_changed(self) -> None:
        """Tell everybody what is served now."""
        known = {name: pool for name, pool in self._core.models.items() if pool.seen}
        self.on_models({name: bool(pool.serving) and not self.draining for name, pool in known.items()})
        models = self._model_list()
        for session in self.sessions.values():
            session.set_models(models, self.draining)
