"""How many of the draft tokens asked for are there when their step begins, by position.

A tail comes in parts, the first of which are two tokens, and a step takes what is there. So the first tokens of a
draft are mostly there, waited for if need be, and the last only where the draft worker could guess ahead.
"""

from __future__ import annotations

MEMORY = 128.0
"""drafts asked for that weigh about as much as all before them"""
STRENGTH = 1.0
"""drafts that the prior is worth: a position is as the one before it, the first always there"""
LEAST = 0.05
"""nothing is thought to come more seldom, so that it is asked for again"""


class Availability:
    """One worker's."""

    def __init__(self) -> None:
        self._asked: list[float] = []
        self._came: list[float] = []

    def observe(self, asked: int, came: int) -> None:
        """A row asked for a draft of so many tokens, and got so many of them."""
        while len(self._asked) < asked:
            self._asked.append(0.0)
            self._came.append(0.0)
        keep = 1.0 - 1.0 / MEMORY
        for position in range(asked):
            self._asked[position] = self._asked[position] * keep + 1.0
            self._came[position] = self._came[position] * keep + (position < came)

    def shares(self, num_positions: int) -> list[float]:
        """Of the tokens asked for at each position, those that were there in time; falls weakly."""
        before = 1.0
        shares = []
        for position in range(num_positions):
            if position < len(self._asked):
                share = (self._came[position] + STRENGTH * before) / (self._asked[position] + STRENGTH)
                before = max(LEAST, min(before, share))
            shares.append(before)
        return shares
