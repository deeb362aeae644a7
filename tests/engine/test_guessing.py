"""Guesses from logits: by the kernels and by torch the same, and the first is the sampler's token."""

from __future__ import annotations

import math

import pytest
import torch

from engine.batch import Choices
from engine.guessing import Guess, best_two, guesses_of
from engine.kernels import cpp_draft, cpp_linear
from engine.kernels.build import NoKernels
from engine.sampler import SampleRow, sample
from engine.sampling_params import SamplingParams

TEMPERATURES = [0.0, 0.7, 1.5] * 4
SEEDS = [(1 << 64) - 1 - row for row in range(12)]


@pytest.fixture(params=["kernels", "torch"])
def _route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(cpp_draft, "level_of_loaded", lambda: None)
        return
    try:
        cpp_linear.load_operations()
    except NoKernels as error:
        pytest.skip(str(error))


def choices(num: int) -> Choices:
    return Choices(TEMPERATURES[:num], SEEDS[:num], list(range(num)))


@pytest.mark.usefixtures("_route")
def test_the_first_is_the_samplers_and_the_second_is_what_it_says_without_the_first() -> None:
    logits = torch.randn(12, 700, generator=torch.Generator().manual_seed(1)) * 4
    logits[3] = logits[3].round()
    before = logits.clone()
    found = best_two(logits, choices(12))
    assert torch.equal(logits, before)
    rows = [
        SampleRow(SamplingParams(temperature=temperature), seed, index, (), 1)
        for index, (temperature, seed) in enumerate(zip(TEMPERATURES, SEEDS, strict=True))
    ]
    assert [guess.token_id for guess in found] == sample(logits, rows).token_ids
    for row, guess in enumerate(found):
        assert guess.token_id is not None
        logits[row, guess.token_id] = -1e4 + logits[row].max()  # the highest logit stays, so that scores do
    others = sample(logits, rows).token_ids
    noisy = [row for row in range(12) if TEMPERATURES[row]]
    assert all(guess.margin >= 0 for guess in found)
    highest = before.argmax(-1).tolist()
    # At T = 0, or where the first wasn't the likeliest, nothing else has changed.
    same = [row for row in range(12) if row not in noisy or found[row].token_id != highest[row]]
    assert len(same) > 6
    assert [found[row].runner_up for row in same] == [others[row] for row in same]


@pytest.mark.usefixtures("_route")
def test_ids_name_the_columns_and_make_the_noise() -> None:
    ids = torch.tensor([2, 5, 11, 600], dtype=torch.int32)
    wide = torch.full((6, 700), -torch.inf)
    logits = torch.randn(6, 4, generator=torch.Generator().manual_seed(2))
    wide[:, ids.long()] = logits
    assert best_two(logits, choices(6), ids) == best_two(wide, choices(6))
    assert {guess.token_id for guess in best_two(logits, choices(6), ids)} <= {2, 5, 11, 600}


@pytest.mark.usefixtures("_route")
def test_what_is_not_there() -> None:
    logits = torch.tensor(
        [[1.0, math.nan], [1.0, math.inf], [-math.inf, -math.inf], [-math.inf, 3.0], [4.0, 4.0]]
    ).repeat_interleave(2, 0)
    wanted = Choices([0.0, 1.0] * 5, [3] * 10, [0] * 10)
    found = best_two(logits, wanted)
    nothing = Guess(None, None, 0.0)
    assert found[:6] == [nothing] * 6
    assert found[6:8] == [Guess(1, None, 0.0)] * 2
    assert found[8] == Guess(0, 1, 0.0), "of equal ones the lower id comes first"
    assert {found[9].token_id, found[9].runner_up} == {0, 1}
    assert best_two(logits[:0], Choices([], [], [])) == []


def test_kernels_and_torch_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        cpp_linear.load_operations()
    except NoKernels as error:
        pytest.skip(str(error))
    logits = torch.randn(12, 5000, generator=torch.Generator().manual_seed(5)) * 3
    by_kernels = best_two(logits, choices(12))
    monkeypatch.setattr(cpp_draft, "level_of_loaded", lambda: None)
    by_torch = best_two(logits, choices(12))
    assert [guess[:2] for guess in by_kernels] == [guess[:2] for guess in by_torch]
    for ours, theirs in zip(by_kernels, by_torch, strict=True):
        assert ours.margin == pytest.approx(theirs.margin, abs=2e-6)


def test_margins_are_in_units() -> None:
    assert guesses_of([4, -1, 0, -1, -1, 0, 7, 9, 3 << 19]) == [
        Guess(4, None, 0.0),
        Guess(None, None, 0.0),
        Guess(7, 9, 1.5),
    ]
