"""The step protocol in the worker's own words: what a plan asks for and what came of it.

A plan is applied in this order: releases, then admissions, then rows. The arrays of rows stay packed, one entry per
row, as they travel. Nothing here knows protobuf, the engine or the clock.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from cluster.draft_news import Source
from engine.logprobs import PositionLogprobs, TokenLogprob
from engine.sampling_params import SamplingParams

__all__ = [
    "Admission",
    "Finish",
    "PositionLogprobs",
    "Resident",
    "RowFailure",
    "RowLogprobs",
    "SamplingParams",
    "Step",
    "StepOutcome",
    "TokenLogprob",
]


class Finish(enum.IntEnum):
    """Why a sequence ended with a row's last token; the numbers are those of the wire."""

    NOT = 0
    STOP = 1
    LENGTH = 2


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence enters a slot, whole, once."""

    slot: int
    sequence_id: int
    token_ids: list[int]
    """prompt and what is already emitted"""
    num_prompt_tokens: int
    choice: int
    params: SamplingParams
    seed: int
    """the request's; the choice's own is derived from it"""
    block_ids: Seq[int]
    num_computed_tokens: int
    """tokens whose KV the blocks hold already"""
    cache_salt: str = ""
    draft_source: Source = Source.ANY
    invalid: str = ""
    """what is wrong with it, when it could not even be read; then it fails at its first row"""


@dataclass(frozen=True, slots=True)
class Step:
    """One plan. The four arrays after admissions have one entry per row."""

    term: int
    epoch: int
    number: int
    released_slots: Seq[int] = ()
    admissions: Seq[Admission] = ()
    slots: Seq[int] = ()
    num_prefill_tokens: Seq[int] = ()
    """known tokens to compute; 0: a decode row"""
    max_draft_tokens: Seq[int] = ()
    num_new_blocks: Seq[int] = ()
    new_block_ids: Seq[int] = ()
    """the appended blocks of all rows, row after row"""


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Log-probabilities that one row settled."""

    row: int
    output: list[PositionLogprobs] = field(default_factory=list)
    first_prompt_position: int = 0
    prompt: list[PositionLogprobs] = field(default_factory=list)


NOTHING_LEFT = "NOTHING_LEFT"
"""a RowFailure's reason where the request's own parameters ban every token"""


@dataclass(frozen=True, slots=True)
class RowFailure:
    """A row that failed; its sequence is over. The message holds no internals."""

    row: int
    reason: str
    message: str


@dataclass(slots=True)
class StepOutcome:
    """What came of a step; the lists up to num_accepted_tokens have one entry per row, token_ids is flat."""

    term: int
    epoch: int
    number: int
    slots: list[int]
    num_tokens: list[int]
    token_ids: list[int]
    finishes: list[int]
    num_drafted_tokens: list[int]
    num_accepted_tokens: list[int]
    logprobs: list[RowLogprobs] = field(default_factory=list)
    failures: list[RowFailure] = field(default_factory=list)
    duration_s: float = 0.0
    num_model_tokens: int = 0
    drafting_s: float = 0.0
    """of duration_s, what went into guessing drafts or waiting for them"""


@dataclass(frozen=True, slots=True)
class Resident:
    """A sequence whose KV the worker still holds, offered to a new leader."""

    token_ids: list[int]
    block_ids: list[int]
    num_computed_tokens: int
    cache_salt: str
