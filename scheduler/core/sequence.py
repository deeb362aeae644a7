"""Requests and sequences, and where a sequence stands.

A request is what a client asked; each of its choices is one sequence. A sequence has *known* tokens (prompt and output,
`token_ids`) and *computed* tokens (those whose KV is valid). Steps make computed catch up with known; whenever it does,
at least one more token becomes known.

    known        len(token_ids)                     tokens that exist
    computed     applied results only               KV that is valid
    prefill_end  known at admission                 where prefilling ends and decoding begins
    planned      computed + prefill in flight       how far issued steps prefill
    horizon      known + Σ in flight (1 + k)        most tokens that can be known once all issued steps are applied
    limit        prompt + max_tokens                never passed

`horizon` is what makes running ahead safe: blocks are reserved for it before a step is issued.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scheduler.core.row_drafts import RowDrafts

SUSPECT_CRASHES = 2
"""after so many crashes in a row without a new token, a sequence is a suspect: its steps contain nothing else"""


class State(Enum):
    """Where a sequence stands."""

    HELD = auto()
    """waits for choice 0 to compute the prompt they share"""
    WAITING = auto()
    """in the queue"""
    RUNNING = auto()
    """in a slot of a worker"""
    LEAVING = auto()
    """preempted; issued steps still contain it, then it waits again"""
    CLOSING = auto()
    """over; issued steps still contain it"""
    DONE = auto()
    """over, and nothing refers to it"""


TRANSITIONS: dict[State, frozenset[State]] = {
    State.HELD: frozenset({State.WAITING, State.DONE}),
    State.WAITING: frozenset({State.RUNNING, State.DONE}),
    State.RUNNING: frozenset({State.WAITING, State.LEAVING, State.CLOSING}),
    State.LEAVING: frozenset({State.WAITING, State.CLOSING}),
    State.CLOSING: frozenset({State.DONE}),
    State.DONE: frozenset(),
}


class IllegalTransition(RuntimeError):
    """A sequence was asked to move where its state does not lead."""


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """What a request asks of the scheduler. Immutable."""

    key: object
    """names the request to the outside; hashable, unique among live requests"""
    model: str
    prompt_token_ids: tuple[int, ...]
    params: object = None
    """carried to the worker untouched"""
    max_tokens: int | None = None
    """most output tokens; None: as many as fit"""
    wants_prompt_logprobs: bool = False
    seed: int = 0
    choices: tuple[tuple[int, tuple[int, ...]], ...] = ((0, ()),)
    """(index, tokens already emitted) of each choice to run"""
    priority: int = 0
    """higher goes first"""
    deadline: float | None = None
    """on the clock of `now`"""
    client: str = ""
    cache_salt: str = ""
    greedy: bool = False
    """temperature 0: drafts are right at other rates"""
    max_draft_tokens: int | None = None
    """None: the cell's choice; 0: plain decoding"""
    speculation_mode: int = 0
    """who drafts; carried to the worker untouched"""
    crashes: int = 0
    """crashes in a row without a new token that it was part of, elsewhere"""
    resumed: bool = False
    """was taken in by an earlier leader: never refused, whoever is attached and however many wait"""


@dataclass(slots=True, eq=False)
class Request:
    """A live request."""

    spec: RequestSpec
    arrival: int
    """rises with each request; older goes first"""
    submitted_at: float
    sequences: dict[int, Sequence] = field(default_factory=dict)
    """live choices by index"""
    cached_tokens: int | None = None
    """prompt tokens found cached at first admission"""
    prompt_logprobs_done: int = 0
    """prompt positions whose log-probabilities were delivered"""
    held: list[Sequence] = field(default_factory=list)
    """choices that wait for the first one to compute the prompt"""
    fit_checked: bool = False
    """that some worker could hold it was seen once, and is not asked again"""
    started: bool = False
    """some choice of it was in a slot, here or under an earlier leader"""


class Sequence:
    """One choice of a live request. Slots only: the step loops touch it hundreds of times a step."""

    __slots__ = (
        "accepted",
        "arrival",
        "block_hashes",
        "block_size",
        "blocks",
        "capacity",
        "choice",
        "computed",
        "crashed_on",
        "crashes",
        "drafted",
        "drafts",
        "fingerprint",
        "horizon",
        "in_flight",
        "limit",
        "links",
        "num_prompt",
        "planned",
        "prefill_end",
        "priority",
        "register_at",
        "request",
        "resumptions",
        "sampling_in_flight",
        "sequence_id",
        "slot",
        "started",
        "state",
        "stranded_since",
        "token_ids",
        "worker_id",
    )

    def __init__(self, sequence_id: int, request: Request, choice: int, emitted: tuple[int, ...]) -> None:
        spec = request.spec
        self.sequence_id = sequence_id
        self.request = request
        self.choice = choice
        self.token_ids: list[int] = [*spec.prompt_token_ids, *emitted]
        self.num_prompt = len(spec.prompt_token_ids)
        self.priority = spec.priority
        self.arrival = (request.arrival, choice)
        self.state = State.WAITING
        self.limit: int | None = None if spec.max_tokens is None else self.num_prompt + spec.max_tokens
        self.forget_placement()
        # Its history.
        self.fingerprint: str | None = None
        self.started = False
        self.drafted = 0
        self.accepted = 0
        self.drafts: RowDrafts | None = None
        self.resumptions = 0
        self.crashes = spec.crashes
        self.crashed_on: str | None = None
        # Its waiting.
        self.stranded_since: float | None = None
        self.links: dict[int, list[tuple[bytes, bytes]]] = {}

    def __repr__(self) -> str:
        return f"<sequence {self.sequence_id} {self.state.name} {self.computed}/{len(self.token_ids)}>"

    @property
    def num_output(self) -> int:
        """Tokens emitted so far."""
        return len(self.token_ids) - self.num_prompt

    @property
    def is_suspect(self) -> bool:
        """Whether it may be what crashes workers; over with its next token."""
        return self.crashes >= SUSPECT_CRASHES

    @property
    def owes_prompt_logprobs(self) -> bool:
        """Whether this choice, the request's first, still has to compute log-probabilities of the prompt."""
        request = self.request
        spec = request.spec
        return (
            spec.wants_prompt_logprobs
            and self.choice == spec.choices[0][0]
            and request.prompt_logprobs_done < self.num_prompt
        )

    @property
    def order(self) -> tuple[int, tuple[int, int]]:
        """Sorts by who goes first: higher priority, then older."""
        return (-self.priority, self.arrival)

    def move(self, state: State) -> None:
        """Change state; raises IllegalTransition where the table has no such arrow."""
        if state not in TRANSITIONS[self.state]:
            raise IllegalTransition(f"sequence {self.sequence_id}: {self.state.name} → {state.name}")
        self.state = state

    def forget_placement(self) -> None:
        """Hold nothing on any worker, as at first. The caller has returned blocks and slot."""
        self.worker_id: str | None = None
        self.slot: int | None = None
        self.blocks: list[int] = []
        self.block_hashes: list[bytes] = []
        self.block_size = 0
        self.capacity = 0
        self.register_at = 0
        self.computed = 0
        self.planned = 0
        self.prefill_end = 0
        self.horizon = len(self.token_ids)
        self.in_flight = 0
        self.sampling_in_flight = 0
