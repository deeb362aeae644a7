"""A disposable mirror of one followed sequence. Pure.

    tokens    |======committed======|                the worker's truth, `base` of them
    guess                           |~~~~~~~~~|      the draft worker's own continuation
    branches                        |~~x----         other continuations, from a runner-up x on (see branching.py)
                                    |~~~~~~x----
    computed  |-----------------------|              proposers with KV: valid up to here, of tokens and guess together

Rollback is by common prefix: of a commit, the part that agrees with the guess turns from guess to truth and keeps its
KV; at the first difference the rest of the guess is dropped, and what replaces it is fed by the next round. Where a
branch agrees further than the guess, it takes the guess's place, KV and all. Nothing is copied: a branch shares its
mirror's first `num_shared` blocks, which hold tokens before its fork only, and owns those behind.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from cluster.draft_news import Source, Tail
from engine.prefix_hash import extend

FIRST_PART = 2
"""tokens of a draft that are sent before the rest is guessed: a step takes what is there"""
LOOKAHEAD = 2
"""A guess runs on to LOOKAHEAD · k + 1 tokens: k are verified while the bonus and the next k are guessed."""


class RunnerUp(NamedTuple):
    """What came second when a token was guessed."""

    token_id: int
    margin: float
    """by how much, in log q / T + g; log q at T = 0"""


class Worth(NamedTuple):
    """Chances of being of use below which a token isn't guessed."""

    next: float
    """for a token that the worker's next step could use"""
    ahead: float
    """for one that only a later step could use: it takes time from the target's model where they share cores"""
    whole: bool = False
    """whether the next step's draft goes out whole: what comes behind a part comes while the target computes"""


ALWAYS = Worth(0.0, 0.0)
OWN_DEVICE = Worth(0.05, 0.04)
SHARED_CORES = Worth(0.3, 0.7, whole=True)
BETWEEN_STEPS = Worth(0.35, 1.01, whole=True)
"""where nothing else computes meanwhile: a guess costs a twentieth of a step, and none is made for a later one"""


@dataclass(slots=True, eq=False)
class Mirror:
    """One followed sequence, or, where `parent` is set, a branch of one: another continuation of the same tokens."""

    stream: int
    slot: int
    generation: int
    tokens: list[int]
    """a branch has its parent's own list"""
    num_prompt: int
    seed: int
    temperature: float
    max_draft: int
    """longest draft that the worker can use"""
    base_hash: int
    source: Source = Source.ANY
    tenant: bytes = b""
    """whose recent outputs may be copied from; empty: nobody's"""
    guess: list[int] = field(default_factory=list)
    runner_ups: dict[int, RunnerUp] = field(default_factory=dict)
    """by position, of guessed tokens, as far as the proposer knows them"""
    computed: int = 0
    block_ids: list[int] = field(default_factory=list)
    num_shared: int = 0
    """leading blocks that are the parent's"""
    worth: Worth = ALWAYS
    reach: float = 1.0
    """chance that the whole guess is right, and the token after it of use"""
    exhausted: bool = False
    """no further guess can be had until the next commit"""
    num_sent: int = 0
    """length of the guess when it was last sent"""
    owes: bool = True
    """the opening or the last commit wants an answer, even an empty one"""
    must_send: bool = False
    """a commit has left a guess: the next tail goes out at once"""
    since: int = 0
    """rises with each opening and commit of all mirrors: whoever waits longest has the lowest"""
    parent: Mirror | None = None
    fork_at: int = 0
    """a branch's guess differs from its parent's from this index on"""
    branches: list[Mirror] = field(default_factory=list)
    forked: bool = False
    """whether branches were chosen since the last commit"""
    num_won: int = 0
    """times that a branch has taken the guess's place"""

    @property
    def known(self) -> int:
        """Committed and guessed tokens together."""
        return len(self.tokens) + len(self.guess)

    @property
    def wanted(self) -> int:
        """How many more tokens should be guessed."""
        if self.exhausted:
            return 0
        if self.parent is None and self.reach < (
            self.worth.next if len(self.guess) < self.max_draft else self.worth.ahead
        ):
            return 0
        length = LOOKAHEAD * self.max_draft + 1 if self.parent is None else self.fork_at + 1 + self.max_draft
        return max(0, length - len(self.guess))

    @property
    def urgent(self) -> bool:
        """Whether the worker's next step may find too short a tail."""
        return self.parent is None and self.wanted > 0 and len(self.guess) < self.max_draft

    def token(self, position: int) -> int:
        """The committed or guessed token at a position."""
        committed = len(self.tokens)
        return self.tokens[position] if position < committed else self.guess[position - committed]

    def commit(self, token_ids: list[int]) -> list[Mirror]:
        """Take tokens as truth; keep KV and guess as far as they agree. Returns the branches that are no more."""
        best = max((self, *self.branches), key=lambda one: one._agreeing(token_ids))
        if best is not self:
            self._become(best)
        gone: list[Mirror] = []
        for branch in self.branches:
            if branch is not best and branch._agreeing(token_ids) == len(token_ids) < len(branch.guess):
                branch.guess = branch.guess[len(token_ids) :]
                branch.fork_at -= len(token_ids)
            else:
                gone.append(branch)
        self._advance(token_ids)
        self.branches = [branch for branch in self.branches if branch not in gone]
        for branch in self.branches:
            branch.base_hash = self.base_hash
        return gone

    def fork(self, index: int, token_id: int) -> Mirror:
        """A branch with `token_id` at that index of the guess; it has no KV yet, and is not in `branches`."""
        return Mirror(
            stream=self.stream,
            slot=self.slot,
            generation=self.generation,
            tokens=self.tokens,
            num_prompt=self.num_prompt,
            seed=self.seed,
            temperature=self.temperature,
            max_draft=self.max_draft,
            base_hash=self.base_hash,
            source=self.source,
            tenant=self.tenant,
            guess=[*self.guess[:index], token_id],
            owes=False,
            since=self.since,
            worth=self.worth,
            parent=self,
            fork_at=index,
        )

    def wants_sending(self) -> bool:
        """Whether the guess should be sent now.

        At once where a commit has left some of it; then its first part, where it has cores of its own, a whole draft,
        and when it is complete: a message costs both sides more than a token is worth. Branches go out whole.
        """
        if self.parent is not None:
            return self.num_sent == 0 and self.wanted == 0
        if self.must_send or (self.owes and not self.wanted):
            return True
        grown = len(self.guess) - self.num_sent
        first = not self.worth.whole and self.num_sent == 0 and grown >= min(FIRST_PART, (self.max_draft + 1) // 2)
        return grown > 0 and (first or self.wanted == 0 or self.num_sent < self.max_draft <= len(self.guess))

    def tail(self) -> Tail:
        """The guess as it stands; noted as sent."""
        self.num_sent = len(self.guess)
        self.must_send = self.owes = False
        return Tail(self.slot, self.generation, len(self.tokens), self.base_hash, list(self.guess))

    def _agreeing(self, token_ids: list[int]) -> int:
        """How many of these tokens the guess begins with."""
        count = 0
        for guessed, token_id in zip(self.guess, token_ids, strict=False):
            if guessed != token_id:
                break
            count += 1
        return count

    def _become(self, branch: Mirror) -> None:
        """Go on as this branch, which gets what it replaces: its own blocks there are given back with it."""
        self.guess, branch.guess = branch.guess, self.guess
        self.runner_ups, branch.runner_ups = branch.runner_ups, self.runner_ups
        self.computed, branch.computed = branch.computed, self.computed
        self.block_ids, branch.block_ids = branch.block_ids, self.block_ids
        self.num_won += 1

    def _advance(self, token_ids: list[int]) -> None:
        agreeing = self._agreeing(token_ids)
        right = agreeing == min(len(token_ids), len(self.guess))
        if not right or agreeing < len(token_ids):
            self.computed = min(self.computed, len(self.tokens) + agreeing)
        self.guess = self.guess[len(token_ids) :] if right else []
        for token_id in token_ids:
            self.base_hash = extend(self.base_hash, token_id)
        self.tokens.extend(token_ids)
        known = self.known
        self.runner_ups = {at: one for at, one in self.runner_ups.items() if len(self.tokens) <= at < known}
        self.exhausted = False
        self.num_sent = 0
        self.must_send = bool(self.guess)
        self.owes = True
        self.forked = False
