"""Where the scheduler's protobuf meets its domain types; nothing else in the service touches message fields."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from google.rpc import status_pb2
from tandem.v1 import admin_pb2, scheduler_pb2, types_pb2

from cluster import errors
from scheduler.core.sequence import RequestSpec
from scheduler.core.step import Admission, ProtocolViolation, Refusal, RefusalKind, Step, StepOutcome, Update
from scheduler.core.step_time import Curve
from scheduler.core.worker_state import Resident, WorkerSpec, WorkerState

RETRY_AFTER_S = 1.0
# Every block and slot has an entry in the scheduler: more than these would stop its loop for seconds.
MAX_BLOCKS = 1 << 22
MAX_SEQUENCES = 1 << 16
MAX_STEP_TIMES = 64


def request_spec(submit: Any, gateway_id: str, now: float) -> RequestSpec:
    """A gateway's Submit in the core's terms; `now` turns the remaining time into a deadline."""
    params = submit.params
    speculation = submit.speculation
    max_draft: int | None = None
    if speculation.HasField("max_draft_tokens"):
        max_draft = speculation.max_draft_tokens
    if speculation.mode == types_pb2.SPECULATION_MODE_OFF:
        max_draft = 0
    return RequestSpec(
        key=(gateway_id, submit.handle),
        model=submit.model,
        prompt_token_ids=tuple(submit.prompt_token_ids),
        params=params,
        max_tokens=params.max_tokens if params.HasField("max_tokens") else None,
        wants_prompt_logprobs=params.HasField("prompt_logprobs"),
        seed=submit.seed,
        choices=tuple((choice.index, tuple(choice.token_ids)) for choice in submit.choices) or ((0, ()),),
        priority=submit.priority,
        deadline=now + submit.remaining_s if submit.HasField("remaining_s") else None,
        client=submit.client,
        cache_salt=submit.cache_salt,
        greedy=params.temperature == 0,
        max_draft_tokens=max_draft,
        speculation_mode=speculation.mode,
        crashes=submit.crashes,
        resumed=submit.attempt > 0 or any(choice.token_ids for choice in submit.choices),
    )


def check_cell(meant: str, own: str) -> None:
    """Raise errors.InvalidField for a peer that was told of another cell than the one it has reached."""
    if meant and meant != own:
        raise errors.InvalidField("hello.cell", f"this scheduler is of cell {own!r}, not {meant!r}: see --cell")


def worker_spec(hello: Any) -> WorkerSpec:
    """A worker's Hello in the core's terms. Raises errors.InvalidField for what can't work."""
    for name in ("worker_id", "model"):
        if not getattr(hello, name):
            raise errors.InvalidField(f"hello.{name}", "must not be empty")
    for name in ("num_blocks", "block_size", "max_sequences", "max_model_len"):
        if getattr(hello, name) < 1:
            raise errors.InvalidField(f"hello.{name}", "must be at least 1")
    for name, most in (("num_blocks", MAX_BLOCKS), ("max_sequences", MAX_SEQUENCES)):
        if getattr(hello, name) > most:
            raise errors.InvalidField(f"hello.{name}", f"at most {most} can be kept account of")
    return WorkerSpec(
        model=hello.model,
        fingerprint=hello.fingerprint,
        num_blocks=hello.num_blocks,
        block_size=hello.block_size,
        max_sequences=hello.max_sequences,
        max_model_len=hello.max_model_len,
        vocab_size=hello.vocab_size,
        residents=tuple(
            Resident(tuple(one.token_ids), tuple(one.block_ids), one.num_computed_tokens, one.cache_salt)
            for one in hello.residents
        ),
        step_times=tuple((one.num_tokens, one.duration_s) for one in hello.step_times[:MAX_STEP_TIMES]),
    )


def step_message(step: Step, term: int, epoch: int) -> Any:
    """A step on the wire."""
    message = scheduler_pb2.Step(
        term=term,
        epoch=epoch,
        number=step.number,
        released_slots=step.released_slots,
        slots=step.slots,
        num_prefill_tokens=step.num_prefill,
        max_draft_tokens=step.num_draft,
        num_new_blocks=[len(blocks) for blocks in step.new_blocks],
        new_block_ids=[block for blocks in step.new_blocks for block in blocks],
    )
    for admission in step.admissions:
        message.admissions.append(_admission(admission))
    return scheduler_pb2.AttachResponse(step=message)


def _admission(admission: Admission) -> Any:
    sequence = admission.sequence
    spec = sequence.request.spec
    given: Any = spec.params
    params = scheduler_pb2.DecodingParams()
    if given is not None:
        params.CopyFrom(given)
    assert sequence.limit is not None
    params.max_tokens = sequence.limit - sequence.num_prompt
    if not sequence.owes_prompt_logprobs:
        params.ClearField("prompt_logprobs")
    return scheduler_pb2.Admission(
        slot=admission.slot,
        sequence_id=sequence.sequence_id,
        token_ids=admission.token_ids,
        num_prompt_tokens=sequence.num_prompt,
        choice=sequence.choice,
        params=params,
        seed=spec.seed,
        block_ids=admission.block_ids,
        num_computed_tokens=admission.num_computed,
        cache_salt=spec.cache_salt,
        speculation_mode=spec.speculation_mode,  # type: ignore[arg-type]  # the wire's own number
    )


def step_outcome(result: Any) -> StepOutcome:
    """A worker's result in the core's terms. Raises ProtocolViolation for an error that says that all went well."""
    for entry in result.errors:
        if not entry.status.code:
            raise ProtocolViolation(f"step {result.number}: row {entry.row} failed with the code of success")
    drafted = list(result.num_drafted_tokens)
    return StepOutcome(
        number=result.number,
        num_tokens=list(result.num_tokens),
        token_ids=list(result.token_ids),
        finish=list(result.finish_reasons),
        num_drafted=drafted if any(drafted) else [],
        num_accepted=list(result.num_accepted_tokens) if any(drafted) else [],
        logprobs={entry.row: list(entry.output) for entry in result.logprobs if entry.output},
        prompt_logprobs={
            entry.row: (entry.first_prompt_position, list(entry.prompt)) for entry in result.logprobs if entry.prompt
        },
        errors={entry.row: entry.status for entry in result.errors},
        duration_s=result.duration_s,
        num_model_tokens=result.num_model_tokens,
        drafting_s=result.drafting_s,
    )


def session_response(
    pending: Mapping[tuple[int, int], Update | status_pb2.Status], models: Any | None, draining: bool, drain: bool
) -> Any:
    """Everything that a gateway has to be told. Keys: (handle, choice); a Status is the end of a request.

    `draining`: the cell is; `drain`: the gateway is to.
    """
    response = scheduler_pb2.SessionResponse()
    handles, indices, token_ids = [], [], []
    for (handle, _), news in pending.items():
        if isinstance(news, Update) and _is_plain(news):
            handles.append(handle)
            indices.append(news.first_index)
            token_ids.append(news.token_ids[0])
            continue
        output = response.outputs.add()
        output.handle = handle
        if isinstance(news, Update):
            _fill_output(output, news)
        else:
            output.error.CopyFrom(news)
    if handles:
        plain = response.plain_outputs
        plain.handles.extend(handles)
        plain.token_indices.extend(indices)
        plain.token_ids.extend(token_ids)
    if models is not None:
        response.models.CopyFrom(models)
    if draining:
        response.draining = True
    if drain:
        response.drain = True
    return response


def _is_plain(update: Update) -> bool:
    """Whether a token is all there is to say. How much was cached is said with the first one."""
    if len(update.token_ids) != 1 or update.finish or update.logprobs or update.prompt_logprobs:
        return False
    sequence = update.sequence
    if sequence.choice or sequence.drafted or sequence.resumptions or sequence.crashes:
        return False
    return bool(update.first_index) or not sequence.request.cached_tokens


def _fill_output(message: Any, update: Update) -> None:
    """News of a choice on the wire.

    Made for every token: fields are set one by one, and only those that say something, which takes half the time that
    a constructor with keywords does.
    """
    sequence = update.sequence
    request = sequence.request
    message.token_ids.extend(update.token_ids)
    if update.first_index:
        message.first_token_index = update.first_index
    if sequence.choice:
        message.choice = sequence.choice
    if update.finish:
        message.finish_reason = update.finish
        if update.finish == types_pb2.FINISH_REASON_STOP:
            message.stop_token_id = update.token_ids[-1]
    if request.cached_tokens:
        message.cached_tokens = request.cached_tokens
    if sequence.drafted:
        message.drafted_tokens = sequence.drafted
        message.accepted_tokens = sequence.accepted
    if sequence.resumptions:
        message.resumptions = sequence.resumptions
    if sequence.crashes:
        message.crashes = sequence.crashes
    if update.logprobs:
        logprobs: Any = update.logprobs
        message.logprobs.extend(logprobs)
    if update.prompt_logprobs:
        prompt_logprobs: Any = update.prompt_logprobs
        message.first_prompt_position = update.first_prompt_position
        message.prompt_logprobs.extend(prompt_logprobs)


def refusal_status(refusal: Refusal) -> Any:
    """A refusal as google.rpc.Status."""
    kind, message = refusal.kind, refusal.message
    if kind is RefusalKind.WORKER_ERROR and isinstance(refusal.detail, status_pb2.Status):
        return refusal.detail
    error: errors.TandemError
    if kind is RefusalKind.INVALID:
        error = errors.InvalidField(refusal.field_name, message)
    elif kind is RefusalKind.QUEUE_FULL:
        error = errors.QueueFull(message, RETRY_AFTER_S)
    elif kind in (RefusalKind.DRAINING, RefusalKind.NO_WORKER):
        error = errors.Unavailable(message, RETRY_AFTER_S, reason=kind.name)
    elif kind is RefusalKind.DEADLINE:
        error = errors.DeadlineExceeded(message)
    else:
        error = errors.Internal(message, reason=kind.name)
    return errors.to_status(error)


def model_state(name: str, specs: Iterable[WorkerSpec]) -> Any:
    """What gateways must know of a model; `specs` are those of its serving workers."""
    workers = list(specs)
    state = scheduler_pb2.ModelState(name=name, workers=len(workers))
    if workers:
        state.max_model_len = max(spec.max_model_len for spec in workers)
        state.vocab_size = max(spec.vocab_size for spec in workers)
        state.max_sequence_tokens = max(spec.num_blocks * spec.block_size for spec in workers)
        state.fingerprints.extend(sorted({spec.fingerprint for spec in workers}))
    return state


def worker_status(worker: WorkerState, epoch: int, last_step_s: float) -> Any:
    """One worker as operators see it."""
    pool = worker.pool
    state = admin_pb2.WORKER_STATE_DRAINING if worker.draining else admin_pb2.WORKER_STATE_SERVING
    return admin_pb2.WorkerStatus(
        worker_id=worker.worker_id,
        model=worker.spec.model,
        fingerprint=worker.spec.fingerprint,
        epoch=epoch,
        state=state,
        running=len(worker.running),
        max_sequences=worker.spec.max_sequences,
        total_blocks=pool.num_blocks,
        free_blocks=pool.num_free,
        cached_blocks=pool.num_cached,
        referenced_blocks=pool.num_referenced,
        steps_in_flight=len(worker.in_flight),
        steps=worker.steps - len(worker.in_flight),
        last_step_s=last_step_s,
        drafting=worker.drafting,
        decode_rows=worker.decode_rows,
        draft_budget_tokens=worker.draft_budget,
        accepted_tokens=sum(worker.speculation.totals.accepted),
        acceptance=worker.speculation.totals.shares,
        speculation_gain=worker.speculation.gain,
        position_drafted_tokens=worker.speculation.totals.tried,
        position_accepted_tokens=worker.speculation.totals.accepted,
        plain_steps=_durations(worker.speculation.plain_times.curve),
        drafting_steps=_durations(worker.speculation.drafting_curve(len(worker.running))),
        drafting_s=worker.drafting_s,
        generated_tokens=worker.generated_tokens,
    )


def _durations(curve: Curve) -> list[Any]:
    sizes = zip(curve.sizes, curve.seconds, strict=True)
    return [admin_pb2.StepDuration(num_tokens=size, seconds=seconds) for size, seconds in sizes]
