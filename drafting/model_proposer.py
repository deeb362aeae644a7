"""Guesses with a small model: any engine, batched over the mirrors of all workers.

At output index i the guess is argmax over the target's ids v of  log q(v) / T + g(seed, i, v),  with the target's own
noise g: where q is near the target's p, so are the two winners, also at T > 0. What comes second is noted beside it,
for branches (branching.py) and for how far a guess is worth going on.

KV is a cache of what can be recomputed. Each mirror holds blocks for its own tokens only; when the pool is short, the
mirrors that were used least recently lose theirs and are fed anew when their turn comes. A branch shares the full
blocks before its fork with its mirror and computes the few tokens between them and the fork again, in blocks of its
own; it takes only blocks that are free, and is the first to lose them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate

import torch

from cluster.draft_news import Source
from drafting.mirror import Mirror, RunnerUp
from drafting.round_inputs import TokenRows, choices_of, packed
from engine.batch import Engine
from engine.guessing import Guess, GuessingEngine, best_two

MAX_ROUND_TOKENS = 256
"""tokens of one forward pass: a long prompt is fed over several rounds, so that it holds nobody up for long"""
MOST_MORE_TOKENS = 16
"""than mirrors in a round that is computed token by token"""
MANY_TOKENS = 24
"""more than these still to be fed are a prompt, or most of one"""
SHARED_PROMPT_TOKENS = 64
"""tokens of prompts in a round in which others guess"""


class ModelProposer:
    """See the module's text."""

    def __init__(
        self,
        engine: Engine,
        name: str,
        vocab_size: int,
        max_round_tokens: int = MAX_ROUND_TOKENS,
    ) -> None:
        """vocab_size is the target's; no id beyond it is guessed."""
        self.name = name
        self.sources = frozenset({Source.ANY, Source.MODEL})
        self._engine = engine
        self._info = engine.info
        self._vocab_size = min(vocab_size, self._info.vocab_size)
        self._max_round_tokens = max_round_tokens
        self._free = list(range(self._info.num_blocks - 1, -1, -1))
        self._holders: OrderedDict[Mirror, None] = OrderedDict()
        self._guessing = engine if isinstance(engine, GuessingEngine) else None
        self._token_rows = TokenRows(self._info.vocab_size)

    def extend(self, mirrors: Sequence[Mirror]) -> None:
        """See Proposer; one forward pass."""
        rows = self._choose(mirrors)
        if not rows:
            return
        guessing = [mirror for mirror, count in rows if mirror.computed + count == mirror.known]
        guesses = self._guess(rows, guessing)
        for mirror, count in rows:
            mirror.computed += count
        for mirror, guess in zip(guessing, guesses, strict=True):
            if guess.token_id is None:
                mirror.exhausted = True
                continue
            if guess.runner_up is not None:
                mirror.runner_ups[mirror.known] = RunnerUp(guess.runner_up, guess.margin)
            mirror.guess.append(guess.token_id)

    def fork(self, branch: Mirror) -> bool:
        """See Proposer."""
        parent, size = branch.parent, self._info.block_size
        assert parent is not None
        num_shared = min((branch.known - 1) // size, parent.computed // size)
        if branch.known - num_shared * size > size or not self._free:
            return False
        branch.block_ids = parent.block_ids[:num_shared]
        branch.num_shared = num_shared
        branch.computed = num_shared * size
        self._holders[branch] = None
        return True

    def forget(self, mirror: Mirror) -> None:
        """See Proposer."""
        for branch in list(mirror.branches):
            self.forget(branch)
        if mirror.parent is not None and mirror in mirror.parent.branches:
            mirror.parent.branches.remove(mirror)
        self._holders.pop(mirror, None)
        self._free.extend(mirror.block_ids[mirror.num_shared :])
        mirror.block_ids = []
        mirror.num_shared = mirror.computed = 0

    def check_integrity(self) -> None:
        """Free and held blocks are all there are, each once. Raises AssertionError."""
        held = [block_id for mirror in self._holders for block_id in mirror.block_ids[mirror.num_shared :]]
        assert sorted(held + self._free) == list(range(self._info.num_blocks))
        for mirror in self._holders:
            if mirror.parent is not None:
                assert mirror.block_ids[: mirror.num_shared] == mirror.parent.block_ids[: mirror.num_shared]

    def _guess(self, rows: list[tuple[Mirror, int]], guessing: list[Mirror]) -> list[Guess]:
        """One guess for each mirror whose last token is among those fed."""
        engine = self._guessing
        if engine is not None and engine.guesses_next and len(guessing) == len(rows):
            ends = list(accumulate(count for _, count in rows))
            # After a draft that was right to its end, its last token and the bonus are to be fed.
            if ends[-1] <= len(rows) + MOST_MORE_TOKENS:
                guesses = engine.guess_next(self._token_rows.of(rows))
                return [guesses[end - 1] for end in ends]
        batch, choices = packed(rows, self._info.block_size, self._info.vocab_size), choices_of(guessing)
        if engine is not None:
            return engine.guess(batch, choices)
        with torch.inference_mode():
            return best_two(self._engine.forward(batch)[:, : self._vocab_size], choices)

    def _choose(self, mirrors: Sequence[Mirror]) -> list[tuple[Mirror, int]]:
        """Which mirrors take part, each with the number of tokens to feed; they get their blocks."""
        left = self._max_round_tokens
        rows: list[tuple[Mirror, int]] = []
        chosen: set[Mirror] = set()
        # In the given order, save that whoever has many tokens to be fed, a prompt, holds up nobody who has few.
        for mirror in sorted(mirrors, key=lambda mirror: mirror.known - mirror.computed > MANY_TOKENS):
            if len(rows) == self._info.max_sequences or left == 0:
                break
            if mirror.parent is not None and mirror not in mirror.parent.branches:
                continue  # it has just lost its blocks to another one
            if mirror.known >= self._info.max_model_len or not self._reserve(mirror, chosen):
                mirror.exhausted = True
                continue
            count = mirror.known - mirror.computed
            if count > MANY_TOKENS and rows and rows[0][1] <= MANY_TOKENS:
                left = min(left, SHARED_PROMPT_TOKENS)
            count = min(left, count)
            left -= count
            rows.append((mirror, count))
            chosen.add(mirror)
        return rows

    def _reserve(self, mirror: Mirror, chosen: set[Mirror]) -> bool:
        """Give a mirror blocks for all its tokens, at the cost of mirrors that don't take part in this round."""
        missing = -(-mirror.known // self._info.block_size) - len(mirror.block_ids)
        for victim in self._victims() if missing > len(self._free) and mirror.parent is None else ():
            if victim is not mirror and victim not in chosen and chosen.isdisjoint(victim.branches):
                self.forget(victim)
            if missing <= len(self._free):
                break
        if missing > len(self._free):
            return False
        mirror.block_ids += [self._free.pop() for _ in range(missing)]
        self._holders[mirror] = None
        self._holders.move_to_end(mirror)
        return True

    def _victims(self) -> list[Mirror]:
        """Who loses blocks first first: branches, then whoever was used least recently."""
        return sorted(self._holders, key=lambda mirror: mirror.parent is None)
