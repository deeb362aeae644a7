"""What came of a step's rows: verifies each row's sampled tokens, moves its sequence on and packs the outcome."""

from __future__ import annotations

import torch

from engine.logprobs import prompt_logprobs
from engine.sampler import ALL_BANNED, SampleResult
from worker.batching import RowPlan
from worker.sequences import Sequence
from worker.steps import NOTHING_LEFT, PositionLogprobs, RowFailure, RowLogprobs, Step, StepOutcome
from worker.verification import finish_after, verify


class Settlement:
    """Gathers the outcome of one step, in the order of its rows; a row that is never settled was a no-op."""

    def __init__(self, step: Step) -> None:
        num_rows = len(step.slots)
        self._step = step
        self._emitted: list[list[int]] = [[]] * num_rows
        self._finishes = [0] * num_rows
        self._drafted = [0] * num_rows
        self._accepted = [0] * num_rows
        self._logprobs: list[RowLogprobs] = []
        self._failures: list[RowFailure] = []
        self._failed_rows: set[int] = set()
        self._num_model_tokens = 0

    def settle_ended(self, row: int, sequence: Sequence) -> None:
        """A row of an ended sequence does nothing, except that what nobody was told yet is told."""
        if sequence.untold_failure:
            self._failures.append(RowFailure(row, "ROW_FAILED", sequence.untold_failure))
            sequence.untold_failure = ""
        elif sequence.untold_finish:
            self._finishes[row] = sequence.finish
            sequence.untold_finish = False

    def fail(self, plan: RowPlan, reason: str, message: str) -> None:
        """A row failed: its sequence is over, and this is the telling of it."""
        plan.sequence.ended = plan.sequence.failed = True
        self._failed_rows.add(plan.row)
        self._failures.append(RowFailure(plan.row, reason, message))

    def settle(self, plans: list[RowPlan], logits: torch.Tensor | None, sampled: SampleResult) -> None:
        """Rows that went through the engine: logits [L, V] of all of them, where a row wants a prompt's
        log-probabilities; sampled tokens of those that sample.
        """
        at_logit = at_sample = 0
        for plan in plans:
            self._num_model_tokens += plan.num_tokens
            if plan.is_plain:
                token_id = sampled.token_ids[at_sample]
                if token_id is None:
                    self._fail_to_sample(plan, sampled, at_sample)
                else:
                    self._emit_one(plan, token_id)
            else:
                own = None if logits is None else logits[at_logit : at_logit + plan.num_logits]
                self._settle_row(plan, own, sampled, at_sample)
            at_logit += plan.num_logits
            at_sample += plan.num_sampled

    def outcome(self, duration_s: float) -> StepOutcome:
        """The packed outcome; duration_s is the whole step's."""
        step = self._step
        return StepOutcome(
            term=step.term,
            epoch=step.epoch,
            number=step.number,
            slots=list(step.slots),
            num_tokens=[len(tokens) for tokens in self._emitted],
            token_ids=[token_id for tokens in self._emitted for token_id in tokens],
            finishes=self._finishes,
            num_drafted_tokens=self._drafted,
            num_accepted_tokens=self._accepted,
            logprobs=self._logprobs,
            failures=self._failures,
            duration_s=duration_s,
            num_model_tokens=self._num_model_tokens,
        )

    def _settle_row(self, plan: RowPlan, logits: torch.Tensor | None, sampled: SampleResult, at: int) -> None:
        """A row with all that it may have."""
        prompt: list[PositionLogprobs] = []
        if plan.wants_prompt_logprobs and logits is not None:
            prompt = self._prompt_logprobs(plan, logits)
        if plan.row in self._failed_rows:
            return
        output: list[PositionLogprobs] = []
        if plan.samples:
            output = self._emit(plan, sampled, at)
        else:
            plan.sequence.computed = plan.start + plan.num_known
        if (prompt or output) and plan.row not in self._failed_rows:
            first_position = 0 if plan.start == 0 else plan.start + 1
            self._logprobs.append(RowLogprobs(plan.row, output, first_position, prompt))

    def _emit_one(self, plan: RowPlan, token_id: int) -> None:
        """Lengthen the sequence of a plain row."""
        sequence = plan.sequence
        finish = finish_after(token_id, 1, sequence.params.stop_token_ids, sequence.tokens_left)
        emitted = [token_id]
        sequence.emit(emitted, finish)
        self._emitted[plan.row] = emitted
        self._finishes[plan.row] = finish

    def _emit(self, plan: RowPlan, sampled: SampleResult, at: int) -> list[PositionLogprobs]:
        """Verify one row and lengthen its sequence; the log-probabilities of what was emitted, where asked for."""
        sequence, draft = plan.sequence, plan.draft
        tokens: list[int] = []
        for token_id in sampled.token_ids[at : at + plan.num_sampled]:
            if token_id is None:
                break
            tokens.append(token_id)
        if not tokens:
            self._fail_to_sample(plan, sampled, at)
            return []
        # A position that failed behind a draft may never be reached. If it is, the next row fails there by itself.
        draft = draft[: len(tokens) - 1]
        params = sequence.params
        verdict = verify(draft, tokens, params.stop_token_ids, sequence.tokens_left)
        emitted = tokens[: verdict.num_emitted]
        sequence.emit(emitted, verdict.finish)
        row = plan.row
        self._emitted[row] = emitted
        self._finishes[row] = verdict.finish
        self._drafted[row] = len(plan.draft)
        self._accepted[row] = verdict.num_accepted
        if params.top_logprobs is None:
            return []
        return [entry for entry in sampled.logprobs[at : at + verdict.num_emitted] if entry is not None]

    def _fail_to_sample(self, plan: RowPlan, sampled: SampleResult, at: int) -> None:
        why = sampled.errors.get(at, "no token could be sampled")
        self.fail(plan, NOTHING_LEFT if why == ALL_BANNED else "SAMPLING_FAILED", why)

    def _prompt_logprobs(self, plan: RowPlan, logits: torch.Tensor) -> list[PositionLogprobs]:
        """Entries of the prompt positions that these tokens predict; first position 0, which nothing predicts."""
        sequence = plan.sequence
        top = sequence.params.prompt_logprobs
        if top is None:
            return []
        first = plan.start + 1
        targets = sequence.tokens[first : min(plan.start + plan.num_known + 1, sequence.num_prompt)]
        try:
            found = prompt_logprobs(logits[: len(targets)], targets, top) if targets else []
        except ValueError as error:
            self.fail(plan, "LOGPROBS_FAILED", str(error))
            return []
        return [PositionLogprobs(None, ()), *found] if plan.start == 0 else found
