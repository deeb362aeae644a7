"""A matrix moves as far in every direction, a vector by the rate; a state goes on exactly."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from distill.optimizer import Optimizer

RATE = 0.01


def parameters(seed: int) -> list[nn.Parameter]:
    source = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(*shape, generator=source)) for shape in ((24, 64), (48, 16), (20,))]


def set_gradients(some: list[nn.Parameter], seed: int) -> None:
    for parameter, gradient in zip(some, parameters(seed), strict=True):
        # Directions of very different strength.
        scale = torch.logspace(0, -2, gradient.shape[-1])
        parameter.grad = gradient.detach() * scale


@pytest.mark.parametrize("index", [0, 1])
def test_a_matrix_moves_about_as_far_in_all_directions(index: int) -> None:
    some = parameters(1)
    before = some[index].detach().clone()
    set_gradients(some, 2)
    gradient = some[index].grad
    assert gradient is not None
    # The nearest orthogonal matrix, by its definition.
    left, strengths, right = torch.linalg.svd(gradient, full_matrices=False)
    assert strengths[0] > 8 * strengths[-1]
    Optimizer(some, momentum=0.95, weight_decay=0.0).step(RATE)
    moved = (before - some[index].detach()) / (RATE * 0.2 * math.sqrt(max(before.shape)))
    found = torch.linalg.svdvals(moved)
    assert 0.4 < float(found.min()) <= float(found.max()) < 1.4
    assert float((moved * (left @ right)).sum() / (moved.norm() * math.sqrt(len(strengths)))) > 0.95


def test_a_vector_moves_by_the_rate_and_does_not_decay() -> None:
    some = parameters(1)
    before = some[2].detach().clone()
    set_gradients(some, 2)
    gradient = some[2].grad
    assert gradient is not None
    signs = gradient.sign()
    Optimizer(some, momentum=0.95, weight_decay=0.5).step(RATE)
    torch.testing.assert_close(some[2].detach(), before - RATE * signs, rtol=0, atol=1e-5)


def test_a_matrix_decays_by_the_rate() -> None:
    with_decay, without = parameters(1), parameters(1)
    for some, decay in ((with_decay, 0.5), (without, 0.0)):
        set_gradients(some, 2)
        Optimizer(some, momentum=0.95, weight_decay=decay).step(RATE)
    torch.testing.assert_close(without[0] - with_decay[0], parameters(1)[0] * (RATE * 0.5), rtol=0, atol=1e-5)


def test_gradients_are_forgotten() -> None:
    some = parameters(1)
    set_gradients(some, 2)
    Optimizer(some, momentum=0.95, weight_decay=0.0).step(RATE)
    assert all(one.grad is None for one in some)


def test_a_state_goes_on_exactly() -> None:
    whole, begun = parameters(1), parameters(1)
    one, other = (Optimizer(some, momentum=0.9, weight_decay=0.05) for some in (whole, begun))
    for seed in (2, 3, 4):
        set_gradients(whole, seed)
        one.step(RATE / seed)
    for seed in (2, 3):
        set_gradients(begun, seed)
        other.step(RATE / seed)
    again = Optimizer(begun, momentum=0.9, weight_decay=0.05)
    again.load_state_dict(other.state_dict())
    set_gradients(begun, 4)
    again.step(RATE / 4)
    for expected, found in zip(whole, begun, strict=True):
        assert torch.equal(expected, found)
