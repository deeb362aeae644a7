"""The draft that comes with the default model: small, whole, made from the prompts that are here, and often right."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from cli.model_source import _SHIPPED_DRAFT as FOLDER
from distill.dataset import DataPlan
from distill.generation import Job
from distill.target import load_target, open_target
from engine.default_model import fetch_default_model
from engine.draft_folder import CONFIG, WEIGHTS, read_draft
from engine.draft_model import load_draft
from engine.sampler import SampleRow, sample
from engine.sampling_params import SamplingParams
from tests.engine.conftest import Sequences

MAX_BYTES = 8_000_000
HELD_OUT_QUESTIONS = ("What do bees do in winter?", "Write a short note to a neighbour about a lost cat.")


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / CONFIG).read_text())
    return found


def test_it_is_small_and_whole(config: dict[str, Any]) -> None:
    assert (FOLDER / WEIGHTS).stat().st_size <= MAX_BYTES
    draft = read_draft(FOLDER)
    assert len(draft.tensors["head_token_ids"]) == config["recipe"]["head_tokens"]
    assert (FOLDER / "README.md").is_file()


def test_its_recipe_can_be_followed(config: dict[str, Any]) -> None:
    """The prompts are still those that its data came from."""
    data = config["data"]
    plan = DataPlan(
        data["target"],
        seed=data["seed"],
        held_out_prompts=data["held_out_prompts"],
        max_answer_tokens=data["max_answer_tokens"],
    )
    assert {name: data[name] for name in plan.description()} == plan.description()


def test_what_it_claims_is_what_is_written_beside_it(config: dict[str, Any]) -> None:
    text = (FOLDER / "README.md").read_text()
    for one in config["acceptance"]:
        assert f"{one['alone']['4']:.2f}" in text
        assert f"{one['with_lookup']['4']:.2f}" in text


@pytest.mark.real_model
@pytest.mark.timeout(300)
def test_it_guesses_what_the_default_model_says() -> None:
    folder = fetch_default_model()
    target = load_target(open_target(folder), torch.device("cpu"), threads=1, batch_size=4, max_answer_tokens=48)
    run = Sequences(load_draft(FOLDER, folder, device="cpu", num_blocks=64, threads=1)).run
    right = total = 0
    for number, question in enumerate(HELD_OUT_QUESTIONS):
        jobs = [Job((question,), temperature, 5 + number) for temperature in (0.0, 0.7)]
        for job, record in target.answers(jobs):
            assert record is not None
            (answer,) = record.answers
            tokens = record.tokens.tolist()
            logits = run((f"{number} {job.temperature}", 0, tokens))[answer.first - 1 : answer.end - 1]
            rows = [
                SampleRow(SamplingParams(temperature=job.temperature), answer.seed, index, (), answer.first)
                for index in range(len(logits))
            ]
            guesses = sample(logits, rows).token_ids
            right += sum(a == b for a, b in zip(guesses, tokens[answer.first :], strict=True))
            total += len(guesses)
    assert total > 60
    assert right / total > 0.25, "a guess of the commonest token is right in 5 % of cases"
