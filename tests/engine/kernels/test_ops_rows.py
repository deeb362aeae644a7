"""Operations that turn rows into rows, for every implementation: right, and a row's bits its own.

`Case.start` is what the result's memory holds before: zeros where an operation overwrites it, values where it adds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from engine.kernels.ops import ACTIVATIONS, Ops
from tests.engine.kernels.conftest import Implementation
from tests.engine.kernels.oracle import (
    ACTIVATION_SLOPE,
    FUNCTION_BOUND,
    UNIT,
    activation,
    assert_close,
    assert_same_bits,
    layer_norm,
    product,
    rms_norm,
    sum_bound,
)

Oracle = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

F32, BF16 = torch.float32, torch.bfloat16
NUM_ROWS = 21
EPS = 1e-5


@dataclass(frozen=True, slots=True)
class Case:
    """One operation on rows."""

    x: torch.Tensor
    start: torch.Tensor
    run: Callable[[torch.Tensor, torch.Tensor], None]
    """(rows, out)"""
    oracle: Oracle
    """(x, start) → the result in float64, and what float32 may be off"""
    out_may_be_strided: bool = False


Maker = Callable[[Ops, torch.Generator], Case]


def _normal(random: torch.Generator, *shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.randn(shape, generator=random).to(dtype)


def _linear(
    n: int, k: int, dtype: torch.dtype, out_dtype: torch.dtype, bias: bool = False, scale: float = 1.0, cap: float = 0.0
) -> Maker:
    def make(ops: Ops, random: torch.Generator) -> Case:
        weight = _normal(random, n, k, dtype=dtype)
        offset = _normal(random, n, dtype=dtype) if bias else None
        packed = ops.pack(weight, offset)

        def oracle(x: torch.Tensor, start: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            exact, bound = product(x, weight, offset)
            exact, bound = exact * scale, bound * abs(scale) + UNIT * exact.abs()
            if cap:
                return torch.tanh(exact / cap) * cap, bound + FUNCTION_BOUND * cap
            return exact, bound

        return Case(
            _normal(random, NUM_ROWS, k, dtype=dtype),
            torch.zeros(NUM_ROWS, n, dtype=out_dtype),
            lambda x, out: ops.linear(x, packed, out, scale, cap),
            oracle,
        )

    return make


def _linear_add(n: int, k: int, dtype: torch.dtype, bias: bool = False, scale: float = 1.0) -> Maker:
    def make(ops: Ops, random: torch.Generator) -> Case:
        weight = _normal(random, n, k, dtype=dtype)
        offset = _normal(random, n) if bias else None
        packed = ops.pack(weight, offset)

        def oracle(x: torch.Tensor, start: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            exact, bound = product(x, weight, offset)
            return start.double() + exact * scale, bound * abs(scale) + 2 * UNIT * exact.abs()

        return Case(
            _normal(random, NUM_ROWS, k, dtype=dtype),
            _normal(random, NUM_ROWS, n),
            lambda x, out: ops.linear_add(x, packed, scale, out),
            oracle,
        )

    return make


def _gated(n: int, k: int, dtype: torch.dtype, name: str, biases: str = "") -> Maker:
    """biases: which of gate and up have one, by their initials."""

    def make(ops: Ops, random: torch.Generator) -> Case:
        gate, up = (_normal(random, n, k, dtype=dtype) / k**0.5 for _ in range(2))
        gate_bias, up_bias = (_normal(random, n) if which in biases else None for which in "gu")
        packed = ops.pack_gated(gate, up, gate_bias, up_bias)

        def oracle(x: torch.Tensor, start: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            (left, left_bound), (right, right_bound) = product(x, gate, gate_bias), product(x, up, up_bias)
            active = activation(name, left)
            active_bound = ACTIVATION_SLOPE * left_bound + FUNCTION_BOUND * left.abs().clamp(min=1)
            return active * right, active.abs() * right_bound + active_bound * (right.abs() + right_bound)

        return Case(
            _normal(random, NUM_ROWS, k, dtype=dtype),
            torch.zeros(NUM_ROWS, n, dtype=dtype),
            lambda x, out: ops.linear_gated(x, packed, name, out),
            oracle,
        )

    return make


def _activated(n: int, k: int, dtype: torch.dtype, name: str, bias: bool = True) -> Maker:
    def make(ops: Ops, random: torch.Generator) -> Case:
        weight = _normal(random, n, k, dtype=dtype) * (3 / k**0.5)
        offset = _normal(random, n) if bias else None
        packed = ops.pack(weight.to(dtype), offset)

        def oracle(x: torch.Tensor, start: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            exact, bound = product(x, weight, offset)
            return activation(name, exact), ACTIVATION_SLOPE * bound + FUNCTION_BOUND * exact.abs().clamp(min=1)

        return Case(
            _normal(random, NUM_ROWS, k, dtype=dtype),
            torch.zeros(NUM_ROWS, n, dtype=dtype),
            lambda x, out: ops.linear_activation(x, packed, name, out),
            oracle,
        )

    return make


def _norm(kind: str, k: int, out_dtype: torch.dtype) -> Maker:
    """kind: rms, layer, layer_plain (without bias)."""

    def make(ops: Ops, random: torch.Generator) -> Case:
        weight = 1 + _normal(random, k) / 4
        bias = _normal(random, k) if kind == "layer" else None

        def run(x: torch.Tensor, out: torch.Tensor) -> None:
            if kind == "rms":
                ops.rms_norm(x, weight, EPS, out)
            else:
                ops.layer_norm(x, weight, bias, EPS, out)

        def oracle(x: torch.Tensor, start: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            exact = rms_norm(x, weight, EPS) if kind == "rms" else layer_norm(x, weight, bias, EPS)
            # Centring costs accuracy where a row's mean is large; these have means below their deviations' size.
            return exact, sum_bound(exact.abs() + 1, 16)

        return Case(
            _normal(random, NUM_ROWS, k) * 3 + 0.5,
            torch.zeros(NUM_ROWS, k, dtype=out_dtype),
            run,
            oracle,
            out_may_be_strided=True,
        )

    return make


def _norm_add(k: int, scale: float) -> Maker:
    def make(ops: Ops, random: torch.Generator) -> Case:
        weight = 1 + _normal(random, k) / 4

        def oracle(x: torch.Tensor, start: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            exact = scale * rms_norm(x, weight, EPS)
            return start.double() + exact, sum_bound(exact.abs() + 1, 16)

        return Case(
            _normal(random, NUM_ROWS, k) * 3,
            _normal(random, NUM_ROWS, k),
            lambda x, out: ops.rms_norm_add(x, weight, EPS, scale, out),
            oracle,
        )

    return make


def _embed(vocab: int, k: int, dtype: torch.dtype, packed: bool, scale: float) -> Maker:
    def make(ops: Ops, random: torch.Generator) -> Case:
        table = _normal(random, vocab, k, dtype=dtype)
        source = ops.pack(table) if packed else table
        ids = torch.randint(vocab, (NUM_ROWS, 1), generator=random, dtype=torch.int32)
        ids[0], ids[1] = 0, vocab - 1

        def oracle(x: torch.Tensor, start: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            exact = table.double()[x.view(-1).long()] * scale
            return exact, UNIT * exact.abs()  # the scale itself may have been rounded

        return Case(
            ids,
            torch.zeros(NUM_ROWS, k),
            lambda x, out: ops.embed(x.view(-1), source, scale, out),
            oracle,
        )

    return make


FULL = pytest.mark.full_only
# (name, case); odd sizes: below a vector, beyond a tile of 32 columns, odd depth, one beyond a slice of plain torch
CASES: list[tuple[str, Maker, Any]] = [
    ("linear-bf16", _linear(96, 64, BF16, F32), ()),
    ("linear-bf16-to-bf16-odd-bias-scale", _linear(100, 37, BF16, BF16, bias=True, scale=0.37), ()),
    ("linear-f32-odd-bias-softcap", _linear(45, 51, F32, F32, bias=True, cap=9.0), ()),
    ("linear-f32-one-by-one", _linear(1, 1, F32, F32), FULL),
    ("linear-bf16-narrow", _linear(7, 3, BF16, F32, bias=True), FULL),
    ("linear-bf16-deep", _linear(33, 1537, BF16, F32), FULL),
    ("linear-f32-deep", _linear(64, 1536, F32, F32), FULL),
    ("linear-bf16-wide-softcap", _linear(2049, 40, BF16, F32, cap=5.0), FULL),
    ("linear-f32-wide-scale", _linear(4099, 24, F32, F32, scale=-1.5), FULL),
    ("add-bf16-scale", _linear_add(72, 130, BF16, scale=0.22), ()),
    ("add-f32-bias", _linear_add(31, 96, F32, bias=True), FULL),
    ("add-bf16-bias-odd", _linear_add(97, 33, BF16, bias=True, scale=2.0), FULL),
    ("gated-bf16-silu", _gated(48, 96, BF16, "silu"), ()),
    ("gated-f32-silu-odd", _gated(37, 65, F32, "silu"), FULL),
    ("gated-bf16-gelu-tanh-odd", _gated(53, 31, BF16, "gelu_tanh", biases="gu"), FULL),
    ("gated-bf16-gelu-one-bias", _gated(17, 64, BF16, "gelu", biases="u"), FULL),
    ("gated-f32-relu-one-bias", _gated(64, 40, F32, "relu", biases="g"), FULL),
    *((f"activation-bf16-{name}", _activated(66, 50, BF16, name), FULL) for name in ACTIVATIONS),
    *((f"activation-f32-{name}", _activated(35, 64, F32, name, bias=False), FULL) for name in ACTIVATIONS),
    ("activation-bf16-odd", _activated(19, 77, BF16, "gelu_tanh"), ()),
    ("rms-to-bf16", _norm("rms", 576, BF16), ()),
    ("rms-to-f32-odd", _norm("rms", 131, F32), FULL),
    ("rms-one", _norm("rms", 1, F32), FULL),
    ("layer-to-bf16", _norm("layer", 96, BF16), ()),
    ("layer-to-f32-odd-no-bias", _norm("layer_plain", 259, F32), FULL),
    ("rms-add", _norm_add(80, 1.0), ()),
    ("rms-add-odd-scale", _norm_add(333, 0.3), FULL),
    ("embed-bf16", _embed(101, 64, BF16, packed=False, scale=1.0), FULL),
    ("embed-packed-bf16-odd-scale", _embed(101, 37, BF16, packed=True, scale=6.25), ()),
    ("embed-packed-f32-odd", _embed(65, 33, F32, packed=True, scale=1.0), FULL),
    ("embed-f32-scale", _embed(40, 70, F32, packed=False, scale=0.1), FULL),
]
PARAMETERS = [pytest.param(make, id=name, marks=marks) for name, make, marks in CASES]
OF_NUMBERS = [parameter for parameter in PARAMETERS if not str(parameter.id).startswith("embed")]
"""the rest take ids"""


def _computed(case: Case, x: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    out = start.clone()
    case.run(x, out)
    return out


@pytest.fixture
def case(implementation: Implementation, request: pytest.FixtureRequest) -> Case:
    return request.param(implementation.ops, torch.Generator().manual_seed(5))


@pytest.mark.parametrize("case", PARAMETERS, indirect=True)
def test_float64_says_the_same(case: Case) -> None:
    expected, bound = case.oracle(case.x, case.start)
    assert_close(_computed(case, case.x, case.start), expected, bound)


@pytest.mark.parametrize("case", PARAMETERS, indirect=True)
def test_a_rows_bits_are_its_own(case: Case) -> None:
    whole = _computed(case, case.x, case.start)
    for first, end in [*((row, row + 1) for row in range(0, NUM_ROWS, 3)), (0, 2), (3, 8), (1, 9), (4, 17), (5, 21)]:
        assert_same_bits(_computed(case, case.x[first:end], case.start[first:end]), whole[first:end])
    order = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(1))
    assert_same_bits(_computed(case, case.x[order], case.start[order]), whole[order])
    many = torch.arange(150) % NUM_ROWS
    assert_same_bits(_computed(case, case.x[many], case.start[many]), whole[many])


@pytest.mark.parametrize("case", OF_NUMBERS, indirect=True)
def test_rows_that_are_no_numbers_keep_it_to_themselves(case: Case) -> None:
    whole = _computed(case, case.x, case.start)
    broken = case.x.clone()
    broken[4], broken[9], broken[10, 0] = torch.nan, torch.inf, -torch.inf
    out = _computed(case, broken, case.start)
    others = [row for row in range(NUM_ROWS) if row not in (4, 9, 10)]
    assert_same_bits(out[others], whole[others])
    assert torch.isnan(out[4]).any()


@pytest.mark.parametrize("case", PARAMETERS, indirect=True)
def test_memory_around_the_rows_is_left_alone(case: Case) -> None:
    whole = _computed(case, case.x, case.start)
    num_rows = 11
    guarded = torch.full((num_rows + 8, case.start.shape[1]), 7.0, dtype=case.start.dtype)
    out = guarded[4 : 4 + num_rows]
    out.copy_(case.start[:num_rows])
    case.run(case.x[:num_rows], out)
    assert_same_bits(out, whole[:num_rows])
    assert (guarded[:4] == 7).all()
    assert (guarded[4 + num_rows :] == 7).all()
    case.run(case.x[:0], guarded[:0])
    assert (guarded[:4] == 7).all()


@pytest.mark.parametrize("case", OF_NUMBERS, indirect=True)
def test_strided_rows(case: Case) -> None:
    """Columns of something wider, as the parts of a product are."""
    whole = _computed(case, case.x, case.start)
    width = case.x.shape[1]
    wide = torch.full((NUM_ROWS, width + 24), torch.nan, dtype=case.x.dtype)
    wide[:, 8 : 8 + width] = case.x
    assert_same_bits(_computed(case, wide[:, 8 : 8 + width], case.start), whole)
    if case.out_may_be_strided:
        around = torch.full((NUM_ROWS, case.start.shape[1] + 16), 7.0, dtype=case.start.dtype)
        out = around[:, 8:-8]
        case.run(case.x, out)
        assert_same_bits(out, whole)
        assert (around[:, :8] == 7).all()
        assert (around[:, -8:] == 7).all()
