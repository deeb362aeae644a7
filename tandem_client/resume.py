"""What a client holds of one request, so that the request can go on at another gateway.

A stream may break at any message. What was delivered up to then, token ids of each choice and the seed, is all that
another gateway needs to go on (`GenerateStreamRequest.resume`). The rules, which make the joined stream the same as an
unbroken one:

    token at the next expected index    delivered
    tokens below it                     delivered before: dropped
    tokens above it                     a gap: the stream is refused and asked for anew from what is held
    anything of a finished choice       dropped
    prompt text, prompt logprobs        delivered once

Text needs no offset: a gateway's text after k tokens is a function of the k tokens, so a gateway that is told the k
tokens continues the text exactly where the lost one stopped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from tandem_client.types import Choice, Chunk, Delta, FinishReason, Generation, PositionLogprobs, Request, Usage


class BrokenStream(Exception):
    """The stream contradicts what was delivered before; resuming asks for it anew."""


@dataclass(slots=True)
class _ChoiceProgress:
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    has_prompt_text: bool = False


class StreamProgress:
    """The state of one request across all its attempts."""

    def __init__(self, request: Request) -> None:
        num_choices = 1 if request.n is None else max(request.n, 1)
        self._choices = [_ChoiceProgress() for _ in range(num_choices)]
        self._started = False
        self._has_prompt_logprobs = False
        self._usage: Usage | None = None
        self._lost = False
        self._num_resumptions = 0
        self.seed = 0

    @property
    def complete(self) -> bool:
        """Whether the last chunk has come."""
        return self._usage is not None

    @property
    def delivered(self) -> dict[int, list[int]]:
        """Token ids of each choice, for a resubmission; empty before the first chunk, when nothing binds the answer."""
        return {index: choice.token_ids for index, choice in enumerate(self._choices)} if self._started else {}

    def stream_lost(self) -> None:
        """A stream broke; the next chunks come from a new one."""
        self._lost = self._started

    def accept(self, chunk: Chunk) -> Chunk | None:
        """What is new in a chunk, or None if nothing is; raise BrokenStream if it can't follow what is held."""
        if self._started and chunk.seed != self.seed:
            raise BrokenStream(f"the seed changed from {self.seed} to {chunk.seed}")
        self._started = True
        self._num_resumptions += self._lost
        self._lost = False
        self.seed = chunk.seed
        deltas = tuple(delta for delta in map(self._accept_delta, chunk.deltas) if delta is not None)
        prompt_logprobs = () if self._has_prompt_logprobs else chunk.prompt_logprobs
        self._has_prompt_logprobs |= bool(prompt_logprobs)
        usage = chunk.usage
        if usage is not None:
            unfinished = [index for index, choice in enumerate(self._choices) if choice.finish_reason is None]
            if unfinished:
                raise BrokenStream(f"the last message came while choices {unfinished} were running")
            usage = replace(usage, resumptions=usage.resumptions + self._num_resumptions)
            self._usage = usage
        if not deltas and not prompt_logprobs and usage is None:
            return None
        return replace(chunk, deltas=deltas, prompt_logprobs=prompt_logprobs, usage=usage)

    def _accept_delta(self, delta: Delta) -> Delta | None:
        if delta.index >= len(self._choices):
            raise BrokenStream(f"choice {delta.index} was not asked for")
        choice = self._choices[delta.index]
        if choice.finish_reason is not None:
            return None
        expected = len(choice.token_ids)
        end = delta.first_token_index + len(delta.token_ids)
        if delta.token_ids and delta.first_token_index != expected:
            if end > expected:
                raise BrokenStream(
                    f"choice {delta.index}: tokens {delta.first_token_index} to {end - 1} came, {expected} was next"
                )
            if delta.finish_reason is None:
                return None
            delta = replace(delta, text="", token_ids=(), logprobs=(), first_token_index=expected)
        if choice.has_prompt_text:
            delta = replace(delta, prompt_text="")
        choice.has_prompt_text |= bool(delta.prompt_text)
        choice.token_ids.extend(delta.token_ids)
        choice.finish_reason = delta.finish_reason
        return delta


@dataclass(slots=True)
class _ChoiceParts:
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_text: str = ""
    last: Delta | None = None


class Collector:
    """Joins the chunks of one stream into a whole answer."""

    def __init__(self) -> None:
        self._parts: dict[int, _ChoiceParts] = {}
        self._prompt_logprobs: tuple[PositionLogprobs, ...] = ()
        self._latest: Chunk | None = None
        self._usage = Usage()

    def add(self, chunk: Chunk) -> None:
        """Take the next chunk."""
        self._latest = chunk
        self._prompt_logprobs += chunk.prompt_logprobs
        self._usage = chunk.usage or self._usage
        for delta in chunk.deltas:
            parts = self._parts.setdefault(delta.index, _ChoiceParts())
            parts.text.append(delta.text)
            parts.token_ids.extend(delta.token_ids)
            parts.logprobs.extend(delta.logprobs)
            parts.prompt_text += delta.prompt_text
            parts.last = delta

    def generation(self) -> Generation:
        """The answer so far; raise ValueError before the first chunk."""
        if self._latest is None:
            raise ValueError("nothing was generated")
        return Generation(
            request_id=self._latest.request_id,
            model=self._latest.model,
            seed=self._latest.seed,
            choices=tuple(self._choice(index, parts) for index, parts in sorted(self._parts.items())),
            usage=self._usage,
            prompt_logprobs=self._prompt_logprobs,
        )

    @staticmethod
    def _choice(index: int, parts: _ChoiceParts) -> Choice:
        return Choice(
            index=index,
            text="".join(parts.text),
            token_ids=tuple(parts.token_ids),
            finish_reason=parts.last.finish_reason if parts.last else None,
            stop_string=parts.last.stop_string if parts.last else None,
            stop_token_id=parts.last.stop_token_id if parts.last else None,
            logprobs=tuple(parts.logprobs),
            prompt_text=parts.prompt_text,
        )


def collect(chunks: Iterable[Chunk]) -> Generation:
    """Join all chunks of one stream."""
    collector = Collector()
    for chunk in chunks:
        collector.add(chunk)
    return collector.generation()
