"""Rounds of a proposer over mirrors, and what becomes of one that fails: it costs its mirrors, and too many end all."""

from __future__ import annotations

import logging

from cluster.logs import event
from drafting.mirror import Mirror
from drafting.mirrors import MirrorTable
from drafting.proposer import Proposer

logger = logging.getLogger(__name__)

MAX_FAILURES = 3
"""in a row"""


class Rounds:
    """Of one proposer. Not thread-safe."""

    def __init__(self, proposer: Proposer, mirrors: MirrorTable) -> None:
        self.proposer = proposer
        self.mirrors = mirrors
        self.num_guessed = 0
        self._failures = 0

    def run(self, hungry: list[Mirror]) -> list[Mirror]:
        """One round; the mirrors that it cost, if it failed. Raises what the proposer raised MAX_FAILURES times in a
        row.
        """
        before = sum(len(mirror.guess) for mirror in hungry)
        try:
            self.proposer.extend(hungry)
        except Exception as error:
            self._failures += 1
            event(logger, "a round failed", level=logging.ERROR, error=error, mirrors=len(hungry))
            if self._failures >= MAX_FAILURES:
                raise
            failed = list(dict.fromkeys(mirror.parent or mirror for mirror in hungry))
            for mirror in failed:
                self.mirrors.drop(mirror)
            self.forget(failed)
            return failed
        self._failures = 0
        for mirror in hungry:
            mirror.reach = self.mirrors.odds.reach(mirror)
        self.num_guessed += sum(len(mirror.guess) for mirror in hungry) - before
        return []

    def forget(self, gone: list[Mirror]) -> None:
        """Mirrors are no more; the proposer gives back what it holds for them."""
        for mirror in gone:
            self.proposer.forget(mirror)
