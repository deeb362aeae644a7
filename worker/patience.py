"""How long a step should wait for drafts that are on their way: δ.

A row whose tail comes in time emits A tokens more than it would, A being what drafts bring on average. A wait of δ
costs what the whole batch makes in that time, Θ tokens a second, and the draft's own verification costs some, too. So δ
is the wait with the highest

    Σ P_i(tail comes within δ | not yet) · (A_i − Θ · v_i)   −   Θ · δ             over the rows i without a tail

and 0 where nothing is above 0: with many rows, each of them waits for the few that are late. P is the share of the
latest late tails that took no longer, among those that took longer than row i has waited already; tails that never came
count as longer than any.

    P │              ┌────────        the sum can be highest only where P rises, so only those δ are looked at
      │      ┌───────┘
      │  ┌───┘
      └──┴───────────────────── δ

What is known of latencies comes from tails that were there in time to be seen, so after a run of vain waits nothing
would ever be waited for again, whatever becomes of the draft worker. Therefore a step waits now and then although
nothing speaks for it (`Exploration`), and has SHARE of the steps' time for what that costs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import isfinite
from typing import NamedTuple

LONGEST_S = 0.05
"""no step waits longer, whatever is expected"""
FIRST_ACCEPTED = 1.0
"""tokens that a draft is thought to bring before one has come"""
MEMORY = 24.0
"""steps, and drafts, that weigh about as much as all before them"""
FEW = 4
"""latencies; with fewer nothing is known of them, and FIRST_LATENCY_S stands for them"""
FIRST_LATENCY_S = 0.004
SHARE = 0.01
"""of the time of steps that may draft, for exploratory waits in vain"""
FIRST_GAP = 64
"""steps without a wait before the first exploratory one; twice as many after each that was in vain"""
LONGEST_GAP = 2048


class Late(NamedTuple):
    """A row without a tail."""

    waited_s: float
    """since its draft worker was told what it owes one for"""
    gain: float
    """tokens that a tail brings, less what its verification costs"""


def wait_s(
    late: Sequence[Late], latencies: Sequence[float], tokens_per_s: float, longest_s: float = LONGEST_S
) -> float:
    """δ; see the module's text. `latencies`: seconds, of late tails, infinite for those that never came."""
    if not late or longest_s <= 0:
        return 0.0
    known = sorted(latencies)
    if len(known) < FEW:
        known = sorted([*known, *[FIRST_LATENCY_S] * (FEW - len(known))])
    groups: dict[float, float] = {}
    for row in late:
        groups[row.waited_s] = groups.get(row.waited_s, 0.0) + max(0.0, row.gain)
    best, best_s = 0.0, 0.0
    for waited_s in groups:
        for latency in known[bisect_right(known, waited_s) :]:
            delta = latency - waited_s
            if not isfinite(delta) or delta > longest_s:
                break
            worth = sum(gain * _arrived(known, waited, delta) for waited, gain in groups.items())
            if worth - tokens_per_s * delta > best:
                best, best_s = worth - tokens_per_s * delta, delta
    return best_s


def _arrived(known: list[float], waited_s: float, delta_s: float) -> float:
    """P(a tail comes within delta_s | it hasn't in waited_s); `known` is sorted."""
    first = bisect_right(known, waited_s)
    if first == len(known):
        return 0.0
    # A hair's breadth, since waited + (latency - waited) may fall short of the latency.
    return (bisect_right(known, waited_s + delta_s + 1e-9) - first) / (len(known) - first)


class Exploration:
    """Waits that nothing speaks for, in case tails come faster than they used to.

    Each is as long as could pay at all, Σ A_i / Θ, and ends when the tails are there. One that was in vain costs, and
    is only begun where SHARE of the time since has paid for its full length; after it the gap to the next one doubles.
    After one that was not the next step explores as well, until what was learned suffices.
    """

    def __init__(self) -> None:
        self._credit_s = 0.0
        self._steps = 0
        self._gap = FIRST_GAP

    def step(self, duration_s: float, longest_s: float = LONGEST_S) -> None:
        """A step that may draft has taken so long."""
        if isfinite(duration_s) and duration_s > 0:
            self._credit_s = min(longest_s, self._credit_s + SHARE * duration_s)
        self._steps += 1

    def wait_s(self, late: Sequence[Late], tokens_per_s: float, longest_s: float = LONGEST_S) -> float:
        """How long a step waits for which `wait_s` found nothing worthwhile; mostly 0."""
        if self._steps < self._gap or tokens_per_s <= 0:
            return 0.0
        delta_s = min(longest_s, sum(max(0.0, row.gain) for row in late) / tokens_per_s)
        return delta_s if delta_s <= self._credit_s else 0.0

    def explored(self, waited_s: float, came: bool) -> None:
        """An exploratory wait is over."""
        self._steps = 0
        if came:
            self._gap = 1
        else:
            self._credit_s -= waited_s
            self._gap = min(LONGEST_GAP, 2 * self._gap)

    def waited(self) -> None:
        """A step has waited because it pays, which tells as much."""
        self._steps = 0


class Pace:
    """What steps make of their time, and what drafts bring: Θ and A, from the latest steps."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0
        self._drafts = self._accepted = 0.0

    def observe(self, num_tokens: int, duration_s: float, num_drafts: int, num_accepted: int) -> None:
        """A step of decode rows emitted so many tokens; so many of its rows had drafts, of which tokens were right."""
        if num_tokens < 1 or duration_s <= 0:
            return
        keep = 1.0 - 1.0 / MEMORY
        self._tokens = self._tokens * keep + num_tokens
        self._seconds = self._seconds * keep + duration_s
        if num_drafts:
            keep **= num_drafts
            self._drafts = self._drafts * keep + num_drafts
            self._accepted = self._accepted * keep + num_accepted

    @property
    def tokens_per_s(self) -> float:
        """Θ; 0 before the first step."""
        return self._tokens / self._seconds if self._seconds else 0.0

    @property
    def accepted(self) -> float:
        """A: tokens that a draft brings."""
        return (self._accepted + 2 * FIRST_ACCEPTED) / (self._drafts + 2)
