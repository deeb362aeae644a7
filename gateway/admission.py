"""Which requests are admitted, and what an admitted one means in token terms. Pure: no clock, no dice, no I/O.

    Ask        what a client wrote; None where it wrote nothing
    check()    everything that can be refused without tokenising → raises Refusal naming the field
    fit()      what needs the prompt's length
    Sampling   how to decode, with every default filled in

Limits on counts and lengths are bounds on the work that one request can cause, not on what models can do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# The reason of every refusal for length.
TOO_LONG = "CONTEXT_LENGTH_EXCEEDED"

MAX_CHOICES = 64
MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_LENGTH = 128
MAX_LOGIT_BIASES = 4096
MAX_NAME_LENGTH = 256
MAX_DRAFT_TOKENS = 64
MAX_MESSAGES = 10_000
PENALTY_BOUND = 2.0
# Beyond these a float32 logit may overflow, and no token is left to choose.
LEAST_REPETITION_PENALTY, MOST_REPETITION_PENALTY = 2.0**-20, 2.0**20
LOGIT_BIAS_BOUND = 100.0
_FLOAT32_MAX = 3.4028234663852886e38


class Refusal(ValueError):
    """A request that can't be served as it is: the field, what is wrong with it, and the limits that it met."""

    def __init__(self, field_path: str, description: str, *, reason: str = "INVALID_FIELD", **limits: int) -> None:
        """`reason`: UPPER_SNAKE, for programs."""
        super().__init__(f"{field_path}: {description}")
        self.reason = reason
        self.field = field_path
        self.description = description
        self.limits = limits


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What admission knows of a model."""

    name: str
    vocab_size: int
    max_model_len: int
    """Most tokens of prompt and output together."""
    max_sequence_tokens: int | None
    """Tokens that the largest pool holds; None while no worker said so."""
    eos_token_ids: frozenset[int]
    longest_token_bytes: int | None
    """No token stands for more bytes of a prompt; None where unknown."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """One choice as far as a client received it."""

    index: int
    token_ids: tuple[int, ...]
    seed: int


@dataclass(frozen=True, slots=True)
class Ask:
    """A request as it came. None: not given. Exactly one of text, token_ids and messages should be given."""

    model: str = ""
    request_id: str = ""
    text: str | None = None
    token_ids: Sequence[int] | None = None
    messages: tuple[tuple[str, str], ...] | None = None
    """(role, content) each"""
    add_generation_prompt: bool = True
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[str, ...] = ()
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    logprobs: bool = False
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    n: int | None = None
    priority: int = 0
    speculation_mode: int = 0
    max_draft_tokens: int | None = None
    cache_salt: str = ""
    resume: tuple[Resumed, ...] = ()


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to decode, in token terms and with every default filled in; as the scheduler wants it."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    bad_words: tuple[tuple[int, ...], ...]
    stop_token_ids: tuple[int, ...]
    """Sorted."""
    min_tokens: int
    max_tokens: int | None
    top_logprobs: int | None
    prompt_logprobs: int | None


def check(ask: Ask, facts: ModelFacts) -> None:
    """Refuse what can be seen to be wrong before tokenising. Raises Refusal; returns nothing."""
    check_names(ask)
    _check_prompt(ask, facts)
    _check_sampling(ask, facts)
    _check_stop(ask, facts)
    _check_output(ask)
    _check_speculation(ask)
    _check_resume(ask, facts)


def fit(ask: Ask, facts: ModelFacts, num_prompt_tokens: int) -> None:
    """Refuse a prompt that is empty or too long, alone or with its explicit max_tokens. Raises Refusal."""
    where = prompt_field(ask)
    if num_prompt_tokens == 0:
        raise Refusal(where, "the prompt is empty: it has no tokens")
    bounds = [("the model's context", facts.max_model_len, "max_model_len")]
    if facts.max_sequence_tokens is not None:
        bounds.append(("the largest worker's KV memory", facts.max_sequence_tokens, "max_sequence_tokens"))
    for what, limit, name in bounds:
        limits = {name: limit, "prompt_tokens": num_prompt_tokens}
        if num_prompt_tokens >= limit:
            text = f"the prompt has {num_prompt_tokens} tokens, but {what} holds {limit}, with at least one of output"
            raise Refusal(where, text, reason=TOO_LONG, **limits)
        if ask.max_tokens is not None and num_prompt_tokens + ask.max_tokens > limit:
            text = f"{num_prompt_tokens} tokens of prompt and {ask.max_tokens} of output exceed {what} of {limit}"
            raise Refusal("stop.max_tokens", text, reason=TOO_LONG, **limits, max_tokens=ask.max_tokens)


def sampling(
    ask: Ask, facts: ModelFacts, bad_words: Sequence[tuple[int, ...]], more_stop_ids: Sequence[int]
) -> Sampling:
    """The decoding parameters of a checked request; `bad_words` are its words' id sequences."""
    stop_ids = {*ask.stop_token_ids, *more_stop_ids}
    if not ask.ignore_eos:
        stop_ids |= {token_id for token_id in facts.eos_token_ids if token_id < facts.vocab_size}
    top_logprobs = ask.top_logprobs
    if not top_logprobs:
        top_logprobs = 0 if ask.logprobs else None
    return Sampling(
        temperature=1.0 if ask.temperature is None else ask.temperature,
        top_k=max(0, ask.top_k or 0),
        top_p=1.0 if ask.top_p is None else ask.top_p,
        min_p=ask.min_p or 0.0,
        repetition_penalty=1.0 if ask.repetition_penalty is None else ask.repetition_penalty,
        presence_penalty=ask.presence_penalty or 0.0,
        frequency_penalty=ask.frequency_penalty or 0.0,
        logit_bias=ask.logit_bias,
        bad_words=tuple(bad_words),
        stop_token_ids=tuple(sorted(stop_ids)),
        min_tokens=ask.min_tokens or 0,
        max_tokens=ask.max_tokens,
        top_logprobs=top_logprobs,
        prompt_logprobs=ask.prompt_logprobs,
    )


def num_choices(ask: Ask) -> int:
    """How many choices a checked request wants."""
    return 1 if ask.n is None else ask.n


def prompt_field(ask: Ask) -> str:
    """The name of the field in which the prompt came."""
    if ask.text is not None:
        return "text"
    return "token_ids" if ask.token_ids is not None else "chat"


def check_messages(messages: Sequence[tuple[str, str]]) -> None:
    """Refuse a malformed conversation."""
    if not messages:
        raise Refusal("chat.messages", "a conversation needs at least one message")
    if len(messages) > MAX_MESSAGES:
        raise Refusal("chat.messages", f"at most {MAX_MESSAGES} messages", limit=MAX_MESSAGES)
    for index, (role, _) in enumerate(messages):
        if not role.strip():
            raise Refusal(f"chat.messages[{index}].role", "a message needs a role, for instance user")


def check_token_ids(field_path: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Refuse ids outside the vocabulary, naming the first one."""
    if token_ids and max(token_ids) >= vocab_size:
        index = next(index for index, token_id in enumerate(token_ids) if token_id >= vocab_size)
        text = f"id {token_ids[index]} is outside the vocabulary of {vocab_size}"
        raise Refusal(f"{field_path}[{index}]", text, vocab_size=vocab_size)


def check_prompt_size(field_path: str, num_bytes: int, facts: ModelFacts) -> None:
    """Refuse a text that can't fit whatever its tokens are, without tokenising it."""
    if facts.longest_token_bytes is not None and num_bytes > facts.max_model_len * facts.longest_token_bytes:
        text = f"the prompt of {num_bytes} bytes can't fit the model's context of {facts.max_model_len} tokens"
        limits = {"max_model_len": facts.max_model_len, "prompt_bytes": num_bytes}
        raise Refusal(field_path, text, reason=TOO_LONG, **limits)


def check_names(ask: Ask) -> None:
    """Refuse names of unreasonable length."""
    for name, value in (("request_id", ask.request_id), ("cache_salt", ask.cache_salt)):
        if len(value) > MAX_NAME_LENGTH:
            raise Refusal(name, f"at most {MAX_NAME_LENGTH} characters", limit=MAX_NAME_LENGTH)


def _check_prompt(ask: Ask, facts: ModelFacts) -> None:
    if ask.messages is not None:
        check_messages(ask.messages)
        num_bytes = sum(len(content.encode()) for _, content in ask.messages)
        check_prompt_size("chat", num_bytes, facts)
    elif ask.token_ids is not None:
        if not ask.token_ids:
            raise Refusal("token_ids", "the prompt is empty")
        if len(ask.token_ids) < facts.max_model_len:
            check_token_ids("token_ids.ids", ask.token_ids, facts.vocab_size)
        fit(ask, facts, len(ask.token_ids))
    elif ask.text is not None:
        if not ask.text:
            raise Refusal("text", "the prompt is empty")
        check_prompt_size("text", len(ask.text.encode()), facts)
    else:
        raise Refusal("prompt", "one of text, token_ids and chat must be given")


def _check_sampling(ask: Ask, facts: ModelFacts) -> None:
    _check_range("sampling.temperature", ask.temperature, 0.0, None)
    _check_range("sampling.top_p", ask.top_p, 0.0, 1.0, above_low=True)
    _check_range("sampling.min_p", ask.min_p, 0.0, 1.0)
    _check_range(
        "sampling.repetition_penalty", ask.repetition_penalty, LEAST_REPETITION_PENALTY, MOST_REPETITION_PENALTY
    )
    _check_range("sampling.presence_penalty", ask.presence_penalty, -PENALTY_BOUND, PENALTY_BOUND)
    _check_range("sampling.frequency_penalty", ask.frequency_penalty, -PENALTY_BOUND, PENALTY_BOUND)
    if ask.top_k is not None and ask.top_k < -1:
        raise Refusal("sampling.top_k", f"must be positive, or 0 or -1 for all tokens, not {ask.top_k}")
    if len(ask.logit_bias) > MAX_LOGIT_BIASES:
        raise Refusal("sampling.logit_bias", f"at most {MAX_LOGIT_BIASES} ids", limit=MAX_LOGIT_BIASES)
    for token_id, bias in ask.logit_bias.items():
        path = f"sampling.logit_bias[{token_id}]"
        if token_id >= facts.vocab_size:
            text = f"id {token_id} is outside the vocabulary of {facts.vocab_size}"
            raise Refusal(path, text, vocab_size=facts.vocab_size)
        _check_range(path, bias, -LOGIT_BIAS_BOUND, LOGIT_BIAS_BOUND)
    if len(ask.bad_words) > MAX_BAD_WORDS:
        raise Refusal("sampling.bad_words", f"at most {MAX_BAD_WORDS} words", limit=MAX_BAD_WORDS)
    for index, word in enumerate(ask.bad_words):
        if not word or len(word) > MAX_BAD_WORD_LENGTH:
            text = f"a bad word has 1 to {MAX_BAD_WORD_LENGTH} characters"
            raise Refusal(f"sampling.bad_words[{index}]", text, limit=MAX_BAD_WORD_LENGTH)


def _check_stop(ask: Ask, facts: ModelFacts) -> None:
    if ask.max_tokens == 0:
        raise Refusal("stop.max_tokens", "must be at least 1; leave it unset for as many as the context holds")
    if ask.max_tokens is not None and ask.min_tokens is not None and ask.min_tokens > ask.max_tokens:
        raise Refusal("stop.min_tokens", f"{ask.min_tokens} is above max_tokens, which is {ask.max_tokens}")
    if ask.min_tokens is not None and ask.min_tokens >= facts.max_model_len:
        text = f"{ask.min_tokens} is beyond the model's context of {facts.max_model_len}"
        raise Refusal("stop.min_tokens", text, max_model_len=facts.max_model_len)
    if len(ask.stop_strings) > MAX_STOP_STRINGS:
        raise Refusal("stop.strings", f"at most {MAX_STOP_STRINGS} strings", limit=MAX_STOP_STRINGS)
    for index, string in enumerate(ask.stop_strings):
        if not string:
            raise Refusal(f"stop.strings[{index}]", "a stop string can't be empty")
        if len(string) > MAX_STOP_STRING_LENGTH:
            text = f"at most {MAX_STOP_STRING_LENGTH} characters"
            raise Refusal(f"stop.strings[{index}]", text, limit=MAX_STOP_STRING_LENGTH)
    if len(ask.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise Refusal("stop.token_ids", f"at most {MAX_STOP_TOKEN_IDS} ids", limit=MAX_STOP_TOKEN_IDS)
    check_token_ids("stop.token_ids", ask.stop_token_ids, facts.vocab_size)


def _check_speculation(ask: Ask) -> None:
    if ask.max_draft_tokens is not None and ask.max_draft_tokens > MAX_DRAFT_TOKENS:
        text = f"at most {MAX_DRAFT_TOKENS} draft tokens per step, not {ask.max_draft_tokens}"
        raise Refusal("speculation.max_draft_tokens", text, limit=MAX_DRAFT_TOKENS)


def _check_output(ask: Ask) -> None:
    for name, value in (("top_logprobs", ask.top_logprobs), ("prompt_logprobs", ask.prompt_logprobs)):
        if value is not None and value > MAX_TOP_LOGPROBS:
            text = f"at most {MAX_TOP_LOGPROBS} alternatives, not {value}"
            raise Refusal(f"output.{name}", text, limit=MAX_TOP_LOGPROBS)
    if ask.n is not None and not 1 <= ask.n <= MAX_CHOICES:
        raise Refusal("n", f"from 1 to {MAX_CHOICES} choices, not {ask.n}", limit=MAX_CHOICES)


def _check_resume(ask: Ask, facts: ModelFacts) -> None:
    seen: set[int] = set()
    for position, resumed in enumerate(ask.resume):
        path = f"resume[{position}]"
        if resumed.index >= num_choices(ask):
            raise Refusal(f"{path}.index", f"choice {resumed.index} is not below n, which is {num_choices(ask)}")
        if resumed.index in seen:
            raise Refusal(f"{path}.index", f"choice {resumed.index} is resumed twice")
        seen.add(resumed.index)
        if resumed.seed != ask.resume[0].seed or (ask.seed is not None and resumed.seed != ask.seed):
            raise Refusal(f"{path}.seed", "all choices of a request have the same seed, the one first returned")
        if ask.max_tokens is not None and len(resumed.token_ids) > ask.max_tokens:
            raise Refusal(f"{path}.token_ids", f"more than max_tokens, which is {ask.max_tokens}")
        if len(resumed.token_ids) > facts.max_model_len:
            text = f"more than the context of {facts.max_model_len} tokens"
            raise Refusal(f"{path}.token_ids", text, max_model_len=facts.max_model_len)
        check_token_ids(f"{path}.token_ids", resumed.token_ids, facts.vocab_size)


def _check_range(
    path: str, value: float | None, low: float | None, high: float | None, *, above_low: bool = False
) -> None:
    """`value` must be finite and in [low, high], or (low, high] where above_low."""
    if value is None:
        return
    if not math.isfinite(value) or abs(value) > _FLOAT32_MAX:
        raise Refusal(path, f"must be finite, not {value}")
    too_low = low is not None and (value < low or (above_low and value == low))
    too_high = high is not None and value > high
    if too_low or too_high:
        bounds = [] if low is None else [f"above {low:g}" if above_low else f"at least {low:g}"]
        bounds += [] if high is None else [f"at most {high:g}"]
        raise Refusal(path, f"must be {' and '.join(bounds)}, not {value:g}")
