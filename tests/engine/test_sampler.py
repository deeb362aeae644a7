"""The sampler against a straightforward float64 reference, and rows against themselves in other company."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine import noise, sampler
from engine.kernels import cpp_choose
from engine.sampler import SampleResult, SampleRow, sample
from engine.sampling_params import SamplingParams
from tests.engine.sampling import row

pytestmark = pytest.mark.usefixtures("each_sampling_route")

VOCAB = 40
NEAR = 1e-4


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def one(logits: list[float] | torch.Tensor, sample_row: SampleRow) -> int:
    result = sample(torch.as_tensor(logits, dtype=torch.float32)[None], [sample_row])
    assert not result.errors
    token_id = result.token_ids[0]
    assert token_id is not None
    return token_id


class Reference:
    """One row in float64, written plainly: dictionaries and sorted lists. `margin` is how far the nearest decision was
    from going the other way."""

    def __init__(self, logits: list[float], sample_row: SampleRow) -> None:
        self.margin = math.inf
        self.touched: set[int] = set()
        self.params = sample_row.params
        self.scores = dict(enumerate(logits))
        prompt = list(sample_row.known_token_ids[: sample_row.num_prompt_tokens])
        output = list(sample_row.known_token_ids[sample_row.num_prompt_tokens :]) + list(sample_row.draft_prefix)
        self._penalise(prompt, output)
        self._bias_and_ban(prompt + output, sample_row.output_index)
        if not self.params.greedy:
            self._scale_and_cut()
            g = noise.gumbel(sample_row.seed, sample_row.output_index, len(logits)).tolist()
            self.scores = {v: s + g[v] for v, s in self.scores.items()}
        order = sorted(self.scores, key=lambda v: (-self.scores[v], v))
        self.token_id = order[0]
        if not self.params.greedy and len(order) > 1:
            self._near(self.scores[order[0]] - self.scores[order[1]])
        self._edge(order, 1)

    def _near(self, distance: float) -> None:
        self.margin = min(self.margin, abs(distance))

    def _edge(self, order: list[int], count: int) -> None:
        """A cut between two scores: exact where both are the model's own, else float32 may see it differently."""
        if 0 < count < len(order) and self.touched & set(order[count - 1 : count + 1]):
            self._near(self.scores[order[count - 1]] - self.scores[order[count]])

    def _penalise(self, prompt: list[int], output: list[int]) -> None:
        if self.params.repetition_penalty != 1:
            self.touched |= set(prompt)
        self.touched |= set(output) | set(self.params.logit_bias)
        for v in set(prompt + output):
            penalty = self.params.repetition_penalty
            self.scores[v] = self.scores[v] / penalty if self.scores[v] > 0 else self.scores[v] * penalty
        for v, count in Counter(output).items():
            self.scores[v] -= self.params.frequency_penalty * count + self.params.presence_penalty

    def _bias_and_ban(self, context: list[int], output_index: int) -> None:
        for v, bias in self.params.logit_bias.items():
            self.scores[v] += bias
        for *before, last in self.params.bad_words:
            if context[len(context) - len(before) :] == before:
                self.scores.pop(last, None)
        if output_index < self.params.min_tokens:
            for v in self.params.stop_token_ids:
                self.scores.pop(v, None)

    def _scale_and_cut(self) -> None:
        peak = max(self.scores.values())
        self.scores = {v: (s - peak) / self.params.temperature for v, s in self.scores.items()}
        order = sorted(self.scores, key=lambda v: (-self.scores[v], v))
        if 0 < self.params.top_k < len(order):
            self._edge(order, self.params.top_k)
            order = order[: self.params.top_k]
        weight = {v: math.exp(self.scores[v]) for v in order}
        if self.params.top_p < 1:
            total, reached, kept = sum(weight.values()), 0.0, []
            for v in order:
                kept.append(v)
                reached += weight[v] / total
                self._near(reached - self.params.top_p)
                if reached >= self.params.top_p:
                    break
            self._edge(order, len(kept))
            order = kept
        for v in order:
            if self.params.min_p > 0 and weight[v] < 1:
                self._near(weight[v] - self.params.min_p)
        self.scores = {v: self.scores[v] for v in order if weight[v] >= self.params.min_p}


LOGITS = st.lists(st.sampled_from([-8.0, -2.5, -1.0, 0.0, 0.5, 1.0, 3.0, 3.25, 7.0]), min_size=VOCAB, max_size=VOCAB)
IDS = st.integers(0, VOCAB - 1)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-6, 0.3, 0.7, 1.0, 2.5]),
    top_k=st.sampled_from([-1, 0, 1, 2, 7, 39, 40, 500]),
    top_p=st.sampled_from([1.0, 1.0, 0.05, 0.5, 0.83, 0.99]),
    min_p=st.sampled_from([0.0, 0.0, 0.01, 0.3, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5, -0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.4, -0.2]),
    logit_bias=st.dictionaries(IDS, st.sampled_from([-100.0, -1.0, 2.0, 100.0]), max_size=3),
    bad_words=st.lists(st.lists(IDS, min_size=1, max_size=3).map(tuple), max_size=4).map(tuple),
    stop_token_ids=st.frozensets(IDS, max_size=3),
    min_tokens=st.sampled_from([0, 0, 3, 100]),
)
ROWS = st.builds(
    lambda params, seed, prompt, output, draft: row(params, seed=seed, prompt=prompt, output=output, draft=draft),
    PARAMS,
    st.integers(0, 2**64 - 1),
    st.lists(IDS, min_size=1, max_size=12),
    st.lists(IDS, max_size=12),
    st.lists(IDS, max_size=5),
)


@settings(max_examples=400, deadline=None)
@given(LOGITS, ROWS)
def test_any_row_equals_the_reference(logits: list[float], sample_row: SampleRow) -> None:
    reference = Reference(logits, sample_row)
    assume(reference.margin > NEAR)
    assert one(logits, sample_row) == reference.token_id


def everything(rng: random.Random, vocab: int, count: int) -> list[SampleRow]:
    """Rows that use every combination of features, large and small."""
    rows = []
    for _ in range(count):
        params = SamplingParams(
            temperature=rng.choice([0.0, 1e-7, 0.4, 0.7, 1.0, 3.0]),
            top_k=rng.choice([0, 0, -1, 1, 5, 50, 300, 5000]),
            top_p=rng.choice([1.0, 1.0, 0.2, 0.9, 0.999]),
            min_p=rng.choice([0.0, 0.0, 0.05, 1e-9]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
            presence_penalty=rng.choice([0.0, 0.5]),
            frequency_penalty=rng.choice([0.0, 0.1]),
            logit_bias={rng.randrange(vocab): 2.0} if rng.random() < 0.3 else {},
            bad_words=((rng.randrange(vocab),),) if rng.random() < 0.3 else (),
            stop_token_ids=frozenset({2, 3}),
            min_tokens=rng.choice([0, 50]),
            top_logprobs=rng.choice([None, 0, 1, 7]),
        )
        context = [rng.randrange(vocab) for _ in range(rng.randrange(2, 60))]
        draft = [rng.randrange(vocab) for _ in range(rng.randrange(3))]
        rows.append(row(params, seed=rng.getrandbits(64), prompt=context[:2], output=context[2:], draft=draft))
    return rows


def entry(result: SampleResult, index: int) -> tuple[Any, ...]:
    return result.token_ids[index], result.logprobs[index], result.errors.get(index)


@pytest.mark.parametrize(("vocab", "count"), [(300, 120), (50_021, 12)])
def test_a_row_is_the_same_in_any_company(vocab: int, count: int) -> None:
    """Case 25: alone, in any batch, at any place, with failing neighbours, with any number of threads: bit for bit."""
    rng = random.Random(vocab)
    logits = torch.randn(count, vocab, generator=torch.Generator().manual_seed(1)) * 3
    logits[:, ::7] = logits[:, ::7].round()  # ties
    rows = everything(rng, vocab, count)
    alone = [entry(sample(logits[i : i + 1], rows[i : i + 1]), 0) for i in range(count)]
    assert all(token_id is not None for token_id, _, _ in alone)
    before = logits.clone()
    for attempt in range(4):
        torch.set_num_threads(1 + attempt % 2)
        order = rng.sample(range(count), count if attempt < 2 else rng.randrange(2, count))
        result = sample(logits[order], [rows[i] for i in order])
        assert [entry(result, at) for at in range(len(order))] == [alone[i] for i in order]
    spoiled = logits.clone()
    spoiled[::3, 5] = math.nan
    result = sample(spoiled, rows)
    assert set(result.errors) == set(range(0, count, 3))
    assert [entry(result, i) for i in range(count) if i % 3] == [alone[i] for i in range(count) if i % 3]
    assert torch.equal(logits, before)


def test_case_25_a_seeded_row_beside_an_unseeded_one() -> None:
    logits = torch.randn(2, 500, generator=torch.Generator().manual_seed(2))
    seen = set()
    for other_seed in range(5):
        rows = [row(SamplingParams(), seed=11), row(SamplingParams(), seed=other_seed * 7919)]
        seen.add(sample(logits, rows).token_ids[0])
    assert len(seen) == 1


def test_pruned_noise_finds_the_winner_of_full_noise() -> None:
    """Noise on every id, added in float32, has the same first maximum; from peaked to flat, with ties, at any T."""
    generator = torch.Generator().manual_seed(3)
    for scale, temperature in [(0.0, 1.0), (0.01, 1.0), (1.0, 1.0), (3.0, 0.7), (3.0, 2.0), (8.0, 1.0), (1.0, 1e-5)]:
        logits = torch.randn(64, 2000, generator=generator) * scale
        logits[::2] = logits[::2].round()
        rows = [row(SamplingParams(temperature=temperature), seed=seed) for seed in range(64)]
        t = torch.tensor(temperature, dtype=torch.float32)
        scores = (logits - logits.amax(-1, keepdim=True)) / t
        totals = scores + torch.stack([noise.gumbel(seed, 0, 2000) for seed in range(64)])
        assert sample(logits, rows).token_ids == totals.argmax(-1).tolist()


def test_triton_chooses_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """In its interpreter; the rows it is not given, changed and cut ones, are chosen as elsewhere."""
    pytest.importorskip("triton")
    logits = torch.randn(8, 300, generator=torch.Generator().manual_seed(6)) * 2
    logits[3, 9] = math.nan
    rows = everything(random.Random(6), 300, 4) + [row(SamplingParams(), seed=seed) for seed in range(4)]
    rows = rows[::2] + rows[1::2]
    usual = sample(logits, rows)
    triton_choose = sampler._triton_choose()
    assert triton_choose is not None
    calls = []
    choose = triton_choose.choose

    def noted(*given: torch.Tensor) -> torch.Tensor:
        calls.append(given)
        chosen: torch.Tensor = choose(*given)
        return chosen

    monkeypatch.setattr(cpp_choose, "kernels_for", lambda logits: None)
    monkeypatch.setattr(sampler, "_is_on_gpu", lambda logits: True)
    monkeypatch.setattr(triton_choose, "choose", noted)
    assert sample(logits, rows) == usual
    assert len(calls) == 2, "for all rows, and for those with changed logits"
    assert usual.errors == {3: sampler.NOT_FINITE}


def test_the_likeliest_may_lose_to_extreme_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token 20 below the maximum wins if its hash is 0, the largest noise there is: 22.87."""
    logits = torch.full((1, 64), -30.0)
    logits[0, 0] = 0.0
    logits[0, 40] = -20.0

    def bits(k0: int, k1: int, token_id: int) -> torch.Tensor:
        return noise.uniform_bits(torch.tensor(k0), torch.tensor(k1), torch.tensor(token_id))

    winners: Counter[int | None] = Counter()
    for k0 in range(200):
        # mix32(0) is 0: so is the hash where k1 takes away what the first mix32 gives, which is bits(0, x, 0) of x.
        k1 = -int(bits(0, 40 ^ k0, 0)) % 2**32
        assert int(bits(k0, k1, 40)) == 0
        monkeypatch.setattr(noise, "row_keys", lambda *_, key=(k0, k1): np.array([key], np.int64))
        (token_id,) = sample(logits, [row(SamplingParams())]).token_ids
        assert token_id == (40 if noise.gumbel_from_bits(bits(k0, k1, 0)) < 2.87 else 0)
        winners[token_id] += 1
    assert winners[40] > 150
    assert winners[0] > 2


def test_greedy_ties_go_to_the_lowest_id_at_every_size() -> None:
    for vocab in (2, 3, 17, 64, 1000, 32_768, 50_000, 151_936):
        logits = torch.zeros(3, vocab)
        for tied in ([vocab - 2, vocab - 1], [vocab // 2, vocab - 1], [0, vocab - 1]):
            logits.zero_()
            logits[:, tied] = 1.0
            for threads in (1, 2):
                torch.set_num_threads(threads)
                assert sample(logits, [row(SamplingParams(temperature=0))] * 3).token_ids == [min(tied)] * 3


def test_case_23_tiny_temperatures_equal_greedy() -> None:
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(4)) * 4
    logits[:25] = logits[:25].round()
    logits[0, :2] = torch.tensor([3e38, -3e38])
    greedy = sample(logits, [row(SamplingParams(temperature=0))] * 50).token_ids
    for temperature in (1e-6, 1e-7, 1e-30, 1e-45):
        rows = [row(SamplingParams(temperature=temperature), seed=seed) for seed in range(50)]
        assert sample(logits, rows).token_ids == greedy
    # Just above, the noise is real but only breaks ties; the scores overflow to -inf and nothing more.
    rows = [row(SamplingParams(temperature=1e-5), seed=seed) for seed in range(50)]
    result = sample(logits, rows)
    assert not result.errors
    assert result.token_ids[0] == 0
    for index, token_id in enumerate(result.token_ids):
        assert logits[index, token_id or 0] >= logits[index].max() - 0.01


def test_case_27_top_k_off_in_three_ways() -> None:
    logits = torch.randn(30, 300, generator=torch.Generator().manual_seed(5))
    answers = {
        tuple(sample(logits, [row(params, seed=seed) for seed in range(30)]).token_ids)
        for params in (SamplingParams(top_k=0), SamplingParams(top_k=-1), SamplingParams(), SamplingParams(top_k=300))
    }
    assert len(answers) == 1


def test_case_30_and_31_a_bad_row_fails_alone() -> None:
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(7))
    logits[4, 3] = math.inf
    logits[5] = -math.inf
    rows = [
        row(SamplingParams(temperature=0)),
        row(SamplingParams(repetition_penalty=1.1), prompt=[VOCAB + 3]),
        row(SamplingParams(logit_bias={VOCAB + 5: 1.0})),
        row(SamplingParams(temperature=0, bad_words=tuple((v,) for v in range(VOCAB)))),
        row(SamplingParams(temperature=0)),
        row(SamplingParams(top_logprobs=2)),
    ]
    result = sample(logits, rows)
    assert result.token_ids == [int(logits[0].argmax()), None, None, None, None, None]
    assert set(result.errors) == {1, 2, 3, 4, 5}
    assert "context" in result.errors[1]
    assert "logit_bias" in result.errors[2]
    assert result.errors[3] == sampler.ALL_BANNED
    assert result.errors[4] == result.errors[5] == sampler.NOT_FINITE
    assert result.logprobs == [None] * 6


def test_infinite_negative_logits_are_never_chosen() -> None:
    logits = torch.full((100, 20), -math.inf)
    logits[:, 3] = -5.0
    logits[:, 17] = -5.0
    for params in (
        SamplingParams(),
        SamplingParams(top_k=10),
        SamplingParams(top_p=0.999),
        SamplingParams(min_p=1e-38),
    ):
        rows = [row(replace(params, top_logprobs=4), seed=seed) for seed in range(100)]
        result = sample(logits, rows)
        assert set(result.token_ids) == {3, 17}
        assert all(p is not None and math.isfinite(t.logprob) for p in result.logprobs for t in (p.top if p else ()))


def test_shapes_and_dtypes_are_checked() -> None:
    assert sample(torch.zeros(0, 5), []) == SampleResult([], [], {})
    with pytest.raises(ValueError, match="2 rows"):
        sample(torch.zeros(1, 5), [row(SamplingParams())] * 2)
    with pytest.raises(ValueError, match="float32"):
        sample(torch.zeros(1, 5, dtype=torch.bfloat16), [row(SamplingParams())])
