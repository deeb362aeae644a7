"""From planned rows to the engine's packed batch; numpy does the per-token work.

A row that is launched while its last token is still being chosen starts where its known tokens end: that token stands
as 0 in the batch and is fed on the device (`launched_rows`).
"""

from __future__ import annotations

import numpy as np

from engine.batch import Batch, Choices, DecodeRows, LaunchedRows
from worker.sequences import Sequence

_ONE = np.ones(1, np.int64)


class RowPlan:
    """One row that takes part in a step: tokens [start, start + num_known) of its sequence, then the draft."""

    __slots__ = (
        "draft",
        "is_decode",
        "is_plain",
        "max_draft_tokens",
        "num_known",
        "num_logits",
        "num_sampled",
        "num_tokens",
        "only_chooses",
        "row",
        "samples",
        "sequence",
        "start",
        "wants_prompt_logprobs",
    )

    def __init__(
        self,
        row: int,
        sequence: Sequence,
        start: int,
        num_known: int,
        draft: list[int],
        max_draft_tokens: int,
        samples: bool,
        wants_prompt_logprobs: bool,
    ) -> None:
        """row: index into the step's rows. max_draft_tokens: the step's budget for it, draft or no draft. samples: the
        row reaches the last known token. wants_prompt_logprobs: logits of all its tokens are wanted, not only of those
        that sample.
        """
        self.row = row
        self.sequence = sequence
        self.start = start
        self.num_known = num_known
        self.draft = draft
        self.max_draft_tokens = max_draft_tokens
        self.samples = samples
        self.wants_prompt_logprobs = wants_prompt_logprobs
        self.num_tokens = num_known + len(draft)
        self.num_sampled = len(draft) + 1 if samples else 0
        self.num_logits = self.num_tokens if wants_prompt_logprobs else self.num_sampled
        """logits come from the last so many tokens of the row"""
        self.is_plain = samples and not draft and not wants_prompt_logprobs and sequence.params.top_logprobs is None
        """one token comes of it, and nothing else"""
        self.is_decode = samples and num_known == 1 and not wants_prompt_logprobs
        """its last known token, and its draft, are all that it computes"""
        self.only_chooses = sequence.params.only_chooses or not (samples or wants_prompt_logprobs)
        """its logits decide tokens by themselves, or with noise"""

    @property
    def is_fed(self) -> bool:
        """Its one token is being chosen by a launched step. No longer so once that step has landed."""
        return self.start >= len(self.sequence.tokens)


def build_batch(plans: list[RowPlan], block_tables: np.ndarray, block_size: int) -> Batch:
    """Pack the rows, in their order; block_tables is the slot table's."""
    num_rows = len(plans)
    starts = np.array([plan.start for plan in plans], np.int64)
    slots = np.array([plan.sequence.slot for plan in plans], np.int64)
    if all(plan.num_tokens == 1 and plan.num_logits == 1 for plan in plans):
        lengths = _ONE
        token_ids = [0 if plan.is_fed else plan.sequence.tokens[plan.start] for plan in plans]
        positions, row_slots = starts, slots
        query_starts = np.arange(num_rows + 1, dtype=np.int32)
        logit_indices = np.arange(num_rows, dtype=np.int64)
    else:
        lengths = np.array([plan.num_tokens for plan in plans], np.int64)
        num_logits = np.array([plan.num_logits for plan in plans], np.int64)
        ends = np.cumsum(lengths)
        token_ids = []
        for plan in plans:
            token_ids.extend([0] if plan.is_fed else plan.sequence.tokens[plan.start : plan.start + plan.num_known])
            token_ids.extend(plan.draft)
        positions, row_slots = _ranges(starts, lengths), np.repeat(slots, lengths)
        query_starts = np.concatenate(([0], ends)).astype(np.int32)
        logit_indices = _ranges(ends - num_logits, num_logits)
    slot_mapping = block_tables[row_slots, positions // block_size] * np.int64(block_size)
    slot_mapping += positions % block_size
    context_lens = starts + lengths
    width = -(-int(context_lens.max()) // block_size)
    return Batch(
        token_ids=np.array(token_ids, np.int32),
        positions=positions.astype(np.int32),
        slot_mapping=slot_mapping,
        query_starts=query_starts,
        context_lens=context_lens.astype(np.int32),
        block_tables=block_tables[slots, :width],
        logit_indices=logit_indices,
    )


def decode_rows(plans: list[RowPlan], block_tables: np.ndarray) -> DecodeRows:
    """The same of rows that are all `is_decode` and `only_chooses`: one for each token, drafted ones behind the known.

    The operations write the KV of all tokens before a layer looks at any, so drafted tokens see each other there.
    """
    numbers: list[int] = []
    temperatures: list[float] = []
    for plan in plans:
        sequence = plan.sequence
        tokens, params = sequence.tokens, sequence.params
        slot, start, seed, first = sequence.slot, plan.start, sequence.signed_seed, len(tokens) - sequence.num_prompt
        temperature = 0.0 if params.greedy else params.temperature
        numbers += (slot, start, tokens[-1], seed, first)
        temperatures.append(temperature)
        for index, token_id in enumerate(plan.draft, 1):
            numbers += (slot, start + index, token_id, seed, first + index)
            temperatures.append(temperature)
    return DecodeRows(numbers, temperatures, block_tables)


def choices_of(plans: list[RowPlan]) -> Choices:
    """How the positions that sample are chosen, row after row, of rows that are all `only_chooses`."""
    choices = Choices([], [], [])
    for plan in plans:
        sequence, num_sampled = plan.sequence, plan.num_sampled
        params, first = sequence.params, plan.start + plan.num_known - sequence.num_prompt
        choices.temperatures += [0.0 if params.greedy else params.temperature] * num_sampled
        choices.seeds += [sequence.choice_seed] * num_sampled
        choices.output_indices += range(first, first + num_sampled)
    return choices


def launched_rows(plans: list[RowPlan], block_tables: np.ndarray, block_size: int) -> LaunchedRows:
    """Rows that are all `only_chooses`, without drafts, some of them fed."""
    batch = build_batch(plans, block_tables, block_size)
    fed = [(first, plan.sequence.slot) for first, plan in zip(batch.query_starts, plans, strict=False) if plan.is_fed]
    fed_at, fed_slots = np.array(fed, np.int64).reshape(-1, 2).T
    slots = np.array([plan.sequence.slot for plan in plans if plan.samples], np.int64)
    return LaunchedRows(batch, choices_of(plans), slots, fed_at, fed_slots)


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """int64: start, start + 1, …, start + length − 1 of each pair, one after the other."""
    total = int(lengths.sum())
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(total, dtype=np.int64)
