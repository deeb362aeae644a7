"""Both proposers: what stood there before where that is likely right, the model's guess elsewhere.

    known      … the cat sat on the          matches 5 tokens     ──▶ the index copies, at once and for nothing
    known      … and a dog                   matches none, or few ──▶ the model, one token a round
    guess      copied, and the copy ended    nothing matches      ──▶ the model goes on from there, when its turn comes

A round belongs to one of the two: copies are sent without waiting for a forward pass, which the next round runs for
whoever still wants. What counts as likely is learned from what came (trust.py). Requests that ask for one of the two
get that one only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cluster.draft_news import Source
from drafting.mirror import Mirror
from drafting.ngram_proposer import NgramProposer, Run
from drafting.proposer import Proposer
from drafting.trust import Trust

MAX_JUDGED = 8
"""tokens of one commit whose predictions are checked"""


class _Said(NamedTuple):
    token_id: int
    by_model: bool


class CombinedProposer:
    """See the module's text."""

    sources = frozenset(Source)

    def __init__(self, index: NgramProposer, model: Proposer) -> None:
        self.index = index
        self.model = model
        self.name = f"{index.name}+{model.name}"
        self.trust = Trust()
        self._said: dict[Mirror, dict[int, _Said]] = {}
        """guesses that no token has come for yet, by position"""

    def extend(self, mirrors: Sequence[Mirror]) -> None:
        """See Proposer; the index's round if it has anything for anybody, else the model's."""
        copied = [self._copy(mirror) for mirror in mirrors]
        if not any(copied):
            self._guess(mirrors)

    def fork(self, branch: Mirror) -> bool:
        """See Proposer. Branches are the model's: a copy costs nothing when it is known to be needed."""
        return branch.source is not Source.NGRAM and self.model.fork(branch)

    def forget(self, mirror: Mirror) -> None:
        """See Proposer."""
        if mirror.parent is None:
            self._said.pop(mirror, None)
            self.index.forget(mirror)
        self.model.forget(mirror)

    def _copy(self, mirror: Mirror) -> bool:
        """Let the index lengthen a guess, where it may and should; whether the mirror needs no model in this round."""
        if mirror.source is Source.MODEL or mirror.parent is not None:
            return False
        self._learn(mirror)
        only = mirror.source is Source.NGRAM
        copied = False
        while mirror.wanted > 0:
            run = self.index.look_up(mirror, mirror.wanted)
            believed = [] if run is None else run.token_ids if only else self._believed(mirror, run)
            if not believed:
                mirror.exhausted = only
                return copied or only
            length = len(mirror.guess)
            mirror.guess.extend(believed)
            self._note(mirror, length, by_model=False)
            copied = True
        return copied

    def _believed(self, mirror: Mirror, run: Run) -> list[int]:
        """The copy as far as the index is to be preferred; each copied token makes the match longer by one."""
        greedy, length = mirror.temperature == 0, run.match_length
        count = 0
        while count < len(run.token_ids) and self.trust.prefers_index(greedy, length + count):
            count += 1
        return run.token_ids[:count]

    def _guess(self, mirrors: Sequence[Mirror]) -> None:
        lengths = [len(mirror.guess) for mirror in mirrors]
        self.model.extend(mirrors)
        for mirror, length in zip(mirrors, lengths, strict=True):
            if mirror.source is not Source.MODEL and mirror.parent is None:
                self._note(mirror, length, by_model=True)

    def _note(self, mirror: Mirror, length: int, *, by_model: bool) -> None:
        """The guess has grown from so many tokens to what it is."""
        said = self._said.setdefault(mirror, {})
        for position, token_id in enumerate(mirror.guess[length:], len(mirror.tokens) + length):
            said[position] = _Said(token_id, by_model)

    def _learn(self, mirror: Mirror) -> None:
        """Index the tokens that came, and see who had said so."""
        start, end = self.index.num_learned(mirror), len(mirror.tokens)
        greedy = mirror.temperature == 0
        if 0 < start < end:
            for position in range(start, min(end, start + MAX_JUDGED)):
                run = self.index.prediction(mirror)
                if run is not None:
                    right = run.token_ids[0] == mirror.tokens[position]
                    self.trust.index(greedy, run.match_length).observe(right)
                self.index.learn(mirror, position + 1)
            self._judge_model(mirror, start, end, greedy)
        self.index.learn(mirror)

    def _judge_model(self, mirror: Mirror, start: int, end: int, greedy: bool) -> None:
        said = self._said.get(mirror, {})
        for position in range(start, end):
            guessed = said.pop(position, None)
            if guessed is None:
                continue
            right = guessed.token_id == mirror.tokens[position]
            if guessed.by_model:
                self.trust.model(greedy).observe(right)
            if not right:
                said.clear()  # the rest was guessed after another token
