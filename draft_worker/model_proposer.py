"""Guesses with a small model: any engine, batched over the mirrors of all workers.

At output index i the guess is argmax over the target's ids v of  log q(v) / T + g(seed, i, v),  with the target's own
noise g: where q is near the target's p, so are the two winners, also at T > 0. It is the sampler that the target uses.

KV is a cache of what can be recomputed. Each mirror holds blocks for its own tokens only; when the pool is short, the
mirrors that were used least recently lose theirs and are fed anew when their turn comes. A branch shares the full
blocks before its fork with its mirror and computes the few tokens between them and the fork again, in blocks of its
own; it takes only blocks that are free, and is the first to lose them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch

from cluster.draft_news import Source
from draft_worker.mirror import Mirror, RunnerUp
from engine.batch import Batch, Engine, pad_tables
from engine.noise import gumbel
from engine.sampler import SampleRow, sample
from engine.sampling_params import SamplingParams

MAX_ROUND_TOKENS = 256
"""tokens of one forward pass: a long prompt is fed over several rounds, so that it holds nobody up for long"""
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
        runner_ups: bool = False,
    ) -> None:
        """vocab_size is the target's; no id beyond it is guessed. runner_ups: note what came second, for branches."""
        self._runner_ups = runner_ups
        self.name = name
        self.sources = frozenset({Source.ANY, Source.MODEL})
        self._engine = engine
        self._info = engine.info
        self._vocab_size = min(vocab_size, self._info.vocab_size)
        self._max_round_tokens = max_round_tokens
        self._free = list(range(self._info.num_blocks - 1, -1, -1))
        self._holders: OrderedDict[Mirror, None] = OrderedDict()
        self._params: dict[float, SamplingParams] = {}

    def extend(self, mirrors: Sequence[Mirror]) -> None:
        """See Proposer; one forward pass."""
        rows = self._choose(mirrors)
        if not rows:
            return
        with torch.inference_mode():
            logits = self._engine.forward(_batch(rows, self._info.block_size, self._info.vocab_size))
            sampling = [mirror for mirror, count in rows if mirror.computed + count == mirror.known]
            logits = logits[:, : self._vocab_size]
            sample_rows = [self._sample_row(mirror) for mirror in sampling]
            token_ids = sample(logits, sample_rows).token_ids
            seconds = runner_ups(logits, sample_rows, token_ids) if self._runner_ups else [None] * len(sampling)
        for mirror, count in rows:
            mirror.computed += count
        for mirror, token_id, second in zip(sampling, token_ids, seconds, strict=True):
            if token_id is None:
                mirror.exhausted = True
                continue
            if second is not None:
                mirror.runner_ups[mirror.known] = second
            mirror.guess.append(token_id)

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

    def _sample_row(self, mirror: Mirror) -> SampleRow:
        params = self._params.get(mirror.temperature)
        if params is None:
            if len(self._params) >= 1024:
                self._params.clear()
            params = self._params[mirror.temperature] = SamplingParams(temperature=mirror.temperature)
        return SampleRow(params, mirror.seed, mirror.known - mirror.num_prompt, (), mirror.num_prompt)


def runner_ups(logits: torch.Tensor, rows: Sequence[SampleRow], winners: Sequence[int | None]) -> list[RunnerUp | None]:
    """What came second in each row of logits [L, V], which are changed; None where there is no first or second."""
    at = [index for index, token_id in enumerate(winners) if token_id is not None]
    first = torch.tensor([winners[index] for index in at], dtype=torch.int64, device=logits.device)
    where = torch.tensor(at, dtype=torch.int64, device=logits.device)
    best = logits[where, first]
    logits[where, first] = -torch.inf
    found = sample(logits, rows).token_ids
    seconds: list[RunnerUp | None] = [None] * len(rows)
    for index, of_first in zip(at, best.tolist(), strict=True):
        second, row = found[index], rows[index]
        if second is None:
            continue
        margin = of_first - float(logits[index, second])
        if row.params.temperature > 0:
            noises = gumbel(row.seed, row.output_index, [winners[index] or 0, second]).tolist()
            margin = margin / row.params.temperature + noises[0] - noises[1]
        seconds[index] = RunnerUp(second, margin)
    return seconds


def _batch(rows: Sequence[tuple[Mirror, int]], block_size: int, vocab_size: int) -> Batch:
    """The packed inputs; only rows that reach their last token want logits, of that one."""
    token_ids: list[int] = []
    positions, slots, tables, wanted = [], [], [], []
    for mirror, count in rows:
        start, end = mirror.computed, mirror.computed + count
        token_ids += [mirror.token(position) for position in range(start, end)]
        table = np.array(mirror.block_ids, np.int32)
        at = np.arange(start, end)
        positions.append(at)
        slots.append(table[at // block_size].astype(np.int64) * block_size + at % block_size)
        tables.append(table)
        if end == mirror.known:
            wanted.append(len(token_ids) - 1)
    # The target's vocabulary may be padded further than ours; such an id is a guess's loss, not an error.
    tokens = np.array(token_ids, np.int64)
    tokens[tokens >= vocab_size] = 0
    lengths = np.array([count for _, count in rows])
    return Batch(
        token_ids=tokens.astype(np.int32),
        positions=np.concatenate(positions).astype(np.int32),
        slot_mapping=np.concatenate(slots),
        query_starts=np.concatenate(([0], np.cumsum(lengths))).astype(np.int32),
        context_lens=np.array([mirror.computed + count for mirror, count in rows], np.int32),
        block_tables=pad_tables(tables),
        logit_indices=np.array(wanted, np.int64),
    )
