"""What a step says and what comes of it. The core returns these; the loop sends and receives them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import NamedTuple

from scheduler.core.sequence import Request, Sequence


class Finish(IntEnum):
    """Why a sequence ended; the numbers are those of the protocol's FinishReason."""

    NONE = 0
    STOP = 1
    LENGTH = 2


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence enters a slot, whole."""

    slot: int
    sequence: Sequence
    token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
    """every block it has so far; those of the prefix hit first"""
    num_computed: int


@dataclass(frozen=True, slots=True)
class Step:
    """One plan for one worker. Releases come first, then admissions, then rows; the row lists run in parallel."""

    number: int
    released_slots: list[int] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    num_prefill: list[int] = field(default_factory=list)
    """tokens to compute; 0: a decode row"""
    num_draft: list[int] = field(default_factory=list)
    """draft budget k"""
    new_blocks: list[list[int]] = field(default_factory=list)
    """blocks appended to each row's table"""
    reserved: list[int] = field(default_factory=list)
    """tokens by which each row may lengthen its sequence: 1 + k, or 0 for an inner prefill chunk"""

    @property
    def num_tokens(self) -> int:
        """Most tokens that this step sends through the model."""
        return sum(p or 1 + k for p, k in zip(self.num_prefill, self.num_draft, strict=True))


@dataclass(slots=True)
class StepOutcome:
    """What a worker says of a step; the lists run parallel to the step's rows."""

    number: int
    num_tokens: list[int]
    token_ids: list[int]
    """of all rows, row after row"""
    finish: list[int]
    num_drafted: list[int] = field(default_factory=list)
    """may be empty when nothing was drafted"""
    num_accepted: list[int] = field(default_factory=list)
    logprobs: dict[int, list[object]] = field(default_factory=dict)
    """by row"""
    prompt_logprobs: dict[int, tuple[int, list[object]]] = field(default_factory=dict)
    """by row: (prompt position of the first, entries)"""
    errors: dict[int, object] = field(default_factory=dict)
    """by row"""
    duration_s: float = 0.0
    num_model_tokens: int = 0
    """that went through the model; 0: not told"""
    drafting_s: float = 0.0
    """of duration_s, what went into guessing drafts or waiting for them"""


class Update(NamedTuple):
    """News of one choice."""

    sequence: Sequence
    first_index: int
    token_ids: list[int]
    finish: int = Finish.NONE
    logprobs: list[object] | None = None
    first_prompt_position: int = 0
    prompt_logprobs: tuple[object, ...] = ()

    def followed_by(self, later: Update) -> Update:
        """Both as one, where the gateway has not taken this one yet. Takes over this one's lists: it is not used again.

        However long a gateway stalls, a choice's news stay one object, and each token is moved once.
        """
        first_index = self.first_index if self.token_ids else later.first_index
        position = self.first_prompt_position if self.prompt_logprobs else later.first_prompt_position
        self.token_ids.extend(later.token_ids)
        logprobs = self.logprobs
        if later.logprobs:
            if logprobs is None:
                logprobs = []
            logprobs.extend(later.logprobs)
        prompt_logprobs = self.prompt_logprobs + later.prompt_logprobs
        return Update(self.sequence, first_index, self.token_ids, later.finish, logprobs, position, prompt_logprobs)


class RefusalKind(Enum):
    """Why the core turns a request away."""

    INVALID = "invalid"
    QUEUE_FULL = "queue full"
    DRAINING = "draining"
    NO_WORKER = "no worker"
    DEADLINE = "deadline"
    POISON = "poison"
    WORKER_ERROR = "worker error"


class Refusal(Exception):
    """A request that the core does not take, or can't go on with."""

    def __init__(self, kind: RefusalKind, message: str, field_name: str = "", detail: object = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.field_name = field_name
        self.detail = detail


class Failure(NamedTuple):
    """A request is over without an answer."""

    request: Request
    refusal: Refusal


class ProtocolViolation(RuntimeError):
    """A worker's result does not match its step; the worker must attach anew."""
