"""Recorded calls against the same calls made from Python."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.program import Program


def test_a_run_does_what_the_calls_did():
    weight = torch.arange(12.0).view(3, 4)

    def calls(x: torch.Tensor, total: torch.Tensor, out: torch.Tensor) -> None:
        torch.mm(x, weight, out=out)
        total.add_(out, alpha=2)
        out.copy_(total)

    recorded = [torch.zeros(2, 3), torch.zeros(2, 4), torch.zeros(2, 4)]
    program = Program(recorded, lambda: calls(*recorded))
    assert not any(tensor.any() for tensor in recorded), "nothing is computed while recording"
    for rows in (1, 5):  # of other shapes than recorded
        x, start = torch.randn(rows, 3), torch.randn(rows, 4)
        ours, theirs = [x, start.clone(), torch.zeros(rows, 4)], [x, start.clone(), torch.zeros(rows, 4)]
        with torch.inference_mode():
            program.run(ours)
        calls(*theirs)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    weight.neg_()
    again = [x, start.clone(), torch.zeros(5, 4)]
    program.run(again)
    calls(x, theirs[1].copy_(start), theirs[2])
    assert torch.equal(again[1], theirs[1]), "what isn't an input is read where it lies, at the time of the run"


def test_what_makes_a_new_tensor_is_refused():
    x = torch.ones(2)
    with pytest.raises(ValueError, match="aten::add writes into none of its arguments"):
        Program([x], lambda: x + 1)


def test_too_few_inputs_and_errors_of_operations_are_told():
    x, weight, out = torch.zeros(2, 3), torch.zeros(3, 4), torch.zeros(2, 4)
    program = Program([x, out], lambda: torch.mm(x, weight, out=out))
    with pytest.raises(RuntimeError, match="takes 2 inputs"):
        program.run([x])
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        program.run([torch.zeros(2, 5), out])
