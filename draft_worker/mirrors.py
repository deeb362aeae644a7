"""Disposable mirrors of the sequences that workers follow. Pure; one thread owns them.

    tokens    |======committed======|                the worker's truth, `base` of them
    guess                           |~~~~~~~~~|      the draft worker's own continuation
    computed  |-----------------------|              proposers with KV: valid up to here, of tokens and guess together

Rollback is by common prefix: of a commit, the part that agrees with the guess turns from guess to truth and keeps its
KV; at the first difference the rest of the guess is dropped, and what replaces it is fed by the next round. Nothing is
copied. A commit that doesn't continue the mirror (a gap, another hash) makes it worthless: it is dropped, and its
worker opens it anew when it misses tails.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from engine.prefix_hash import extend, prefix_hash

LOOKAHEAD = 2
"""A guess runs on to LOOKAHEAD · k + 1 tokens: k are verified while the bonus and the next k are guessed."""


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


@dataclass(slots=True, eq=False)
class Mirror:
    """One followed sequence."""

    stream: int
    slot: int
    generation: int
    tokens: list[int]
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
    computed: int = 0
    block_ids: list[int] = field(default_factory=list)
    exhausted: bool = False
    """no further guess can be had until the next commit"""
    num_sent: int = 0
    """length of the guess when it was last sent"""
    must_send: bool = True
    """a commit wants an answer, even an empty one"""

    @property
    def known(self) -> int:
        """Committed and guessed tokens together."""
        return len(self.tokens) + len(self.guess)

    @property
    def wanted(self) -> int:
        """How many more tokens should be guessed."""
        return 0 if self.exhausted else max(0, LOOKAHEAD * self.max_draft + 1 - len(self.guess))

    @property
    def urgent(self) -> bool:
        """Whether the worker's next step may find too short a tail."""
        return self.wanted > 0 and len(self.guess) < self.max_draft

    def token(self, position: int) -> int:
        """The committed or guessed token at a position."""
        committed = len(self.tokens)
        return self.tokens[position] if position < committed else self.guess[position - committed]

    def commit(self, token_ids: list[int]) -> None:
        """Take tokens as truth; keep the KV and the guess as far as they agree."""
        agreeing = 0
        while agreeing < min(len(token_ids), len(self.guess)) and token_ids[agreeing] == self.guess[agreeing]:
            agreeing += 1
        right = agreeing == min(len(token_ids), len(self.guess))
        if not right or agreeing < len(token_ids):
            self.computed = min(self.computed, len(self.tokens) + agreeing)
        self.guess = self.guess[len(token_ids) :] if right else []
        for token_id in token_ids:
            self.base_hash = extend(self.base_hash, token_id)
        self.tokens.extend(token_ids)
        self.exhausted = False
        self.num_sent = 0
        self.must_send = True

    def wants_sending(self) -> bool:
        """Whether the guess should be sent now: in blocks of half a draft, and when it is complete."""
        if self.must_send:
            return True
        grown = len(self.guess) - self.num_sent
        return grown > 0 and (grown >= (self.max_draft + 1) // 2 or self.wanted == 0)

    def tail(self) -> Tail:
        """The guess as it stands; noted as sent."""
        self.num_sent = len(self.guess)
        self.must_send = False
        return Tail(self.slot, self.generation, len(self.tokens), self.base_hash, list(self.guess))


class MirrorTable:
    """All mirrors of all streams, keyed by stream and slot."""

    def __init__(self, max_mirrors: int, max_draft_tokens: int, sources: frozenset[Source] = frozenset(Source)) -> None:
        """sources: what the proposer serves; whoever wants another gets no drafts."""
        self._max_mirrors = max_mirrors
        self._max_draft = max_draft_tokens
        self._sources = sources
        self._mirrors: dict[tuple[int, int], Mirror] = {}
        self.num_refused = 0
        """openings beyond max_mirrors, without tokens or for another proposer; their sequences simply get no drafts"""

    def __len__(self) -> int:
        return len(self._mirrors)

    def __iter__(self) -> Iterator[Mirror]:
        return iter(self._mirrors.values())

    def get(self, stream: int, slot: int) -> Mirror | None:
        """The mirror of a slot."""
        return self._mirrors.get((stream, slot))

    def apply(self, stream: int, news: News) -> list[Mirror]:
        """Bring the mirrors up to date; returns those that are no more."""
        gone: list[Mirror] = []
        for close in news.closes:
            mirror = self._mirrors.get((stream, close.slot))
            if mirror is not None and mirror.generation <= close.generation:
                gone.append(self._mirrors.pop((stream, close.slot)))
        for opening in news.opens:
            gone += self._open(stream, opening)
        for commit in news.commits:
            mirror = self._mirrors.get((stream, commit.slot))
            if mirror is None or mirror.generation != commit.generation:
                continue
            if commit.base == len(mirror.tokens):
                mirror.commit(commit.token_ids)
            if mirror.base_hash != commit.prefix_hash:
                gone.append(self._mirrors.pop((stream, commit.slot)))
        return gone

    def drop(self, mirror: Mirror) -> None:
        """Forget one mirror."""
        self._mirrors.pop((mirror.stream, mirror.slot), None)

    def drop_stream(self, stream: int) -> list[Mirror]:
        """A worker is gone; returns the mirrors that are no more."""
        gone = [mirror for key, mirror in self._mirrors.items() if key[0] == stream]
        for mirror in gone:
            self.drop(mirror)
        return gone

    def hungry(self) -> list[Mirror]:
        """Mirrors to guess for in the next round: the urgent ones if there are any, else those that can run ahead."""
        wanting = [mirror for mirror in self._mirrors.values() if mirror.wanted > 0]
        urgent = [mirror for mirror in wanting if mirror.urgent]
        return urgent or wanting

    def _open(self, stream: int, opening: Open) -> list[Mirror]:
        key = (stream, opening.slot)
        old = self._mirrors.pop(key, None)
        gone = [] if old is None else [old]
        full = len(self._mirrors) >= self._max_mirrors
        if full or not opening.token_ids or opening.source not in self._sources:
            self.num_refused += 1
            return gone
        self._mirrors[key] = Mirror(
            stream=stream,
            slot=opening.slot,
            generation=opening.generation,
            tokens=opening.token_ids,
            num_prompt=opening.num_prompt_tokens,
            seed=opening.seed,
            temperature=opening.temperature,
            max_draft=max(1, min(opening.max_draft_tokens, self._max_draft)),
            base_hash=prefix_hash(opening.token_ids),
            source=opening.source,
            tenant=opening.tenant,
        )
        return gone
