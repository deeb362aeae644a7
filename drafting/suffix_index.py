"""Where did the last few tokens stand before? An index over a growing run of tokens, by hash chains as in deflate.

    tokens     the cat sat on the mat and the cat | sat on …
    suffix                             the cat      ▲
    match      the cat ──────────────────────────┘  its position: the token that followed

For each of two sizes a table holds, by the hash of a run of so many tokens, the latest position that such a run was
followed at; `before` leads from there to the one before it with the same hash, and so on. Hashes may collide: what
counts is the comparison of the tokens themselves, backwards from the candidate, which also tells how long the match is.

Appending is O(1) per token (a table doubles when it is full), a search compares at most MAX_CHAIN candidates of
MAX_MATCH tokens for each size, and memory is about 20 bytes per token. The long size comes first, because common pairs
of tokens have long chains in which a long match may lie too deep.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

SIZES = (4, 2)
"""lengths of the hashed runs, longest first; the last is the shortest match that is found"""
MAX_MATCH = 24
"""tokens of a match beyond which no more are compared"""
MAX_CHAIN = 16
"""candidates compared for each size"""
FIRST_SLOTS = 64

_MULTIPLIER = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Match:
    """An earlier occurrence of a suffix."""

    position: int
    """of the token that followed it"""
    length: int
    """tokens that agree, at most MAX_MATCH"""


class _Chains:
    """Positions by the hash of the `size` tokens before them."""

    __slots__ = ("_before", "_heads", "_shift", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self._before = array("i")  # by position
        self._resize(FIRST_SLOTS)

    def __len__(self) -> int:
        return len(self._before)

    def append(self, tokens: Sequence[int]) -> None:
        """Index the next position; `tokens` reaches beyond it."""
        position = len(self._before)
        if position >= len(self._heads):
            self._rebuild(tokens)
        self._before.append(self._insert(tokens, position))

    def candidates(self, suffix: Sequence[int], max_chain: int) -> list[int]:
        """Positions that may follow the suffix, the latest first."""
        if len(suffix) < self.size:
            return []
        found: list[int] = []
        position = self._heads[self._slot(suffix, len(suffix))]
        while position >= 0 and len(found) < max_chain:
            found.append(position)
            position = self._before[position]
        return found

    def _insert(self, tokens: Sequence[int], position: int) -> int:
        if position < self.size:
            return -1
        slot = self._slot(tokens, position)
        before, self._heads[slot] = self._heads[slot], position
        return before

    def _slot(self, tokens: Sequence[int], end: int) -> int:
        value = 0
        for index in range(end - self.size, end):
            value = ((value ^ (tokens[index] + 1)) * _MULTIPLIER) & _MASK
        return value >> self._shift

    def _rebuild(self, tokens: Sequence[int]) -> None:
        """Twice the slots, and every position anew: constant per token over time."""
        self._resize(2 * len(self._heads))
        for position in range(len(self._before)):
            self._before[position] = self._insert(tokens, position)

    def _resize(self, num_slots: int) -> None:
        self._heads = array("i", [-1]) * num_slots
        self._shift = 64 - (num_slots.bit_length() - 1)


class SuffixIndex:
    """Over tokens that somebody else appends to; `learn` says that there are new ones."""

    __slots__ = ("_chains", "max_chain", "tokens")

    def __init__(self, tokens: Sequence[int], max_chain: int = MAX_CHAIN) -> None:
        """tokens: what is there already must never change; negative ones match nothing and follow nothing."""
        self.tokens = tokens
        self.max_chain = max_chain
        self._chains = tuple(_Chains(size) for size in SIZES)

    def __len__(self) -> int:
        """Tokens learned."""
        return len(self._chains[0])

    def learn(self, end: int | None = None) -> None:
        """Take in the tokens before `end`, or all there are."""
        end = len(self.tokens) if end is None else end
        for chains in self._chains:
            for _ in range(len(chains), end):
                chains.append(self.tokens)

    def find(self, suffix: Sequence[int]) -> Match | None:
        """The longest match of the suffix's end, the latest of equally long ones; None below SIZES[-1] tokens."""
        for chains in self._chains:
            best: Match | None = None
            for position in chains.candidates(suffix, self.max_chain):
                if best is not None and best.length == min(len(suffix), MAX_MATCH):
                    break
                length = self._agreeing(suffix, position) if self.tokens[position] >= 0 else 0
                if length >= chains.size and (best is None or length > best.length):
                    best = Match(position, length)
            if best is not None:
                return best
        return None

    def _agreeing(self, suffix: Sequence[int], position: int) -> int:
        """How many tokens before `position` are the suffix's last ones."""
        tokens, last = self.tokens, len(suffix) - 1
        most = min(len(suffix), position, MAX_MATCH)
        length = 0
        while length < most and tokens[position - 1 - length] == suffix[last - length] >= 0:
            length += 1
        return length
