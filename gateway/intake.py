"""From what a client wrote to a live request: checks, tokens, decoding parameters, choices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from gateway import admission
from gateway.admission import Ask, ModelFacts, Refusal
from gateway.requests import LiveRequest, RequestSpec
from gateway.streams import ChoiceStream, StopRules
from gateway.text import ModelText, TooManyTokens
from gateway.text_workers import TextWorkers

READY_TOKENS = 4096
"""so many token ids are taken in on the event loop; microseconds"""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and until when they wait."""

    client: str
    deadline: float | None
    """On the event loop's clock, in seconds."""
    arrived: float


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What tokenising a request yields."""

    token_ids: list[int]
    text: str
    """Empty unless it is to be echoed."""
    bad_words: list[tuple[int, ...]]


class Intake:
    """Makes live requests. `draw_seed()`: a fresh seed below 2^64."""

    def __init__(self, workers: TextWorkers, draw_seed: Callable[[], int], max_prompt_bytes: int) -> None:
        self._workers = workers
        self._draw_seed = draw_seed
        self._max_prompt_bytes = max_prompt_bytes

    async def open(self, ask: Ask, request_id: str, text: ModelText, facts: ModelFacts, caller: Caller) -> LiveRequest:
        """The request, ready to be registered. Raises Refusal naming the field."""
        self.check_size(ask)
        admission.check(ask, facts)
        if _is_ready(ask):
            prepared = _prepare(ask, text, facts)
        else:
            prepared = await self._workers.run(_size(ask), _prepare, ask, text, facts)
        # A stop string that is spelt like a special token can't be found in text, where such tokens don't show.
        special_stops = {token_id: stop for stop in ask.stop_strings if (token_id := text.special_id(stop)) is not None}
        params = admission.sampling(ask, facts, prepared.bad_words, list(special_stops))
        spec = RequestSpec(
            request_id=request_id,
            model=text.name,
            prompt_token_ids=prepared.token_ids,
            sampling=params,
            seed=self._seed(ask),
            priority=ask.priority,
            client=caller.client,
            cache_salt=ask.cache_salt,
            speculation_mode=ask.speculation_mode,
            max_draft_tokens=ask.max_draft_tokens,
            deadline=caller.deadline,
        )
        stop = StopRules(
            strings=ask.stop_strings,
            token_ids=frozenset(params.stop_token_ids),
            shown_token_ids=frozenset(ask.stop_token_ids) | frozenset(special_stops),
            special_strings=special_stops,
            include=ask.include_stop,
            min_tokens=params.min_tokens,
        )
        choices = [
            ChoiceStream(
                index,
                text.detokenizer(prepared.token_ids),
                stop,
                token_text=lambda token_id: text.decode([token_id], skip_special_tokens=False),
                prompt_text=prepared.text,
            )
            for index in range(admission.num_choices(ask))
        ]
        await _restore(choices, ask, facts.max_model_len - len(prepared.token_ids))
        return LiveRequest(spec, choices, caller.arrived)

    def check_size(self, ask: Ask) -> None:
        """Refuse a text that would take too long to tokenise, whatever the model."""
        texts = [ask.text or "", *(content for _, content in ask.messages or ())]
        # UTF-8 has at least one byte per character; only near the limit the bytes are counted.
        if sum(map(len, texts)) * 4 > self._max_prompt_bytes:
            num_bytes = sum(len(text.encode()) for text in texts)
            if num_bytes > self._max_prompt_bytes:
                text = f"at most {self._max_prompt_bytes} bytes of text, not {num_bytes}"
                raise Refusal(admission.prompt_field(ask), text, max_prompt_bytes=self._max_prompt_bytes)

    def _seed(self, ask: Ask) -> int:
        if ask.resume:
            return ask.resume[0].seed
        return self._draw_seed() if ask.seed is None else ask.seed


def _is_ready(ask: Ask) -> bool:
    """Whether preparing is no more than copying a few ids, which another thread would only make later."""
    return ask.token_ids is not None and len(ask.token_ids) <= READY_TOKENS and not (ask.echo or ask.bad_words)


def _size(ask: Ask) -> int:
    if ask.token_ids is not None:
        return len(ask.token_ids)
    return len(ask.text or "") + sum(len(content) for _, content in ask.messages or ())


def _prepare(ask: Ask, text: ModelText, facts: ModelFacts) -> _Prepared:
    """Tokenise; runs on a text thread. Raises Refusal where the template refuses, or the prompt doesn't fit."""
    token_ids, prompt_text = _tokenise(ask, text, facts)
    admission.fit(ask, facts, len(token_ids))
    if ask.token_ids is None:
        admission.check_token_ids(admission.prompt_field(ask), token_ids, facts.vocab_size)
    bad_words = [ids for word in ask.bad_words for ids in text.bad_word_sequences(word)]
    return _Prepared(token_ids, prompt_text if ask.echo else "", list(dict.fromkeys(bad_words)))


def _tokenise(ask: Ask, text: ModelText, facts: ModelFacts) -> tuple[list[int], str]:
    try:
        if ask.messages is not None:
            prompt = text.encode_chat(ask.messages, ask.add_generation_prompt, facts.max_model_len)
            return prompt.token_ids, prompt.text
        if ask.token_ids is not None:
            token_ids = list(ask.token_ids)
            return token_ids, text.detokenize(token_ids, skip_special_tokens=True) if ask.echo else ""
        return text.encode_text(ask.text or "", max_tokens=facts.max_model_len), ask.text or ""
    except TooManyTokens as error:
        admission.fit(ask, facts, error.num_tokens)
        raise


async def _restore(choices: list[ChoiceStream], ask: Ask, room: int) -> None:
    """Bring resumed choices to where their client left them."""
    max_tokens = room if ask.max_tokens is None else min(room, ask.max_tokens)
    for resumed in ask.resume:
        choices[resumed.index].restore(resumed.token_ids, max_tokens)
        # Long histories are fed on the loop: let others in between.
        await asyncio.sleep(0)
