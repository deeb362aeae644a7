"""One step for one worker.

Decode rows come first, then prefill chunks, within the token budget. A decode row may lengthen its sequence by 1 + k
tokens, and results of issued steps are not known yet, so blocks are reserved for the worst case

    ceil(min(limit, horizon + 1 + k) / block_size)          horizon = known + Σ in flight (1 + k)

before the row is issued. When the pool is short, in this order:

    1. k = 0
    2. wait for the issued steps (running ahead less is cheaper than throwing work away)
    3. preempt whoever goes last: lowest priority, then newest. If an issued step contains the victim, its blocks come
       back with that step's result, and the short row waits for it.

A suspect (see `SUSPECT_CRASHES`) has its worker's steps to itself until its next token, which takes only its prefill:
then whoever crashes a worker alone is known for certain, and nobody else is part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import repeat

from scheduler.core.block_tables import grow_table
from scheduler.core.config import CoreConfig, SpeculationMode
from scheduler.core.sequence import Sequence
from scheduler.core.step import Step
from scheduler.core.worker_state import WorkerState

NO_BLOCKS: list[int] = []


def draft_budgets(worker: WorkerState, decodes: list[Sequence], config: CoreConfig) -> Iterable[int]:
    """k of each decode row, where blocks and tokens allow it: 0 where nobody guesses, else as the mode says."""
    if not worker.drafting or config.speculation is SpeculationMode.OFF:
        return repeat(0)
    if config.speculation is SpeculationMode.FIXED:
        k = max(0, min(config.max_draft_tokens, config.draft_token_budget // len(decodes) - 1))
        return repeat(k)
    num_prefill = min(worker.prefill_backlog, config.token_budget - len(decodes))
    return worker.speculation.budgets(decodes, max(0, num_prefill), config) or repeat(0)


class Planner:
    """Fills steps. `preempt` takes a victim out of its slot; it belongs to the scheduler, which owns the queue."""

    def __init__(self, config: CoreConfig, preempt: Callable[[WorkerState, Sequence], None]) -> None:
        self._config = config
        self._preempt = preempt

    def fill(self, worker: WorkerState) -> Step | None:
        """The next step, or None where there is nothing to do or enough is issued."""
        if len(worker.in_flight) >= self._config.depth:
            return None
        step = Step(number=worker.steps + 1)
        if worker.suspect is not None:
            if worker.in_flight:
                return None
            self._add_prefills(worker, [worker.suspect], step, self._config.token_budget)
        else:
            self._add_rows(worker, step)
        if not step.sequences and (worker.in_flight or not worker.released_slots):
            return None
        step.released_slots.extend(worker.released_slots)
        step.admissions.extend(worker.admissions)
        worker.released_slots.clear()
        worker.admissions.clear()
        worker.steps += 1
        worker.in_flight.append(step)
        return step

    def _add_rows(self, worker: WorkerState, step: Step) -> None:
        """Whatever runs, decode rows first."""
        budget = self._config.token_budget
        decodes = [one for one in worker.running if one.planned >= one.prefill_end]
        if decodes:
            budget = self._add_decodes(worker, decodes, step, budget)
        if worker.prefill_backlog > 0:
            self._add_prefills(worker, worker.running, step, budget)
        worker.shared_steps += bool(step.sequences)

    def _add_decodes(self, worker: WorkerState, decodes: list[Sequence], step: Step, budget: int) -> int:
        """Add a row per sequence that can go on; the budget that is left. The loop every token passes: kept lean."""
        budgets = draft_budgets(worker, decodes, self._config)
        sequences, slots, new_blocks = step.sequences, step.slots, step.new_blocks
        num_draft, reserved = step.num_draft, step.reserved
        drafting = 0
        for sequence, k in zip(decodes, budgets, strict=False):
            if sequence.slot is None:  # preempted by a row before it
                continue
            if len(sequence.token_ids) + sequence.sampling_in_flight >= sequence.limit:  # type: ignore[operator]
                continue  # the issued steps end it
            if budget <= 0:
                break
            if k:
                most = sequence.request.spec.max_draft_tokens
                k = min(k, budget - 1, k if most is None else most)
                drafting += k
            horizon = sequence.horizon + 1 + k
            if horizon <= sequence.capacity:
                new_blocks.append(NO_BLOCKS)
            else:
                blocks = grow_table(sequence, worker.pool, horizon)
                if blocks is None:
                    horizon -= k
                    drafting -= k
                    k = 0
                    blocks = self._make_room(worker, sequence, horizon)
                    if blocks is None:
                        continue
                new_blocks.append(blocks)
            budget -= 1 + k
            sequence.horizon = horizon
            sequence.in_flight += 1
            sequence.sampling_in_flight += 1
            sequences.append(sequence)
            slots.append(sequence.slot)
            num_draft.append(k)
            reserved.append(1 + k)
        step.num_prefill.extend([0] * len(sequences))
        worker.decode_rows += len(sequences)
        worker.draft_budget += drafting
        return budget

    def _make_room(self, worker: WorkerState, sequence: Sequence, horizon: int) -> list[int] | None:
        """Blocks for a plain decode row of a short pool, or None: the row sits this step out."""
        blocks = grow_table(sequence, worker.pool, horizon)
        while blocks is None:
            if sequence.in_flight or any(one.blocks for one in worker.leaving):
                return None
            victim = worker.running[-1]
            self._preempt(worker, victim)
            if victim is sequence:
                return None
            blocks = grow_table(sequence, worker.pool, horizon)
        return blocks

    def _add_prefills(self, worker: WorkerState, sequences: list[Sequence], step: Step, budget: int) -> None:
        """Add a chunk per sequence with known tokens that no issued step computes, while the budget lasts."""
        for sequence in sequences:
            remaining = sequence.prefill_end - sequence.planned
            if remaining <= 0:
                continue
            if budget <= 0:
                return
            chunk = min(remaining, budget)
            samples = chunk == remaining
            budget -= chunk
            sequence.planned += chunk
            sequence.in_flight += 1
            worker.prefill_backlog -= chunk
            if samples:
                sequence.horizon += 1
                sequence.sampling_in_flight += 1
            assert sequence.slot is not None
            step.sequences.append(sequence)
            step.slots.append(sequence.slot)
            step.num_prefill.append(chunk)
            step.num_draft.append(0)
            step.new_blocks.append(NO_BLOCKS)
            step.reserved.append(1 if samples else 0)
