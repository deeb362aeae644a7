"""From planned rows to the engine's packed batch; numpy does the per-token work."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from engine.batch import Batch
from worker.sequences import Sequence


@dataclass(slots=True)
class RowPlan:
    """One row that takes part in a step: tokens [start, start + num_known) of its sequence, then the draft."""

    row: int
    """index into the step's rows"""
    sequence: Sequence
    start: int
    num_known: int
    draft: list[int]
    max_draft_tokens: int
    """the step's budget for the row, whether or not a draft was there"""
    samples: bool
    """the row reaches the last known token"""
    wants_prompt_logprobs: bool
    """logits of all its tokens are wanted, not only of those that sample"""
    num_tokens: int = field(init=False)
    num_sampled: int = field(init=False)
    num_logits: int = field(init=False)
    """logits come from the last so many tokens of the row"""

    def __post_init__(self) -> None:
        self.num_tokens = self.num_known + len(self.draft)
        self.num_sampled = len(self.draft) + 1 if self.samples else 0
        self.num_logits = self.num_tokens if self.wants_prompt_logprobs else self.num_sampled


def build_batch(plans: list[RowPlan], block_tables: np.ndarray, block_size: int) -> Batch:
    """Pack the rows, in their order; block_tables is the slot table's."""
    flat: list[int] = []
    for plan in plans:
        tokens = plan.sequence.tokens
        if plan.num_known == 1:
            flat.append(tokens[plan.start])
        else:
            flat.extend(tokens[plan.start : plan.start + plan.num_known])
        if plan.draft:
            flat.extend(plan.draft)
    lengths = np.array([plan.num_tokens for plan in plans], np.int64)
    starts = np.array([plan.start for plan in plans], np.int64)
    num_logits = np.array([plan.num_logits for plan in plans], np.int64)
    slots = np.array([plan.sequence.slot for plan in plans], np.int64)
    ends = np.cumsum(lengths)
    positions = _ranges(starts, lengths)
    row_slots = np.repeat(slots, lengths)
    slot_mapping = block_tables[row_slots, positions // block_size].astype(np.int64) * block_size
    slot_mapping += positions % block_size
    context_lens = starts + lengths
    width = -(-int(context_lens.max()) // block_size)
    return Batch(
        token_ids=np.array(flat, np.int32),
        positions=positions.astype(np.int32),
        slot_mapping=slot_mapping,
        query_starts=np.concatenate(([0], ends)).astype(np.int32),
        context_lens=context_lens.astype(np.int32),
        block_tables=block_tables[slots, :width],
        logit_indices=_ranges(ends - num_logits, num_logits),
    )


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """int64: start, start + 1, …, start + length − 1 of each pair, one after the other."""
    total = int(lengths.sum())
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(total, dtype=np.int64)
