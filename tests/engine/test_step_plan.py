"""A step's index arrays against the batch they were made of."""

from __future__ import annotations

import random
from dataclasses import fields

import numpy as np
import pytest
import torch

from engine.batch import Batch, pad_tables
from engine.step_plan import StepPlanBuilder

CPU = torch.device("cpu")


def _batch(draw: random.Random, num_rows: int, longest: int) -> Batch:
    lengths = [draw.randint(1, longest) for _ in range(num_rows)]
    before = [draw.randint(0, 200) for _ in range(num_rows)]
    num_tokens = sum(lengths)
    context_lens = [start + length for start, length in zip(before, lengths, strict=True)]
    positions = [start + i for start, length in zip(before, lengths, strict=True) for i in range(length)]
    return Batch(
        token_ids=np.array([draw.randrange(50000) for _ in range(num_tokens)], np.int32),
        positions=np.array(positions, np.int32),
        slot_mapping=np.array([draw.randrange(1 << 40) for _ in range(num_tokens)], np.int64),
        query_starts=np.cumsum([0, *lengths]).astype(np.int32),
        context_lens=np.array(context_lens, np.int32),
        block_tables=pad_tables([[draw.randrange(5000) for _ in range(-(-n // 16))] for n in context_lens]),
        logit_indices=np.array(sorted(draw.sample(range(num_tokens), draw.randint(0, num_rows))), np.int64),
    )


def _check(batch: Batch, builder: StepPlanBuilder) -> list[torch.Tensor]:
    plan = builder.build(batch)
    pairs = {field.name: getattr(batch, field.name) for field in fields(Batch) if field.name != "slot_mapping"}
    pairs["slots"] = batch.slot_mapping
    tensors = []
    for name, array in pairs.items():
        tensor = getattr(plan, name)
        assert tensor.dtype == (torch.int64 if name in ("slots", "logit_indices") else torch.int32)
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 64 == 0 or not tensor.numel()
        assert tensor.shape == array.shape
        assert tensor.tolist() == array.tolist()
        tensors.append(tensor)
    lengths = [int(end - start) for start, end in zip(batch.query_starts, batch.query_starts[1:], strict=False)]
    assert plan.max_query_len == max(lengths, default=0)
    assert plan.max_context_len == max(batch.context_lens.tolist(), default=0)
    return tensors


def test_small_and_large_steps_in_turn() -> None:
    draw = random.Random(1)
    builder = StepPlanBuilder(CPU)
    for num_rows, longest in ((1, 1), (3, 700), (1, 1), (64, 1), (0, 1), (7, 5), (300, 3), (1, 4000), (2, 2)):
        _check(_batch(draw, num_rows, longest), builder)


def test_any_integers_and_layouts() -> None:
    batch = _batch(random.Random(2), 5, 9)
    wide = np.zeros((5, 2 * batch.block_tables.shape[1]), np.int64)
    wide[:, ::2] = batch.block_tables
    changed = {name: getattr(batch, name).astype(np.int64) for name in ("token_ids", "positions", "context_lens")}
    others = {field.name: getattr(batch, field.name) for field in fields(Batch)}
    _check(Batch(**(others | changed | {"block_tables": wide[:, ::2]})), StepPlanBuilder(CPU))


def test_memory_is_used_again() -> None:
    draw = random.Random(3)
    builder = StepPlanBuilder(CPU)
    steps = [_check(_batch(draw, 8, 40), builder) for _ in range(6)]
    assert len({tensor[0].data_ptr() for tensor in steps}) == 2


def test_a_plan_outlives_the_next() -> None:
    """The next step's arrays are filled while a step may still run."""
    draw = random.Random(4)
    builder = StepPlanBuilder(CPU)
    for _ in range(4):
        tensors = _check(_batch(draw, 8, 20), builder)
        before = [tensor.tolist() for tensor in tensors]
        _check(_batch(draw, 8, 20), builder)
        assert [tensor.tolist() for tensor in tensors] == before


def test_the_batch_is_not_kept() -> None:
    batch = _batch(random.Random(5), 4, 20)
    tensors = _check(batch, StepPlanBuilder(CPU))
    before = [tensor.tolist() for tensor in tensors]
    for field in fields(Batch):
        getattr(batch, field.name)[...] = 0
    assert [tensor.tolist() for tensor in tensors] == before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_on_a_gpu() -> None:
    draw = random.Random(6)
    builder = StepPlanBuilder(torch.device("cuda"))
    for num_rows, longest in ((1, 1), (3, 700), (64, 1), (7, 5), (300, 3)):
        assert _check_device(_batch(draw, num_rows, longest), builder)


def _check_device(batch: Batch, builder: StepPlanBuilder) -> bool:
    plan = builder.build(batch)
    return plan.token_ids.is_cuda and plan.slots.tolist() == batch.slot_mapping.tolist()
