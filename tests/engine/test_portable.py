"""exp, log and integer sums against float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine import portable


def test_log_against_float64() -> None:
    values = torch.cat(
        [torch.logspace(-37, 38, 40_000), torch.linspace(0.4, 2.5, 40_000), 1 + torch.arange(-99, 99) / 2**23]
    )
    exact = np.log(values.double().numpy())
    error = np.abs(portable.log(values).double().numpy() - exact)
    assert (error <= np.maximum(1e-7, 1.2 * np.spacing(np.abs(exact).astype(np.float32)))).all()
    assert portable.log(torch.ones(1)).item() == 0.0


def test_neg_log1p_neg_against_float64() -> None:
    u = torch.cat(
        [torch.logspace(-10, -0.001, 40_000), torch.linspace(0.28, 0.31, 10_000), 1 - torch.arange(1, 99) / 2**24]
    )
    exact = -np.log1p(-u.double().numpy())
    relative = np.abs(portable.neg_log1p_neg(u).double().numpy() / exact - 1)
    assert relative.max() < 2.5e-7


def test_exp_against_float64() -> None:
    x = torch.cat([torch.linspace(-87, 0, 100_000), -torch.logspace(-30, 0, 1000)])
    relative = np.abs(portable.exp(x).double().numpy() / np.exp(x.double().numpy()) - 1)
    assert relative.max() < 2e-7
    assert portable.exp(torch.zeros(1)).item() == 1.0


def test_exp_at_and_below_its_floor() -> None:
    low = portable.exp(torch.tensor([-87.0, -88.0, -1e30, -math.inf])).tolist()
    assert len(set(low)) == 1
    assert low[0] >= np.finfo(np.float32).tiny
    assert portable.weights_of(torch.tensor(low)).tolist() == [0, 0, 0, 0]


@given(st.lists(st.floats(-60, 0, width=32), min_size=1, max_size=200))
def test_a_sum_of_weights_has_no_order(values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    total = portable.weights_of(portable.exp(x)).sum()
    assert total == portable.weights_of(portable.exp(x.flip(0))).sum()
    exact = float(np.exp(x.double().numpy()).sum())
    tolerance = 3e-7 * exact + len(values) * 2.0 ** -(portable.UNIT_BITS + 1)
    assert abs(float(total) * 2.0**-portable.UNIT_BITS - exact) <= tolerance


def test_the_largest_sum_fits() -> None:
    total = portable.weights_of(portable.exp(torch.zeros(portable.MAX_TERMS))).sum()
    assert int(total) == portable.MAX_TERMS << portable.UNIT_BITS
    assert portable.log_of_sum(total[None]).item() == pytest.approx(math.log(portable.MAX_TERMS), rel=1e-7)


@pytest.mark.parametrize("name", ["exp", "log", "neg_log1p_neg"])
def test_bits_depend_on_the_element_alone(name: str) -> None:
    """Not on its place in a vector, the tensor's shape, its strides or the number of threads."""
    function = getattr(portable, name)
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(70_001, generator=generator).clamp(2.0**-30, 1 - 2.0**-24)
    x = -x * 40 if name == "exp" else x
    whole = function(x)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            for start, step in ((0, 1), (1, 1), (3, 7), (69_990, 1)):
                assert torch.equal(function(x[start::step]), whole[start::step])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.cat([function(x[i : i + 1]) for i in range(100)]), whole[:100])
    assert torch.equal(function(x[:70_000].view(7, -1).t()).t().reshape(-1), whole[:70_000])
