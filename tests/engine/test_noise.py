"""Noise against an oracle in plain Python."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine import noise
from tests.engine.noise_oracle import EDGES, M32, M64, mix64, oracle_bits, oracle_gumbel

GOLDEN_FILE = Path(__file__).with_name("golden_noise.txt")


def exact_gumbel(bits: int) -> float:
    return -math.log(-math.log1p(-min((bits + 0.5) / 2**32, 1 - 2**-24)))


def torch_gumbel(bits: list[int]) -> list[float]:
    return noise.gumbel_from_bits(torch.tensor(bits, dtype=torch.int64)).tolist()


def test_bits_and_noise_equal_the_oracle() -> None:
    rng = random.Random(1)
    for _ in range(40):
        seed, index = rng.getrandbits(64), rng.choice([0, 1, rng.randrange(5000), rng.getrandbits(32)])
        ids = [0, 1, 2**17, 2**18 - 1] + [rng.randrange(2**18) for _ in range(100)]
        k0, k1 = (torch.tensor(half) for half in noise.row_key(seed, index))
        expected = [oracle_bits(seed, index, token_id) for token_id in ids]
        assert noise.uniform_bits(k0, k1, torch.tensor(ids)).tolist() == expected
        assert noise.gumbel(seed, index, ids).tolist() == [oracle_gumbel(bits) for bits in expected]


def test_every_kind_of_bits_equals_the_oracle() -> None:
    rng = random.Random(2)
    near_the_branch = [round((1 - math.sqrt(0.5)) * 2**32) + d for d in range(-400, 400, 7)]
    bits = EDGES + near_the_branch + [1 << k for k in range(32)] + [rng.getrandbits(32) for _ in range(8000)]
    bits += [rng.getrandbits(rng.randrange(1, 32)) for _ in range(2000)] + [
        M32 - rng.getrandbits(20) for _ in range(500)
    ]
    assert torch_gumbel(bits) == [oracle_gumbel(b) for b in bits]


@given(st.lists(st.integers(0, M32), min_size=1, max_size=50))
def test_any_bits_equal_the_oracle(bits: list[int]) -> None:
    assert torch_gumbel(bits) == [oracle_gumbel(b) for b in bits]


def test_golden_vectors() -> None:
    lines = [line.split() for line in GOLDEN_FILE.read_text().splitlines() if line and not line.startswith("#")]
    vectors = [line for line in lines if line[0] == "g"]
    raw = [line for line in lines if line[0] == "bits"]
    choices = [line for line in lines if line[0] == "choice"]
    assert len(vectors) >= 40
    assert len(raw) >= 10
    assert len(choices) >= 8
    assert {line[1] for line in raw} >= {"00000000", "ffffffff"}
    for _, seed, index, token_id, g in vectors:
        assert noise.gumbel(int(seed, 16), int(index), [int(token_id)]).item() == float.fromhex(g)
    for _, bits, g in raw:
        assert torch_gumbel([int(bits, 16)]) == [float.fromhex(g)]
    for _, seed, choice, derived in choices:
        assert noise.choice_seed(int(seed, 16), int(choice)) == int(derived, 16)


def test_extremes_are_finite_and_the_bounds_hold() -> None:
    lowest, highest = torch_gumbel([M32, 0])
    assert noise.GUMBEL_MIN <= lowest < -2.811
    assert 22.873 < highest <= noise.GUMBEL_MAX
    assert highest == pytest.approx(33 * math.log(2), abs=2e-6)
    values = torch_gumbel(EDGES)
    assert all(math.isfinite(v) and noise.GUMBEL_MIN <= v <= noise.GUMBEL_MAX for v in values)


def test_accuracy_against_float64() -> None:
    rng = random.Random(3)
    bits = [rng.getrandbits(rng.randrange(1, 33)) for _ in range(20_000)] + EDGES
    worst = max(abs(g - exact_gumbel(b)) for g, b in zip(torch_gumbel(bits), bits, strict=True) if b < M32 - 2**20)
    assert worst < 2.0e-6  # one ulp at 22.9
    # Near u = 1 the resolution of float32 decides; there the noise is lowest and never wins.
    upper = [M32 - rng.getrandbits(20) for _ in range(5000)]
    assert max(abs(g - exact_gumbel(b)) for g, b in zip(torch_gumbel(upper), upper, strict=True)) < 0.05


def test_row_keys_are_those_of_each_row() -> None:
    rng = random.Random(4)
    seeds = [0, M64, M64 + 5, *(rng.getrandbits(64) for _ in range(50))]
    indices = [0, 2**32, 3, *(rng.randrange(10_000) for _ in range(50))]
    expected = [list(noise.row_key(seed, index)) for seed, index in zip(seeds, indices, strict=True)]
    assert noise.row_keys(seeds, indices).tolist() == expected
    assert noise.row_keys([], []).shape == (0, 2)


def test_a_subset_equals_the_whole_vocabulary_whatever_its_shape() -> None:
    whole = noise.gumbel(77, 5, 50_000)
    ids = torch.randperm(50_000, generator=torch.Generator().manual_seed(0))[:997]
    assert torch.equal(noise.gumbel(77, 5, ids), whole[ids])
    assert torch.equal(noise.gumbel(77, 5, [49_999]), whole[49_999:])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        single = noise.gumbel(77, 5, 50_000)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(single, whole)


def test_choice_seeds() -> None:
    rng = random.Random(5)
    for seed in [0, 1, M64, *(rng.getrandbits(64) for _ in range(50))]:
        assert noise.choice_seed(seed, 0) == seed
        derived = [noise.choice_seed(seed, choice) for choice in range(64)]
        assert len(set(derived)) == 64
        for choice in range(1, 64):
            start = mix64(seed ^ 0xD1B54A32D192ED03)
            assert derived[choice] == mix64((start + choice * 11400714819323198485) % 2**64)


def test_noise_is_gumbel_and_independent_across_seed_index_and_token() -> None:
    """Mean γ, variance π²/6; correlation between neighbours in each of the three arguments within 5 sigma."""
    base = noise.gumbel(1000, 0, 200_000).double()
    n = len(base)
    assert abs(base.mean().item() - 0.5772156649) < 5 * math.sqrt(math.pi**2 / 6 / n)
    assert abs(base.var().item() - math.pi**2 / 6) < 5 * math.sqrt((5.4 - 1) * (math.pi**2 / 6) ** 2 / n)
    others = {
        "seed": noise.gumbel(1001, 0, 200_000),
        "high seed bit": noise.gumbel(1000 ^ 1 << 63, 0, 200_000),
        "index": noise.gumbel(1000, 1, 200_000),
        "choice": noise.gumbel(noise.choice_seed(1000, 1), 0, 200_000),
        "token": base.roll(1),
    }
    for name, other in others.items():
        correlation = torch.corrcoef(torch.stack([base, other.double()]))[0, 1].item()
        assert abs(correlation) < 5 / math.sqrt(n), name


def test_bits_are_uniform() -> None:
    """Chi-square of the upper and of the lower 8 bits over consecutive ids, and over consecutive indices of one id."""
    k0, k1 = (torch.tensor(half) for half in noise.row_key(9, 9))
    by_token = noise.uniform_bits(k0, k1, torch.arange(256_000))
    keys = torch.tensor([noise.row_key(9, index) for index in range(64_000)])
    by_index = noise.uniform_bits(keys[:, 0], keys[:, 1], torch.tensor([50]))
    for bits in (by_token, by_index):
        for part in (bits >> 24, bits & 255, (bits >> 12) & 255):
            counts = torch.bincount(part, minlength=256).double()
            expected = len(bits) / 256
            chi_square = ((counts - expected) ** 2 / expected).sum().item()
            assert 255 - 5 * math.sqrt(510) < chi_square < 255 + 5 * math.sqrt(510)
