"""What goes into a request and what comes out: frozen dataclasses, no protobuf.

`None` in a request means "not set", which differs from 0: the server's defaults apply (`generation.proto` names them).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypedDict


class FinishReason(StrEnum):
    """Why a choice ended."""

    STOP = "stop"
    """a stop string, a stop token or the model's end-of-sequence token"""
    LENGTH = "length"
    """max_tokens, or the end of the context"""


class Speculation(StrEnum):
    """Who drafts for a request; where there is no such proposer, decoding is plain."""

    OFF = "off"
    AUTO = "auto"
    """from whoever guesses, a draft worker or the worker itself, in the way it was started for"""
    NGRAM = "ngram"
    """only what stood in the sequence, or in recent ones, before"""
    MODEL = "model"
    """only what the draft model guesses"""
    COMBINED = "combined"
    """what stood there before where a long run of tokens matches, what the draft model guesses elsewhere"""


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message."""

    role: str
    content: str


Prompt = str | Sequence[int] | Sequence[Message]
"""Text, token ids, or a conversation, which the model's own chat template renders."""


class Options(TypedDict, total=False):
    """Everything of a `Request` but the prompt, as keyword arguments."""

    model: str
    request_id: str
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float]
    bad_words: Sequence[str]
    max_tokens: int | None
    min_tokens: int | None
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool | None
    include_stop: bool | None
    logprobs: bool | None
    top_logprobs: int | None
    prompt_logprobs: int | None
    echo: bool | None
    n: int | None
    priority: int | None
    speculation: Speculation | bool | None
    max_draft_tokens: int | None
    cache_salt: str
    add_generation_prompt: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One question to the cluster; the fields are those of `GenerateStreamRequest`."""

    prompt: Prompt
    model: str = ""
    """may be empty where the cluster serves exactly one"""
    request_id: str = ""
    """idempotency and tracing; the client makes one when it is empty, since a resumed request keeps its id"""
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: Sequence[str] = ()
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool | None = None
    include_stop: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool | None = None
    n: int | None = None
    priority: int | None = None
    speculation: Speculation | bool | None = None
    """who drafts; False: OFF; True: AUTO; None: the cluster's default. Never changes a token."""
    max_draft_tokens: int | None = None
    """most drafted tokens per step, up to 64; None: the cluster's choice"""
    cache_salt: str = ""
    add_generation_prompt: bool | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One alternative at one position."""

    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """The log-probabilities of one position."""

    chosen: TokenLogprob | None
    """None for a prompt's first token, which nothing precedes"""
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request used, in tokens."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    resumptions: int = 0


@dataclass(frozen=True, slots=True)
class Delta:
    """New text and tokens of one choice."""

    index: int
    text: str
    first_token_index: int
    """output index of the first of token_ids"""
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    """set on the choice's last delta"""
    stop_string: str | None = None
    stop_token_id: int | None = None
    logprobs: tuple[PositionLogprobs, ...] = ()
    prompt_text: str = ""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One message of a stream."""

    request_id: str
    model: str
    seed: int
    deltas: tuple[Delta, ...]
    usage: Usage | None = None
    """on the last chunk only"""
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()

    @property
    def text(self) -> str:
        """New text of choice 0."""
        return "".join(delta.text for delta in self.deltas if delta.index == 0)


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished choice."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stop_string: str | None = None
    stop_token_id: int | None = None
    logprobs: tuple[PositionLogprobs, ...] = ()
    prompt_text: str = ""


@dataclass(frozen=True, slots=True)
class Generation:
    """A whole answer."""

    request_id: str
    model: str
    seed: int
    choices: tuple[Choice, ...]
    usage: Usage
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()

    @property
    def text(self) -> str:
        """Text of choice 0."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens of choice 0."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why choice 0 ended."""
        return self.choices[0].finish_reason


@dataclass(frozen=True, slots=True)
class Model:
    """A served model."""

    name: str
    max_model_len: int
    vocab_size: int
    workers: int
    chat: bool
    fingerprints: tuple[str, ...]
    max_sequence_tokens: int
