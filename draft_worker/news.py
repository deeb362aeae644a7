"""What workers and the draft worker tell each other, in the draft worker's own words."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Source(Enum):
    """Who is to guess, where a request says so."""

    ANY = "any"
    """whoever the draft worker was started with"""
    NGRAM = "ngram"
    MODEL = "model"
    COMBINED = "combined"


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
    """Tokens that the target emitted after `base` others."""

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
    """What a worker sent, in this order."""

    closes: list[Close] = field(default_factory=list)
    opens: list[Open] = field(default_factory=list)
    commits: list[Commit] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Tail:
    """A guess, as it is sent."""

    slot: int
    generation: int
    base: int
    prefix_hash: int
    token_ids: list[int]
