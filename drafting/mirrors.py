"""The mirrors of all sequences that workers follow (mirror.py), and whose turn it is. Pure; one thread owns them.

A commit that doesn't continue its mirror (a gap, another hash) makes the mirror worthless: it is dropped, and its
worker opens it anew when it misses tails.

Turns: first mirrors whose worker may be waiting, for their next tail is too short, longest waiting first. Only when
there are none, guesses run ahead: the main ones, then branches, RUN_AHEAD_ROWS of them, so that a commit that comes
meanwhile is never further away than a short round.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from cluster.draft_news import News, Open, Source
from drafting.branching import Odds
from drafting.mirror import ALWAYS, Mirror, Worth
from engine.prefix_hash import prefix_hash

RUN_AHEAD_ROWS = 16


class MirrorTable:
    """All mirrors of all streams, keyed by stream and slot."""

    def __init__(
        self,
        max_mirrors: int,
        max_draft_tokens: int,
        sources: frozenset[Source] = frozenset(Source),
    ) -> None:
        """sources: what the proposer serves; whoever wants another gets no drafts."""
        self._max_mirrors = max_mirrors
        self._max_draft = max_draft_tokens
        self._sources = sources
        self._worth: dict[int, Worth] = {}
        """by stream"""
        self._mirrors: dict[tuple[int, int], Mirror] = {}
        self._turns = itertools.count(1)
        self.odds = Odds()
        self.num_branches_won = 0
        self.num_refused = 0
        """openings beyond max_mirrors, for another proposer, without tokens or with fewer than their prompt has; their
        sequences simply get no drafts"""

    def __len__(self) -> int:
        return len(self._mirrors)

    def __iter__(self) -> Iterator[Mirror]:
        return iter(self._mirrors.values())

    def get(self, stream: int, slot: int) -> Mirror | None:
        """The mirror of a slot."""
        return self._mirrors.get((stream, slot))

    def begin_stream(self, stream: int, worth: Worth) -> None:
        """How far guesses for its sequences go; ALWAYS where nothing is said."""
        self._worth[stream] = worth

    def apply(self, stream: int, news: News) -> list[Mirror]:
        """Bring the mirrors up to date; returns those that are no more."""
        gone: list[Mirror] = []
        for close in news.closes:
            mirror = self._mirrors.get((stream, close.slot))
            if mirror is not None and mirror.generation <= close.generation:
                gone.append(self._mirrors.pop((stream, close.slot)))
        for opening in news.opens:
            gone += self.open(stream, opening)
        for commit in news.commits:
            mirror = self._mirrors.get((stream, commit.slot))
            if mirror is None or mirror.generation != commit.generation:
                continue
            if commit.base == len(mirror.tokens):
                gone += self.commit(mirror, commit.token_ids)
            if mirror.base_hash != commit.prefix_hash:
                gone.append(self._mirrors.pop((stream, commit.slot)))
        return gone

    def drop(self, mirror: Mirror) -> None:
        """Forget one mirror."""
        self._mirrors.pop((mirror.stream, mirror.slot), None)

    def drop_stream(self, stream: int) -> list[Mirror]:
        """A worker is gone; returns the mirrors that are no more."""
        self._worth.pop(stream, None)
        gone = [mirror for key, mirror in self._mirrors.items() if key[0] == stream]
        for mirror in gone:
            self.drop(mirror)
        return gone

    def hungry(self) -> list[Mirror]:
        """Mirrors to guess for in the next round, whoever goes first first; among them branches."""
        mirrors = self._mirrors.values()
        urgent = [mirror for mirror in mirrors if mirror.urgent]
        if urgent:
            return sorted(urgent, key=lambda mirror: mirror.since)
        ahead = [mirror for mirror in mirrors if mirror.wanted > 0]
        ahead.sort(key=lambda mirror: mirror.since)
        branches = [branch for mirror in mirrors for branch in mirror.branches if branch.wanted > 0]
        return (ahead + branches)[:RUN_AHEAD_ROWS]

    def commit(self, mirror: Mirror, token_ids: list[int]) -> list[Mirror]:
        """Tokens became known behind a mirror's own; returns the mirrors that are no more."""
        self.odds.learn(mirror, token_ids)
        mirror.since = next(self._turns)
        self.num_branches_won -= mirror.num_won
        gone = mirror.commit(token_ids)
        self.num_branches_won += mirror.num_won
        mirror.reach = self.odds.reach(mirror)
        return gone

    def open(self, stream: int, opening: Open) -> list[Mirror]:
        """A sequence is to be followed, unless it is refused; returns the mirrors that are no more."""
        key = (stream, opening.slot)
        old = self._mirrors.pop(key, None)
        gone = [] if old is None else [old]
        full = len(self._mirrors) >= self._max_mirrors
        nonsense = len(opening.token_ids) < max(1, opening.num_prompt_tokens)
        if full or nonsense or opening.source not in self._sources:
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
            worth=self._worth.get(stream, ALWAYS),
            since=next(self._turns),
        )
        return gone
