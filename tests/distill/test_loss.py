"""The loss and its gradient against autograd in float64."""

from __future__ import annotations

import pytest
import torch

from distill.loss import CHUNK_ROWS, Head, mixture_loss

MIX = 0.6


@pytest.mark.parametrize(("scale", "softcap"), [(1.0, 0.0), (0.5, 0.0), (1.0, 3.0), (0.25, 2.0)])
def test_gradient(scale: float, softcap: float) -> None:
    torch.manual_seed(1)
    rows, hidden, vocab = CHUNK_ROWS + 70, 24, 50
    head = Head(torch.randn(vocab, hidden).bfloat16(), scale, softcap)
    output = (0.4 * torch.randn(rows, hidden)).bfloat16().requires_grad_()
    features = (0.4 * torch.randn(rows, hidden)).bfloat16()
    loss, agreeing = mixture_loss(output, features, head, MIX)
    loss.backward()

    exact = output.detach().double().requires_grad_()

    def logits(x: torch.Tensor) -> torch.Tensor:
        products = scale * (x @ head.weight.double().T)
        return softcap * torch.tanh(products / softcap) if softcap else products

    goal = logits(features.double())
    goals = MIX * goal.softmax(-1) + (1 - MIX) * torch.nn.functional.one_hot(goal.argmax(-1), vocab)
    expected = -(goals * logits(exact).log_softmax(-1)).sum(-1).mean()
    expected.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=0.01)
    same = float((logits(exact).argmax(-1) == goal.argmax(-1)).double().mean())
    assert float(agreeing) == pytest.approx(same, abs=0.02)
    assert output.grad is not None
    assert exact.grad is not None
    error = (output.grad.double() - exact.grad).norm() / exact.grad.norm()
    assert float(error) < 0.1  # logits are rounded to bfloat16


def test_a_perfect_draft_agrees() -> None:
    torch.manual_seed(2)
    features = torch.randn(40, 16).bfloat16()
    _, agreeing = mixture_loss(features.clone(), features, Head(torch.randn(30, 16).bfloat16()), MIX)
    assert float(agreeing) == 1.0
