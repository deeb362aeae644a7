"""How many tokens to draft for each row of a step.

A step of n model tokens that is expected to make N output tokens in T(n) seconds is worth N / T(n). A plain row adds
one to both. A draft token that becomes output with probability s adds s to N and one to n, so it pays while

    s > N · ΔT / T                                                               (Liu et al., arXiv 2406.14066)

Whatever T looks like, the best set of m draft tokens is that of the m likeliest: they come in the order of survival,
which keeps each row's in order, too. T may have plateaus (tiles), where one token doesn't pay and four do; so all m are
compared, not only up to the first that doesn't pay. With a convex T that is the same.

Drafts don't always come in time: of the tokens asked for at a position, a share `availability` does. The rest costs
nothing, and brings nothing. The first tokens of a draft come more often than the last, so a draft that is mostly there
by half is asked for by half.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.core.step_time import Curve


@dataclass(frozen=True, slots=True)
class Load:
    """What a step computes before any draft, and what drafts may add."""

    num_rows: int
    """decode rows; each makes one token"""
    num_other_tokens: int = 0
    """prompt tokens computed beside them"""
    max_draft_tokens: int = 64
    """of all rows together"""


@dataclass(frozen=True, slots=True)
class Budget:
    """k of each row, and what the choice is expected to bring."""

    drafts: list[int]
    gain: float
    """expected tokens per second by those of the plain step; 1 if nothing is drafted, never less"""

    def __bool__(self) -> bool:
        return self.gain > 1.0


def choose(
    survivals: Sequence[Sequence[float]],
    load: Load,
    plain: Curve,
    drafting: Curve,
    availability: Sequence[Sequence[float]] = (),
    margin: float = 0.0,
) -> Budget:
    """k per row for the most expected tokens per second, or none where that gains no more than `margin`.

    `survivals`: per row, falling weakly, as long as the row may draft; rows that are in the load alone need no entry.
    `plain` and `drafting`: T(n) of steps without and with drafts. `availability`, per row and position, falls weakly,
    too; positions beyond its last are like that. Empty: all drafts come.
    """
    num_tokens = load.num_rows + load.num_other_tokens
    nothing = Budget([0] * len(survivals), 1.0)
    if not load.num_rows or load.max_draft_tokens < 1:
        return nothing
    candidates = [(-s, j, row) for row, survival in enumerate(survivals) for j, s in enumerate(survival)]
    candidates.sort()
    best, best_count = (1.0 + margin) * load.num_rows / plain.at(num_tokens), 0
    expected, size = float(load.num_rows), float(num_tokens)
    for count, (minus_s, position, row) in enumerate(candidates[: load.max_draft_tokens], 1):
        comes = availability[row][min(position, len(availability[row]) - 1)] if availability else 1.0
        expected -= comes * minus_s
        size += comes
        rate = expected / drafting.at(size)
        if rate > best:
            best, best_count = rate, count
    if not best_count:
        return nothing
    drafts = nothing.drafts
    for _, _, row in candidates[:best_count]:
        drafts[row] += 1
    return Budget(drafts, best * plain.at(num_tokens) / load.num_rows)
