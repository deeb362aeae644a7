"""What is refused, by which field, and what the rest becomes."""

from __future__ import annotations

import ast
import math
from dataclasses import replace
from pathlib import Path

import pytest

from gateway import admission
from gateway.admission import Ask, ModelFacts, Refusal, Resumed

FACTS = ModelFacts(
    name="m",
    vocab_size=100,
    max_model_len=64,
    max_sequence_tokens=48,
    eos_token_ids=frozenset({2, 3}),
    longest_token_bytes=4,
)
HI = Ask(text="hi")
NAN, INF = math.nan, math.inf

REFUSED = [
    (Ask(), "prompt"),
    (Ask(text=""), "text"),
    (Ask(token_ids=[]), "token_ids"),
    (Ask(token_ids=[1, 100]), "token_ids.ids[1]"),
    (Ask(token_ids=[1] * 48), "token_ids"),
    (Ask(token_ids=[1] * 65), "token_ids"),
    (Ask(text="x" * 257), "text"),
    (Ask(messages=()), "chat.messages"),
    (Ask(messages=(("user", "hi"), ("", "x"))), "chat.messages[1].role"),
    (Ask(messages=((" ", "x"),)), "chat.messages[0].role"),
    (Ask(messages=(("user", "x" * 257),)), "chat"),
    (replace(HI, request_id="x" * 257), "request_id"),
    (replace(HI, cache_salt="x" * 257), "cache_salt"),
    *((replace(HI, temperature=value), "sampling.temperature") for value in (-0.1, NAN, INF, 1e39)),
    *((replace(HI, top_k=value), "sampling.top_k") for value in (-2, -100)),
    *((replace(HI, top_p=value), "sampling.top_p") for value in (0.0, -1.0, 1.01, NAN)),
    *((replace(HI, min_p=value), "sampling.min_p") for value in (-0.1, 1.01, NAN)),
    *((replace(HI, repetition_penalty=value), "sampling.repetition_penalty") for value in (0.0, -1.0, NAN, INF)),
    *((replace(HI, presence_penalty=value), "sampling.presence_penalty") for value in (-2.1, 2.1, NAN)),
    *((replace(HI, frequency_penalty=value), "sampling.frequency_penalty") for value in (-2.1, 2.1, NAN)),
    (replace(HI, logit_bias={100: 1.0}), "sampling.logit_bias[100]"),
    (replace(HI, logit_bias={5: NAN}), "sampling.logit_bias[5]"),
    (replace(HI, logit_bias=dict.fromkeys(range(5000), 1.0)), "sampling.logit_bias"),
    (replace(HI, bad_words=("a", "")), "sampling.bad_words[1]"),
    (replace(HI, bad_words=("a" * 129,)), "sampling.bad_words[0]"),
    (replace(HI, bad_words=("a",) * 257), "sampling.bad_words"),
    (replace(HI, max_tokens=0), "stop.max_tokens"),
    (replace(HI, max_tokens=4, min_tokens=5), "stop.min_tokens"),
    (replace(HI, min_tokens=64), "stop.min_tokens"),
    (replace(HI, stop_strings=("a", "")), "stop.strings[1]"),
    (replace(HI, stop_strings=("a" * 1025,)), "stop.strings[0]"),
    (replace(HI, stop_strings=("a",) * 65), "stop.strings"),
    (replace(HI, stop_token_ids=(5, 100)), "stop.token_ids[1]"),
    (replace(HI, stop_token_ids=(5,) * 1025), "stop.token_ids"),
    (replace(HI, repetition_penalty=1e-45), "sampling.repetition_penalty"),
    (replace(HI, repetition_penalty=1e30), "sampling.repetition_penalty"),
    (replace(HI, top_logprobs=21), "output.top_logprobs"),
    (replace(HI, prompt_logprobs=21), "output.prompt_logprobs"),
    (replace(HI, n=0), "n"),
    (replace(HI, n=65), "n"),
    (replace(HI, resume=(Resumed(1, (5,), 1),)), "resume[0].index"),
    (replace(HI, n=2, resume=(Resumed(0, (5,), 1), Resumed(0, (5,), 1))), "resume[1].index"),
    (replace(HI, n=2, resume=(Resumed(0, (5,), 1), Resumed(1, (5,), 2))), "resume[1].seed"),
    (replace(HI, seed=7, resume=(Resumed(0, (5,), 1),)), "resume[0].seed"),
    (replace(HI, resume=(Resumed(0, (5, 100), 1),)), "resume[0].token_ids[1]"),
    (replace(HI, max_tokens=1, resume=(Resumed(0, (5, 6), 1),)), "resume[0].token_ids"),
    (replace(HI, resume=(Resumed(0, (5,) * 65, 1),)), "resume[0].token_ids"),
]


@pytest.mark.parametrize(("ask", "field"), REFUSED)
def test_bad_fields_are_named(ask: Ask, field: str) -> None:
    with pytest.raises(Refusal) as refusal:
        admission.check(ask, FACTS)
    assert refusal.value.field == field


@pytest.mark.parametrize(
    "ask",
    [
        HI,
        replace(HI, temperature=0.0, top_p=1.0, min_p=0.0, repetition_penalty=1e-6, presence_penalty=-2.0),
        replace(HI, temperature=1e-6, top_k=-1, frequency_penalty=2.0),
        replace(HI, top_k=0, logit_bias={99: -100.0}, n=64, top_logprobs=20, prompt_logprobs=0),
        replace(HI, max_tokens=4, min_tokens=4),
        replace(HI, resume=(Resumed(0, (5,), 1),)),
        replace(HI, seed=1, resume=(Resumed(0, (), 1),)),
        Ask(token_ids=[99] * 47),
    ],
)
def test_good_ones_pass(ask: Ask) -> None:
    admission.check(ask, FACTS)


@pytest.mark.parametrize(
    ("max_tokens", "num_prompt_tokens", "field"),
    [
        (None, 0, "text"),
        (None, 48, "text"),
        (None, 64, "text"),
        (None, 65, "text"),
        (1, 47, None),
        (2, 47, "stop.max_tokens"),
        (40, 8, None),
        (41, 8, "stop.max_tokens"),
        (None, 47, None),
    ],
)
def test_lengths(max_tokens: int | None, num_prompt_tokens: int, field: str | None) -> None:
    ask = replace(HI, max_tokens=max_tokens)
    if field is None:
        admission.fit(ask, FACTS, num_prompt_tokens)
        return
    with pytest.raises(Refusal) as refusal:
        admission.fit(ask, FACTS, num_prompt_tokens)
    assert refusal.value.field == field


def test_too_long_prompts_tell_the_limits() -> None:
    with pytest.raises(Refusal) as refusal:
        admission.fit(HI, FACTS, 50)
    assert refusal.value.reason == "CONTEXT_LENGTH_EXCEEDED"
    assert refusal.value.limits == {"max_sequence_tokens": 48, "prompt_tokens": 50}


def test_unset_parameters_get_their_defaults() -> None:
    params = admission.sampling(HI, FACTS, [], [])
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.0, 0, 1.0, 0.0)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.0, 0.0, 0.0)
    assert (params.min_tokens, params.max_tokens) == (0, None)
    assert (params.top_logprobs, params.prompt_logprobs) == (None, None)
    assert params.stop_token_ids == (2, 3)


@pytest.mark.parametrize("top_k", [None, 0, -1])
def test_every_way_to_switch_top_k_off_is_the_same(top_k: int | None) -> None:
    assert admission.sampling(replace(HI, top_k=top_k), FACTS, [], []).top_k == 0


@pytest.mark.parametrize(
    ("logprobs", "top", "expected"),
    [(False, None, None), (True, None, 0), (False, 3, 3), (True, 0, 0), (False, 0, None)],
)
def test_logprobs(logprobs: bool, top: int | None, expected: int | None) -> None:
    assert admission.sampling(replace(HI, logprobs=logprobs, top_logprobs=top), FACTS, [], []).top_logprobs == expected


def test_stop_ids() -> None:
    ask = replace(HI, stop_token_ids=(9, 5, 9))
    assert admission.sampling(ask, FACTS, [], [7]).stop_token_ids == (2, 3, 5, 7, 9)
    assert admission.sampling(replace(ask, ignore_eos=True), FACTS, [], []).stop_token_ids == (5, 9)


def test_admission_is_pure() -> None:
    tree = ast.parse(Path(admission.__file__).read_text())
    imported = {
        alias.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    } | {(node.module or "").split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported <= {"__future__", "math", "collections", "dataclasses"}
