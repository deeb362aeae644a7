"""Taking in the outcome of a step.

A result is matched with its own plan, never with current tables: between issue and result a sequence may have been
cancelled (its tokens are ignored), preempted or moved (its tokens count; it waits again after its last issued step).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler.core.block_tables import register_full_blocks
from scheduler.core.sequence import Sequence, State
from scheduler.core.step import Failure, ProtocolViolation, Refusal, RefusalKind, Step, StepOutcome, Update
from scheduler.core.worker_state import WorkerState

if TYPE_CHECKING:
    from scheduler.core.scheduler import Scheduler


def check_outcome(worker: WorkerState, outcome: StepOutcome) -> Step:
    """The step that an outcome answers; raises ProtocolViolation if they don't belong together."""
    if not worker.in_flight:
        raise ProtocolViolation(f"{worker.worker_id} answers step {outcome.number}, but none is issued")
    step = worker.in_flight[0]
    rows = len(step.sequences)
    if outcome.number != step.number:
        raise ProtocolViolation(f"{worker.worker_id} answers step {outcome.number}, {step.number} was next")
    if len(outcome.num_tokens) != rows or len(outcome.finish) != rows:
        raise ProtocolViolation(f"{worker.worker_id} answers step {step.number} with other rows than were planned")
    if sum(outcome.num_tokens) != len(outcome.token_ids):
        raise ProtocolViolation(f"{worker.worker_id} answers step {step.number} with token counts that don't add up")
    for row, (emitted, reserved) in enumerate(zip(outcome.num_tokens, step.reserved, strict=True)):
        sequence = step.sequences[row]
        if emitted > reserved:
            raise ProtocolViolation(f"{sequence}: {emitted} tokens where {reserved} were reserved")
        owed = reserved and not emitted and row not in outcome.errors
        if owed and sequence.state in (State.RUNNING, State.LEAVING):
            raise ProtocolViolation(f"{sequence}: no token where one was due")
    return step


def apply_outcome(scheduler: Scheduler, worker: WorkerState, outcome: StepOutcome) -> list[Update | Failure]:
    """Advance every sequence of the step. The loop every token passes: the common row takes the straight path."""
    step = check_outcome(worker, outcome)
    worker.in_flight.popleft()
    updates: list[Update | Failure] = []
    tokens, finish = outcome.token_ids, outcome.finish
    plain = not (outcome.logprobs or outcome.prompt_logprobs or outcome.errors or outcome.num_drafted)
    generated = start = 0
    rows = zip(step.sequences, outcome.num_tokens, step.num_prefill, step.reserved, strict=True)
    for row, (sequence, count, prefill, reserved) in enumerate(rows):
        sequence.in_flight -= 1
        if reserved:
            sequence.sampling_in_flight -= 1
            sequence.horizon += count - reserved
        known = sequence.token_ids
        first = len(known)
        new = tokens[start : start + count]
        start += count
        state = sequence.state
        if state is State.RUNNING or state is State.LEAVING:
            if count:
                known += new
                sequence.computed = first + count - 1
                generated += count
            elif prefill:
                sequence.computed += prefill
            if sequence.computed >= sequence.register_at:
                register_full_blocks(sequence, worker.pool)
            ended = finish[row]
            if plain:
                if count:
                    updates.append(Update(sequence, first - sequence.num_prompt, new, ended))
            else:
                updates += _report(scheduler, sequence, outcome, row, first, new)
            if prefill and sequence.request.held:
                _release_choices(scheduler, sequence)
            if ended:
                scheduler.finish(sequence)
        else:
            sequence.horizon -= count  # ignored tokens never became known
        if state is not State.RUNNING and sequence.in_flight == 0 and sequence in worker.leaving:
            scheduler.settle(worker, sequence)
    worker.generated_tokens += generated
    scheduler.counters.generated_tokens += generated
    return updates


def _release_choices(scheduler: Scheduler, sequence: Sequence) -> None:
    """The other choices start once every full block of the prompt can be a prefix hit for them."""
    full = (sequence.num_prompt - 1) // sequence.block_size * sequence.block_size
    if sequence.computed >= full:
        scheduler.release_held(sequence.request)


def _report(
    scheduler: Scheduler, sequence: Sequence, outcome: StepOutcome, row: int, first: int, new: list[int]
) -> list[Update | Failure]:
    """The news of a row that may carry log-probabilities, drafts or an error."""
    request = sequence.request
    if row in outcome.errors:
        refusal = Refusal(RefusalKind.WORKER_ERROR, "the worker could not compute it", detail=outcome.errors[row])
        return [scheduler.fail_request(request, refusal)]
    if outcome.num_drafted:
        sequence.drafted += outcome.num_drafted[row]
        sequence.accepted += outcome.num_accepted[row]
        scheduler.counters.drafted_tokens += outcome.num_drafted[row]
        scheduler.counters.accepted_tokens += outcome.num_accepted[row]
    position, entries = outcome.prompt_logprobs.get(row, (0, []))
    if entries:
        # After a preemption the prompt is computed again; what was delivered once is not delivered twice.
        skipped = max(0, request.prompt_logprobs_done - position)
        position, entries = position + skipped, entries[skipped:]
        if entries and position == request.prompt_logprobs_done:
            request.prompt_logprobs_done += len(entries)
    if not new and not entries:
        return []
    update = Update(
        sequence,
        first - sequence.num_prompt,
        new,
        outcome.finish[row],
        outcome.logprobs.get(row),
        position,
        tuple(entries),
    )
    return [update]
