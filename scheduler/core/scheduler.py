"""The scheduler's core: every decision about what runs where, as plain method calls.

    submit ──▶ queue ──place──▶ worker.running ──plan──▶ Step ──(loop, worker)──▶ StepOutcome ──apply──▶ Update…
      ▲                              │ preempt, lost worker, drain
      └──────── back at the head ◀───┘

The core never waits and never reads a clock. Its caller sends the steps, feeds back outcomes in order, and
passes `now`.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import asdict

from scheduler.core.applier import apply_outcome
from scheduler.core.block_tables import open_table
from scheduler.core.config import CoreConfig
from scheduler.core.fit import check_fit, check_spec, clamped_limit, stranded
from scheduler.core.integrity import check_integrity
from scheduler.core.model_pool import Counters, ModelPool
from scheduler.core.placement import Placement, choose_worker, is_eligible, takers
from scheduler.core.planner import Planner
from scheduler.core.sequence import Request, RequestSpec, Sequence, State
from scheduler.core.step import Admission, Failure, Refusal, RefusalKind, Step, StepOutcome, Update
from scheduler.core.worker_state import WorkerSpec, WorkerState


class Scheduler:
    """One cell's state. Not thread-safe: one owner calls it."""

    def __init__(self, config: CoreConfig) -> None:
        config.validate()
        self.config = config
        self.counters = Counters()
        self.models: dict[str, ModelPool] = {}
        self.workers: dict[str, WorkerState] = {}
        self.requests: dict[object, Request] = {}
        self._planner = Planner(config, self._preempt)
        self._next_sequence_id = 1
        self._next_arrival = 1

    # ------------------------------------------------------------------------------------------------- workers

    def attach(self, worker_id: str, spec: WorkerSpec, now: float) -> list[Update | Failure]:
        """Take a worker in; an earlier attachment of the same id is lost. Draining workers hand over to it."""
        failures = self.detach(worker_id, now, crashed=False) if worker_id in self.workers else []
        worker = WorkerState.attach(worker_id, spec)
        self.workers[worker_id] = worker
        pool = self._model(spec.model)
        pool.workers[worker_id] = worker
        pool.seen = True
        pool.unpark()
        for other in pool.workers.values():
            if other.draining:
                self._relieve(other)
        return failures

    def detach(self, worker_id: str, now: float, crashed: bool) -> list[Update | Failure]:
        """A worker is gone: its sequences go back to the head of the queue as prompt + emitted.

        `crashed` says that it died, hung or answered nonsense, not that it was cut off, drained or replaced; then that
        is counted for all that its issued steps contain, and told; and a suspect whose steps they were alone is what
        killed it, and fails.
        """
        worker = self.workers.pop(worker_id)
        del self._model(worker.spec.model).workers[worker_id]
        self.counters.evictions += worker.pool.evictions
        sequences = sorted(worker.sequences, key=lambda one: one.order)
        executing = [one for one in sequences if one.in_flight]
        culprit = executing[0] if crashed and len(executing) == 1 and executing[0].is_suspect else None
        news: list[Update | Failure] = []
        for sequence in sequences:
            in_flight = sequence.in_flight
            sequence.forget_placement()
            if sequence.state is State.CLOSING:
                sequence.move(State.DONE)
                continue
            if crashed and in_flight:
                sequence.crashes += 1
                sequence.crashed_on = worker_id
                news.append(Update(sequence, sequence.num_output, []))
            sequence.move(State.WAITING)
            self.wait(sequence)
        if culprit is None or culprit.state is State.DONE:
            return news
        refusal = Refusal(RefusalKind.POISON, "alone, it crashed the worker that ran it")
        return [self.fail_request(culprit.request, refusal)]

    def drain(self, worker_id: str) -> None:
        """No new requests for a worker. What it runs moves, if another worker can take it, or else ends there."""
        worker = self.workers[worker_id]
        worker.draining = True
        self._relieve(worker)

    def is_drained(self, worker_id: str) -> bool:
        """Nothing runs there and nothing will."""
        worker = self.workers[worker_id]
        if not worker.draining or worker.running or worker.leaving or worker.in_flight:
            return False
        pool = self._model(worker.spec.model)
        return not any(worker in takers(sequence, pool.workers.values()) for sequence in pool.waiting)

    def crashes_of(self, key: object) -> int:
        """Crashes in a row that a live request was part of; 0 for an unknown one."""
        request = self.requests.get(key)
        return max((one.crashes for one in request.sequences.values()), default=0) if request else 0

    # ------------------------------------------------------------------------------------------------ requests

    def submit(self, spec: RequestSpec, now: float) -> Request:
        """Take a request in. Raises Refusal; one that was resumed is refused only where it contradicts itself."""
        if spec.key in self.requests:
            raise ValueError(f"a live request has the key {spec.key!r}")
        check_spec(spec)
        pool = self._model(spec.model)
        request = Request(spec, self._next_arrival, now)
        request.started = spec.resumed or any(emitted for _, emitted in spec.choices)
        request.fit_checked = request.started or spec.crashes > 0
        if not request.fit_checked:
            self._check_fit(request, pool)
            waiting = pool.num_waiting + pool.num_held
            if waiting + len(spec.choices) > self.config.max_waiting:
                raise Refusal(RefusalKind.QUEUE_FULL, f"{waiting} choices wait already")
        self._next_arrival += 1
        for choice, emitted in spec.choices:
            sequence = Sequence(self._next_sequence_id, request, choice, emitted)
            self._next_sequence_id += 1
            sequence.started = bool(emitted)
            request.sequences[choice] = sequence
        first, *others = request.sequences.values()
        for sequence in others:
            sequence.state = State.HELD
            request.held.append(sequence)
        pool.num_held += len(others)
        self.requests[spec.key] = request
        self.counters.requests_accepted += 1
        self.wait(first)
        return request

    def cancel(self, key: object, choice: int | None = None) -> None:
        """Nobody waits for a request, or one choice of it, any more. Unknown ones are ignored: they have just ended."""
        request = self.requests.get(key)
        if request is None:
            return
        if choice is None:
            self.counters.requests_cancelled += 1
            for sequence in list(request.sequences.values()):
                self.end(sequence)
        elif choice in request.sequences:
            self.finish(request.sequences[choice])

    def expire(self, now: float) -> list[Failure]:
        """Fail what has passed its deadline, and what waited too long for any worker."""
        failures = []
        for request in list(self.requests.values()):
            deadline = request.spec.deadline
            if deadline is not None and now >= deadline:
                failures.append(self.fail_request(request, Refusal(RefusalKind.DEADLINE, "the deadline has passed")))
        for pool in list(self.models.values()):
            if not (pool.seen or pool.num_waiting):
                del self.models[pool.name]
                continue
            for sequence in stranded(pool, now):
                since, request = sequence.stranded_since, sequence.request
                if request.spec.deadline is None and since is not None and now - since >= self.config.capacity_wait_s:
                    message = f"no worker of {pool.name!r} could take it at present"
                    failures.append(self.fail_request(request, Refusal(RefusalKind.NO_WORKER, message)))
        return failures

    # --------------------------------------------------------------------------------------------------- steps

    def place(self, model: str) -> list[Failure]:
        """Move waiting sequences into slots, in the queue's order, as long as the next one fits somewhere.

        Who has to wait keeps the workers that could take it from those behind it, and no others.
        """
        failures: list[Failure] = []
        pool = self.models.get(model)
        if pool is None or not pool.num_waiting:
            return failures
        workers = list(pool.workers.values())
        for sequence in list(pool.suspects):
            placement = choose_worker(sequence, takers(sequence, workers), self.config)
            if placement is not None:
                pool.suspects.remove(sequence)
                self._admit(sequence, placement)
        skipped: set[Sequence] = set()
        while workers and (head := pool.queue.peek(skipped)) is not None:
            try:
                self._check_fit(head.request, pool)
            except Refusal as refusal:
                failures.append(self.fail_request(head.request, refusal))
                continue
            able = takers(head, pool.workers.values())
            placement = choose_worker(head, [worker for worker in able if worker in workers], self.config)
            if placement is not None:
                pool.queue.take(head)
                self._admit(head, placement)
            elif able:
                skipped.add(head)
                workers = [worker for worker in workers if worker not in able]
            else:
                pool.queue.remove(head)
                pool.parked[head.sequence_id] = head
        return failures

    def plan(self, worker_id: str) -> Step | None:
        """The next step for a worker, or None. Call `place` for its model before."""
        return self._planner.fill(self.workers[worker_id])

    def apply(self, worker_id: str, outcome: StepOutcome) -> list[Update | Failure]:
        """Take in the outcome of the oldest issued step. On a mismatch ProtocolViolation, and nothing is changed."""
        return apply_outcome(self, self.workers[worker_id], outcome)

    # ---------------------------------------------------------------------------- what the parts of a step call

    def wait(self, sequence: Sequence) -> None:
        """Put a sequence where the next `place` finds it."""
        pool = self._model(sequence.request.spec.model)
        sequence.stranded_since = None
        if sequence.is_suspect:
            insort(pool.suspects, sequence, key=lambda one: one.order)
        else:
            pool.queue.push(sequence)

    def release_held(self, request: Request) -> None:
        """The prompt is computed (or its first choice gone): the other choices may start."""
        held, request.held = request.held, []
        for sequence in held:
            if sequence.state is State.HELD:
                self._model(request.spec.model).num_held -= 1
                sequence.move(State.WAITING)
                self.wait(sequence)

    def finish(self, sequence: Sequence) -> None:
        """A choice has its answer; with the last one the request is finished."""
        self.end(sequence)
        if not sequence.request.sequences:
            self.counters.requests_finished += 1

    def end(self, sequence: Sequence) -> None:
        """A choice is over. Its slot is free at once, its blocks when no issued step contains it. Idempotent."""
        request = sequence.request
        request.sequences.pop(sequence.choice, None)
        if sequence.state in (State.CLOSING, State.DONE):
            return
        if sequence.state is State.WAITING:
            self._stop_waiting(sequence)
            sequence.move(State.DONE)
        elif sequence.state is State.HELD:
            self._model(request.spec.model).num_held -= 1
            sequence.move(State.DONE)
        else:
            self._end_placed(sequence)
        if not request.sequences:
            self.requests.pop(request.spec.key, None)
        elif request.held and sequence not in request.held:
            self.release_held(request)

    def settle(self, worker: WorkerState, sequence: Sequence) -> None:
        """The last issued step with a leaving sequence is applied."""
        worker.settle(sequence)
        if sequence.state is State.CLOSING:
            sequence.move(State.DONE)
        else:
            sequence.move(State.WAITING)
            self.wait(sequence)

    def fail_request(self, request: Request, refusal: Refusal) -> Failure:
        """End every choice of a request without an answer."""
        self.counters.requests_failed += 1
        for sequence in list(request.sequences.values()):
            self.end(sequence)
        return Failure(request, refusal)

    # ------------------------------------------------------------------------------------------------ integrity

    @property
    def num_waiting(self) -> int:
        return sum(pool.num_waiting for pool in self.models.values())

    @property
    def num_running(self) -> int:
        return sum(len(worker.running) for worker in self.workers.values())

    def totals(self) -> dict[str, int]:
        """Every counter by name."""
        totals = asdict(self.counters)
        totals["evictions"] += sum(worker.pool.evictions for worker in self.workers.values())
        return totals

    def check_integrity(self) -> None:
        """Raise AssertionError unless blocks, slots, queues and requests all add up. Slow; for tests and on demand."""
        check_integrity(self)

    # ------------------------------------------------------------------------------------------------- internals

    def _model(self, name: str) -> ModelPool:
        if name not in self.models:
            self.models[name] = ModelPool(name)
        return self.models[name]

    def _check_fit(self, request: Request, pool: ModelPool) -> None:
        """Refuse, as soon as there are workers to ask, what none of them could ever hold."""
        if not request.fit_checked and pool.workers:
            check_fit(request.spec, [worker.spec for worker in pool.workers.values()])
            request.fit_checked = True

    def _admit(self, sequence: Sequence, placement: Placement) -> None:
        worker, prefix = placement
        if sequence.limit is None:
            specs = [one.spec for one in self._model(worker.spec.model).workers.values()]
            sequence.limit = clamped_limit(sequence, specs)
        sequence.move(State.RUNNING)
        sequence.worker_id = worker.worker_id
        open_table(sequence, worker.pool, prefix)
        sequence.slot = worker.enter(sequence)
        worker.prefill_backlog += sequence.prefill_end - sequence.planned
        worker.admissions.append(
            Admission(sequence.slot, sequence, tuple(sequence.token_ids), tuple(sequence.blocks), sequence.computed)
        )
        self._count_admission(sequence, worker)

    def _count_admission(self, sequence: Sequence, worker: WorkerState) -> None:
        counters = self.counters
        if sequence.started:
            counters.resumptions += 1
        if sequence.fingerprint is not None:
            sequence.resumptions += 1
        if sequence.request.cached_tokens is None:
            sequence.request.cached_tokens = min(sequence.computed, sequence.num_prompt)
        counters.cached_tokens += sequence.computed
        counters.prefill_tokens += sequence.prefill_end - sequence.computed
        fingerprint = worker.spec.fingerprint
        if sequence.fingerprint not in (None, fingerprint):
            counters.fingerprint_crossings += 1
        sequence.fingerprint = fingerprint
        sequence.started = sequence.request.started = True

    def _preempt(self, worker: WorkerState, sequence: Sequence) -> None:
        self.counters.preemptions += 1
        self._take_out(worker, sequence)

    def _relieve(self, worker: WorkerState) -> None:
        """What a draining worker runs, and another could, leaves it."""
        others = self._model(worker.spec.model).serving
        for sequence in list(worker.running):
            if any(is_eligible(sequence, other) for other in others):
                self._take_out(worker, sequence)

    def _take_out(self, worker: WorkerState, sequence: Sequence) -> None:
        """Out of its slot and back to the queue, at once or after its last issued step."""
        worker.leave(sequence)
        sequence.move(State.LEAVING)
        if sequence.in_flight == 0:
            self.settle(worker, sequence)

    def _end_placed(self, sequence: Sequence) -> None:
        assert sequence.worker_id is not None
        worker = self.workers[sequence.worker_id]
        if sequence.state is State.RUNNING:
            worker.leave(sequence)
        sequence.move(State.CLOSING)
        if sequence.in_flight == 0:
            self.settle(worker, sequence)

    def _stop_waiting(self, sequence: Sequence) -> None:
        pool = self._model(sequence.request.spec.model)
        if sequence in pool.suspects:
            pool.suspects.remove(sequence)
        elif sequence.sequence_id in pool.parked:
            del pool.parked[sequence.sequence_id]
        else:
            pool.queue.remove(sequence)
