"""Log-probabilities against float64, and against themselves in other company."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.logprobs import FLOOR, likeliest, position_logprobs, prompt_logprobs
from engine.sampler import SampleRow, sample
from engine.sampling_params import SamplingParams

pytestmark = pytest.mark.usefixtures("each_sampling_route")


def reference(logits: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """float64 log-softmax and all ids by falling logit, rising id."""
    exact = logits.astype(np.float64)
    shifted = exact - exact.max()
    return shifted - math.log(np.exp(shifted).sum()), sorted(range(len(logits)), key=lambda v: (-exact[v], v))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.floats(-30, 30, width=32) | st.sampled_from([0.0, 1.0, 2.0]), min_size=1, max_size=60),
    st.integers(0, 70),
    st.data(),
)
def test_any_row_equals_float64(values: list[float], top: int, data: st.DataObject) -> None:
    token_id = data.draw(st.integers(0, len(values) - 1))
    (position,) = position_logprobs(torch.tensor([values], dtype=torch.float32), [token_id], [top])
    exact, order = reference(np.array(values, dtype=np.float32))
    assert position.chosen is not None
    assert position.chosen.token_id == token_id
    assert position.chosen.rank == order.index(token_id) + 1
    assert position.chosen.logprob == pytest.approx(exact[token_id], abs=1e-5)
    assert [entry.token_id for entry in position.top] == order[:top]
    assert [entry.rank for entry in position.top] == list(range(1, min(top, len(values)) + 1))
    for entry in position.top:
        assert entry.logprob == pytest.approx(exact[entry.token_id], abs=1e-5)
        if entry.token_id == token_id:
            assert entry == position.chosen


def test_a_large_vocabulary_equals_float64() -> None:
    logits = torch.randn(9, 50_021, generator=torch.Generator().manual_seed(0)) * 3
    targets = [0, 50_020, *range(1000, 8000, 1000)]
    for row, position in enumerate(prompt_logprobs(logits, targets, 20)):
        exact, order = reference(logits[row].numpy())
        assert position.chosen is not None
        assert position.chosen.logprob == pytest.approx(exact[targets[row]], abs=2e-6 * 16)
        assert position.chosen.rank == order.index(targets[row]) + 1
        assert [entry.token_id for entry in position.top] == order[:20]


def test_numbers_do_not_depend_on_chunks_neighbours_or_threads() -> None:
    """Cases 34 and 35, as far as they are ours: a position's numbers come from its own logits alone."""
    logits = torch.randn(24, 12_011, generator=torch.Generator().manual_seed(1)) * 4
    logits[::2] = logits[::2].round()
    targets = list(range(24))
    whole = prompt_logprobs(logits, targets, 5)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            for size in (1, 3, 16):
                pieces = [
                    entry
                    for start in range(0, 24, size)
                    for entry in prompt_logprobs(logits[start : start + size], targets[start : start + size], 5)
                ]
                assert pieces == whole
    finally:
        torch.set_num_threads(threads)
    mixed = position_logprobs(logits[:3], targets[:3], [0, 20, 5])
    assert [entry.chosen for entry in mixed] == [entry.chosen for entry in whole[:3]]
    assert [len(entry.top) for entry in mixed] == [0, 20, 5]
    assert mixed[2] == whole[2]


def test_the_floor_replaces_what_has_no_finite_logarithm() -> None:
    logits = torch.tensor([[0.0, -math.inf, -20_000.0, -3.4e38, 3.4e38 * 0.1]])
    for target in range(4):
        (position,) = position_logprobs(logits, [target], [5])
        assert position.chosen is not None
        assert position.chosen.logprob == FLOOR
        assert [entry.logprob for entry in position.top] == [0.0] + [FLOOR] * 4


def test_case_37_processors_leave_log_probabilities_alone() -> None:
    """top_k 1 and bans change the choice, not the model's numbers; nothing becomes -inf."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    exact, _ = reference(logits[0].numpy())
    chosen = []
    for params in (
        SamplingParams(temperature=0.3, top_k=1, top_logprobs=4),
        SamplingParams(temperature=0, bad_words=((0,),), logit_bias={3: 50.0}, top_logprobs=4),
    ):
        (position,) = sample(logits, [SampleRow(params, 1, 0, [0], 1)]).logprobs
        assert position is not None
        assert [entry.token_id for entry in position.top] == [0, 1, 2, 3]
        assert [entry.logprob for entry in position.top] == pytest.approx(list(exact), abs=1e-6)
        chosen.append(position.chosen)
    assert [entry.token_id for entry in chosen if entry] == [0, 3]


def test_ties_are_ordered_by_id_at_every_size() -> None:
    for vocab in (5, 64, 5000, 40_000):
        logits = torch.zeros(3, vocab)
        logits[1, vocab - 1] = 1.0
        assert likeliest(logits, 4).tolist() == [[0, 1, 2, 3], [vocab - 1, 0, 1, 2], [0, 1, 2, 3]]
    assert likeliest(torch.zeros(2, 5), 0).shape == (2, 0)


def test_what_cannot_be_answered_raises() -> None:
    with pytest.raises(ValueError, match="not finite"):
        prompt_logprobs(torch.tensor([[0.0, math.nan]]), [0], 1)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        prompt_logprobs(torch.zeros(1, 2), [2], 1)
    with pytest.raises(ValueError, match="2 token ids"):
        prompt_logprobs(torch.zeros(1, 2), [0, 0], 1)
    assert prompt_logprobs(torch.zeros(0, 2), [], 1) == []
