"""Attention over a paged cache, for every implementation: right, and a token's bits its own."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from engine.kernels.ops import AttentionRule, HeadShape
from tests.engine.kernels.conftest import Implementation
from tests.engine.kernels.oracle import assert_close, assert_same_bits
from tests.engine.kernels.paged import Layer, Paged, Row

F32, BF16 = torch.float32, torch.bfloat16

# (context before the step, tokens of the step): fresh, decode at the edges of blocks, tiles and partitions,
# verification, chunks in the middle, and long ones
STEPS = [
    (0, 1),
    (0, 3),
    (15, 1),
    (16, 1),
    (63, 1),
    (64, 1),
    (130, 5),
    (60, 9),
    (0, 33),
    (100, 17),
    (511, 1),
    (512, 1),
    (510, 5),
    (1030, 2),
]


def _layer(
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
) -> Layer:
    logits = torch.randn(heads[0], generator=torch.Generator().manual_seed(3)) if sinks else None
    # Twice the usual scale: weights that aren't nearly equal.
    rule = AttentionRule(2 * heads[2] ** -0.5, window, softcap, logits)
    return Layer(HeadShape(*heads), rule, dtype)


FULL = pytest.mark.full_only
LAYERS: list[tuple[str, Layer, Any]] = [
    ("bf16-9x3x64", _layer((9, 3, 64), BF16), ()),
    ("f32-4x4x80-everything", _layer((4, 4, 80), F32, window=70, softcap=3.0, sinks=True), ()),
    ("bf16-8x1x128-window", _layer((8, 1, 128), BF16, window=513), FULL),
    ("bf16-6x2x96-softcap", _layer((6, 2, 96), BF16, softcap=5.0), FULL),
    ("f32-4x2x256", _layer((4, 2, 256), F32), FULL),
    ("bf16-14x2x64-sinks", _layer((14, 2, 64), BF16, sinks=True), FULL),
    ("f32-4x2x16-window-of-one", _layer((4, 2, 16), F32, window=1), FULL),
    ("f32-4x1x32-window", _layer((4, 1, 32), F32, window=24, sinks=True), FULL),
]
PARAMETERS = [pytest.param(layer, id=name, marks=marks) for name, layer, marks in LAYERS]


def _loaded(implementation: Implementation, layer: Layer, **settings: int) -> tuple[Paged, list[Row]]:
    """The sequences with their contexts written, and the step's rows."""
    paged = Paged(implementation, layer, [before + new for before, new in STEPS], **settings)
    paged.write([(index, 0, before) for index, (before, _) in enumerate(STEPS) if before])
    return paged, [(index, before, before + new) for index, (before, new) in enumerate(STEPS)]


@pytest.mark.parametrize("layer", PARAMETERS)
def test_float64_says_the_same(implementation: Implementation, layer: Layer) -> None:
    paged, rows = _loaded(implementation, layer)
    out = paged.attend(rows)
    for row, part in zip(rows, out.split([end - first for _, first, end in rows]), strict=True):
        assert_close(part, *paged.expected(row))


@pytest.mark.parametrize("block_size", [8, pytest.param(32, marks=FULL), pytest.param(64, marks=FULL)])
def test_other_block_sizes(implementation: Implementation, block_size: int) -> None:
    paged, rows = _loaded(implementation, _layer((6, 2, 64), BF16, window=300), block_size=block_size)
    out = paged.attend(rows)
    for row, part in zip(rows, out.split([end - first for _, first, end in rows]), strict=True):
        assert_close(part, *paged.expected(row))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=FULL) for seed in range(1, 6))])
def test_any_steps(implementation: Implementation, seed: int) -> None:
    """Shapes, rules, contexts and chunks at random: right, and the same bits alone and in chunks."""
    draw = random.Random(seed)
    kv_heads, group = draw.choice([1, 2, 3, 4]), draw.choice([1, 2, 3, 5, 8])
    heads = (kv_heads * group, kv_heads, draw.choice([32, 64, 80, 96, 128]))
    window, softcap = draw.choice([None, draw.randint(1, 700)]), draw.choice([None, 2.0])
    layer = _layer(heads, draw.choice([F32, BF16]), window, softcap, sinks=draw.random() < 0.5)
    steps = [(draw.choice([0, draw.randint(0, 80), draw.randint(400, 1100)]), draw.randint(1, 40)) for _ in range(6)]
    paged = Paged(implementation, layer, [before + new for before, new in steps], seed=seed)
    paged.write([(index, 0, before) for index, (before, _) in enumerate(steps) if before])
    rows = [(index, before, before + new) for index, (before, new) in enumerate(steps)]
    for row, part in zip(rows, paged.attend(rows).split([new for _, new in steps]), strict=True):
        assert_close(part, *paged.expected(row))
        assert_same_bits(paged.attend([row]), part)
        index, first, end = row
        middle = draw.randint(first, end)
        chunks = [chunk for chunk in ((index, first, middle), (index, middle, end)) if chunk[1] < chunk[2]]
        assert_same_bits(torch.cat([paged.attend([chunk]) for chunk in chunks]), part)


@pytest.mark.parametrize("layer", PARAMETERS)
def test_a_tokens_bits_are_its_own(implementation: Implementation, layer: Layer) -> None:
    paged, rows = _loaded(implementation, layer)
    whole = dict(zip(rows, paged.attend(rows).split([end - first for _, first, end in rows]), strict=True))
    for row in rows:
        assert_same_bits(paged.attend([row]), whole[row])
    for size in (1, 7):
        for index, first, end in rows:
            chunks = [(index, start, min(start + size, end)) for start in range(first, end, size)]
            assert_same_bits(torch.cat([paged.attend([chunk]) for chunk in chunks]), whole[index, first, end])
    backwards = rows[::-1]
    assert_same_bits(paged.attend(backwards), torch.cat([whole[row] for row in backwards]))
    few = rows[8:3:-2]
    assert_same_bits(paged.attend(few), torch.cat([whole[row] for row in few]))


@pytest.mark.parametrize("layer", PARAMETERS[:2])
def test_where_blocks_lie_decides_nothing(implementation: Implementation, layer: Layer) -> None:
    first, rows = _loaded(implementation, layer, seed=0)
    second, _ = _loaded(implementation, layer, seed=1)
    assert first.tables != second.tables
    assert_same_bits(first.attend(rows), second.attend(rows))


def test_a_chunk_and_single_steps_leave_the_same_cache(implementation: Implementation) -> None:
    layer = _layer((6, 2, 64), BF16)
    chunked, rows = _loaded(implementation, layer)
    stepped = Paged(implementation, layer, chunked.lengths)
    for index, length in enumerate(stepped.lengths[:8]):
        for position in range(length):
            stepped.write([(index, position, position + 1)])
    last = [(index, length - 1, length) for index, length in enumerate(stepped.lengths[:8])]
    chunked.write(rows)
    assert_same_bits(stepped.attend(last), chunked.attend(last))


def test_rows_that_are_no_numbers_keep_it_to_themselves(implementation: Implementation) -> None:
    layer = _layer((9, 3, 64), BF16)
    paged, rows = _loaded(implementation, layer)
    whole = paged.attend(rows)
    for broken in (6, 8):
        paged.qkv[broken][rows[broken][1] :] = torch.nan
    paged.qkv[10][-1] = torch.inf
    lengths = [end - first for _, first, end in rows]
    out = paged.attend(rows)
    for index, (part, before) in enumerate(zip(out.split(lengths), whole.split(lengths), strict=True)):
        if index in (6, 8):
            assert torch.isnan(part).all()
        elif index != 10:
            assert_same_bits(part, before)


def test_what_is_no_number_is_kept_as_zero(implementation: Implementation) -> None:
    """Later queries see it as zeros, and so does whoever gets the block next."""
    for dtype in (F32, BF16):
        layer = _layer((6, 2, 64), dtype)
        paged = Paged(implementation, layer, [40])
        width = layer.heads.num_heads * layer.heads.head_dim
        paged.qkv[0][3, width:] = torch.nan
        paged.qkv[0][7, width::2] = torch.inf
        paged.qkv[0][9, width + 1 :: 2] = -torch.inf
        paged.qkv[0][11, -3:] = 3.4e38  # beyond bfloat16 once rounded
        if dtype == F32:
            paged.qkv[0][11, -3:] = torch.nan
        own = paged.qkv[0].clone()
        paged.write([(0, 0, 40)])
        out = paged.attend([(0, 30, 40)])
        paged.qkv[0] = torch.where(own.to(dtype).isfinite(), own, 0.0)
        assert_close(out, *paged.expected((0, 30, 40)))


def test_no_rows(implementation: Implementation) -> None:
    paged = Paged(implementation, _layer((6, 2, 64), BF16), [4])
    plan = paged.plan([])
    queries = torch.empty(0, 6, 64, dtype=BF16)
    ops, heads = implementation.ops, paged.layer.heads
    ops.rotate_write(torch.empty(0, 10 * 64), heads, None, None, plan, paged.cache, queries)
    ops.attend(queries, heads, paged.layer.rule, plan, paged.cache, torch.empty(0, 6 * 64, dtype=BF16))
