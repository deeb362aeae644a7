"""What workers and draft workers tell each other, as both know it on this side of their converts. Pure.

A worker sends `News` of the sequences that it wants drafts for, a draft worker sends `Tail`s, its guesses how they go
on. Slots are the worker's; a slot opened anew has a higher generation, and what belongs to a lower one is stale.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum


class Source(IntEnum):
    """Who is to guess, where a request says so; numbered as in tandem.v1.SpeculationMode."""

    ANY = 0
    """whoever the draft worker was started with"""
    NGRAM = 3
    MODEL = 4
    COMBINED = 5

    @classmethod
    def _missing_(cls, value: object) -> Source:
        """The other modes say whether to draft, not who does."""
        return cls.ANY


@dataclass(frozen=True, slots=True)
class Open:
    """A sequence to follow."""

    slot: int
    generation: int
    token_ids: list[int]
    num_prompt_tokens: int
    seed: int
    temperature: float
    max_draft_tokens: int
    source: Source = Source.ANY
    tenant: bytes = b""


@dataclass(frozen=True, slots=True)
class Commit:
    """Tokens that became known after `base` others; prefix_hash is of all of them."""

    slot: int
    generation: int
    base: int
    token_ids: list[int]
    prefix_hash: int


@dataclass(frozen=True, slots=True)
class Close:
    """A sequence to forget."""

    slot: int
    generation: int


@dataclass(frozen=True, slots=True)
class News:
    """What a worker sends, in this order."""

    closes: list[Close] = field(default_factory=list)
    opens: list[Open] = field(default_factory=list)
    commits: list[Commit] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.closes or self.opens or self.commits)


@dataclass(frozen=True, slots=True)
class Tail:
    """A guess at what follows the first `base` tokens, whose hash is prefix_hash."""

    slot: int
    generation: int
    base: int
    prefix_hash: int
    token_ids: list[int]
