"""Paged attention of the transformers route, by the C++ kernels and in plain torch, against a dense float64 oracle."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from engine.attention import PagedStep
from engine.batch import Batch, pad_tables
from engine.kernels import build
from engine.kernels.cpp_attention import CppCache
from engine.kv_cache import LayerShape, make_caches
from engine.step_plan import StepPlanBuilder

HEADS, KV_HEADS, KEY_DIM = 6, 2, 24
SCALING = 0.37
CPU = torch.device("cpu")


def dense(query, keys, values, positions, window, softcap, sinks):
    """query [heads, n, D] at `positions`, keys and values [kv_heads, context, …] → [n, heads, Dv], all float64."""
    keys, values = (x.repeat_interleave(HEADS // KV_HEADS, dim=0) for x in (keys, values))
    scores = query @ keys.transpose(1, 2) * SCALING
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    distance = torch.tensor(positions)[:, None] - torch.arange(keys.shape[1])
    scores[:, (distance < 0) | (distance >= (window or 10**6))] = -torch.inf
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(HEADS, len(positions), 1)), dim=-1)
        return (scores.softmax(-1)[..., :-1] @ values).transpose(0, 1)
    return (scores.softmax(-1) @ values).transpose(0, 1)


@pytest.fixture(params=["kernels", "torch"])
def level(request):
    """The level of the C++ kernels, or None for plain torch."""
    if request.param == "torch":
        return None
    try:
        return build.library()
    except build.NoKernels as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("value_dim", [24, 16])
@pytest.mark.parametrize("window", [None, 1, 70])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_against_dense_float64(level, value_dim, window, softcap, with_sinks):
    draw = random.Random(1)
    torch.manual_seed(1)
    block_size, num_blocks = 8, 120
    layers = {4: LayerShape(KV_HEADS, KEY_DIM, value_dim)}
    caches = make_caches(layers, num_blocks, block_size, torch.float32, CPU, level)
    assert isinstance(caches[4], CppCache) == (level is not None and value_dim == KEY_DIM)
    free = list(range(num_blocks))
    draw.shuffle(free)
    sinks = torch.randn(HEADS, dtype=torch.float64) if with_sinks else None
    # (context before the step, tokens of the step): fresh, decode, over tile edges, chunk in the middle
    rows = [(0, 3), (63, 1), (64, 1), (130, 1), (60, 9), (0, 130), (100, 17)]
    all_keys = [torch.randn(KV_HEADS, before + new, KEY_DIM, dtype=torch.float64) for before, new in rows]
    all_values = [torch.randn(KV_HEADS, before + new, value_dim, dtype=torch.float64) for before, new in rows]
    tables = [[free.pop() for _ in range(-(-(before + new) // block_size))] for before, new in rows]

    def run(step_rows):
        """Attention of one step over rows (index, first, end)."""
        places, starts, query, keys, values = [], [0], [], [], []
        for index, first, end in step_rows:
            places += [(index, position) for position in range(first, end)]
            starts.append(len(places))
            keys.append(all_keys[index][:, first:end])
            values.append(all_values[index][:, first:end])
            query.append(torch.randn(HEADS, end - first, KEY_DIM, dtype=torch.float64))
        slots = [tables[i][p // block_size] * block_size + p % block_size for i, p in places]
        batch = Batch(
            token_ids=np.zeros(len(places), np.int32),
            positions=np.array([position for _, position in places], np.int32),
            slot_mapping=np.array(slots, np.int64),
            query_starts=np.array(starts, np.int32),
            context_lens=np.array([end for _, _, end in step_rows], np.int32),
            block_tables=pad_tables([tables[index] for index, _, _ in step_rows]),
            logit_indices=np.arange(1),
        )
        padding = -len(places) % 16
        packed_query, packed_keys, packed_values = (
            torch.nn.functional.pad(torch.cat(part, dim=1), (0, 0, 0, padding))[None].float()
            for part in (query, keys, values)
        )
        step = PagedStep(StepPlanBuilder(CPU).build(batch), caches, level)
        return query, step.attend(4, packed_query, packed_keys, packed_values, SCALING, window, softcap, sinks)

    run([(index, 0, before) for index, (before, _) in enumerate(rows) if before])
    query, out = run([(index, before, before + new) for index, (before, new) in enumerate(rows)])
    assert out.shape[0] == 1
    assert out.shape[2:] == (HEADS, value_dim)
    start = 0
    for index, (before, new) in enumerate(rows):
        positions = list(range(before, before + new))
        expected = dense(query[index], all_keys[index], all_values[index], positions, window, softcap, sinks)
        torch.testing.assert_close(out[0, start : start + new].double(), expected, atol=1e-5, rtol=1e-5)
        start += new
