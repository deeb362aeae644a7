"""What processors count, ban and leave, on inputs small enough to see. Their combinations are test_sampler.py's."""

from __future__ import annotations

import pytest
import torch

from engine import processors
from engine.sampler import SampleRow, sample
from engine.sampling_params import SamplingParams
from tests.engine.sampling import row

pytestmark = pytest.mark.usefixtures("each_sampling_route")


def one(logits: list[float], sample_row: SampleRow) -> int:
    (token_id,) = sample(torch.tensor([logits]), [sample_row]).token_ids
    assert token_id is not None
    return token_id


def test_case_28_penalties_need_nothing_but_the_context() -> None:
    """Cold and warm caches hand the sampler the same row: known tokens, not computed ones."""
    params = SamplingParams(temperature=0, repetition_penalty=1.3)
    logits = [2.0, 1.6, -1.0, 0.0]
    for prompt, output in (([0, 3], []), ([3, 0], []), ([3], [0]), ([0] * 5 + [3], []), ([0], [3, 3])):
        assert one(logits, row(params, prompt=prompt, output=output)) == 1
    assert one(logits, row(params, prompt=[3], draft=[0])) == 1
    assert one(logits, row(params, prompt=[3])) == 0
    # negative logits are multiplied: seen tokens only ever fall
    assert one([-1.0, -1.2], row(params, prompt=[0])) == 1


def test_logits_are_left_as_they_are() -> None:
    """They are written over for the choice, also where something wrong shows half-way; log-probabilities come later."""
    rows = [
        row(SamplingParams(temperature=0, repetition_penalty=1.3, top_logprobs=1), prompt=[1, 2], output=[3]),
        row(SamplingParams(temperature=0.5, logit_bias={0: 2.0, 5: -1.0}, presence_penalty=0.5), output=[5]),
        row(SamplingParams(temperature=0, bad_words=((4,),), logit_bias={4: 9.0})),
        row(SamplingParams(temperature=0, presence_penalty=0.5, logit_bias={99: 1.0}), output=[2]),
    ]
    logits = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))
    before = logits.clone()
    result = sample(logits, rows)
    assert list(result.errors) == [3]
    assert torch.equal(logits, before)
    entry = result.logprobs[0]
    assert entry is not None
    assert entry.top[0].logprob == pytest.approx(before[0].log_softmax(-1).max().item(), abs=1e-5)


def test_case_29_what_each_penalty_counts() -> None:
    logits = [1.0, 0.9, 0.0]
    repetition = SamplingParams(temperature=0, repetition_penalty=1.3)
    assert one(logits, row(repetition, prompt=[0, 0])) == 1
    assert one(logits, row(repetition, prompt=[2], output=[0])) == 1
    for params in (
        SamplingParams(temperature=0, presence_penalty=0.5),
        SamplingParams(temperature=0, frequency_penalty=0.5),
    ):
        assert one(logits, row(params, prompt=[0, 0])) == 0
        assert one(logits, row(params, prompt=[2], output=[0])) == 1
    # presence: once, however often; frequency: each time
    assert one([1.0, 0.0, 0.0], row(SamplingParams(temperature=0, presence_penalty=0.4), output=[0, 0, 0])) == 0
    assert one([1.0, 0.0, 0.0], row(SamplingParams(temperature=0, frequency_penalty=0.4), output=[0, 0, 0])) == 1


def test_case_12_neither_form_of_a_bad_word_appears() -> None:
    """ "Rome" and " Rome" are token sequences here; both forms are given and neither ever ends a context."""
    generator = torch.Generator().manual_seed(10)
    words = ((5,), (6, 7), (8, 9, 10))
    known, banned_once = [0], 0
    for index in range(400):
        logits = torch.randn(1, 12, generator=generator)
        plain = sample(logits, [SampleRow(SamplingParams(), 3, index, known, 1)]).token_ids[0] or 0
        banned_once += any(tuple([*known, plain][-len(w) :]) == w for w in words)
        known = [
            *known,
            sample(logits, [SampleRow(SamplingParams(bad_words=words), 3, index, known, 1)]).token_ids[0] or 0,
        ]
        assert not any(tuple(known[-len(w) :]) == w for w in words)
    assert banned_once > 20
    assert {6, 8, 9} <= set(known)


def test_bad_word_across_prompt_and_draft() -> None:
    params = SamplingParams(temperature=0, bad_words=((1, 2, 3),))
    logits = [0.0, 0.0, 0.0, 9.0, 1.0]
    assert one(logits, row(params, prompt=[1], draft=[2])) == 4
    assert one(logits, row(params, prompt=[1, 2])) == 4
    assert one(logits, row(params, prompt=[0, 1], output=[0], draft=[2])) == 3
    assert one(logits, row(params, prompt=[2])) == 3


def test_min_tokens_bans_stop_tokens_and_no_longer() -> None:
    params = SamplingParams(temperature=0, stop_token_ids=frozenset({0, 1}), min_tokens=2)
    logits = [9.0, 8.0, 1.0]
    assert [one(logits, row(params, output=[2] * count)) for count in range(4)] == [2, 2, 0, 0]
    assert one(logits, row(params, output=[2], draft=[2])) == 0


def test_ties_at_the_top_k_edge_keep_the_lowest_ids() -> None:
    logits = torch.zeros(200, 300)
    rows = [row(SamplingParams(top_k=3), seed=seed) for seed in range(200)]
    assert set(sample(logits, rows).token_ids) == {0, 1, 2}
    logits[:, 250] = 1.0
    assert set(sample(logits, rows).token_ids) == {0, 1, 250}


def test_top_p_keeps_exactly_what_reaches_it() -> None:
    logits = torch.zeros(200, 4)
    for top_p, kept in (
        (0.5, {0, 1}),
        (0.25, {0}),
        (0.2500001, {0, 1}),
        (1e-9, {0}),
        (0.75, {0, 1, 2}),
        (1.0, {0, 1, 2, 3}),
    ):
        rows = [row(SamplingParams(top_p=top_p), seed=seed) for seed in range(200)]
        assert set(sample(logits, rows).token_ids) == kept
    # top-p counts among what top-k left: halves of two, not quarters of four
    rows = [row(SamplingParams(top_k=2, top_p=0.5), seed=seed) for seed in range(200)]
    assert set(sample(logits, rows).token_ids) == {0}


@pytest.mark.parametrize("spread", [0.0, 0.5, 3.0, 9.0])
def test_every_window_gives_the_same_kept_ids(spread: float, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = torch.randn(8, 3000, generator=torch.Generator().manual_seed(11)) * spread
    scores[::2] = scores[::2].round()
    scores -= scores.amax(-1, keepdim=True)
    params = [
        SamplingParams(top_p=0.9),
        SamplingParams(top_p=0.999),
        SamplingParams(min_p=0.01),
        SamplingParams(top_k=200),
        SamplingParams(top_k=200, top_p=0.9),
        SamplingParams(top_p=0.9, min_p=0.2),
        SamplingParams(top_k=2999, min_p=1e-6),
        SamplingParams(top_k=5, top_p=0.3, min_p=0.5),
    ]

    def kept() -> list[tuple[int, int]]:
        at, ids = processors.kept_token_ids(scores, params)
        return sorted(zip(at.tolist(), ids.tolist(), strict=True))

    usual = kept()
    assert {at for at, _ in usual} == set(range(8))
    for windows in ((), (1,), (1, 2, 3, 10, 100), (2000,)):
        monkeypatch.setattr(processors, "_WINDOWS", windows)
        assert kept() == usual


def test_banned_ids_are_never_kept() -> None:
    scores = torch.tensor([[0.0, -torch.inf, -1.0, -torch.inf]]).repeat(3, 1)
    params = [SamplingParams(top_k=3), SamplingParams(top_p=0.99999), SamplingParams(min_p=1e-38)]
    at, ids = processors.kept_token_ids(scores, params)
    assert sorted(zip(at.tolist(), ids.tolist(), strict=True)) == [(row, id) for row in range(3) for id in (0, 2)]
