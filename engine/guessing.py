"""What comes first and second at a position, and how narrowly: what a draft guesses, and where it is likely wrong.

Tokens are ordered by  (l_v − max l) / T + g(seed, i, v)  with the target's own noise g (`engine.noise`), at T = 0 by
their logits; of equal ones the lower id comes first. The first is the token that `engine.sampler` would choose.

On a CPU with the C++ kernels one pass over the logits tells both (csrc/best_two.cpp); elsewhere torch does, with noise
for every token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from engine import noise
from engine.batch import Batch, Choices, DecodeRows
from engine.kernels import cpp_draft
from engine.kernels.cpp_draft import MARGIN_UNITS, NUMBERS_OF_TWO


class Guess(NamedTuple):
    """Of one row of logits."""

    token_id: int | None
    """None where the highest logit isn't finite or one is NaN"""
    runner_up: int | None
    """None where no other logit is above −inf"""
    margin: float
    """first minus second, in (l − max l) / T + g, at T = 0 in l; 0 without a runner-up"""


@runtime_checkable
class GuessingEngine(Protocol):
    """An engine that goes on to guesses, in ids of its target, without logits for all of the target's vocabulary."""

    def guess(self, batch: Batch, choices: Choices) -> list[Guess]:
        """Write the batch's KV; one guess for each wanted logit."""
        ...

    def guess_next(self, rows: DecodeRows) -> list[Guess]:
        """The same for rows of one token, also of one slot, one guess for each; only where `guesses_next`."""
        ...

    @property
    def guesses_next(self) -> bool:
        """Whether it has a way for rows of one token that is cheaper than `guess`."""
        ...


def best_two(logits: torch.Tensor, choices: Choices, ids: torch.Tensor | None = None) -> list[Guess]:
    """Of float32 logits [L, V], which are left as they are; ids int32 [V]: the columns' tokens, ascending, None: their
    numbers.
    """
    if not len(logits):
        return []
    temperatures = torch.tensor(choices.temperatures, dtype=torch.float32)
    keys = torch.from_numpy(noise.row_keys(choices.seeds, choices.output_indices))
    level = cpp_draft.level_of_loaded() if logits.device.type == "cpu" else None
    if level is None:
        return _best_two_in_torch(logits, temperatures, keys, ids)
    numbers = torch.empty(len(logits), NUMBERS_OF_TWO, dtype=torch.int64)
    cpp_draft.best_two(level, logits, ids, temperatures, keys, numbers)
    return guesses_of(numbers.flatten().tolist())


def guesses_of(numbers: Sequence[int]) -> list[Guess]:
    """What `cpp_draft.best_two` wrote, NUMBERS_OF_TWO a row."""
    rows = zip(*(numbers[place::NUMBERS_OF_TWO] for place in range(NUMBERS_OF_TWO)), strict=True)
    return [
        Guess(None if first < 0 else first, None if second < 0 else second, margin / MARGIN_UNITS)
        for first, second, margin in rows
    ]


def _best_two_in_torch(
    logits: torch.Tensor, temperatures: torch.Tensor, keys: torch.Tensor, ids: torch.Tensor | None
) -> list[Guess]:
    device, num_columns = logits.device, logits.shape[1]
    columns = torch.arange(num_columns, device=device) if ids is None else ids.to(device, torch.int64)
    temperatures, keys = temperatures.to(device)[:, None], keys.to(device)
    peaks = logits.amax(-1, keepdim=True)
    totals = logits.clone()
    for row in torch.nonzero(temperatures[:, 0] > 0).flatten().tolist():
        bits = noise.uniform_bits(keys[row, 0], keys[row, 1], columns)
        totals[row] = (logits[row] - peaks[row]) / temperatures[row] + noise.gumbel_from_bits(bits)
    first = totals.argmax(-1, keepdim=True)
    highest = totals.gather(1, first)
    rest = totals.scatter(1, first, -torch.inf)
    second = rest.argmax(-1, keepdim=True)
    next_highest = rest.gather(1, second)
    found = zip(
        columns[first[:, 0]].tolist(),
        columns[second[:, 0]].tolist(),
        highest[:, 0].tolist(),
        next_highest[:, 0].tolist(),
        torch.isfinite(peaks[:, 0]).tolist(),
        strict=True,
    )
    return [
        Guess(None, None, 0.0)
        if not usable
        else Guess(token_id, None, 0.0)
        if next_best == -torch.inf
        else Guess(token_id, runner_up, best - next_best)
        for token_id, runner_up, best, next_best, usable in found
    ]
