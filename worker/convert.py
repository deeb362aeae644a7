"""Where protobuf meets the worker's own types, for the attach stream and the draft stream."""

from __future__ import annotations

from collections.abc import Iterable

from google.rpc import status_pb2
from tandem.v1 import draft_pb2, scheduler_pb2, types_pb2

from cluster.draft_news import News, Source, Tail
from cluster.errors import Internal, InvalidField, to_status
from worker.sequences import Limits
from worker.steps import (
    NOTHING_LEFT,
    Admission,
    PositionLogprobs,
    Resident,
    RowFailure,
    RowLogprobs,
    SamplingParams,
    Step,
    StepOutcome,
    TokenLogprob,
)


def step_from_proto(message: scheduler_pb2.Step) -> Step:
    """A plan. An admission that can't be read is marked invalid, so that it fails alone, at its first row."""
    return Step(
        term=message.term,
        epoch=message.epoch,
        number=message.number,
        released_slots=list(message.released_slots),
        admissions=[_admission(admission) for admission in message.admissions],
        slots=list(message.slots),
        num_prefill_tokens=list(message.num_prefill_tokens),
        max_draft_tokens=list(message.max_draft_tokens),
        num_new_blocks=list(message.num_new_blocks),
        new_block_ids=list(message.new_block_ids),
    )


def result_to_proto(outcome: StepOutcome) -> scheduler_pb2.AttachRequest:
    """The outcome of a step."""
    result = scheduler_pb2.StepResult(
        term=outcome.term,
        epoch=outcome.epoch,
        number=outcome.number,
        slots=outcome.slots,
        num_tokens=outcome.num_tokens,
        token_ids=outcome.token_ids,
        num_drafted_tokens=outcome.num_drafted_tokens,
        num_accepted_tokens=outcome.num_accepted_tokens,
        logprobs=[_row_logprobs(row) for row in outcome.logprobs],
        errors=[scheduler_pb2.RowError(row=failure.row, status=_status(failure)) for failure in outcome.failures],
        duration_s=outcome.duration_s,
        num_model_tokens=outcome.num_model_tokens,
        drafting_s=outcome.drafting_s,
    )
    # Extended, not passed: the stubs type enum members, and the numbers are the wire's own.
    result.finish_reasons.extend(outcome.finishes)  # type: ignore[arg-type]
    return scheduler_pb2.AttachRequest(result=result)


def hello_to_proto(
    *,
    worker_id: str,
    boot_id: str,
    model: str,
    fingerprint: str,
    limits: Limits,
    highest_term: int,
    cell: str,
    draining: bool,
    residents: Iterable[Resident],
    step_times: Iterable[tuple[int, float]] = (),
) -> scheduler_pb2.AttachRequest:
    """The first message of an attach stream. `cell`: the one that is meant, empty for any."""
    hello = scheduler_pb2.WorkerHello(
        worker_id=worker_id,
        boot_id=boot_id,
        model=model,
        fingerprint=fingerprint,
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        max_sequences=limits.max_sequences,
        max_model_len=limits.max_model_len,
        vocab_size=limits.vocab_size,
        highest_term=highest_term,
        cell=cell,
        draining=draining,
        step_times=[scheduler_pb2.StepTime(num_tokens=size, duration_s=seconds) for size, seconds in step_times],
        residents=[
            scheduler_pb2.ResidentSequence(
                token_ids=resident.token_ids,
                block_ids=resident.block_ids,
                num_computed_tokens=resident.num_computed_tokens,
                cache_salt=resident.cache_salt,
            )
            for resident in residents
        ],
    )
    return scheduler_pb2.AttachRequest(hello=hello)


def heartbeat_to_proto(last_step: int, running_step_s: float, drafting: bool) -> scheduler_pb2.AttachRequest:
    """A sign of life."""
    heartbeat = scheduler_pb2.Heartbeat(last_step=last_step, running_step_s=running_step_s, drafting=drafting)
    return scheduler_pb2.AttachRequest(heartbeat=heartbeat)


def draining_to_proto() -> scheduler_pb2.AttachRequest:
    """The worker asks to be relieved."""
    return scheduler_pb2.AttachRequest(draining=scheduler_pb2.WorkerDraining())


def leaving_to_proto() -> scheduler_pb2.AttachRequest:
    """The worker leaves by its own will."""
    return scheduler_pb2.AttachRequest(leaving=scheduler_pb2.WorkerLeaving())


def draft_hello_to_proto(worker_id: str, model: str, vocab_size: int, cores: str = "") -> draft_pb2.DraftRequest:
    """The first message of a draft stream."""
    hello = draft_pb2.DraftHello(worker_id=worker_id, model=model, vocab_size=vocab_size, cores=cores)
    return draft_pb2.DraftRequest(hello=hello)


def news_to_proto(news: News) -> draft_pb2.DraftRequest:
    """What became known of the speculated sequences."""
    return draft_pb2.DraftRequest(
        closes=[draft_pb2.DraftClose(slot=close.slot, generation=close.generation) for close in news.closes],
        opens=[
            draft_pb2.DraftOpen(
                slot=opening.slot,
                generation=opening.generation,
                token_ids=opening.token_ids,
                num_prompt_tokens=opening.num_prompt_tokens,
                seed=opening.seed,
                temperature=opening.temperature,
                max_draft_tokens=opening.max_draft_tokens,
                mode=opening.source.value,  # type: ignore[arg-type]
                tenant=opening.tenant,
            )
            for opening in news.opens
        ],
        commits=[
            draft_pb2.DraftCommit(
                slot=commit.slot,
                generation=commit.generation,
                base=commit.base,
                token_ids=commit.token_ids,
                prefix_hash=commit.prefix_hash,
            )
            for commit in news.commits
        ],
    )


def tails_from_proto(message: draft_pb2.DraftResponse) -> list[Tail]:
    """Guesses."""
    return [
        Tail(tail.slot, tail.generation, tail.base, tail.prefix_hash, list(tail.token_ids)) for tail in message.tails
    ]


def _admission(message: scheduler_pb2.Admission) -> Admission:
    invalid = ""
    try:
        params = _params(message.params)
    except ValueError as error:
        params, invalid = SamplingParams(), str(error)
    return Admission(
        slot=message.slot,
        sequence_id=message.sequence_id,
        token_ids=list(message.token_ids),
        num_prompt_tokens=message.num_prompt_tokens,
        choice=message.choice,
        params=params,
        seed=message.seed,
        block_ids=list(message.block_ids),
        num_computed_tokens=message.num_computed_tokens,
        cache_salt=message.cache_salt,
        draft_source=Source(message.speculation_mode),
        invalid=invalid,
    )


def _params(message: scheduler_pb2.DecodingParams) -> SamplingParams:
    """Raises ValueError, naming the field, for what cannot be."""
    return SamplingParams(
        temperature=message.temperature,
        top_k=message.top_k,
        # Fields that are always set by the gateway; 0 is proto3's unset, and would be a value of neither.
        top_p=message.top_p or 1.0,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty or 1.0,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=dict(message.logit_bias),
        bad_words=tuple(tuple(word.ids) for word in message.bad_words),
        stop_token_ids=frozenset(message.stop_token_ids),
        min_tokens=message.min_tokens,
        max_tokens=message.max_tokens,
        top_logprobs=message.top_logprobs if message.HasField("top_logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
    )


def _row_logprobs(row: RowLogprobs) -> scheduler_pb2.RowLogprobs:
    return scheduler_pb2.RowLogprobs(
        row=row.row,
        output=[_position(entry) for entry in row.output],
        first_prompt_position=row.first_prompt_position,
        prompt=[_position(entry) for entry in row.prompt],
    )


def _position(entry: PositionLogprobs) -> types_pb2.PositionLogprobs:
    return types_pb2.PositionLogprobs(
        chosen=None if entry.chosen is None else _token(entry.chosen), top=[_token(token) for token in entry.top]
    )


def _token(token: TokenLogprob) -> types_pb2.TokenLogprob:
    return types_pb2.TokenLogprob(token_id=token.token_id, logprob=token.logprob, rank=token.rank)


def _status(failure: RowFailure) -> status_pb2.Status:
    if failure.reason == NOTHING_LEFT:
        return to_status(InvalidField("sampling", failure.message, reason=failure.reason))
    return to_status(Internal(failure.message, reason=failure.reason))
