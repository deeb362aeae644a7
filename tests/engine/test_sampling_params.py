"""Sampling parameters are checked once, and an error names the field."""

from __future__ import annotations

import math
from typing import Any

import pytest

from engine.sampling_params import SamplingParams

FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
EDGES = {
    "temperature": 0.0,
    "top_k": -1,
    "top_p": 1e-9,
    "min_p": 1.0,
    "presence_penalty": -2.0,
    "top_logprobs": 0,
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in FLOATS for value in (math.nan, math.inf, -math.inf)),
        ("temperature", -0.1),
        ("top_k", -2),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: math.nan}),
        ("bad_words", ((1,), ())),
        ("bad_words", ((-1,),)),
        ("min_tokens", -1),
        ("max_tokens", -1),
        ("top_logprobs", -1),
        ("prompt_logprobs", -1),
    ],
)
def test_bad_values_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(("name", "value"), EDGES.items())
def test_edges_are_accepted(name: str, value: Any) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value


def test_what_needs_doing() -> None:
    plain = SamplingParams()
    assert not plain.greedy
    assert not plain.truncates
    assert not plain.changes_logits
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(temperature=1e-6).greedy
    assert not SamplingParams(temperature=1e-5).greedy
    for cut in (SamplingParams(top_k=1), SamplingParams(top_p=0.9), SamplingParams(min_p=0.1)):
        assert cut.truncates
    for change in (
        SamplingParams(repetition_penalty=1.1),
        SamplingParams(presence_penalty=0.1),
        SamplingParams(frequency_penalty=-0.1),
        SamplingParams(logit_bias={1: 0.5}),
        SamplingParams(bad_words=((1,),)),
        SamplingParams(min_tokens=1, stop_token_ids=frozenset({2})),
    ):
        assert change.changes_logits
