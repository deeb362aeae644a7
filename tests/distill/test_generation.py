"""What a target is recorded to have said is what transformers makes it say, features included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from distill.dialogue import Dialogue
from distill.generation import Job, Target, jobs
from distill.prompts import HELD_OUT, TRAIN
from distill.shards import Record
from distill.target import Opened, load_target
from engine import noise

MAX_ANSWER = 16
CONVERSATIONS = [
    Job(("Why?", "Go on."), 0.0, 11),
    Job(("What is a tide, and who says so?",), 0.8, 12),
    Job(("Because.", "And then?"), 1.0, 13),
    Job(("",), 0.0, 14),
    Job(("x" * 300,), 0.0, 15),
]


def load(opened: Opened, batch_size: int) -> Target:
    return load_target(
        opened,
        torch.device("cpu"),
        dtype=torch.float32,
        threads=1,
        batch_size=batch_size,
        max_answer_tokens=MAX_ANSWER,
    )


def held(target: Target) -> dict[int, Record | None]:
    return {job.seed: record for job, record in target.answers(CONVERSATIONS)}


@pytest.fixture(scope="module")
def found(opened: Opened) -> dict[int, Record | None]:
    return held(load(opened, 4))


@pytest.fixture(scope="module")
def oracle(target_folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32)


@torch.inference_mode()
def test_tokens_and_features_are_the_models_own(found: dict[int, Record | None], oracle: Any) -> None:
    checked = 0
    for job in CONVERSATIONS[:4]:
        record = found[job.seed]
        assert record is not None
        tokens = record.tokens.long()
        out = oracle.model(input_ids=tokens[None])
        hidden = out.last_hidden_state[0]
        torch.testing.assert_close(record.features.float(), hidden[record.predicting()], atol=2e-3, rtol=2e-3)
        logits = oracle.lm_head(hidden)
        for answer in record.answers:
            assert answer.end - answer.first == MAX_ANSWER or tokens[answer.end - 1] == 257
            for index, position in enumerate(range(answer.first, answer.end)):
                scores = logits[position - 1]
                if job.temperature:
                    scores = scores / job.temperature + noise.gumbel(answer.seed, index, len(scores))
                assert int(scores.argmax()) == int(tokens[position])
                checked += 1
    assert checked > 60


def test_the_template_goes_around_the_texts(found: dict[int, Record | None], target_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    record = found[11]
    assert record is not None
    first, second = record.answers
    tokens = record.tokens.tolist()
    answer = tokens[first.first : first.end]
    ended = answer[-1] == 257
    start = tokenizer("<|bos|><|user|>Why?<|assistant|>", add_special_tokens=False).input_ids
    between = tokenizer(f"{'' if ended else '<|eos|>'}<|user|>Go on.<|assistant|>", add_special_tokens=False).input_ids
    assert tokens[: second.first] == start + answer + between


def test_a_question_of_the_targets_own_is_no_answer(found: dict[int, Record | None]) -> None:
    record = found[14]
    assert record is not None
    (answer,) = record.answers
    assert record.tokens[:2].tolist() == [256, 258]
    assert record.tokens[answer.first - 1] == 259
    assert answer.first > 3


def test_too_long_a_prompt_is_left_out(found: dict[int, Record | None]) -> None:
    assert found[15] is None


def test_company_changes_nothing(opened: Opened, found: dict[int, Record | None]) -> None:
    for seed, record in held(load(opened, 1)).items():
        other = found[seed]
        assert (record is None) == (other is None)
        if record is not None and other is not None:
            assert record.tokens.tolist() == other.tokens.tolist()
            assert record.answers == other.answers
            assert torch.equal(record.features, other.features)


def test_jobs_of_a_shard() -> None:
    train = jobs(TRAIN, 1, 4, 200)
    assert train == jobs(TRAIN, 1, 4, 200)
    assert train != jobs(TRAIN, 1, 6, 200)
    assert 0.3 < sum(job.turns[0] == "" for job in train) / 200 < 0.5
    assert {job.temperature for job in train} == {0.0, 0.7, 0.85, 1.0}
    assert 0.4 < sum(job.turns[0] == "" for job in jobs(TRAIN, 1, 5, 200)) / 200 < 0.6
    held_out = jobs(HELD_OUT, 1, 0, 10)
    assert [job.temperature for job in held_out] == [0.0, 0.7] * 10
    assert all(job.turns[0] for job in held_out)
    assert [job.turns for job in held_out[::2]] == [job.turns for job in held_out[1::2]]


def test_without_a_template_prompts_are_plain_text(target_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    tokenizer.chat_template = None
    dialogue = Dialogue(tokenizer)
    assert not dialogue.has_template
    assert dialogue.first("Hi") == [*b"Hi\n"]
    assert dialogue.next("Ho", ended=True) == [*b"\nHo\n"]
