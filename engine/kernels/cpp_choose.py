"""choose.cpp for Python: a token per row, and log-probabilities, with the bits that torch gives them.

The level decides only how fast: the bits are the same at each, and those of engine.sampler, engine.processors and
engine.logprobs without kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from engine.kernels.build import level_number, library

_loaded: CppChoose | None = None


def kernels_for(logits: torch.Tensor) -> CppChoose | None:
    """The kernels, if the logits are on the CPU and whoever loaded the model has loaded them.

    Nothing is built here: a step can't wait for a compiler, and without kernels the bits are the same.
    """
    global _loaded
    if logits.device.type != "cpu":
        return None
    if _loaded is None and hasattr(torch.ops.tandem, "choose"):
        _loaded = CppChoose(library())
    return _loaded


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
        operations = torch.ops.tandem
        self._choose = operations.choose.default
        self._choose_truncated = operations.choose_truncated.default
        self._logprobs = operations.logprobs.default
        self._gumbels = operations.gumbels.default

    def choose(
        self, logits: torch.Tensor, temperatures: torch.Tensor, keys: torch.Tensor, cuts: Cuts | None = None
    ) -> torch.Tensor:
        """int64 [L]: see `ops.Ops.choose`; among those tokens that the cuts leave, as `kept_token_ids` says."""
        if cuts is None:
            return self._choose(self._level, logits, temperatures, keys)
        return self._choose_truncated(self._level, logits, temperatures, keys, cuts.top_k, cuts.top_p, cuts.min_p)

    def logprobs(
        self, logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Numbers float32 [L, 1 + num_top] of the token_ids int64 [L] and then of the likeliest ids, best first; ranks
        int64 [L] of the former, 0 where the highest logit isn't finite or a logit is NaN; the likeliest ids
        int64 [L, num_top]."""
        numbers, ranks, top_ids = self._logprobs(self._level, logits, token_ids, num_top)
        return numbers, ranks, top_ids

    def gumbels(self, bits: torch.Tensor) -> torch.Tensor:
        """`noise.gumbel_from_bits`, float32 of int64."""
        return self._gumbels(self._level, bits)


@cache
def load_operations() -> str:
    """Load the library, tell torch how the operations behave on tensors without data, and return the best level.

    Raises `build.NoKernels`.
    """
    level = library()
    for name in ("choose", "choose_truncated"):
        torch.library.register_fake(f"tandem::{name}", _fake_choose)
    torch.library.register_fake("tandem::logprobs", _fake_logprobs)
    torch.library.register_fake("tandem::gumbels", lambda level, bits: torch.empty_like(bits, dtype=torch.float32))
    return level


def _fake_choose(level: int, logits: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.int64)


def _fake_logprobs(
    level: int, logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_rows = logits.shape[0]
    return (
        logits.new_empty((num_rows, 1 + num_top)),
        logits.new_empty(num_rows, dtype=torch.int64),
        logits.new_empty((num_rows, num_top), dtype=torch.int64),
    )
