"""What is known of one sequence's drafts, and what it may still draft."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from scheduler.core.acceptance import RowEvidence

if TYPE_CHECKING:
    from scheduler.core.sequence import Sequence

ROW_WAIT = 16
"""steps without a budget while others have one, before a row is probed; twice as many after each probe in vain"""
LONGEST_ROW_WAIT = 256
READING_STEPS = 2
"""with a budget, in which a draft worker may still be reading the sequence, if no draft comes before"""


@dataclass(slots=True)
class RowDrafts:
    """What drafts have been for one sequence; goes with it from worker to worker."""

    evidence: RowEvidence = field(default_factory=RowEvidence)
    waited: int = 0
    """steps without a budget while others had one"""
    wait: int = ROW_WAIT
    failed: int = 0
    """drafts of this probe that were wrong"""
    unanswered: int = 0
    """steps with a budget since it had none, before the first draft came"""

    def end_probe(self, right: bool) -> None:
        """The row's probe is over: the next comes at once where it was right, else later than the last."""
        self.failed = 0
        if right:
            self.waited = self.wait = ROW_WAIT
        else:
            self.waited, self.wait = 0, min(2 * self.wait, LONGEST_ROW_WAIT)


def may_be_read(sequence: Sequence, k: int) -> bool:
    """Whether a draft worker may be reading a row with such a budget; what that costs isn't the draft's."""
    return k > 0 and (sequence.drafts is None or sequence.drafts.unanswered < READING_STEPS)


def tokens_left(sequence: Sequence) -> int:
    """Tokens that a row may have yet behind the next one."""
    return sequence.limit - len(sequence.token_ids) - sequence.sampling_in_flight - 1  # type: ignore[operator]


def most_drafted(sequence: Sequence, max_draft_tokens: int) -> int:
    """Draft tokens that a row may have at most: no token may be its last but one, and its request may want fewer."""
    left = tokens_left(sequence)
    wanted = sequence.request.spec.max_draft_tokens
    return min(left, max_draft_tokens) if wanted is None else min(left, max_draft_tokens, wanted)
