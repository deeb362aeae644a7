"""Drafts that a worker guesses itself, between its steps, for a draft model that would compute on the target's cores.

    step thread    … settle n │ commit │ guess, guess │ verify n + 1 ──────────▶ …
                                └ the mirrors of its rows, and one round for all of them after the other

A draft worker on those cores only takes turns with the target, and pays for each turn with messages and two processes
waking each other; here a turn is a call. Who guesses, and how, is the same: mirrors and proposers of `drafting`, with
nothing ahead of the step that is about to begin.

A step guesses no further than its rows' budgets, nor where a guess is unlikely to be of use, and reads at most one
round of prompts, so that a long one holds up its neighbours for some milliseconds a step and no longer. A round that
fails costs its mirrors, whose sequences decode plainly from there; too many in a row end all drafting.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq

from cluster.draft_news import Source
from cluster.logs import event
from drafting.mirror import BETWEEN_STEPS, Mirror
from drafting.mirrors import MirrorTable
from drafting.model_proposer import MANY_TOKENS
from drafting.proposer import Proposer
from drafting.rounds import Rounds
from worker.followed import opening_of
from worker.sequences import Sequence
from worker.steps import StepOutcome

logger = logging.getLogger(__name__)

_LONGEST = 64
_STREAM = 0


class OwnDrafts:
    """See the module's text; implements `executor.Drafting` and `attachment.Drafts`. The step thread owns it."""

    def __init__(
        self,
        proposer: Proposer,
        max_sequences: int,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """on_change: called, on the step thread, when there will be no drafts any more."""
        self.drafting = True
        self.longest_draft = 0
        """of no account here: a budget that rises costs nothing"""
        self.mirrors = MirrorTable(max_sequences, _LONGEST, proposer.sources)
        self.mirrors.begin_stream(_STREAM, BETWEEN_STEPS)
        self.rounds = Rounds(proposer, self.mirrors)
        self._on_change = on_change
        self._generations = itertools.count(1)
        self._refused: set[int] = set()
        """slots whose sequences get no drafts"""

    # ------------------------------------------------------------------------------------- from the executor's thread

    def tail(self, slot: int, tokens: list[int], limit: int) -> list[int]:
        """See executor.Drafting."""
        mirror = self.mirrors.get(_STREAM, slot)
        return mirror.guess[:limit] if mirror is not None and len(mirror.tokens) == len(tokens) else []

    def follow(self, sequence: Sequence, max_draft_tokens: int) -> None:
        """See executor.Drafting. Of a sequence that may not draft nothing is noted until it may."""
        if max_draft_tokens > 0:
            self._mirror(sequence, max_draft_tokens)

    def forget(self, slot: int) -> None:
        """See executor.Drafting."""
        self._refused.discard(slot)
        mirror = self.mirrors.get(_STREAM, slot)
        if mirror is not None:
            self.mirrors.drop(mirror)
            self.rounds.forget([mirror])

    def flush(self) -> None:
        """See executor.Drafting: nothing goes anywhere."""
        return

    def wait(self, rows: Seq[tuple[Sequence, int]], before: Callable[[], None]) -> None:
        """See executor.Drafting: guess what the step is to verify."""
        followed = []
        for sequence, max_draft in rows:
            most = min(max_draft, sequence.tokens_left - 1)
            mirror = self._mirror(sequence, most) if most > 0 else None
            if mirror is not None:
                followed.append(mirror)
        told = False
        while hungry := [mirror for mirror in followed if mirror.urgent]:
            # Reading a prompt takes long enough for the last step's outcome to be told before.
            if not told and self._num_unread(hungry) > MANY_TOKENS:
                before()
                told = True
            if not self._guess(hungry):
                break

    def learn(self, outcome: StepOutcome) -> None:
        """See executor.Drafting: the mirrors see what came of their guesses."""
        return

    def _mirror(self, sequence: Sequence, max_draft_tokens: int) -> Mirror | None:
        """The sequence's mirror as of now; None where it gets no drafts."""
        slot, tokens = sequence.slot, sequence.tokens
        if slot in self._refused or not self.drafting:
            return None
        mirror = self.mirrors.get(_STREAM, slot)
        if mirror is None:
            mirror = self._open(sequence, max_draft_tokens)
        elif len(mirror.tokens) < len(tokens):
            self.rounds.forget(self.mirrors.commit(mirror, tokens[len(mirror.tokens) :]))
        if mirror is not None:
            mirror.max_draft = min(max_draft_tokens, _LONGEST)
        return mirror

    def _open(self, sequence: Sequence, max_draft_tokens: int) -> Mirror | None:
        self.mirrors.open(_STREAM, opening_of(sequence, next(self._generations), max_draft_tokens))
        mirror = self.mirrors.get(_STREAM, sequence.slot)
        if mirror is None:
            self._refused.add(sequence.slot)
        return mirror

    def _guess(self, hungry: list[Mirror]) -> bool:
        """One round; whether another may bring more in this step."""
        before = self.rounds.num_guessed
        try:
            failed = self.rounds.run(hungry)
        except Exception as error:
            event(logger, "no drafts any more", level=logging.ERROR, error=error)
            self.drafting = False
            self._on_change()
            return False
        if failed:
            self._refused.update(mirror.slot for mirror in failed)
            return False
        return self.rounds.num_guessed > before or any(mirror.exhausted for mirror in hungry)

    def _num_unread(self, mirrors: list[Mirror]) -> int:
        """Tokens that a model has yet to read; an index takes no time worth speaking of."""
        if Source.MODEL not in self.rounds.proposer.sources:
            return 0
        return sum(mirror.known - mirror.computed for mirror in mirrors if mirror.source is not Source.NGRAM)

    # ----------------------------------------------------------------------------------------------- on the event loop

    def set_addresses(self, addresses: Seq[str]) -> None:
        """See attachment.Drafts: draft workers aren't asked."""
        return
