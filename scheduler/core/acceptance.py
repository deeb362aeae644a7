"""How likely drafts are to be right: by position, by temperature, by sequence.

Position j counts only where the positions before it were right, so the numbers are conditional, and a draft token's
*survival*, the probability that it becomes output, is their product:

    draft      d1      d2      d3              m1 = P(d1 right)
    verdict    right   right   wrong           m2 = P(d2 right | d1 right)            survival of d3 = m1·m2·m3
    counts     hit 1   hit 2   miss 3          …

A worker's *curve* m is learned from all its rows, apart for T = 0 and T > 0. A position seldom tried is taken to be
like the one before it. A sequence differs from the curve by one number, the ratio of its odds to the curve's

    r = (hits + s) / (expected hits + s)  ÷  (misses + s) / (expected misses + s),       odds(p_j) = r · odds(m_j)

(expected: what the curve said at each trial), so that one row that copies, and one that no draft fits, are told within
few steps, whatever positions they reached. s = ROW_STRENGTH holds r near 1 while little is known. All counts decay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

FIRST_GUESS = 0.7
"""of a draft worker of which nothing is known: high enough to be tried"""
STRENGTH = 4.0
"""trials that a position's prior is worth"""
ROW_STRENGTH = 4.0
"""right tokens, and wrong ones, that a row's likeness to the others is worth"""
CURVE_MEMORY = 512.0
"""trials of a position that weigh about as much as all before them"""
ROW_MEMORY = 40.0
"""the same of a row, in steps"""
FIRST_TOKENS = 4
LIKELY = 0.6
"""a draft of more than FIRST_TOKENS goes one token beyond those that were tried and are right so often"""
SURE = 0.99
"""nothing is more certain than this, nor less than 1 - SURE"""


def survival(conditional: Sequence[float]) -> list[float]:
    """P(draft token j becomes output) of each position: products of P(right | those before it right)."""
    product = 1.0
    products = []
    for probability in conditional:
        product *= probability
        products.append(product)
    return products


def shifted(curve: Sequence[float], odds_ratio: float) -> list[float]:
    """The curve with each position's odds multiplied."""
    return [odds_ratio * m / (odds_ratio * m + 1.0 - m) for m in curve]


class AcceptanceCurve:
    """One worker's conditional acceptance by position, at one kind of temperature."""

    def __init__(self) -> None:
        self._hits: list[float] = []
        self._tries: list[float] = []

    def observe(self, drafted: int, accepted: int, count: int = 1) -> None:
        """Drafts of `drafted` tokens were verified in `count` rows, and the first `accepted` of each were right."""
        tried = min(drafted, accepted + 1)
        while len(self._tries) < tried:
            self._hits.append(0.0)
            self._tries.append(0.0)
        keep = (1.0 - 1.0 / CURVE_MEMORY) ** count
        for position in range(tried):
            self._tries[position] = self._tries[position] * keep + count
            self._hits[position] = self._hits[position] * keep + count * (position < accepted)

    def explored(self, num_positions: int) -> list[float]:
        """The same as `conditional`, of as many of these positions as a draft should have."""
        curve = self.conditional(num_positions)
        count, most = FIRST_TOKENS, min(num_positions, len(self._tries) + 1)
        while count < most and self._tries[count - 1] >= STRENGTH and curve[count - 1] >= LIKELY:
            count += 1
        return curve[:count]

    def conditional(self, num_positions: int) -> list[float]:
        """P(position j is right | those before it are), each within [1 - SURE, SURE]."""
        before = FIRST_GUESS
        probabilities = []
        for position in range(num_positions):
            if position < len(self._tries):
                before = (self._hits[position] + STRENGTH * before) / (self._tries[position] + STRENGTH)
                before = min(SURE, max(1.0 - SURE, before))
            probabilities.append(before)
        return probabilities


@dataclass(slots=True)
class RowEvidence:
    """How a sequence's drafts fared, against what the curve had expected; decayed counts."""

    hits: float = 0.0
    misses: float = 0.0
    expected_hits: float = 0.0
    expected_misses: float = 0.0

    def observe(self, drafted: int, accepted: int, curve: Sequence[float]) -> None:
        """One verified draft; `curve` holds at least as many positions as were tried."""
        tried = min(drafted, accepted + 1)
        if not tried:
            return
        keep = 1.0 - 1.0 / ROW_MEMORY
        expected = sum(curve[:tried])
        self.hits = self.hits * keep + accepted
        self.misses = self.misses * keep + (tried - accepted)
        self.expected_hits = self.expected_hits * keep + expected
        self.expected_misses = self.expected_misses * keep + (tried - expected)

    @property
    def odds_ratio(self) -> float:
        """The sequence's odds of a right token, by the curve's."""
        right = (self.hits + ROW_STRENGTH) / (self.expected_hits + ROW_STRENGTH)
        wrong = (self.misses + ROW_STRENGTH) / (self.expected_misses + ROW_STRENGTH)
        return right / wrong


@dataclass(slots=True)
class PositionTotals:
    """Verified draft tokens since the start, by position; for people."""

    tried: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def observe(self, drafted: int, accepted: int, count: int = 1) -> None:
        """`count` verified drafts."""
        tried = min(drafted, accepted + 1)
        while len(self.tried) < tried:
            self.tried.append(0)
            self.accepted.append(0)
        for position in range(tried):
            self.tried[position] += count
            self.accepted[position] += count * (position < accepted)

    @property
    def shares(self) -> list[float]:
        """P(right | those before it are right) by position, over all."""
        return [accepted / tried for accepted, tried in zip(self.accepted, self.tried, strict=True)]
