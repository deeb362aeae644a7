"""One slot that a draft worker follows: what it was told, and the tails it sent.

    told      |===prompt===|==output==|         length `told`; its hashes are kept for the last HASHES_KEPT lengths
    tail                base |~~~~guess~~~~|    usable iff its generation is the slot's, hash(base) is ours and the
    known     |===prompt===|==output==|         guess agrees with what was committed beyond base; the rest is the draft

There are several tails at a time: the likeliest continuation and branches, which differ from it from some token on, and
older ones that still agree. A tail serves until MAX_COMMITS have come since it did, so that the third step after a
draft worker's death has none, whether or not that was noticed; a live one has long sent another. Where SILENT_COMMITS
in a row went unanswered, none is waited for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b

from cluster.draft_news import Open, Tail
from engine.prefix_hash import extend
from worker.sequences import Sequence

HASHES_KEPT = 128
MAX_TAILS = 8
MAX_COMMITS = 2
SILENT_COMMITS = 2


@dataclass(slots=True)
class Followed:
    """A slot that the draft worker follows, or will once its opening is sent."""

    generation: int
    max_draft_tokens: int
    first_hashed: int
    """hashes[i] is the prefix hash at length first_hashed + i"""
    hashes: list[int]
    opening: Open | None
    """not sent yet; later commits go into it"""
    pending_base: int = 0
    pending: list[int] = field(default_factory=list)
    heard: int = 0
    """longest base of a tail that came; before one, the length at the opening"""
    idle_rows: int = 0
    silent_commits: int = 0
    """commits since a tail came"""
    told_s: float = 0.0
    """when the opening was sent, or the last commit noted"""
    declined: int = 0
    """what was told when it answered that no tail comes; 0: it hasn't"""
    answered: bool = False
    """whether it has said anything since the opening, which it has to read first: that takes longer than a tail does"""
    awaited: bool = False
    """a step has waited since, and no tail has come yet"""
    tails: list[Tail] = field(default_factory=list)
    """in the order in which they came"""
    ages: dict[int, int] = field(default_factory=dict)
    """commits since a tail came, by its id()"""

    @property
    def told(self) -> int:
        return self.first_hashed + len(self.hashes) - 1

    def learn(self, token_ids: list[int]) -> None:
        """Extend the hashes; keep only the last."""
        value = self.hashes[-1]
        for token_id in token_ids:
            value = extend(value, token_id)
            self.hashes.append(value)
        if len(self.hashes) > 2 * HASHES_KEPT:
            dropped = len(self.hashes) - HASHES_KEPT
            del self.hashes[:dropped]
            self.first_hashed += dropped

    def rest(self, tokens: list[int], limit: int) -> list[int]:
        """The first `limit` tokens of what a tail says after `tokens`; tails that disagree with them are dropped.

        The tail with the longest base counts, of equal ones the first, unless another one reaches further.
        """
        known = len(tokens)
        self.tails = [tail for tail in self.tails if _may_serve(tail, tokens)]
        best: list[int] = []
        for tail in sorted(self.tails, key=lambda tail: -tail.base):
            offset = known - tail.base
            if offset >= 0 and min(len(tail.token_ids) - offset, limit) > len(best):
                best = tail.token_ids[offset : offset + limit]
        return best

    def note_commit(self) -> None:
        """Tokens were committed: every tail is a step older."""
        self.silent_commits += 1
        self.tails = [tail for tail in self.tails if self.ages[id(tail)] + 1 < MAX_COMMITS]
        self.ages = {id(tail): self.ages[id(tail)] + 1 for tail in self.tails}

    @property
    def owes(self) -> bool:
        """Whether a tail may come: not before the opening is sent, nor from one that is silent or said no."""
        return self.opening is None and self.silent_commits < SILENT_COMMITS and self.declined != self.told

    def keep(self, tail: Tail) -> None:
        """A tail that only lengthens another replaces it; beyond MAX_TAILS the oldest goes."""
        self.answered = True
        if not tail.token_ids:
            self.declined = tail.base
        self.tails = [
            one for one in self.tails if one.base != tail.base or one.token_ids != tail.token_ids[: len(one.token_ids)]
        ]
        if tail.token_ids:
            self.tails.append(tail)
            self.ages[id(tail)] = 0
        del self.tails[:-MAX_TAILS]

    def hash_at(self, length: int) -> int | None:
        index = length - self.first_hashed
        return self.hashes[index] if 0 <= index < len(self.hashes) else None


def opening_of(sequence: Sequence, generation: int, max_draft_tokens: int) -> Open:
    """All that is known of a sequence, for who is to guess; its list of tokens is its own."""
    return Open(
        sequence.slot,
        generation,
        list(sequence.tokens),
        sequence.num_prompt,
        sequence.choice_seed,
        sequence.params.temperature,
        max_draft_tokens,
        sequence.draft_source,
        _tenant(sequence.cache_salt),
    )


def _tenant(cache_salt: str) -> bytes:
    """Sequences with the same salt share cached prefixes, and what is drafted from; the salt itself goes nowhere."""
    return blake2b(cache_salt.encode(), digest_size=16).digest() if cache_salt else b""


def _may_serve(tail: Tail, tokens: list[int]) -> bool:
    """Whether something of a tail is left behind `tokens`, now or, where it is ahead of them, later."""
    offset = len(tokens) - tail.base
    if offset < 0:
        return True
    return offset < len(tail.token_ids) and tokens[tail.base :] == tail.token_ids[:offset]
