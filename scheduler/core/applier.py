"""Taking in the outcome of a step.

A result is matched with its own plan, never with current tables: between issue and result a sequence may have been
cancelled (its tokens are ignored), preempted or moved (its tokens count; it waits again after its last issued step).
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from scheduler.core.block_tables import register_full_blocks
from scheduler.core.sequence import Sequence, State
from scheduler.core.step import Failure, Finish, ProtocolViolation, Refusal, RefusalKind, Step, StepOutcome, Update
from scheduler.core.worker_state import WorkerState

if TYPE_CHECKING:
    from scheduler.core.scheduler import Scheduler


KNOWN_ENDS = frozenset(Finish)


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
    if (outcome.num_drafted or outcome.num_accepted) and not (
        len(outcome.num_drafted) == len(outcome.num_accepted) == rows
    ):
        raise ProtocolViolation(f"{worker.worker_id} answers step {step.number} with drafts of other rows")
    vocab_size = worker.spec.vocab_size
    if vocab_size and outcome.token_ids and max(outcome.token_ids) >= vocab_size:
        raise ProtocolViolation(f"{worker.worker_id} answers step {step.number} with ids beyond its vocabulary")
    if any(row >= rows for news in (outcome.errors, outcome.logprobs, outcome.prompt_logprobs) for row in news):
        raise ProtocolViolation(f"{worker.worker_id} answers step {step.number} with news of a row that is not there")
    if sum(outcome.num_tokens) != len(outcome.token_ids):
        raise ProtocolViolation(f"{worker.worker_id} answers step {step.number} with token counts that don't add up")
    rowwise = zip(step.sequences, outcome.num_tokens, step.reserved, outcome.finish, strict=True)
    for row, (sequence, emitted, reserved, ended) in enumerate(rowwise):
        if 0 < emitted <= reserved and not ended and len(sequence.token_ids) + emitted < sequence.limit:  # type: ignore[operator]
            continue  # the common row
        if not 0 <= emitted <= reserved:
            raise ProtocolViolation(f"{sequence}: {emitted} tokens where {reserved} were reserved")
        if ended not in KNOWN_ENDS:
            raise ProtocolViolation(f"{sequence}: ended for an unknown reason, {ended}")
        if sequence.state in (State.RUNNING, State.LEAVING) and row not in outcome.errors:
            _check_row(sequence, emitted, reserved, ended)
    return step


def _check_row(sequence: Sequence, emitted: int, reserved: int, ended: int) -> None:
    """A row of a live sequence emits when it samples, and ends the sequence at its limit, no later."""
    if not emitted:
        if reserved and not ended:
            raise ProtocolViolation(f"{sequence}: no token where one was due")
        if ended == Finish.STOP:
            raise ProtocolViolation(f"{sequence}: stopped by a token, but there is none")
        return
    left = sequence.limit - len(sequence.token_ids) - emitted  # type: ignore[operator]
    if left < 0 or (left == 0 and not ended):
        raise ProtocolViolation(f"{sequence}: goes beyond its limit of {sequence.limit} tokens")


def apply_outcome(scheduler: Scheduler, worker: WorkerState, outcome: StepOutcome) -> list[Update | Failure]:
    """Advance every sequence of the step. The loop every token passes: the common row takes the straight path."""
    step = check_outcome(worker, outcome)
    worker.in_flight.popleft()
    worker.speculation.observe(step, outcome)
    updates: list[Update | Failure] = []
    tokens, finish = outcome.token_ids, outcome.finish
    plain = not (outcome.logprobs or outcome.prompt_logprobs or outcome.errors)
    num_drafted = outcome.num_drafted
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
            elif prefill and not reserved:
                sequence.computed += prefill
            if sequence.computed >= sequence.register_at:
                register_full_blocks(sequence, worker.pool)
            ended = finish[row]
            if num_drafted and num_drafted[row]:
                sequence.drafted += num_drafted[row]
                sequence.accepted += outcome.num_accepted[row]
            if plain:
                if count or ended:
                    updates.append(Update(sequence, first - sequence.num_prompt, new, ended))
            else:
                updates += _report(scheduler, sequence, outcome, row, first, new)
            if prefill:
                _note_prefill(scheduler, worker, sequence, count)
            if ended and row not in outcome.errors:
                scheduler.finish(sequence)
        else:
            sequence.horizon -= count  # ignored tokens never became known
        if state is not State.RUNNING and sequence.in_flight == 0 and sequence in worker.leaving:
            scheduler.settle(worker, sequence)
    worker.generated_tokens += generated
    if 0.0 < outcome.drafting_s < inf:
        worker.drafting_s += outcome.drafting_s
    scheduler.counters.generated_tokens += generated
    scheduler.counters.drafted_tokens += sum(num_drafted)
    scheduler.counters.accepted_tokens += sum(outcome.num_accepted)
    return updates


def _note_prefill(scheduler: Scheduler, worker: WorkerState, sequence: Sequence, count: int) -> None:
    """What only a prefill row can bring about: the first token after an admission, and the end of the prompt."""
    if count and sequence.crashes:
        sequence.crashes = 0
        sequence.crashed_on = None
        if worker.suspect is sequence:
            worker.suspect = None
    if sequence.request.held:
        _release_choices(scheduler, sequence)


def _release_choices(scheduler: Scheduler, sequence: Sequence) -> None:
    """The other choices start once every full block of the prompt can be a prefix hit for them."""
    full = (sequence.num_prompt - 1) // sequence.block_size * sequence.block_size
    if sequence.computed >= full:
        scheduler.release_held(sequence.request)


def _report(
    scheduler: Scheduler, sequence: Sequence, outcome: StepOutcome, row: int, first: int, new: list[int]
) -> list[Update | Failure]:
    """The news of a row that may carry log-probabilities or an error."""
    request = sequence.request
    if row in outcome.errors:
        refusal = Refusal(RefusalKind.WORKER_ERROR, "the worker could not compute it", detail=outcome.errors[row])
        return [scheduler.fail_request(request, refusal)]
    position, entries = outcome.prompt_logprobs.get(row, (0, []))
    if entries:
        # After a preemption the prompt is computed again; what was delivered once is not delivered twice.
        skipped = max(0, request.prompt_logprobs_done - position)
        position, entries = position + skipped, entries[skipped:]
        if entries and position == request.prompt_logprobs_done:
            request.prompt_logprobs_done += len(entries)
    if not new and not entries and not outcome.finish[row]:
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
