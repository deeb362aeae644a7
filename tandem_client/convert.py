"""Protobuf ⇄ the client's own types; the only module here that knows both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tandem.v1 import generation_pb2, types_pb2

from tandem_client.types import (
    Chunk,
    Delta,
    FinishReason,
    Message,
    Model,
    PositionLogprobs,
    Prompt,
    Request,
    Speculation,
    TokenLogprob,
    Usage,
)

_FINISH_REASONS = {
    types_pb2.FINISH_REASON_UNSPECIFIED: None,
    types_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    types_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}
_SPECULATION_MODES = {
    Speculation.OFF: types_pb2.SPECULATION_MODE_OFF,
    Speculation.AUTO: types_pb2.SPECULATION_MODE_DRAFT,
    Speculation.NGRAM: types_pb2.SPECULATION_MODE_NGRAM,
    Speculation.MODEL: types_pb2.SPECULATION_MODE_MODEL,
    Speculation.COMBINED: types_pb2.SPECULATION_MODE_COMBINED,
}


def stream_request(
    request: Request, delivered: Mapping[int, Sequence[int]], seed: int
) -> generation_pb2.GenerateStreamRequest:
    """The request as it travels; `delivered` is what the client holds of each choice, `seed` what it was told."""
    message = generation_pb2.GenerateStreamRequest(
        model=request.model,
        request_id=request.request_id,
        sampling=generation_pb2.SamplingParams(
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            min_p=request.min_p,
            seed=request.seed,
            repetition_penalty=request.repetition_penalty,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            logit_bias=dict(request.logit_bias),
            bad_words=request.bad_words,
        ),
        stop=generation_pb2.StopCriteria(
            max_tokens=request.max_tokens,
            min_tokens=request.min_tokens,
            strings=request.stop,
            token_ids=request.stop_token_ids,
            ignore_eos=request.ignore_eos,
            include_stop=request.include_stop,
        ),
        output=generation_pb2.OutputOptions(
            logprobs=request.logprobs,
            top_logprobs=request.top_logprobs,
            prompt_logprobs=request.prompt_logprobs,
            echo=request.echo,
        ),
        n=request.n,
        priority=request.priority,
        speculation=types_pb2.Speculation(
            mode=speculation_mode(request.speculation), max_draft_tokens=request.max_draft_tokens
        ),
        cache_salt=request.cache_salt,
        resume=[
            generation_pb2.ResumedChoice(index=index, token_ids=token_ids, seed=seed)
            for index, token_ids in sorted(delivered.items())
        ],
    )
    _set_prompt(message, request.prompt, request.add_generation_prompt)
    return message


def speculation_mode(speculation: Speculation | str | bool | None) -> types_pb2.SpeculationMode:
    """On the wire. Raises ValueError for a name that is none of Speculation's."""
    if speculation is None:
        return types_pb2.SPECULATION_MODE_UNSPECIFIED
    if isinstance(speculation, bool):
        speculation = Speculation.AUTO if speculation else Speculation.OFF
    return _SPECULATION_MODES[Speculation(speculation)]


def tokenize_request(prompt: Prompt, model: str, add_special_tokens: bool | None) -> generation_pb2.TokenizeRequest:
    """Ask for the ids of a text or a conversation."""
    message = generation_pb2.TokenizeRequest(model=model, add_special_tokens=add_special_tokens)
    if isinstance(prompt, str):
        message.text = prompt
    else:
        message.chat.CopyFrom(_chat(prompt, None))
    return message


def _set_prompt(
    message: generation_pb2.GenerateStreamRequest, prompt: Prompt, add_generation_prompt: bool | None
) -> None:
    if isinstance(prompt, str):
        message.text = prompt
    elif prompt and all(isinstance(item, Message) for item in prompt):
        message.chat.CopyFrom(_chat(prompt, add_generation_prompt))
    else:
        try:
            message.token_ids.CopyFrom(types_pb2.TokenIds(ids=prompt))  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            raise ValueError(f"prompt: expected text, token ids or messages ({error})") from error


def _chat(messages: Iterable[object], add_generation_prompt: bool | None) -> generation_pb2.ChatPrompt:
    chat = generation_pb2.ChatPrompt(add_generation_prompt=add_generation_prompt)
    for message in messages:
        if not isinstance(message, Message):
            raise ValueError(f"prompt: expected messages, got {type(message).__name__}")
        chat.messages.add(role=message.role, content=message.content)
    return chat


def chunk(response: generation_pb2.GenerateStreamResponse) -> Chunk:
    """One message of a stream."""
    return Chunk(
        request_id=response.request_id,
        model=response.model,
        seed=response.seed,
        deltas=tuple(_delta(delta) for delta in response.deltas),
        usage=_usage(response.usage) if response.HasField("usage") else None,
        prompt_logprobs=_positions(response.prompt_logprobs),
    )


def model(message: generation_pb2.Model) -> Model:
    """A served model."""
    return Model(
        name=message.name,
        max_model_len=message.max_model_len,
        vocab_size=message.vocab_size,
        workers=message.workers,
        chat=message.chat,
        fingerprints=tuple(message.fingerprints),
        max_sequence_tokens=message.max_sequence_tokens,
    )


def _delta(delta: generation_pb2.ChoiceDelta) -> Delta:
    stopped_by = delta.WhichOneof("stopped_by")
    return Delta(
        index=delta.index,
        text=delta.text,
        first_token_index=delta.first_token_index,
        token_ids=tuple(delta.token_ids),
        finish_reason=_FINISH_REASONS[delta.finish_reason],
        stop_string=delta.stop_string if stopped_by == "stop_string" else None,
        stop_token_id=delta.stop_token_id if stopped_by == "stop_token_id" else None,
        logprobs=_positions(delta.logprobs),
        prompt_text=delta.prompt_text,
    )


def _usage(usage: types_pb2.Usage) -> Usage:
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        drafted_tokens=usage.drafted_tokens,
        accepted_tokens=usage.accepted_tokens,
        resumptions=usage.resumptions,
    )


def _positions(positions: Iterable[types_pb2.PositionLogprobs]) -> tuple[PositionLogprobs, ...]:
    return tuple(
        PositionLogprobs(
            chosen=_logprob(position.chosen) if position.HasField("chosen") else None,
            top=tuple(_logprob(alternative) for alternative in position.top),
        )
        for position in positions
    )


def _logprob(message: types_pb2.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(token_id=message.token_id, logprob=message.logprob, rank=message.rank)
