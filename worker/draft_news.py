"""What a worker and a draft worker tell each other, in the worker's own words."""

from __future__ import annotations

from dataclasses import dataclass


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
    mode: int = 0
    """who is to guess; as it travels"""
    tenant: bytes = b""


@dataclass(frozen=True, slots=True)
class Commit:
    """Tokens that became known after `base` others."""

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
class Tail:
    """A guess."""

    slot: int
    generation: int
    base: int
    prefix_hash: int
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class Outgoing:
    """What to send, in this order."""

    closes: list[Close]
    opens: list[Open]
    commits: list[Commit]

    def __bool__(self) -> bool:
        return bool(self.closes or self.opens or self.commits)
