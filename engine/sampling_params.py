"""How one request is sampled, in token terms."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them could only overflow, and noise would decide exact ties."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Validated once, here; a bad value raises ValueError that names its field. Defaults: plain sampling at T = 1."""

    temperature: float = 1.0
    """0 is greedy"""
    top_k: int = 0
    """keep the k likeliest; 0 or -1: all"""
    top_p: float = 1.0
    """keep the smallest likeliest set whose probability reaches this; in (0, 1]"""
    min_p: float = 0.0
    """keep tokens at least this fraction as likely as the likeliest; in [0, 1]"""
    repetition_penalty: float = 1.0
    """divides positive and multiplies negative logits of tokens in prompt or output; above 0"""
    presence_penalty: float = 0.0
    """subtracted once from logits of tokens in the output"""
    frequency_penalty: float = 0.0
    """subtracted per occurrence in the output"""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """added to the logits of these ids"""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """sequences whose last token is banned wherever the others stand just before"""
    stop_token_ids: frozenset[int] = frozenset()
    """banned before min_tokens; the worker ends a sequence at them"""
    min_tokens: int = 0
    """output tokens"""
    max_tokens: int = 16
    """output tokens; the worker's affair"""
    top_logprobs: int | None = None
    """alternatives per output token; None: no log-probabilities"""
    prompt_logprobs: int | None = None
    """alternatives per prompt token; None: none"""
    greedy: bool = field(init=False, repr=False, compare=False)
    truncates: bool = field(init=False, repr=False, compare=False)
    """whether top_k, top_p or min_p may leave tokens out"""
    penalises: bool = field(init=False, repr=False, compare=False)
    """whether what stands in the context changes logits"""
    changes_logits: bool = field(init=False, repr=False, compare=False)
    """whether anything before the temperature may apply"""
    only_chooses: bool = field(init=False, repr=False, compare=False)
    """whether a token is all that is wanted, and the likeliest one or the one with the highest noise"""

    def __post_init__(self) -> None:
        _check(self.temperature >= 0, "temperature", "finite and not negative", self.temperature)
        _check(self.top_k >= -1, "top_k", "-1 or more", self.top_k)
        _check(0 < self.top_p <= 1, "top_p", "in (0, 1]", self.top_p)
        _check(0 <= self.min_p <= 1, "min_p", "in [0, 1]", self.min_p)
        _check(self.repetition_penalty > 0, "repetition_penalty", "finite and above 0", self.repetition_penalty)
        _check(True, "presence_penalty", "finite", self.presence_penalty)
        _check(True, "frequency_penalty", "finite", self.frequency_penalty)
        for token_id, bias in self.logit_bias.items():
            _check(token_id >= 0, "logit_bias", "for ids from 0", token_id)
            _check(True, "logit_bias", "finite", bias)
        for word in self.bad_words:
            _check(len(word) > 0 and min(word) >= 0, "bad_words", "sequences of at least one id from 0", word)
        _check(self.min_tokens >= 0, "min_tokens", "0 or more", self.min_tokens)
        _check(self.max_tokens >= 0, "max_tokens", "0 or more", self.max_tokens)
        _check(self.top_logprobs is None or self.top_logprobs >= 0, "top_logprobs", "0 or more", self.top_logprobs)
        _check(
            self.prompt_logprobs is None or self.prompt_logprobs >= 0,
            "prompt_logprobs",
            "0 or more",
            self.prompt_logprobs,
        )
        # Asked for in every step, so found out once.
        object.__setattr__(self, "greedy", self.temperature < GREEDY_BELOW)
        object.__setattr__(self, "truncates", self.top_k > 0 or self.top_p < 1 or self.min_p > 0)
        penalises = self.repetition_penalty != 1 or bool(self.presence_penalty or self.frequency_penalty)
        object.__setattr__(self, "penalises", penalises)
        bans = bool(self.bad_words or (self.min_tokens and self.stop_token_ids))
        object.__setattr__(self, "changes_logits", penalises or bans or bool(self.logit_bias))
        logprobs = self.top_logprobs is not None or self.prompt_logprobs is not None
        object.__setattr__(self, "only_chooses", not (self.truncates or self.changes_logits or logprobs))


def _check(valid: bool, name: str, rule: str, value: object) -> None:
    if not valid or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(f"{name} must be {rule}; got {value!r}")
