"""A whole cell in memory: the core, simulated workers and clients that know what they must receive.

Nothing here decides: each method is one thing that can happen (a client submits, a step is sent, runs, is answered, a
worker dies…), in any order. After each the core's conservation laws are checked, and every token a client receives is
compared with the oracle of `model_worker`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from scheduler.core.config import CoreConfig
from scheduler.core.scheduler import Scheduler
from scheduler.core.sequence import SUSPECT_CRASHES, RequestSpec, Sequence, State
from scheduler.core.step import Failure, Refusal, Step, StepOutcome
from scheduler.core.worker_state import Resident, WorkerSpec
from tests.scheduler.core.clients import Clients
from tests.scheduler.core.model_worker import DraftPolicy, ModelWorker, WireStep, no_drafts, to_wire

Choice = tuple[object, int]
"""(request key, choice index)"""


@dataclass
class Machine:
    """One worker process and its stream."""

    spec: WorkerSpec
    model: ModelWorker
    attached: bool = False
    sent: deque[WireStep] = field(default_factory=deque)
    """not yet run"""
    answers: deque[StepOutcome] = field(default_factory=deque)
    """not yet applied"""
    issued: deque[set[Choice]] = field(default_factory=deque)
    """who is in the steps that are not yet applied"""


class Simulation:
    """Everything that can happen to a cell, one method each."""

    def __init__(self, config: CoreConfig) -> None:
        self.config = config
        self.core = Scheduler(config)
        self.now = 100.0
        self.clients = Clients(config.capacity_wait_s)
        self.machines: dict[str, Machine] = {}
        self.poison: dict[object, int] = {}
        """request key → the output index at which it kills its worker"""
        self.crashes: dict[Choice, int] = {}
        self.resumed_with_tokens = 0
        self.last_step: Step | None = None
        self.attempt = 0

    # ------------------------------------------------------------------------------------------------- requests

    def submit(self, spec: RequestSpec) -> Refusal | None:
        """A client's request, or a resumption: the tokens in spec.choices are the client's already."""
        try:
            self.core.submit(spec, self.now)
        except Refusal as refusal:
            self.check()
            return refusal
        self.clients.add(spec)
        self.check()
        return None

    def cancel(self, key: object, choice: int | None = None) -> None:
        """The client goes away, or one of its choices hit a stop string."""
        client = self.clients[key]
        client.cancelled.update(client.tokens if choice is None else [choice])
        self.core.cancel(key, choice)
        self.check()

    def advance(self, seconds: float) -> None:
        """Time passes."""
        self.now += seconds
        self.clients.take(self.core.expire(self.now), self.now)
        for client in self.clients.live.values():
            late = client.spec.deadline is not None and client.spec.deadline <= self.now
            assert not late, f"{client.spec.key!r} lives beyond its deadline"
        self.check()

    # --------------------------------------------------------------------------------------------------- steps

    def place(self) -> None:
        """Waiting sequences enter slots, for every model."""
        for model in list(self.core.models):
            self.clients.take(self.core.place(model), self.now)
        self.check()

    def plan(self, worker_id: str) -> bool:
        """One more step is sent to a worker, if the core wants it."""
        step = self.last_step = self.core.plan(worker_id)
        if step is None:
            self.check()
            return False
        machine = self.machines[worker_id]
        self._forget_crashes()
        rows: set[Choice] = {(one.request.spec.key, one.choice) for one in step.sequences}
        assert len(rows) == len(step.sequences), "a choice has two rows in one step"
        assert all(one.state is State.RUNNING for one in step.sequences), "a row of a sequence that does not run"
        assert step.num_tokens <= self.config.token_budget, "the step is over the token budget"
        for key, choice in rows:
            assert choice in self.clients[key].open_choices, f"{key!r} is planned though nobody waits for it"
        if any(self.crashes.get(one, 0) >= SUSPECT_CRASHES for one in rows):
            assert len(rows) == 1, "a suspect shares a step"
            assert not any(machine.issued), "a suspect shares the worker"
        machine.sent.append(to_wire(step))
        machine.issued.append(rows)
        assert len(machine.issued) <= self.config.depth
        self.check()
        return True

    def run(self, worker_id: str) -> bool:
        """The worker runs its oldest step; a poisoned row kills it instead. False when there is none."""
        machine = self.machines[worker_id]
        if not machine.sent:
            return False
        if self._kills(machine, machine.sent[0]):
            self.crash(worker_id)
            return True
        machine.answers.append(machine.model.run(machine.sent.popleft()))
        return True

    def apply(self, worker_id: str) -> bool:
        """The scheduler takes in the worker's oldest result."""
        machine = self.machines[worker_id]
        if not machine.answers:
            return False
        machine.issued.popleft()
        self.clients.take(self.core.apply(worker_id, machine.answers.popleft()), self.now)
        self.check()
        return True

    def _kills(self, machine: Machine, step: WireStep) -> bool:
        if not self.poison:
            return False
        entering = {admission.slot: admission for admission in step.admissions}
        for slot, *_ in step.rows:
            if slot in entering:
                admission, known, ended = entering[slot], len(entering[slot].token_ids), False
            else:
                resident = machine.model.slots[slot]
                admission, known, ended = resident.admission, len(resident.tokens), resident.ended
            kills_at = self.poison.get(admission.key)
            if kills_at is not None and not ended and known - admission.num_prompt == kills_at:
                return True
        return False

    # ------------------------------------------------------------------------------------------------- workers

    def start(self, worker_id: str, spec: WorkerSpec, draft: DraftPolicy = no_drafts) -> None:
        """A new worker process with an empty memory attaches."""
        assert worker_id not in self.machines
        model = ModelWorker(spec.num_blocks, spec.block_size, spec.max_sequences, spec.max_model_len, draft)
        self.machines[worker_id] = Machine(spec, model)
        self.attach(worker_id)

    def attach(self, worker_id: str) -> None:
        """A worker says Hello; where it is attached already, its old stream is replaced."""
        machine = self.machines[worker_id]
        self._drop_stream(machine)
        residents = tuple(
            Resident(tuple(tokens), tuple(blocks), computed, salt)
            for tokens, blocks, computed, salt in machine.model.attach()
        )
        self.clients.take(self.core.attach(worker_id, replace(machine.spec, residents=residents), self.now), self.now)
        self.core.workers[worker_id].drafting = machine.model.draft is not no_drafts
        machine.attached = True
        self.check()

    def cut(self, worker_id: str) -> None:
        """The network loses a worker, which lives on and keeps what it holds."""
        machine = self.machines[worker_id]
        self._drop_stream(machine)
        machine.attached = False
        self.clients.take(self.core.detach(worker_id, self.now, crashed=False), self.now)
        self.check()

    def crash(self, worker_id: str) -> None:
        """A worker process dies."""
        if self.machines[worker_id].attached:
            self._fence(worker_id)
        del self.machines[worker_id]

    def hang(self, worker_id: str) -> None:
        """A worker's step takes for ever, or it answers nonsense: it is left as if it had died, and may come back."""
        self._fence(worker_id)
        machine = self.machines[worker_id]
        self._drop_stream(machine)
        machine.attached = False

    def _fence(self, worker_id: str) -> None:
        machine = self.machines[worker_id]
        self._forget_crashes()
        involved: set[Choice] = set().union(*machine.issued)
        live = [one for one in involved if one[1] in self.clients[one[0]].open_choices]
        for one in live:
            self.crashes[one] = self.crashes.get(one, 0) + 1
        guilty = set()
        if len(involved) == 1 and live and self.crashes[live[0]] > SUSPECT_CRASHES:
            guilty = {live[0][0]}
        news = self.core.detach(worker_id, self.now, crashed=True)
        failed = {item.request.spec.key for item in news if isinstance(item, Failure)}
        assert failed == guilty, "poison is told from bystanders"
        self.clients.take(news, self.now)
        self.check()

    def _forget_crashes(self) -> None:
        """A new token clears a choice."""
        for one in self.clients.progressed:
            self.crashes.pop(one, None)
        self.clients.progressed.clear()

    def drain(self, worker_id: str) -> None:
        """A worker asks to be relieved."""
        self.core.drain(worker_id)
        self.check()

    def leave_if_drained(self, worker_id: str) -> bool:
        """A relieved worker exits."""
        if not self.core.is_drained(worker_id):
            return False
        machine = self.machines.pop(worker_id)
        assert not machine.issued
        assert self.core.detach(worker_id, self.now, crashed=False) == []
        self.check()
        return True

    def restart(self) -> None:
        """The scheduler dies; gateways resubmit what is live to a new one, to which no worker has attached yet."""
        for machine in self.machines.values():
            self._drop_stream(machine)
            machine.attached = False
        self.core = Scheduler(self.config)
        self.clients.delivered = 0
        self._forget_crashes()
        counts, self.crashes = self.crashes, {}
        self.attempt += 1
        live = self.clients.live
        for key in live:
            del self.clients.by_key[key]
        for key, client in live.items():
            choices = tuple((index, tuple(client.tokens[index])) for index in client.open_choices)
            renewed = ("attempt", self.attempt, key)
            self.resumed_with_tokens += any(emitted for _, emitted in choices)
            if key in self.poison:
                self.poison[renewed] = self.poison[key]
            told = max(client.crashes.get(index, 0) for index in client.open_choices)
            crashes = max(counts.get((key, index), 0) for index in client.open_choices)
            assert told == crashes, "a client knows of as many crashes as there were"
            self.crashes |= {(renewed, index): crashes for index in client.open_choices if crashes}
            spec = replace(client.spec, key=renewed, choices=choices, crashes=told, resumed=True)
            assert self.submit(spec) is None
            self.clients[renewed].crashes = dict.fromkeys(client.open_choices, crashes)

    @staticmethod
    def _drop_stream(machine: Machine) -> None:
        """The worker ends its running step; queued ones and unsent results are lost."""
        if machine.sent and not machine.answers:
            machine.model.run(machine.sent.popleft())
        machine.sent.clear()
        machine.answers.clear()
        machine.issued.clear()

    # ------------------------------------------------------------------------------------------------- together

    @property
    def attached(self) -> list[str]:
        """Workers with a stream."""
        return [name for name, machine in self.machines.items() if machine.attached]

    def round(self) -> bool:
        """Place, plan all there is, run and answer one step per worker. False when nothing moved."""
        self.place()
        moved = False
        for name in self.attached:
            while self.plan(name):
                moved = True
        for name in self.attached:
            moved |= self.run(name)
        for name in self.attached:
            moved |= self.apply(name)
        return moved

    def run_dry(self, patience: int = 300) -> None:
        """Go on until nothing moves, and then nothing may be left that could.

        Moving without getting anywhere is a livelock: within `patience` rounds somebody gets a token or an end.
        """
        best, since = -1, 0
        while self.round():
            counters = self.core.counters
            ended = counters.requests_finished + counters.requests_cancelled + counters.requests_failed
            if self.clients.delivered + ended > best:
                best, since = self.clients.delivered + ended, 0
            since += 1
            assert since < patience, f"{patience} rounds without a token: {self.core.num_waiting} wait"
        self.check_quiescent()

    def check_quiescent(self) -> None:
        """The watchdog: nothing in flight and nothing planned means that nothing could be done."""
        for name in self.attached:
            worker = self.core.workers[name]
            assert not worker.in_flight
            assert not worker.running, f"{worker.running} run on {name} but get no rows"
            assert not worker.leaving
            assert worker.pool.num_referenced == 0
            assert len(worker.free_slots) == worker.spec.max_sequences
        for pool in self.core.models.values():
            for sequence in pool.waiting:
                assert not self._eligible(sequence), f"{sequence} waits beside idle workers: {self._eligible(sequence)}"

    def _eligible(self, sequence: Sequence) -> list[str]:
        needed = sequence.limit or len(sequence.token_ids) + 1
        names = []
        for name in self.attached:
            spec = self.core.workers[name].spec
            large = needed <= min(spec.max_model_len, spec.num_blocks * spec.block_size)
            if large and spec.model == sequence.request.spec.model:
                names.append(name)
        serving = [name for name in names if not self.core.workers[name].draining]
        # What has started may end on a draining worker where there is no other.
        return serving if serving or not sequence.request.started else names

    def check_over(self) -> None:
        """Everything has ended: no request, no slot, no referenced block is left."""
        assert not self.core.requests
        assert self.core.num_waiting == 0
        assert all(pool.num_held == 0 for pool in self.core.models.values())
        self.check_quiescent()
        assert not self.clients.live, "somebody was forgotten"

    # ------------------------------------------------------------------------------------------------- checking

    def check(self) -> None:
        """The core's conservation laws, and those it has with the clients."""
        self.core.check_integrity()
        counters = self.core.counters
        ended = counters.requests_finished + counters.requests_cancelled + counters.requests_failed
        assert counters.requests_accepted == ended + len(self.core.requests)
        assert counters.generated_tokens == self.clients.delivered, "counted tokens are not those delivered"
        open_choices = {key: sorted(client.open_choices) for key, client in self.clients.live.items()}
        live = {key: sorted(request.sequences) for key, request in self.core.requests.items()}
        assert live == open_choices, "the core and its clients disagree about what is live"
        for request in self.core.requests.values():
            held = [one.state is State.HELD for one in request.sequences.values()]
            assert not all(held), "held choices wait for nobody"
