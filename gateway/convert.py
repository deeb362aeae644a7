"""Where protobuf meets the gateway's own types, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.v1 import generation_pb2, scheduler_pb2, types_pb2

from gateway.admission import Ask, Refusal, Resumed, Sampling
from gateway.streams import Delta, Finish, FinishReason, OutputNews

_REASONS = {
    types_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    types_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}
_REASON_NUMBERS = {reason: number for number, reason in _REASONS.items()}


@dataclass(frozen=True, slots=True)
class ModelNews:
    """What the scheduler says of a model."""

    name: str
    workers: int
    max_model_len: int
    vocab_size: int
    max_sequence_tokens: int
    fingerprints: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SessionNews:
    """One message from the scheduler. `models` is None where nothing changed, `term` where there is no welcome."""

    term: int | None
    outputs: list[OutputNews]
    models: tuple[ModelNews, ...] | None
    draining: bool
    """the cell is"""
    drain: bool
    """the gateway is to"""


# --------------------------------------------------------------------------------------------------- from clients


def ask(request: generation_pb2.GenerateRequest | generation_pb2.GenerateStreamRequest) -> Ask:
    """A client's request. Raises Refusal for enum values that don't exist."""
    sampling, stop, output = request.sampling, request.stop, request.output
    speculation = request.speculation
    if speculation.mode not in types_pb2.SpeculationMode.values():
        raise Refusal("speculation.mode", f"there is no mode {speculation.mode}")
    prompt = request.WhichOneof("prompt")
    return Ask(
        model=request.model,
        request_id=request.request_id,
        text=request.text if prompt == "text" else None,
        # Not copied yet: it may be far too long, and only its length may be wanted.
        token_ids=request.token_ids.ids if prompt == "token_ids" else None,
        messages=messages(request.chat) if prompt == "chat" else None,
        add_generation_prompt=generation_prompt(request.chat),
        temperature=_optional(sampling, "temperature"),
        top_k=_optional(sampling, "top_k"),
        top_p=_optional(sampling, "top_p"),
        min_p=_optional(sampling, "min_p"),
        seed=_optional(sampling, "seed"),
        repetition_penalty=_optional(sampling, "repetition_penalty"),
        presence_penalty=_optional(sampling, "presence_penalty"),
        frequency_penalty=_optional(sampling, "frequency_penalty"),
        logit_bias=dict(sampling.logit_bias),
        bad_words=tuple(sampling.bad_words),
        max_tokens=_optional(stop, "max_tokens"),
        min_tokens=_optional(stop, "min_tokens"),
        stop_strings=tuple(stop.strings),
        stop_token_ids=tuple(stop.token_ids),
        ignore_eos=stop.ignore_eos,
        include_stop=stop.include_stop,
        logprobs=output.logprobs,
        top_logprobs=_optional(output, "top_logprobs"),
        prompt_logprobs=_optional(output, "prompt_logprobs"),
        echo=output.echo,
        n=_optional(request, "n"),
        priority=request.priority,
        speculation_mode=speculation.mode,
        max_draft_tokens=_optional(speculation, "max_draft_tokens"),
        cache_salt=request.cache_salt,
        resume=tuple(Resumed(one.index, tuple(one.token_ids), one.seed) for one in request.resume),
    )


def messages(chat: generation_pb2.ChatPrompt) -> tuple[tuple[str, str], ...]:
    """(role, content) of each message."""
    return tuple((message.role, message.content) for message in chat.messages)


def generation_prompt(chat: generation_pb2.ChatPrompt) -> bool:
    """Whether the marker that opens the assistant's turn is wanted."""
    return chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True


def _optional(message: Any, name: str) -> Any:
    return getattr(message, name) if message.HasField(name) else None


# ----------------------------------------------------------------------------------------------------- to clients


def stream_response(
    request_id: str, model: str, seed: int, deltas: Sequence[Delta], prompt_logprobs: Sequence[Any], usage: Any | None
) -> generation_pb2.GenerateStreamResponse:
    """One message of a stream; `usage` (UsageCounts) on the last one only.

    Made for every token: fields are set one by one, and only those that say something, which takes a quarter of the
    time that a constructor with keywords does.
    """
    message = generation_pb2.GenerateStreamResponse()
    message.request_id = request_id
    message.model = model
    message.seed = seed
    for delta in deltas:
        _add_delta(message.deltas.add(), delta)
    if prompt_logprobs:
        message.prompt_logprobs.extend(prompt_logprobs)
    if usage is not None:
        message.usage.CopyFrom(_usage(usage))
    return message


def response(
    request_id: str,
    model: str,
    seed: int,
    choices: Iterable[Delta],
    prompt_logprobs: Sequence[Any],
    usage: Any,
) -> generation_pb2.GenerateResponse:
    """The whole answer; `choices`: all of each, in order of index."""
    return generation_pb2.GenerateResponse(
        request_id=request_id,
        model=model,
        seed=seed,
        choices=map(_choice, choices),
        prompt_logprobs=prompt_logprobs,
        usage=_usage(usage),
    )


def _add_delta(message: generation_pb2.ChoiceDelta, delta: Delta) -> None:
    message.text = delta.text
    message.first_token_index = delta.first_token_index
    message.token_ids.extend(delta.token_ids)
    if delta.index:
        message.index = delta.index
    if delta.logprobs:
        message.logprobs.extend(delta.logprobs)
    if delta.prompt_text:
        message.prompt_text = delta.prompt_text
    if delta.finish is not None:
        for name, value in _finish_fields(delta.finish).items():
            setattr(message, name, value)


def _choice(whole: Delta) -> generation_pb2.Choice:
    return generation_pb2.Choice(
        index=whole.index,
        text=whole.text,
        token_ids=whole.token_ids,
        logprobs=whole.logprobs,
        prompt_text=whole.prompt_text,
        **({} if whole.finish is None else _finish_fields(whole.finish)),
    )


def _finish_fields(finish: Finish) -> dict[str, Any]:
    fields: dict[str, Any] = {"finish_reason": _REASON_NUMBERS[finish.reason]}
    if finish.stop_string is not None:
        fields["stop_string"] = finish.stop_string
    elif finish.stop_token_id is not None:
        fields["stop_token_id"] = finish.stop_token_id
    return fields


def _usage(usage: Any) -> types_pb2.Usage:
    return types_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        drafted_tokens=usage.drafted_tokens,
        accepted_tokens=usage.accepted_tokens,
        resumptions=usage.resumptions,
    )


def tokenize_response(token_ids: Sequence[int], pieces: Sequence[str]) -> generation_pb2.TokenizeResponse:
    """Ids and their spelling."""
    return generation_pb2.TokenizeResponse(token_ids=token_ids, pieces=pieces)


def model(
    name: str,
    max_model_len: int,
    vocab_size: int,
    chat: bool,
    workers: int,
    fingerprints: Sequence[str],
    max_sequence_tokens: int,
) -> generation_pb2.Model:
    """A served model's description."""
    return generation_pb2.Model(
        name=name,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        workers=workers,
        chat=chat,
        fingerprints=fingerprints,
        max_sequence_tokens=max_sequence_tokens,
    )


# ---------------------------------------------------------------------------------------------- to the scheduler


def hello(gateway_id: str, highest_term: int, cell: str) -> scheduler_pb2.SessionRequest:
    """The first message of a session; `cell`: the one that is meant, empty for any."""
    return scheduler_pb2.SessionRequest(
        hello=scheduler_pb2.SessionHello(gateway_id=gateway_id, highest_term=highest_term, cell=cell)
    )


def session_request(
    submits: Sequence[scheduler_pb2.Submit], cancels: Sequence[tuple[int, int | None]], draining: bool
) -> scheduler_pb2.SessionRequest:
    """Submissions and cancellations, the latter as (handle, choice or None for all)."""
    return scheduler_pb2.SessionRequest(
        submits=submits,
        cancels=[scheduler_pb2.Cancel(handle=handle, choice=choice) for handle, choice in cancels],
        draining=draining,
    )


def submit(live: Any, now: float) -> scheduler_pb2.Submit:
    """A LiveRequest as it stands: unfinished choices with what they have emitted. `now`: the event loop's clock."""
    spec = live.spec
    message = scheduler_pb2.Submit(
        handle=live.handle,
        request_id=spec.request_id,
        attempt=live.attempt,
        model=spec.model,
        prompt_token_ids=spec.prompt_token_ids,
        params=_decoding_params(spec.sampling, with_prompt_logprobs=live.wants_prompt_logprobs),
        seed=spec.seed,
        choices=[
            scheduler_pb2.SubmittedChoice(index=choice.index, token_ids=choice.tokens)
            for choice in live.choices
            if choice.finish is None
        ],
        priority=spec.priority,
        client=spec.client,
        cache_salt=spec.cache_salt,
        speculation=types_pb2.Speculation(mode=spec.speculation_mode, max_draft_tokens=spec.max_draft_tokens),
        resumptions=live.resumptions,
        crashes=live.crashes,
    )
    if spec.deadline is not None:
        message.remaining_s = max(0.0, spec.deadline - now)
    return message


def _decoding_params(sampling: Sampling, with_prompt_logprobs: bool) -> scheduler_pb2.DecodingParams:
    return scheduler_pb2.DecodingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=sampling.logit_bias,
        bad_words=[types_pb2.TokenIds(ids=word) for word in sampling.bad_words],
        stop_token_ids=sampling.stop_token_ids,
        min_tokens=sampling.min_tokens,
        max_tokens=sampling.max_tokens,
        top_logprobs=sampling.top_logprobs,
        # Once all of them have come, a resubmission need not compute the prompt again for their sake.
        prompt_logprobs=sampling.prompt_logprobs if with_prompt_logprobs else None,
    )


# -------------------------------------------------------------------------------------------- from the scheduler


def session_news(message: scheduler_pb2.SessionResponse) -> SessionNews:
    """One message from the scheduler. Raises ValueError for lists that aren't equally long."""
    outputs = [_output(output) for output in message.outputs]
    if message.HasField("plain_outputs"):
        plain = message.plain_outputs
        tokens = zip(plain.handles, plain.token_indices, plain.token_ids, strict=True)
        outputs += [OutputNews(handle, 0, index, [token_id]) for handle, index, token_id in tokens]
    return SessionNews(
        term=message.welcome.term if message.HasField("welcome") else None,
        outputs=outputs,
        models=tuple(_model_news(state) for state in message.models.models) if message.HasField("models") else None,
        draining=message.draining,
        drain=message.drain,
    )


def _output(output: scheduler_pb2.Output) -> OutputNews:
    return OutputNews(
        output.handle,
        output.choice,
        output.first_token_index,
        list(output.token_ids),
        output.logprobs,
        _REASONS.get(output.finish_reason),
        output.stop_token_id if output.HasField("stop_token_id") else None,
        output.error if output.HasField("error") else None,
        output.first_prompt_position,
        output.prompt_logprobs,
        output.cached_tokens,
        output.drafted_tokens,
        output.accepted_tokens,
        output.resumptions,
        output.crashes,
    )


def _model_news(state: scheduler_pb2.ModelState) -> ModelNews:
    return ModelNews(
        name=state.name,
        workers=state.workers,
        max_model_len=state.max_model_len,
        vocab_size=state.vocab_size,
        max_sequence_tokens=state.max_sequence_tokens,
        fingerprints=tuple(state.fingerprints),
    )
