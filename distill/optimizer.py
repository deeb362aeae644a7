"""What changes the weights: Muon for matrices, AdamW for the rest, at one learning rate.

Muon takes a matrix's gradients, smoothed, for a direction alone: all its singular values are made about one before it
is followed. From the same answers a draft learns more than with AdamW everywhere; what that costs, five products of
the matrix with itself, doesn't grow with the batch, so batches are large.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

_BETAS = (0.9, 0.95)


class Optimizer:
    """Both as one; a state goes on exactly where it was taken."""

    def __init__(self, parameters: Iterable[nn.Parameter], momentum: float, weight_decay: float) -> None:
        """Parameters of two dimensions are the matrices; what is left, norms and biases, doesn't decay."""
        every = list(parameters)
        matrices = [one for one in every if one.dim() == 2]
        others = [one for one in every if one.dim() != 2]
        self._parts: list[torch.optim.Optimizer] = []
        if matrices:
            # Scaled to the size of AdamW's steps, so that one rate suits both.
            self._parts.append(
                torch.optim.Muon(matrices, momentum=momentum, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
            )
        if others:
            self._parts.append(torch.optim.AdamW(others, betas=_BETAS, weight_decay=0.0, fused=True))

    def step(self, learning_rate: float) -> None:
        """Follow the gradients that are there, then forget them."""
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = learning_rate
            part.step()
            part.zero_grad()

    def state_dict(self) -> list[dict[str, Any]]:
        """What `load_state_dict` takes."""
        return [part.state_dict() for part in self._parts]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """Go on where another one was, of the same parameters."""
        for part, own in zip(self._parts, state, strict=True):
            part.load_state_dict(own)
