"""What only the C++ norms have: every width's tail, and sums of one fixed order. `test_ops_rows` has the contract."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.cpp_ops import CppOps
from tests.engine.kernels.conftest import on_threads
from tests.engine.kernels.oracle import UNIT, assert_same_bits, layer_norm, rms_norm

EPS = 1e-5


def _rows(num_rows: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.randn((num_rows, width), generator=torch.Generator().manual_seed(seed)) * 2 + 0.3


@pytest.mark.parametrize("width", [*range(1, 70), 127, 576, 1000])
def test_every_width(width: int, ops: CppOps) -> None:
    """Against float64: a few roundings of a value of the size of its weight."""
    x, weight, bias = _rows(3, width), _rows(1, width, 1)[0], _rows(1, width, 2)[0]
    out = torch.full((3, width), torch.nan)
    size = weight.double().abs() * (width**0.5)
    ops.rms_norm(x, weight, EPS, out)
    assert ((out.double() - rms_norm(x, weight, EPS)).abs() <= 16 * UNIT * size).all()
    ops.layer_norm(x, weight, bias, EPS, out)
    deviation = layer_norm(x, weight, bias, EPS)
    spread = 1 + (x.double().mean(-1).abs() / (x.double().var(-1, correction=0) + EPS).sqrt())[:, None]
    assert ((out.double() - deviation).abs() <= 16 * UNIT * (size * spread + bias.double().abs())).all()


@pytest.mark.parametrize("width", [5, 576])
def test_a_rows_bits_are_its_own(width: int, ops: CppOps) -> None:
    """Alone and among enough rows for several items, with one, two and three threads, rows packed or apart."""
    num_rows = 16384 // width * 3 + 5
    x, weight = _rows(num_rows, 2 * width)[:, :width], _rows(1, width, 1)[0]
    alone = torch.empty(num_rows, width)
    for row in range(num_rows):
        ops.layer_norm(x[row : row + 1], weight, None, EPS, alone[row : row + 1])
    for count in (1, 2, 3):
        with on_threads(count):
            for rows in (x, x.contiguous()):
                out = torch.empty(num_rows, width)
                ops.layer_norm(rows, weight, None, EPS, out)
                assert_same_bits(out, alone)


def test_a_norm_of_zeros_and_of_infinity(ops: CppOps) -> None:
    x = torch.zeros(3, 40)
    x[1, 7], x[2, 7] = torch.inf, torch.nan
    out = torch.empty(3, 40)
    ops.rms_norm(x, torch.ones(40), EPS, out)
    assert out[0].count_nonzero() == 0
    assert out[1, 7].isnan()
    assert out[2].isnan().all()


def test_wrong_arguments_are_named(ops: CppOps) -> None:
    x, out = _rows(3, 8), torch.empty(3, 8)
    with pytest.raises(RuntimeError, match=r"weight must be float32 \[8\]"):
        ops.rms_norm(x, torch.ones(9), EPS, out)
    with pytest.raises(RuntimeError, match="x must be float32"):
        ops.rms_norm(x.bfloat16(), torch.ones(8), EPS, out)
    with pytest.raises(RuntimeError, match="out is"):
        ops.rms_norm(x, torch.ones(8), EPS, out[:2])
    with pytest.raises(RuntimeError, match="out must be float32"):
        ops.rms_norm_add(x, torch.ones(8), EPS, 1.0, out.bfloat16())
