"""Which other continuations are worth guessing while the target verifies the likeliest one.

The target will reject the guess at index i, if it reaches it, with 1 - p_i; then the runner-up r_i is what it puts
there with q_i, and whoever has guessed on from r_i has the next tail ready without a round trip:

    worth of a branch at i  =  p_0 · … · p_{i-1} · (1 - p_i) · q_i

p and q are learned from commits, by the margin with which the guess won over the runner-up: a guess that only just won
is likely wrong, and then the runner-up likely right. At T > 0 the margin contains the noise, which the draft worker
shares with the target, so it knows the coin flips.
"""

from __future__ import annotations

from bisect import bisect_right

from drafting.mirror import Mirror

EDGES = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""margins at which the next bin begins"""
RIGHT_PRIORS = (0.35, 0.4, 0.45, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
SECOND_PRIOR = 0.4
UNKNOWN_RIGHT = 0.8
"""of a guess that came without a runner-up (a copy)"""
COPIED_RIGHT = 0.95
"""the same where it decides how far to guess on: a copy costs nothing"""
STRENGTH = 8.0
"""trials that a prior is worth"""
MEMORY = 512.0
"""trials of a bin that weigh about as much as all before them"""
MIN_WORTH = 0.04
"""branches less likely to be needed than this cost more than they bring"""


class Odds:
    """How often guesses, and runner-ups of wrong ones, were right, by margin."""

    def __init__(self) -> None:
        bins = len(EDGES) + 1
        self._tried = [0.0] * bins
        self._right = [0.0] * bins
        self._second = [0.0] * bins

    def observe(self, margin: float, right: bool, second: bool) -> None:
        """A guess met its token: it was right, or its runner-up was."""
        at = bisect_right(EDGES, margin)
        keep = 1.0 - 1.0 / MEMORY
        self._tried[at] = self._tried[at] * keep + 1.0
        self._right[at] = self._right[at] * keep + right
        self._second[at] = self._second[at] * keep + second

    def right(self, margin: float) -> float:
        """P(the guess is right)."""
        at = bisect_right(EDGES, margin)
        return (self._right[at] + STRENGTH * RIGHT_PRIORS[at]) / (self._tried[at] + STRENGTH)

    def second(self, margin: float) -> float:
        """P(the runner-up is right | the guess is wrong)."""
        at = bisect_right(EDGES, margin)
        wrong = self._tried[at] - self._right[at]
        return (self._second[at] + STRENGTH * SECOND_PRIOR) / (wrong + STRENGTH)

    def reach(self, mirror: Mirror) -> float:
        """P(all of the mirror's guess is right)."""
        value = 1.0
        for position in range(len(mirror.tokens), mirror.known):
            runner_up = mirror.runner_ups.get(position)
            value *= COPIED_RIGHT if runner_up is None else self.right(runner_up.margin)
        return value

    def learn(self, mirror: Mirror, token_ids: list[int]) -> None:
        """Tokens are about to be committed to a mirror."""
        for position, (guessed, token_id) in enumerate(
            zip(mirror.guess, token_ids, strict=False), start=len(mirror.tokens)
        ):
            runner_up = mirror.runner_ups.get(position)
            if runner_up is not None:
                self.observe(runner_up.margin, guessed == token_id, runner_up.token_id == token_id)
            if guessed != token_id:
                return


def best_forks(mirror: Mirror, odds: Odds, count: int) -> list[tuple[int, int]]:
    """(index of the guess, token to stand there instead) of at most `count` new branches, the worthiest first."""
    taken = {branch.fork_at for branch in mirror.branches}
    found: list[tuple[float, int, int]] = []
    reached = 1.0
    for index in range(min(len(mirror.guess), mirror.max_draft + 1)):
        runner_up = mirror.runner_ups.get(len(mirror.tokens) + index)
        if runner_up is None:
            reached *= UNKNOWN_RIGHT
            continue
        right = odds.right(runner_up.margin)
        worth = reached * (1.0 - right) * odds.second(runner_up.margin)
        if worth >= max(MIN_WORTH, mirror.worth.ahead) and index not in taken:
            found.append((worth, index, runner_up.token_id))
        reached *= right
    found.sort(key=lambda one: (-one[0], one[1]))
    return [(index, token_id) for _, index, token_id in found[: max(0, count - len(taken))]]
