"""Made-up sequences on a paged cache, and steps over them."""

from __future__ import annotations

import numpy as np
import torch

from engine.batch import Batch, pad_tables
from engine.kernels.ops import StepPlan
from engine.step_plan import StepPlanBuilder

Row = tuple[int, int, int]
"""sequence, first position, end"""


class Sequences:
    """Sequences of the given lengths, each with blocks for all of its tokens; blocks lie shuffled."""

    def __init__(self, lengths: list[int], block_size: int, vocab_size: int = 200) -> None:
        self.lengths = lengths
        self.block_size = block_size
        self._vocab_size = vocab_size
        needed = [-(-length // block_size) for length in lengths]
        self.num_blocks = sum(needed)
        order = np.random.default_rng(1).permutation(self.num_blocks).astype(np.int32)
        self.tables = np.split(order, np.cumsum(needed)[:-1])

    def batch(self, rows: list[Row], *, logits: bool = True) -> Batch:
        """Logits of all tokens, or of none."""
        indices = np.concatenate([np.full(end - first, index) for index, first, end in rows])
        positions = np.concatenate([np.arange(first, end) for _, first, end in rows])
        tables = pad_tables([self.tables[index][: -(-end // self.block_size)] for index, _, end in rows])
        row_of = np.repeat(np.arange(len(rows)), [end - first for _, first, end in rows])
        slots = tables[row_of, positions // self.block_size].astype(np.int64) * self.block_size
        return Batch(
            token_ids=((indices * 7919 + positions * 104729) % (self._vocab_size - 1)).astype(np.int32),
            positions=positions.astype(np.int32),
            slot_mapping=slots + positions % self.block_size,
            query_starts=np.cumsum([0] + [end - first for _, first, end in rows]).astype(np.int32),
            context_lens=np.array([end for _, _, end in rows], np.int32),
            block_tables=tables,
            logit_indices=np.arange(len(positions) if logits else 0, dtype=np.int64),
        )

    def plan(self, rows: list[Row], device: torch.device, *, logits: bool = True) -> StepPlan:
        """In memory of its own."""
        return StepPlanBuilder(device).build(self.batch(rows, logits=logits))
