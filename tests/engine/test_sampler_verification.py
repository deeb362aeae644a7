"""Drafted positions, sampled at once, give the tokens of plain decoding, whatever the processors."""

from __future__ import annotations

import random

import pytest
import torch

from engine.sampler import SampleRow, sample
from engine.sampling_params import SamplingParams

pytestmark = pytest.mark.usefixtures("each_sampling_route")


@pytest.mark.parametrize("draft_quality", [0.0, 0.7, 1.0])
def test_case_15_verification_equals_plain_decoding_with_every_processor(draft_quality: float) -> None:
    """Drafted positions, sampled at once with their draft prefix, give the plain tokens up to the first difference."""
    vocab, steps = 30, 40
    table = torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(8)) * 2

    def logits_after(token_id: int, position: int) -> torch.Tensor:
        return table[token_id].roll(position)

    params = SamplingParams(
        temperature=0.9,
        top_p=0.95,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        bad_words=((3,), (4, 5), (6, 7, 8)),
        stop_token_ids=frozenset({1, 2}),
        min_tokens=16,
        top_logprobs=2,
    )
    prompt = [9, 4]
    plain, plain_logprobs = list(prompt), []
    for index in range(steps):
        result = sample(logits_after(plain[-1], len(plain))[None], [SampleRow(params, 5, index, list(plain), 2)])
        plain.append(result.token_ids[0] or 0)
        plain_logprobs.append(result.logprobs[0])
    rng = random.Random(9)
    known, logprobs, accepted, rejected = list(prompt), [], 0, 0
    while len(known) < len(plain):
        truth = plain[len(known) : len(known) + 4]
        draft = [v if rng.random() < draft_quality else rng.randrange(vocab) for v in truth][: rng.randrange(5)]
        context = known + draft
        first = len(known) - 2
        rows = [SampleRow(params, 5, first + j, known, 2, draft[:j]) for j in range(len(draft) + 1)]
        logits = [logits_after(context[len(known) - 1 + j], len(known) + j) for j in range(len(draft) + 1)]
        result = sample(torch.stack(logits), rows)
        for j, token_id in enumerate(result.token_ids):
            known = [*known, token_id or 0]
            logprobs.append(result.logprobs[j])
            if j < len(draft) and draft[j] != token_id:
                rejected += 1
                break
            accepted += j < len(draft)
    assert known[: len(plain)] == plain
    assert logprobs[:steps] == plain_logprobs
    assert all(v not in (1, 2) for v in plain[2 : 2 + 16])
    assert accepted > 0 or draft_quality == 0.0
    assert rejected > 0 or draft_quality == 1.0
    assert len(set(plain)) > 8
