"""Guesses with a small model: any engine, batched over the mirrors of all workers.

At output index i the guess is argmax over the target's ids v of  log q(v) / T + g(seed, i, v),  with the target's own
noise g: where q is near the target's p, so are the two winners, also at T > 0. It is the sampler that the target uses.

KV is a cache of what can be recomputed. Each mirror holds blocks for its own tokens only; when the pool is short, the
mirrors that were used least recently lose theirs and are fed anew when their turn comes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch

from draft_worker.mirrors import Mirror, Source
from engine.batch import Batch, Engine, pad_tables
from engine.sampler import SampleRow, sample
from engine.sampling_params import SamplingParams

MAX_ROUND_TOKENS = 256
"""tokens of one forward pass: a long prompt is fed over several rounds, so that it holds nobody up for long"""


class ModelProposer:
    """See the module's text."""

    def __init__(self, engine: Engine, name: str, vocab_size: int, max_round_tokens: int = MAX_ROUND_TOKENS) -> None:
        """vocab_size is the target's; no id beyond it is guessed."""
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
            result = sample(logits[:, : self._vocab_size], [self._sample_row(mirror) for mirror in sampling])
        for mirror, count in rows:
            mirror.computed += count
        for mirror, token_id in zip(sampling, result.token_ids, strict=True):
            if token_id is None:
                mirror.exhausted = True
            else:
                mirror.guess.append(token_id)

    def forget(self, mirror: Mirror) -> None:
        """See Proposer."""
        self._holders.pop(mirror, None)
        self._free.extend(mirror.block_ids)
        mirror.block_ids = []
        mirror.computed = 0

    def check_integrity(self) -> None:
        """Free and held blocks are all there are, each once. Raises AssertionError."""
        held = [block_id for mirror in self._holders for block_id in mirror.block_ids]
        assert sorted(held + self._free) == list(range(self._info.num_blocks))

    def _choose(self, mirrors: Sequence[Mirror]) -> list[tuple[Mirror, int]]:
        """Which mirrors take part, each with the number of tokens to feed; they get their blocks."""
        left = self._max_round_tokens
        rows: list[tuple[Mirror, int]] = []
        chosen: set[Mirror] = set()
        for mirror in sorted(mirrors, key=lambda mirror: mirror.known - mirror.computed):
            if len(rows) == self._info.max_sequences or left == 0:
                break
            if mirror.known >= self._info.max_model_len or not self._reserve(mirror, chosen):
                mirror.exhausted = True
                continue
            count = min(left, mirror.known - mirror.computed)
            left -= count
            rows.append((mirror, count))
            chosen.add(mirror)
        return rows

    def _reserve(self, mirror: Mirror, chosen: set[Mirror]) -> bool:
        """Give a mirror blocks for all its tokens, at the cost of mirrors that don't take part in this round."""
        missing = -(-mirror.known // self._info.block_size) - len(mirror.block_ids)
        for victim in list(self._holders) if missing > len(self._free) else ():
            if victim is not mirror and victim not in chosen:
                self.forget(victim)
            if missing <= len(self._free):
                break
        if missing > len(self._free):
            return False
        mirror.block_ids += [self._free.pop() for _ in range(missing)]
        self._holders[mirror] = None
        self._holders.move_to_end(mirror)
        return True

    def _sample_row(self, mirror: Mirror) -> SampleRow:
        params = self._params.get(mirror.temperature)
        if params is None:
            if len(self._params) >= 1024:
                self._params.clear()
            params = self._params[mirror.temperature] = SamplingParams(temperature=mirror.temperature)
        return SampleRow(params, mirror.seed, mirror.known - mirror.num_prompt, (), mirror.num_prompt)


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
