"""Per-head norms, rotation and the write to the cache, for every implementation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.kernels.ops import AttentionRule, HeadNorms, HeadShape, Rotary
from tests.engine.kernels.conftest import Implementation
from tests.engine.kernels.oracle import UNIT, assert_close, assert_same_bits
from tests.engine.kernels.paged import Layer, Paged

F32, BF16 = torch.float32, torch.bfloat16
LENGTHS = [1, 5, 37, 100]


def _layer(
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    rotary_dim: int | None,
    interleaved: bool = False,
    norms: bool = False,
) -> Layer:
    random = torch.Generator().manual_seed(7)
    rotary = None
    if rotary_dim:
        frequencies = 10000.0 ** -(torch.arange(rotary_dim // 2, dtype=torch.float64) * 2 / rotary_dim)
        angles = torch.arange(max(LENGTHS) + 3)[:, None] * frequencies
        # As with attention scaling, not of length one.
        rotary = Rotary((torch.cat((angles.cos(), angles.sin()), dim=1) * 1.19).float(), rotary_dim, interleaved)
    head_norms = None
    if norms:
        query, key = (1 + torch.randn(heads[2], generator=random) / 4 for _ in range(2))
        head_norms = HeadNorms(query, key, 1e-6)
    return Layer(HeadShape(*heads), AttentionRule(heads[2] ** -0.5), dtype, head_norms, rotary)


FULL = pytest.mark.full_only
LAYERS: list[tuple[str, Layer, Any]] = [
    ("bf16-full", _layer((9, 3, 64), BF16, 64), ()),
    ("f32-full", _layer((4, 2, 80), F32, 80), ()),
    ("f32-partial-norms", _layer((4, 2, 80), F32, 32, norms=True), FULL),
    ("f32-interleaved", _layer((4, 4, 64), F32, 64, interleaved=True), ()),
    ("f32-interleaved-partial-norms", _layer((8, 2, 96), F32, 24, interleaved=True, norms=True), FULL),
    ("f32-norms-no-rotation", _layer((4, 1, 128), F32, None, norms=True), FULL),
    ("bf16-full-norms", _layer((8, 4, 128), BF16, 128, norms=True), ()),
    ("bf16-partial-interleaved", _layer((4, 2, 64), BF16, 20, interleaved=True), FULL),
    ("bf16-none", _layer((4, 2, 64), BF16, None), FULL),
    ("f32-small-partial", _layer((4, 2, 16), F32, 4), FULL),
    ("bf16-wide", _layer((2, 1, 256), BF16, 256), FULL),
]
PARAMETERS = [pytest.param(layer, id=name, marks=marks) for name, layer, marks in LAYERS]


@pytest.mark.parametrize("layer", PARAMETERS)
def test_queries(implementation: Implementation, layer: Layer) -> None:
    paged = Paged(implementation, layer, LENGTHS)
    rows = [(index, 0, length) for index, length in enumerate(LENGTHS)]
    _, queries = paged.write(rows)
    expected = torch.cat([paged.parts(index)[0] for index in range(len(LENGTHS))])
    # A pair's sum of two products, of sizes that rotation keeps; and the norm before.
    size = expected.square().mean(-1, keepdim=True).sqrt() + expected.abs()
    assert_close(queries, expected, 32 * UNIT * size)


@pytest.mark.parametrize("layer", PARAMETERS)
def test_keys_and_values(implementation: Implementation, layer: Layer) -> None:
    """Seen through attention, the queries as they were computed."""
    paged = Paged(implementation, layer, LENGTHS)
    rows = [(index, 0, length) for index, length in enumerate(LENGTHS)]
    _, queries = paged.write(rows)
    out = paged.attend(rows)
    for row, own, part in zip(rows, queries.split(LENGTHS), out.split(LENGTHS), strict=True):
        expected, bound = paged.expected(row, own)
        # float32 keys are off by roundings; a bfloat16 key rarely falls on the other side of a rounding.
        assert_close(part, expected, bound * 4 + (2**-7 if layer.dtype == BF16 else 0.0))


@pytest.mark.parametrize("layer", PARAMETERS)
def test_a_tokens_bits_are_its_own(implementation: Implementation, layer: Layer) -> None:
    paged = Paged(implementation, layer, LENGTHS)
    rows = [(index, 0, length) for index, length in enumerate(LENGTHS)]
    _, queries = paged.write(rows)
    whole = dict(zip(rows, queries.split(LENGTHS), strict=True))
    attended = paged.attend(rows).split(LENGTHS)
    for row, seen in zip(rows, attended, strict=True):
        fresh = Paged(implementation, layer, LENGTHS, seed=1)
        index, _, length = row
        parts = [fresh.write([(index, at, min(at + 3, length))])[1] for at in range(0, length, 3)]
        assert_same_bits(torch.cat(parts), whole[row])
        assert_same_bits(fresh.attend([row]), seen)
