"""The scheduler's core: every decision about what runs where, as plain method calls.

    submit ──▶ queue ──place──▶ worker.running ──plan──▶ Step ──(loop, worker)──▶ StepOutcome ──apply──▶ Update…
      ▲                              │ preempt, lost worker, drain
      └──────── back at the head ◀───┘

The core never waits and never reads a clock. Its caller sends the steps, feeds back outcomes in order, and
passes `now`.
"""

from __future__ import annotations

from dataclasses import asdict

from scheduler.core.applier import apply_outcome
from scheduler.core.block_tables import open_table
from scheduler.core.config import CoreConfig
from scheduler.core.integrity import check_integrity
from scheduler.core.model_pool import Counters, ModelPool
from scheduler.core.placement import SUSPECT_CRASHES, Placement, choose_worker, is_eligible
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

    def attach(self, worker_id: str, spec: WorkerSpec, now: float) -> list[Failure]:
        """Take a worker in; an earlier attachment of the same id is lost."""
        failures = self.detach(worker_id, now, crashed=False) if worker_id in self.workers else []
        worker = WorkerState.attach(worker_id, spec)
        self.workers[worker_id] = worker
        pool = self._model(spec.model)
        pool.workers[worker_id] = worker
        pool.seen = True
        return failures

    def detach(self, worker_id: str, now: float, crashed: bool) -> list[Failure]:
        """A worker is gone: its sequences go back to the head of the queue as prompt + emitted.

        `crashed` says that it died, rather than being cut off, drained or replaced; then what it was running is counted
        as a suspect, and what killed it alone fails.
        """
        worker = self.workers.pop(worker_id)
        pool = self._model(worker.spec.model)
        del pool.workers[worker_id]
        if not pool.workers:
            pool.unserved_since = now
        failures = []
        sequences = list(worker.sequences)
        suspects = [one for one in sequences if one.in_flight and one.crashes >= SUSPECT_CRASHES]
        self.counters.evictions += worker.pool.evictions
        for sequence in sequences:
            if sequence.state is State.CLOSING:
                sequence.move(State.DONE)
                sequence.forget_placement()
                continue
            if crashed and sequence.in_flight:
                self._count_crash(sequence)
            killed_alone = crashed and suspects == [sequence]
            self._requeue(sequence)
            if killed_alone and sequence.request.spec.key in self.requests:
                refusal = Refusal(RefusalKind.POISON, "this request, alone, crashed the worker that ran it")
                failures.append(self._fail(sequence.request, refusal))
        return failures

    def drain(self, worker_id: str) -> None:
        """No new work for a worker. What it runs moves, if another worker can take it, or else ends there."""
        worker = self.workers[worker_id]
        worker.draining = True
        others = self._model(worker.spec.model).serving
        for sequence in list(worker.running):
            if any(is_eligible(sequence, other) for other in others):
                self._take_out(worker, sequence)

    def is_drained(self, worker_id: str) -> bool:
        """Nothing runs there and nothing will."""
        worker = self.workers[worker_id]
        return worker.draining and not worker.running and not worker.leaving and not worker.in_flight

    # ------------------------------------------------------------------------------------------------ requests

    def submit(self, spec: RequestSpec, now: float) -> Request:
        """Take a request in. Raises Refusal; one that already emitted something is refused only where it can't fit."""
        pool = self._model(spec.model)
        resumed = any(emitted for _, emitted in spec.choices) or spec.crashes > 0
        if not resumed and pool.num_waiting + len(spec.choices) > self.config.max_waiting:
            raise Refusal(RefusalKind.QUEUE_FULL, f"{pool.num_waiting} choices wait already")
        request = Request(spec, self._next_arrival, now)
        self._check_fit(request, pool)
        if spec.max_tokens is not None and any(len(emitted) >= spec.max_tokens for _, emitted in spec.choices):
            raise Refusal(RefusalKind.INVALID, "a choice has max_tokens tokens already", "resume")
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
                failures.append(self._fail(request, Refusal(RefusalKind.DEADLINE, "the deadline has passed")))
        for pool in list(self.models.values()):
            if not (pool.seen or pool.num_waiting):
                del self.models[pool.name]
            if not pool.num_waiting or pool.serving:
                continue
            for sequence in pool.waiting:
                request = sequence.request
                since = max(pool.unserved_since, request.submitted_at)
                waited_out = request.spec.deadline is None and now - since >= self.config.capacity_wait_s
                if waited_out and request.spec.key in self.requests:
                    message = f"no worker serves {pool.name!r} at present"
                    failures.append(self._fail(request, Refusal(RefusalKind.NO_WORKER, message)))
        return failures

    # --------------------------------------------------------------------------------------------------- steps

    def place(self, model: str) -> list[Failure]:
        """Move waiting sequences into slots, in the queue's order, as long as the next one fits somewhere."""
        failures: list[Failure] = []
        pool = self.models[model]
        workers = pool.serving
        if not workers:
            return failures
        for sequence in list(pool.suspects):
            placement = choose_worker(sequence, workers, self.config)
            if placement is not None:
                pool.suspects.remove(sequence)
                self._admit(sequence, placement)
        while (head := pool.queue.peek()) is not None:
            try:
                self._resolve_limit(head, pool)
            except Refusal as refusal:
                failures.append(self._fail(head.request, refusal))
                continue
            placement = choose_worker(head, workers, self.config)
            if placement is None:
                break
            pool.queue.pop()
            self._admit(head, placement)
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
        if sequence.crashes >= SUSPECT_CRASHES:
            pool.suspects.append(sequence)
        else:
            pool.queue.push(sequence)

    def release_held(self, request: Request) -> None:
        """The prompt is computed (or its first choice gone): the other choices may start."""
        held, request.held = request.held, []
        for sequence in held:
            if sequence.state is State.HELD:
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
        return self._fail(request, refusal)

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
        """Refuse at once what no worker of the model could ever hold."""
        workers = list(pool.workers.values())
        if not workers:
            return
        spec = request.spec
        context = max(worker.spec.max_model_len for worker in workers)
        held = max(worker.spec.num_blocks * worker.spec.block_size for worker in workers)
        prompt = len(spec.prompt_token_ids)
        wanted = prompt + (1 if spec.max_tokens is None else spec.max_tokens)
        if prompt >= context:
            message = f"the prompt has {prompt} tokens, the context holds {context}, one of them for output"
            raise Refusal(RefusalKind.INVALID, message, "prompt")
        if wanted > context:
            message = f"prompt ({prompt}) and max_tokens ({spec.max_tokens}) exceed the context of {context} tokens"
            raise Refusal(RefusalKind.INVALID, message, "stop.max_tokens")
        if wanted > held:
            message = f"prompt and max_tokens need {wanted} tokens of KV memory, the largest worker holds {held}"
            raise Refusal(RefusalKind.INVALID, message, "prompt" if prompt >= held else "stop.max_tokens")

    def _resolve_limit(self, sequence: Sequence, pool: ModelPool) -> None:
        """Clamp an unset max_tokens, once, when workers are known: to the least capacity that holds the prompt.

        The least, so that any worker can take the sequence over.
        """
        if sequence.limit is not None and sequence.started:
            return
        self._check_fit(sequence.request, pool)
        if sequence.limit is None:
            specs = [worker.spec for worker in pool.workers.values()]
            capacities = {min(spec.max_model_len, spec.num_blocks * spec.block_size) for spec in specs}
            sequence.limit = min(capacity for capacity in capacities if capacity > len(sequence.token_ids))

    def _admit(self, sequence: Sequence, placement: Placement) -> None:
        worker, prefix = placement
        if sequence.limit is None:
            self._resolve_limit(sequence, self._model(worker.spec.model))
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
        sequence.started = True

    def _preempt(self, worker: WorkerState, sequence: Sequence) -> None:
        self.counters.preemptions += 1
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

    def _requeue(self, sequence: Sequence) -> None:
        """The worker is gone with everything it held."""
        sequence.forget_placement()
        sequence.move(State.WAITING)
        self.wait(sequence)

    def _count_crash(self, sequence: Sequence) -> None:
        known = len(sequence.token_ids)
        fresh = sequence.last_crash_known >= 0 and known > sequence.last_crash_known
        sequence.crashes = 1 if fresh else sequence.crashes + 1
        sequence.last_crash_known = known

    def _stop_waiting(self, sequence: Sequence) -> None:
        pool = self._model(sequence.request.spec.model)
        if sequence in pool.suspects:
            pool.suspects.remove(sequence)
        else:
            pool.queue.remove(sequence)

    def _fail(self, request: Request, refusal: Refusal) -> Failure:
        self.counters.requests_failed += 1
        for sequence in list(request.sequences.values()):
            self.end(sequence)
        return Failure(request, refusal)
