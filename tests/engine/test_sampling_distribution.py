"""What is sampled is distributed as it should be: chi-square over 200 000 requests, first and second token jointly.

The expected probabilities are computed here, in float64, from the definition. Seeds are fixed, so this can't flake; the
bound is the 5-sigma point of a wrong rejection.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
import torch

from engine import noise
from engine.sampler import SampleRow, sample
from engine.sampling_params import SamplingParams

VOCAB = 6
DRAWS = 200_000
FIRST = np.array([1.2, 0.3, -0.4, 1.15, -2.0, 0.0])
SECOND = np.random.default_rng(1).normal(size=(VOCAB, VOCAB))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def probabilities(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """softmax(l / T), cut by top-k, top-p and min-p in that order, each by its definition."""
    p = np.exp(logits / params.temperature)
    order = np.argsort(-p, kind="stable")
    if params.top_k > 0:
        p[order[params.top_k :]] = 0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= params.top_p]] = 0
    p[p < params.min_p * p.max()] = 0
    return p / p.sum()


def draw(logits: np.ndarray, rows: list[SampleRow]) -> list[int]:
    tokens = sample(torch.tensor(logits, dtype=torch.float32), rows).token_ids
    return [token_id for token_id in tokens if token_id is not None]


@pytest.mark.parametrize(
    "params",
    [SamplingParams(temperature=1.0), SamplingParams(temperature=1.4, top_k=4, top_p=0.9, min_p=0.05)],
    ids=["T=1", "T=1.4, top-k, top-p, min-p"],
)
def test_first_and_second_token_jointly(params: SamplingParams) -> None:
    seeds = [noise.choice_seed(123, c) if c % 2 else c for c in range(DRAWS)]  # consecutive seeds and derived ones
    first = draw(np.tile(FIRST, (DRAWS, 1)), [SampleRow(params, seed, 0, [0], 1) for seed in seeds])
    rows = [SampleRow(params, seed, 1, [0, token_id], 1) for seed, token_id in zip(seeds, first, strict=True)]
    second = draw(SECOND[first], rows)
    assert len(first) == len(second) == DRAWS
    counts = np.bincount(np.array(first) * VOCAB + np.array(second), minlength=VOCAB * VOCAB)
    p_first = probabilities(FIRST, params)
    p_second = [probabilities(SECOND[v], params) for v in range(VOCAB)]
    expected = np.array([p_first[a] * p_second[a][b] for a, b in product(range(VOCAB), repeat=2)]) * DRAWS
    assert counts[expected == 0].sum() == 0
    possible = expected > 0
    assert (expected[possible] > 5).all()
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    freedom = int(possible.sum()) - 1
    assert freedom > 3
    # Wilson-Hilferty: a chi-square's cube root is nearly normal
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert z < 5


def test_noise_of_one_index_would_be_caught() -> None:
    """Two tokens from one index's noise are always equal here; from two indices, as often as chance has it."""
    params = SamplingParams(temperature=1.0)
    logits = np.tile(FIRST, (20_000, 1))
    first = draw(logits, [SampleRow(params, seed, 0, [0], 1) for seed in range(len(logits))])
    same = draw(logits, [SampleRow(params, seed, 0, [0], 1) for seed in range(len(logits))])
    second = draw(logits, [SampleRow(params, seed, 1, [0], 1) for seed in range(len(logits))])
    assert first == same
    chance = (probabilities(FIRST, params) ** 2).sum()
    equal = float(np.mean(np.array(first) == np.array(second)))
    assert abs(equal - chance) < 5 * math.sqrt(chance * (1 - chance) / len(logits))
