"""The loss: cross-entropy against a mixture of the target's distribution and its likeliest token.

    goal   = mix · softmax(t) + (1 - mix) · onehot(argmax t)       t: the target's logits over the draft's vocabulary
    loss   = - Σ goal · log softmax(z)                             z: the draft's

The first part is the Kullback-Leibler divergence up to a constant: what decides acceptance at T > 0. The second
sharpens the winner, which decides it at T = 0. Both logits are products with the same frozen head, so the gradient is
computed here, a chunk of rows at a time, and no matrix of logits outlives its chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

CHUNK_ROWS = 512


@dataclass(frozen=True, slots=True)
class Head:
    """The frozen rows of the target's head."""

    weight: torch.Tensor
    """[draft vocabulary, hidden]"""
    scale: float = 1.0
    softcap: float = 0.0

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [rows, draft vocabulary] of [rows, hidden], whose dtype is the weight's."""
        logits = (x @ self.weight.T).float()
        if self.scale != 1.0:
            logits *= self.scale
        return (logits / self.softcap).tanh_().mul_(self.softcap) if self.softcap else logits


class _Mixture(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, features: torch.Tensor, head: Head, mix: float) -> torch.Tensor:
        gradient = torch.empty_like(output)
        total, agreeing = output.new_zeros((), dtype=torch.float64), output.new_zeros((), dtype=torch.int64)
        for rows in torch.arange(len(output)).split(CHUNK_ROWS):
            part = slice(int(rows[0]), int(rows[-1]) + 1)
            logits, goal = head.logits(output[part]), head.logits(features[part])
            winner = goal.argmax(-1, keepdim=True)
            agreeing += (logits.argmax(-1, keepdim=True) == winner).sum()
            goal = torch.softmax(goal, -1).mul_(mix)
            goal.scatter_add_(1, winner, torch.full_like(winner, 1.0 - mix, dtype=goal.dtype))
            capped = logits if not head.softcap else logits.clone()
            log_shares = torch.log_softmax(logits, -1)
            total -= (goal * log_shares).sum()
            slope = log_shares.exp_().sub_(goal)
            if head.softcap:
                slope *= 1.0 - (capped / head.softcap).square()
            gradient[part] = (slope.mul_(head.scale) if head.scale != 1.0 else slope).to(output.dtype) @ head.weight
        ctx.save_for_backward(gradient.div_(max(len(output), 1)))
        ctx.mark_non_differentiable(agreeing)
        return torch.stack((total, agreeing.double())) / max(len(output), 1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * gradients[0][0].to(gradient.dtype), None, None, None


def mixture_loss(
    output: torch.Tensor, features: torch.Tensor, head: Head, mix: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean loss over bfloat16 rows [N, hidden], and the share of rows whose winner is the target's."""
    both: torch.Tensor = _Mixture.apply(output, features, head, mix)
    return both[0], both[1].detach()
