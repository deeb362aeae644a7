"""The port of proposers: who guesses how mirrored sequences go on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cluster.draft_news import Source
from drafting.mirror import Mirror


class Proposer(Protocol):
    """A model (model_proposer.py) or an n-gram index (ngram_proposer.py). One thread owns it."""

    @property
    def name(self) -> str:
        """What the scheduler is told."""
        ...

    @property
    def sources(self) -> frozenset[Source]:
        """Which wishes of requests it serves; mirrors with another one never come."""
        ...

    def extend(self, mirrors: Sequence[Mirror]) -> None:
        """One round: lengthen the guesses of these mirrors, all of which want it, or mark them exhausted.

        A mirror may be left as it is when its turn needs more rounds (a long prompt), but some mirror always moves on.
        """
        ...

    def fork(self, branch: Mirror) -> bool:
        """Take in a branch (see mirror.py) that is about to join its parent's; whether it can be guessed for.

        From then on it comes to `extend` and `forget` like any mirror.
        """
        ...

    def forget(self, mirror: Mirror) -> None:
        """A mirror is no more; give back what is held for it and for its branches, which it loses."""
        ...
