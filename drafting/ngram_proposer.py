"""Guesses by looking up where the last few tokens stood before, and copying what followed there.

Looked up are the sequence itself, prompt and output, and what its tenant's sequences put out recently
(output_memory.py). The longer match counts, of equal ones the sequence's own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.draft_news import Source
from drafting.mirror import Mirror
from drafting.output_memory import OutputMemory
from drafting.suffix_index import MAX_MATCH, SuffixIndex
from engine.prefix_hash import prefix_hash


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens that followed an earlier occurrence of a suffix."""

    token_ids: list[int]
    """one at least"""
    match_length: int


class NgramProposer:
    """An index per mirror, and the memory of all."""

    name = "ngram"
    sources = frozenset({Source.ANY, Source.NGRAM})

    def __init__(self, memory: OutputMemory | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.memory = OutputMemory(0, 0.0) if memory is None else memory
        self._clock = clock
        self._indexes: dict[Mirror, SuffixIndex] = {}

    def extend(self, mirrors: Sequence[Mirror]) -> None:
        """See Proposer; one round gives all that can be had."""
        for mirror in mirrors:
            self.learn(mirror)
            while mirror.wanted > 0:
                run = self.look_up(mirror, mirror.wanted)
                if run is None:
                    mirror.exhausted = True
                else:
                    mirror.guess.extend(run.token_ids)

    def fork(self, branch: Mirror) -> bool:
        """See Proposer. Never: what stood before is looked up in no time once it is known to be needed."""
        return False

    def forget(self, mirror: Mirror) -> None:
        """See Proposer. What the sequence has put out is remembered."""
        self._indexes.pop(mirror, None)
        if len(mirror.tokens) > mirror.num_prompt and self.memory.serves(mirror.tenant):
            # Equal prompts with equal seeds have equal outputs; such a mirror may also be one that was opened anew.
            key = hash((prefix_hash(mirror.tokens[: mirror.num_prompt]), mirror.seed, mirror.temperature))
            self.memory.remember(mirror.tenant, key, mirror.tokens[mirror.num_prompt :], self._clock())

    def learn(self, mirror: Mirror, end: int | None = None) -> None:
        """Index the mirror's committed tokens, all or those before `end`; they only grow."""
        index = self._indexes.get(mirror)
        if index is None:
            index = self._indexes[mirror] = SuffixIndex(mirror.tokens)
        index.learn(end)

    def num_learned(self, mirror: Mirror) -> int:
        """Committed tokens that are indexed."""
        index = self._indexes.get(mirror)
        return 0 if index is None else len(index)

    def look_up(self, mirror: Mirror, count: int) -> Run | None:
        """At most `count` tokens that may follow all that is known, guess included; None where nothing matches."""
        short = MAX_MATCH - len(mirror.guess)
        suffix = (mirror.tokens[-short:] + mirror.guess) if short > 0 else mirror.guess[-MAX_MATCH:]
        return self._look_up(mirror, suffix, count)

    def prediction(self, mirror: Mirror) -> Run | None:
        """The one token that may follow the learned ones, whatever was guessed or came since."""
        end = self.num_learned(mirror)
        return self._look_up(mirror, mirror.tokens[max(0, end - MAX_MATCH) : end], 1)

    def _look_up(self, mirror: Mirror, suffix: list[int], count: int) -> Run | None:
        own = self._indexes[mirror].find(suffix)
        if self.memory.num_tokens and (own is None or own.length < min(len(suffix), MAX_MATCH)):
            found = self.memory.find(mirror.tenant, suffix, self._clock())
            if found is not None and (own is None or found.match.length > own.length):
                return Run(found.following(count), found.match.length)
        if own is None:
            return None
        # The copy may run into what is being copied, as it should for a repeating text.
        start, end = own.position, min(own.position + count, mirror.known)
        return Run([mirror.token(position) for position in range(start, end)], own.length)
