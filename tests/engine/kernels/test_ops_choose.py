"""The choice of tokens, for every implementation: the noise of every id, added and compared one by one in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine import noise
from tests.engine.kernels.conftest import Implementation


def _keys(seeds: list[int]) -> torch.Tensor:
    return torch.tensor([noise.row_key(seed, seed % 7) for seed in seeds], dtype=torch.int64).view(-1, 2)


def _expected(row: torch.Tensor, temperature: float, seed: int) -> int:
    logits = row.numpy()
    peak = logits.max()
    if not np.isfinite(peak):
        return -1
    if temperature == 0:
        return int(np.flatnonzero(logits == peak)[0])
    totals = (logits - peak) / np.float32(temperature) + noise.gumbel(seed, seed % 7, len(logits)).numpy()
    return int(np.flatnonzero(totals == totals.max())[0])


def _logits(num_rows: int, vocab_size: int, spread: float) -> torch.Tensor:
    return torch.randn((num_rows, vocab_size), generator=torch.Generator().manual_seed(vocab_size)) * spread


@pytest.mark.parametrize(
    ("vocab_size", "spread"),
    [
        (1000, 3.0),
        pytest.param(1, 1.0, marks=pytest.mark.full_only),
        pytest.param(17, 1.0, marks=pytest.mark.full_only),
        pytest.param(203, 0.01, marks=pytest.mark.full_only),
        pytest.param(49153, 4.0, marks=pytest.mark.full_only),
    ],
)
def test_the_highest_sum(implementation: Implementation, vocab_size: int, spread: float) -> None:
    logits = _logits(24, vocab_size, spread)
    before = logits.clone()
    temperatures = torch.tensor([0.0, 1.0, 0.7, 1.3, 0.01, 8.0] * 4)
    seeds = [(1 << 63) + 11 * row for row in range(24)]
    chosen = implementation.ops.choose(logits, temperatures, _keys(seeds))
    assert chosen.dtype == torch.int64
    assert chosen.device.type == "cpu"
    wanted = [_expected(logits[row], temperatures[row].item(), seeds[row]) for row in range(24)]
    assert chosen.tolist() == wanted
    assert torch.equal(logits, before)
    if vocab_size > 100:
        assert len(set(wanted)) > 10
        assert wanted != logits.argmax(-1).tolist()


def test_a_rows_choice_is_its_own(implementation: Implementation) -> None:
    logits = _logits(9, 1003, 2.0)
    temperatures = torch.tensor([1.0, 0.0, 0.8] * 3)
    keys = _keys(list(range(9)))
    whole = implementation.ops.choose(logits, temperatures, keys).tolist()
    for row in range(9):
        one = slice(row, row + 1)
        assert implementation.ops.choose(logits[one], temperatures[one], keys[one]).tolist() == [whole[row]]
    strided = torch.full((9, 1003 + 5), 1e9)
    strided[:, 2:-3] = logits
    assert implementation.ops.choose(strided[:, 2:-3], temperatures, keys).tolist() == whole
    # Noise decides among equals of these, so that another key is another choice.
    other = implementation.ops.choose(logits, torch.ones(9), _keys(list(range(100, 109)))).tolist()
    assert other != whole


def test_of_equals_the_lowest_id(implementation: Implementation) -> None:
    logits = torch.zeros(3, 530)
    logits[0, [7, 8, 40, 529]] = 2.0
    logits[1, [16, 33, 528]] = 1.0
    logits[2] = -torch.inf
    logits[2, [400, 401]] = -5.0
    assert implementation.ops.choose(logits, torch.zeros(3), _keys([1, 2, 3])).tolist() == [7, 16, 400]


def test_minus_infinity_is_never_chosen(implementation: Implementation) -> None:
    logits = torch.full((20, 300), -torch.inf)
    logits[:, [11, 222]] = 0.0
    chosen = implementation.ops.choose(logits, torch.ones(20), _keys(list(range(20)))).tolist()
    assert set(chosen) == {11, 222}


def test_rows_without_a_highest_logit(implementation: Implementation) -> None:
    logits = _logits(8, 259, 1.0)
    expected = implementation.ops.choose(logits, torch.tensor([0.0, 1.0] * 4), _keys(list(range(8)))).tolist()
    logits[1, 258] = torch.nan
    logits[2, 0] = torch.nan
    logits[3, 100] = torch.inf
    logits[4] = -torch.inf
    logits[5] = torch.nan
    for row in range(1, 6):
        expected[row] = -1
    chosen = implementation.ops.choose(logits, torch.tensor([0.0, 1.0] * 4), _keys(list(range(8)))).tolist()
    assert chosen == expected


def test_no_rows(implementation: Implementation) -> None:
    assert implementation.ops.choose(torch.empty(0, 50), torch.empty(0), _keys([])).tolist() == []
