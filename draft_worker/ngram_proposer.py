"""Guesses by looking up where the last few tokens stood before, in prompt and output, and copying what followed."""

from __future__ import annotations

from collections.abc import Sequence

from draft_worker.mirrors import Mirror

SIZES = (4, 2)
"""lengths of the looked-up runs, longest first"""


class NgramProposer:
    """Keeps, per mirror, the latest place that each run of committed tokens was followed from."""

    name = "ngram"

    def __init__(self) -> None:
        self._indexes: dict[Mirror, _Index] = {}

    def extend(self, mirrors: Sequence[Mirror]) -> None:
        """See Proposer; one round gives all that can be had."""
        for mirror in mirrors:
            index = self._indexes.setdefault(mirror, _Index())
            index.learn(mirror.tokens)
            while mirror.wanted > 0:
                run = index.continuation(mirror, mirror.wanted)
                mirror.guess.extend(run)
                mirror.exhausted = not run

    def forget(self, mirror: Mirror) -> None:
        """See Proposer."""
        self._indexes.pop(mirror, None)


class _Index:
    """hash of a run of tokens → position of what followed it last; one table per size."""

    def __init__(self) -> None:
        self._tables: tuple[dict[int, int], ...] = tuple({} for _ in SIZES)
        self._learned = 0

    def learn(self, tokens: list[int]) -> None:
        """Index the committed tokens that are new; a mirror's committed tokens only grow."""
        for size, table in zip(SIZES, self._tables, strict=True):
            for position in range(max(self._learned, size), len(tokens)):
                table[hash(tuple(tokens[position - size : position]))] = position
        self._learned = len(tokens)

    def continuation(self, mirror: Mirror, count: int) -> list[int]:
        """At most `count` tokens that followed the longest run that ends as the known tokens do; [] for none."""
        known = mirror.known
        for size, table in zip(SIZES, self._tables, strict=True):
            if known < size:
                continue
            run = [mirror.token(position) for position in range(known - size, known)]
            position = table.get(hash(tuple(run)))
            if position is not None:
                # The copy may run into what is being copied, as it should for a repeating text.
                return [mirror.token(p) for p in range(position, min(position + count, known))]
        return []
