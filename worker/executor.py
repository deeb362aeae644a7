"""Runs one step: applies a plan to the slot table, drives the engine, verifies, and says what came of it.

    releases → admissions → rows            the order within a step
    plan rows → forward → sample → verify   once for all rows together

Rows are independent: a row whose data is bad becomes a failure of its own, and when the engine itself raises, the rows
are split in halves until the culprits stand alone (a forward pass may be repeated, it writes the same KV). An engine
that fails on everything, twice in a row, raises EngineBroken: then the process should end, so that its sequences
resume elsewhere.

Synchronous; one thread owns it, the engine and the slot table (worker/stepping.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

import torch

from cluster.logs import event
from engine.batch import AheadEngine, ChoosingEngine, Engine
from engine.sampler import SampleResult, SampleRow, sample, sampled_tokens
from worker.batching import RowPlan, build_batch, choices_of, decode_rows
from worker.run_ahead import RunAhead
from worker.sequences import Sequence, SequenceTable
from worker.settlement import Settlement
from worker.steps import Step, StepOutcome

logger = logging.getLogger(__name__)

MOST_READ_AGAIN = 4096
"""tokens; beyond, drafted tokens go through the engine with their row, which reads its KV once for all of them"""
BROKEN_AFTER = 2
"""rows that failed alone, with no success in between, after which the engine itself is to blame"""


def _nothing() -> None:
    return


def _no_bell() -> int:
    return -1


class EngineBroken(RuntimeError):
    """The engine failed on every row it was given, more than once in a row."""


class Drafting(Protocol):
    """Who knows drafts. Called from the executor's thread only; no call raises, and none but `wait` takes time."""

    def tail(self, slot: int, tokens: list[int], limit: int) -> list[int]:
        """At most `limit` guessed tokens to follow `tokens`, all the sequence's known ones; often none."""
        ...

    def follow(self, sequence: Sequence, max_draft_tokens: int) -> None:
        """The known tokens are what they are now; drafts of this length are wanted (0: none at the moment)."""
        ...

    def forget(self, slot: int) -> None:
        """No drafts are wanted for this slot any more; harmless if they never were."""
        ...

    def flush(self) -> None:
        """Pass on what was noted since the last flush."""
        ...

    def wait(self, rows: list[tuple[Sequence, int]], before: Callable[[], None]) -> None:
        """A step of such decode rows, each with its draft budget, is about to begin: wait for late tails, or guess,
        while it pays.

        `before` is called before what takes long.
        """
        ...

    def learn(self, outcome: StepOutcome) -> None:
        """What came of a step of decode rows some of which had a draft budget."""
        ...


class NoDrafting:
    """Plain decoding."""

    def tail(self, slot: int, tokens: list[int], limit: int) -> list[int]:
        return []

    def follow(self, sequence: Sequence, max_draft_tokens: int) -> None:
        return

    def forget(self, slot: int) -> None:
        return

    def flush(self) -> None:
        return

    def wait(self, rows: list[tuple[Sequence, int]], before: Callable[[], None]) -> None:
        return

    def learn(self, outcome: StepOutcome) -> None:
        return


class Executor:
    """The engine, its slot table and its drafts."""

    def __init__(
        self,
        engine: Engine,
        sequences: SequenceTable,
        drafting: Drafting,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = engine
        self.sequences = sequences
        self.drafting = drafting
        self._chooser = engine if isinstance(engine, ChoosingEngine) and engine.chooses else None
        self.ahead = RunAhead(self, engine, clock) if isinstance(engine, AheadEngine) and engine.runs_ahead else None
        """how steps are launched, where the engine can; while some are in flight, nothing else here is called"""
        self._block_size = sequences.limits.block_size
        self._clock = clock
        self._failed_in_a_row = 0
        self._before_forward: Callable[[], None] = _nothing
        self._bell: Callable[[], int] = _no_bell

    def run(
        self, step: Step, before_forward: Callable[[], None] = _nothing, bell: Callable[[], int] = _no_bell
    ) -> StepOutcome:
        """Execute one step. Raises EngineBroken, and nothing else for whatever a row holds.

        Each time that the engine is about to be entered, one of two is called: `before_forward`, or `bell` for the
        event that the engine is to raise (`DecodeRows.bell`) where it can.
        """
        self._before_forward, self._bell = before_forward, bell
        began_s = self._clock()
        settlement = Settlement(step)
        self.apply_slots(step)
        speculative = any(step.max_draft_tokens) and not any(step.num_prefill_tokens)
        drafting_s = 0.0
        if speculative:
            self._wait_for_tails(step)
            drafting_s = self._clock() - began_s
        plans = self.plan(step, settlement)
        self.drafting.flush()
        if plans:
            self._compute_all(plans, settlement)
            self.tell_drafting(plans)
        outcome = settlement.outcome(self._clock() - began_s)
        outcome.drafting_s = drafting_s
        if speculative:
            self.drafting.learn(outcome)
        return outcome

    def reset(self) -> None:
        """Forget all sequences: a new leader, or the same one in a new epoch, admits anew."""
        for slot in self.sequences.slots():
            self.drafting.forget(slot)
        self.drafting.flush()
        self.sequences.clear()

    # ------------------------------------------------------------------------------------------------------ planning

    def apply_slots(self, step: Step) -> None:
        """A step's releases, then its admissions."""
        for slot in step.released_slots:
            self.sequences.release(slot)
            self.drafting.forget(slot)
        for admission in step.admissions:
            self.drafting.forget(admission.slot)
            self.sequences.admit(admission)

    def plan(self, step: Step, settlement: Settlement) -> list[RowPlan]:
        """The rows that have something to compute; failed and ended ones are settled here."""
        plans: list[RowPlan] = []
        seen: set[int] = set()
        taken = 0
        rows = zip(step.slots, step.num_prefill_tokens, step.max_draft_tokens, step.num_new_blocks, strict=True)
        for row, (slot, num_prefill, max_draft, num_new) in enumerate(rows):
            new_blocks = slice(taken, taken + num_new)
            taken += num_new
            sequence = self.sequences.get(slot)
            if sequence is None or slot in seen:
                continue
            seen.add(slot)
            if num_new and not sequence.ended:
                self.sequences.append_blocks(sequence, step.new_block_ids[new_blocks])
            if sequence.ended:
                settlement.settle_ended(row, sequence)
                continue
            plan = self._plan_row(row, sequence, num_prefill, max_draft)
            if plan is not None:
                plans.append(plan)
        return plans

    def _plan_row(self, row: int, sequence: Sequence, num_prefill: int, max_draft: int) -> RowPlan | None:
        """What a row computes, clamped to what exists and to its blocks; None when that is nothing."""
        capacity = sequence.num_blocks * self._block_size
        start, known = max(sequence.computed, sequence.launched), len(sequence.tokens) + sequence.awaited
        if sequence.awaited and sequence.awaited >= sequence.tokens_left:
            return None  # what is launched ends it
        wanted = known - start if num_prefill == 0 else min(num_prefill, known - start)
        num_known = min(wanted, capacity - start)
        if num_known < 1:
            return None
        samples = start + num_known == known
        draft: list[int] = []
        if samples and num_prefill == 0 and max_draft > 0:
            # A sequence that is not followed yet is from here on, so that drafts grow while this step runs.
            self.drafting.follow(sequence, max_draft)
            limit = min(max_draft, capacity - known, sequence.tokens_left - 1)
            if limit > 0:
                draft = self._usable(self.drafting.tail(sequence.slot, sequence.tokens, limit), limit)
        prompt_logprobs = sequence.params.prompt_logprobs is not None and start < sequence.num_prompt
        return RowPlan(row, sequence, start, num_known, draft, max_draft, samples, prompt_logprobs)

    def _wait_for_tails(self, step: Step) -> None:
        rows = []
        for slot, max_draft in zip(step.slots, step.max_draft_tokens, strict=True):
            sequence = self.sequences.get(slot)
            if sequence is not None and max_draft > 0 and not sequence.ended:
                rows.append((sequence, max_draft))
        self.drafting.wait(rows, self._before_forward)

    def _usable(self, draft: list[int], limit: int) -> list[int]:
        """A draft may be anything, but it must not reach the engine with ids that do not exist."""
        vocab_size = self.sequences.limits.vocab_size
        draft = draft[:limit]
        for index, token_id in enumerate(draft):
            if not 0 <= token_id < vocab_size:
                return draft[:index]
        return draft

    def tell_drafting(self, plans: list[RowPlan]) -> None:
        """What the step made known, so that drafts grow until the next one."""
        for plan in plans:
            if plan.sequence.ended:
                self.drafting.forget(plan.sequence.slot)
            elif plan.samples:
                self.drafting.follow(plan.sequence, plan.max_draft_tokens)
        self.drafting.flush()

    # ----------------------------------------------------------------------------------------------------- computing

    def _compute_all(self, plans: list[RowPlan], settlement: Settlement) -> None:
        """Compute and settle all rows. Raises EngineBroken when not one of several attempts succeeded."""
        with torch.inference_mode():
            num_failed = self._compute(plans, settlement)
        self._failed_in_a_row = 0 if num_failed < len(plans) else self._failed_in_a_row + num_failed
        if self._failed_in_a_row >= BROKEN_AFTER:
            raise EngineBroken(f"the engine failed on {self._failed_in_a_row} rows in a row and on nothing else")

    def settle(self, plans: list[RowPlan], settlement: Settlement, sampled: SampleResult) -> None:
        """Rows that were launched, with their tokens."""
        settlement.settle(plans, None, sampled)
        if plans:
            self._failed_in_a_row = 0

    def compute_late(self, plans: list[RowPlan], settlement: Settlement) -> None:
        """Compute and settle rows whose launch came to nothing; all before them is settled."""
        if any(self.sequences.get(plan.sequence.slot) is not plan.sequence for plan in plans):
            # Its block table is gone, so the row can't be computed again, and it is owed a token.
            raise EngineBroken("the device failed on sequences that have left their slots since")
        if plans:
            self._compute_all(plans, settlement)

    def _compute(self, plans: list[RowPlan], settlement: Settlement) -> int:
        """Forward, sample and settle; on an exception, halve until the culprits stand alone. Returns how many do."""
        try:
            logits, sampled = self._forward(plans)
        except Exception as error:
            if len(plans) > 1:
                middle = len(plans) // 2
                return self._compute(plans[:middle], settlement) + self._compute(plans[middle:], settlement)
            event(logger, "a row failed in the engine", level=logging.ERROR, error=error, row=plans[0].row)
            settlement.fail(plans[0], "ENGINE_FAILED", "the engine failed on this sequence")
            return 1
        settlement.settle(plans, logits, sampled)
        return 0

    def _choose(self, chooser: ChoosingEngine, plans: list[RowPlan]) -> list[int]:
        """One token for each position that samples, row after row, -1 where there is none; no logits are seen."""
        if all(plan.is_decode for plan in plans) and _read_again(plans) <= MOST_READ_AGAIN:
            rows = decode_rows(plans, self.sequences.block_tables)
            rows.bell = self._bell()
            return chooser.decode(rows)
        batch, choices = build_batch(plans, self.sequences.block_tables, self._block_size), choices_of(plans)
        self._before_forward()
        return chooser.choose(batch, choices)

    def _forward(self, plans: list[RowPlan]) -> tuple[torch.Tensor | None, SampleResult]:
        """One sampled token for each position that samples, row after row; and logits [L, V] of all rows, None where
        nothing wants them.
        """
        if self._chooser is not None and all(plan.only_chooses for plan in plans):
            return None, sampled_tokens(self._choose(self._chooser, plans))
        batch = build_batch(plans, self.sequences.block_tables, self._block_size)
        self._before_forward()
        logits = self.engine.forward(batch)
        rows: list[SampleRow] = []
        for plan in plans:
            if plan.samples:
                _append_sample_rows(rows, plan)
        return logits, sample(_sampling_logits(logits, plans), rows)


def _read_again(plans: list[RowPlan]) -> int:
    """Tokens whose KV drafted tokens read another time, where each is a row of its own."""
    return sum(len(plan.draft) * plan.start for plan in plans)


def _append_sample_rows(rows: list[SampleRow], plan: RowPlan) -> None:
    """One row for each sampled position; position j takes the first j draft tokens as its output so far."""
    sequence, draft = plan.sequence, plan.draft
    params, seed, tokens, num_prompt = sequence.params, sequence.choice_seed, sequence.tokens, sequence.num_prompt
    first, counts = len(tokens) - num_prompt, sequence.counts()
    for j in range(len(draft) + 1):
        rows.append(SampleRow(params, seed, first + j, tokens, num_prompt, draft[:j], counts))


def _sampling_logits(logits: torch.Tensor, plans: list[RowPlan]) -> torch.Tensor:
    """Those logits that sample: the last num_sampled of each row's."""
    if not any(plan.wants_prompt_logprobs for plan in plans):
        return logits
    indices: list[int] = []
    end = 0
    for plan in plans:
        end += plan.num_logits
        indices.extend(range(end - plan.num_sampled, end))
    return logits[indices]
