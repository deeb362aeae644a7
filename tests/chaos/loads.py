"""What clients ask while something is struck: five kinds of eight requests each, and what the answers must be."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from tandem.v1 import types_pb2

from tests.integration.harness import expected_tokens, request

STREAMS = 8
SHARED = list(b"A shared beginning that fills a few blocks of sixteen tokens. ")


@dataclass(frozen=True, slots=True)
class Ask:
    """One request; its answer is a function of this alone."""

    prompt: tuple[int, ...]
    max_tokens: int
    n: int = 1
    temperature: float = 0.0
    seed: int = 7
    drafts: bool = True
    logprobs: int = 0
    """alternatives; 0: no log-probabilities"""
    prompt_logprobs: bool = False
    penalty: float = 0.0

    def message(self) -> Any:
        """The request as it is sent, without an id."""
        fields: dict[str, Any] = {"temperature": self.temperature, "seed": self.seed, "n": self.n}
        if self.penalty:
            fields["frequency_penalty"] = self.penalty
        message = request(list(self.prompt), self.max_tokens, **fields)
        if not self.drafts:
            message.speculation.mode = types_pb2.SPECULATION_MODE_OFF
        if self.logprobs:
            message.output.logprobs = True
            message.output.top_logprobs = self.logprobs
        if self.prompt_logprobs:
            message.output.prompt_logprobs = 1
        return message


@lru_cache(maxsize=4096)
def fake_answer(ask: Ask) -> tuple[tuple[int, ...], ...]:
    """The tokens of each choice with the fake engine, by the harness's own loop."""

    def tokens(choice: int) -> tuple[int, ...]:
        params = {"temperature": ask.temperature, "frequency_penalty": ask.penalty}
        return tuple(expected_tokens(list(ask.prompt), ask.max_tokens, choice, ask.seed, **params))

    return tuple(tokens(choice) for choice in range(ask.n))


@dataclass(frozen=True, slots=True)
class Load:
    """A kind of request, in eight sizes."""

    name: str
    asks: tuple[Ask, ...] = field(repr=False)


def _prompt(kind: str, index: int, length: int = 0) -> tuple[int, ...]:
    tokens = (SHARED if index % 2 else []) + list(f"{kind} {index}: ".encode())
    # Neither periodic nor shared beyond its beginning.
    tokens += [33 + (17 * position * position + 31 * position + 7 * index) % 90 for position in range(length)]
    return tuple(tokens)


def _length(index: int, scale: float) -> int:
    return round((60, 75, 90, 105, 120, 64, 80, 96)[index] * scale)


def make_loads(scale: float = 1.0, prefill: int = 1200) -> dict[str, Load]:
    """All five by name; `scale` multiplies the answers' lengths, `prefill` is the longest prompt's length."""

    def temperature(index: int) -> float:
        return 0.8 if index % 3 else 0.0

    kinds = {
        "plain": [
            Ask(_prompt("plain", i), _length(i, scale), 1, temperature(i), i, drafts=False) for i in range(STREAMS)
        ],
        "speculative": [
            Ask(_prompt("speculative", i), _length(i, scale), 1, temperature(i), i, penalty=0.5 if i == 3 else 0.0)
            for i in range(STREAMS)
        ],
        "n=3": [Ask(_prompt("three", i), _length(i, scale) // 2, 3, 0.8, i) for i in range(STREAMS)],
        "logprobs": [
            Ask(
                _prompt("logprobs", i), _length(i, scale) // 2, 1, temperature(i), i, logprobs=1 + i % 3,
                prompt_logprobs=i % 2 == 0,
            )
            for i in range(STREAMS)
        ],
        "long prefill": [
            Ask(_prompt("long", i, prefill - 100 * i), _length(i, scale) // 3, 1, temperature(i), i)
            for i in range(STREAMS)
        ],
    }  # fmt: skip
    return {name: Load(name, tuple(asks)) for name, asks in kinds.items()}


LOADS = ("plain", "speculative", "n=3", "logprobs", "long prefill")
