"""The packed batch, against one built token by token."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.noise import choice_seed
from worker.batching import RowPlan, build_batch
from worker.sequences import Limits, SequenceTable
from worker.steps import Admission, SamplingParams

BLOCK = 4


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_equals_token_by_token(data: st.DataObject) -> None:
    table = SequenceTable(Limits(1000, 64, 400, BLOCK, 8), choice_seed)
    free = data.draw(st.permutations(range(400)))
    plans = []
    decodes = data.draw(st.booleans())
    slots = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=8, unique=True))
    for row, slot in enumerate(slots):
        known = data.draw(st.integers(1, 40))
        start = known - 1 if decodes else data.draw(st.integers(0, known - 1))
        count = data.draw(st.integers(1, known - start))
        samples = start + count == known
        draft = data.draw(st.lists(st.integers(0, 999), max_size=5)) if samples and not decodes else []
        blocks, free = list(free[:12]), free[12:]
        sequence = table.admit(
            Admission(
                slot, 1, list(range(slot, slot + known)), known, 0, SamplingParams(max_tokens=20), 1, blocks, start
            )
        )
        plans.append(RowPlan(row, sequence, start, count, draft, 5, samples, data.draw(st.booleans())))
    batch = build_batch(plans, table.block_tables, BLOCK)

    tokens: list[int] = []
    positions: list[int] = []
    mapping: list[int] = []
    wanted: list[int] = []
    starts = [0]
    for plan in plans:
        row_tokens = plan.sequence.tokens[plan.start : plan.start + plan.num_known] + plan.draft
        first = len(tokens)
        for offset, token in enumerate(row_tokens):
            position = plan.start + offset
            tokens.append(token)
            positions.append(position)
            block = int(table.block_tables[plan.sequence.slot, position // BLOCK])
            mapping.append(block * BLOCK + position % BLOCK)
            sampled = plan.samples and offset >= len(row_tokens) - len(plan.draft) - 1
            if sampled or plan.wants_prompt_logprobs:
                wanted.append(first + offset)
        starts.append(len(tokens))
    assert batch.token_ids.tolist() == tokens
    assert batch.positions.tolist() == positions
    assert batch.slot_mapping.tolist() == mapping
    assert batch.logit_indices.tolist() == wanted
    assert batch.query_starts.tolist() == starts
    for plan, context, ids in zip(plans, batch.context_lens.tolist(), batch.block_tables, strict=True):
        assert context == plan.start + plan.num_known + len(plan.draft)
        assert ids.tolist() == table.block_tables[plan.sequence.slot, : len(ids)].tolist()
        assert len(ids) * BLOCK >= context
    assert (batch.token_ids.dtype, batch.positions.dtype, batch.slot_mapping.dtype) == (np.int32, np.int32, np.int64)
    assert (batch.query_starts.dtype, batch.context_lens.dtype, batch.block_tables.dtype) == (np.int32,) * 3
    assert batch.logit_indices.dtype == np.int64
