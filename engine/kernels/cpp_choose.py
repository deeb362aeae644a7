"""choose.cpp for Python: a token per row, and log-probabilities, with the bits that torch gives them.

The level decides only how fast: the bits are the same at each, and those of engine.sampler, engine.processors and
engine.logprobs without kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from engine.kernels.build import NoKernels, level_number, library


@cache
def kernels() -> CppChoose | None:
    """Those of this machine, or None where there are none; decided once, since building may take a minute."""
    try:
        return CppChoose(library())
    except NoKernels:
        return None


@dataclass(frozen=True, slots=True)
class Cuts:
    """What top-k, top-p and min-p ask for, per row; arguments out of range are refused where they enter."""

    top_k: torch.Tensor
    """int64 [L]: 0 or less for all"""
    top_p: torch.Tensor
    """float64 [L], in (0, 1]"""
    min_p: torch.Tensor
    """float32 [L], in [0, 1]"""


class CppChoose:
    """The operations at one level. Logits are float32 [L, V] on the CPU; their rows may be strided."""

    def __init__(self, level: str) -> None:
        self._level = level_number(level)

    def choose(
        self, logits: torch.Tensor, temperatures: torch.Tensor, keys: torch.Tensor, cuts: Cuts | None = None
    ) -> torch.Tensor:
        """int64 [L]: see `ops.Ops.choose`; among those tokens that the cuts leave, as `kept_token_ids` says."""
        operations = torch.ops.tandem
        if cuts is None:
            chosen: torch.Tensor = operations.choose(self._level, logits, temperatures, keys)
        else:
            chosen = operations.choose_truncated(
                self._level, logits, temperatures, keys, cuts.top_k, cuts.top_p, cuts.min_p
            )
        return chosen

    def logprobs(
        self, logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Numbers float32 [L, 1 + num_top] of the token_ids int64 [L] and then of the likeliest ids, best first; ranks
        int64 [L] of the former, 0 where the highest logit isn't finite or a logit is NaN; the likeliest ids
        int64 [L, num_top]."""
        numbers, ranks, top_ids = torch.ops.tandem.logprobs(self._level, logits, token_ids, num_top)
        return numbers, ranks, top_ids

    def gumbels(self, bits: torch.Tensor) -> torch.Tensor:
        """`noise.gumbel_from_bits`, float32 of int64."""
        noise: torch.Tensor = torch.ops.tandem.gumbels(self._level, bits)
        return noise
