"""How long a step should wait for drafts that are on their way: δ.

A row whose tail comes in time emits A tokens more than it would, A being what late drafts bring on average; they are
shorter than others, since a step waits for the first of a tail only. A wait of δ costs what the whole batch makes in
that time, Θ tokens a second, and the draft's own verification costs some, too. So δ is the wait with the highest

    Σ P_i(tail comes within δ | not yet) · (A_i − Θ · v_i)   −   Θ · δ             over the rows i without a tail

and 0 where nothing is above 0: with many rows, each of them waits for the few that are late. P is the share of the
latest late tails from the row's own draft worker that took no longer, among those that took longer than row i has
waited already; tails that never came count as longer than any.

On cores that a draft worker shares with the target a wait loses less. What the draft worker does in it, it does in
any case, and beside a step it takes the time from that; so only LOST_ON_SHARED_CORES of Θ · δ counts.

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
FIRST_DRAFTED = 2.0
"""tokens that it is thought to have"""
LOST_ON_SHARED_CORES = 0.5
"""of a wait for a draft worker there: the messages' share"""
MEMORY = 24.0
"""steps that weigh about as much as all before them"""
LATE_MEMORY = 64.0
"""late drafts that do: were one bad run enough to end all waits, little would be learned of what they bring"""
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
    latencies: Sequence[float]
    """seconds, of late tails from its draft worker, infinite for those that never came; rows of one have the same"""


def wait_s(late: Sequence[Late], tokens_per_s: float, longest_s: float = LONGEST_S) -> float:
    """δ; see the module's text."""
    if not late or longest_s <= 0:
        return 0.0
    of_source = {id(row.latencies): _known(row.latencies) for row in late}
    groups: dict[tuple[int, float], float] = {}
    for row in late:
        group = id(row.latencies), row.waited_s
        groups[group] = groups.get(group, 0.0) + max(0.0, row.gain)
    best, best_s = 0.0, 0.0
    for source, waited_s in groups:
        known = of_source[source]
        for latency in known[bisect_right(known, waited_s) :]:
            delta = latency - waited_s
            if not isfinite(delta) or delta > longest_s:
                break
            worth = sum(gain * _arrived(of_source[one], waited, delta) for (one, waited), gain in groups.items())
            if worth - tokens_per_s * delta > best:
                best, best_s = worth - tokens_per_s * delta, delta
    return best_s


def _known(latencies: Sequence[float]) -> list[float]:
    """Sorted, and enough of them."""
    return sorted([*latencies, *[FIRST_LATENCY_S] * (FEW - len(latencies))])


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
    """What steps make of their time, and what drafts bring that they waited for: Θ, A, and their tokens."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0
        self._drafts = self._drafted = self._accepted = 0.0

    def observe(self, num_tokens: int, duration_s: float) -> None:
        """A step of decode rows, some of which may draft, emitted so many tokens."""
        if num_tokens < 1 or duration_s <= 0:
            return
        keep = 1.0 - 1.0 / MEMORY
        self._tokens = self._tokens * keep + num_tokens
        self._seconds = self._seconds * keep + duration_s

    def observe_late(self, num_drafts: int, num_drafted: int, num_accepted: int) -> None:
        """So many rows had drafts that were waited for, of so many tokens together."""
        keep = (1.0 - 1.0 / LATE_MEMORY) ** num_drafts
        self._drafts = self._drafts * keep + num_drafts
        self._drafted = self._drafted * keep + num_drafted
        self._accepted = self._accepted * keep + num_accepted

    @property
    def tokens_per_s(self) -> float:
        """Θ; 0 before the first step."""
        return self._tokens / self._seconds if self._seconds else 0.0

    @property
    def accepted(self) -> float:
        """A: tokens that a draft brings that was waited for."""
        return (self._accepted + 2 * FIRST_ACCEPTED) / (self._drafts + 2)

    @property
    def drafted(self) -> float:
        """Tokens of such a draft."""
        return (self._drafted + 2 * FIRST_DRAFTED) / (self._drafts + 2)
