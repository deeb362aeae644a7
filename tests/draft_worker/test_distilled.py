"""A distilled draft as a proposer: beside its target, with the target's ids and noise; refused where it can't be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from draft_worker.config import DraftWorkerConfig
from draft_worker.loading import options_of
from drafting.combined_proposer import CombinedProposer
from drafting.loading import load_proposer
from drafting.mirror import Mirror
from engine import noise
from engine.errors import ModelError
from tests.distill.conftest import write_target
from tests.drafting.mirroring import feed, mirror
from tests.integration.test_distilled_draft import write_first_layers

PROMPT = [256, 258, *b"Why?", 259]
SEED = 9


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("tiny") / "target")


@pytest.fixture(scope="module")
def draft(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_first_layers(target, tmp_path_factory.mktemp("draft"))


def config(target: Path, draft: Path, **changes: Any) -> DraftWorkerConfig:
    settings = {"target": "m", "threads": 1, "dtype": "float32", "device": "cpu", "proposer": "model"}
    return DraftWorkerConfig(**{**settings, "target_model": str(target), "draft": str(draft), **changes})


@torch.inference_mode()
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_it_guesses_what_the_target_would_say(target: Path, draft: Path, temperature: float) -> None:
    proposer = load_proposer(options_of(config(target, draft)))
    mirror = Mirror(1, 0, 1, list(PROMPT), len(PROMPT), SEED, temperature, 8, 0)
    while mirror.wanted:
        proposer.extend([mirror])
    oracle: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    outside = torch.arange(oracle.config.vocab_size) % 4 == 0
    token_ids, right = list(PROMPT), 0
    for index, guess in enumerate(mirror.guess):
        scores = oracle(input_ids=torch.tensor([token_ids])).logits[0, -1]
        if temperature:
            scores = scores / temperature + noise.gumbel(SEED, index, len(scores))
        right += guess == int(scores.masked_fill(outside, -torch.inf).argmax())
        token_ids.append(guess)
    # Its weights are rounded to int8, so that a guess may differ; most don't.
    assert right >= 0.7 * len(mirror.guess) > 5
    assert all(guess % 4 for guess in mirror.guess)


def test_after_a_commit_of_several_tokens_it_guesses_as_one_that_reads_all(target: Path, draft: Path) -> None:
    """Rows of one to four tokens in a round, each its mirror's last ones: the guess is the one behind the last."""
    proposer, fresh = (load_proposer(options_of(config(target, draft))) for _ in range(2))
    mirrors = [mirror([*PROMPT, slot], slot, temperature=0.9 * (slot % 2), max_draft=1) for slot in range(4)]
    feed(proposer, mirrors)
    guessed = set()
    for turn in range(5):
        for slot, one in enumerate(mirrors):
            one.commit([*one.guess, *range(7, 7 + (slot + turn) % 4)])
        assert {one.known - one.computed for one in mirrors} == {1, 2, 3, 4}
        proposer.extend(mirrors)
        again = [
            mirror(one.tokens, one.slot, temperature=one.temperature, num_prompt=one.num_prompt) for one in mirrors
        ]
        fresh.extend(again)
        assert [one.guess for one in again] == [one.guess for one in mirrors]
        guessed |= {one.guess[-1] for one in mirrors}
        feed(proposer, mirrors)
    assert len(guessed) > 6


def test_the_index_stands_in_front_of_it(target: Path, draft: Path) -> None:
    proposer = load_proposer(options_of(config(target, draft, proposer="auto")))
    assert isinstance(proposer, CombinedProposer)
    assert proposer.name == f"ngram+{draft.name}"


def test_another_target_is_refused(target: Path, draft: Path, tmp_path: Path) -> None:
    other = write_target(tmp_path / "other", seed=4)
    with pytest.raises(ModelError, match="draft for another target"):
        load_proposer(options_of(config(other, draft)))


@pytest.mark.parametrize("vocabulary", ["text", "intersection"])
def test_its_vocabulary_is_its_targets(target: Path, draft: Path, vocabulary: str) -> None:
    with pytest.raises(ModelError, match=r"vocabulary: .* was distilled for one target"):
        load_proposer(options_of(config(target, draft, vocabulary=vocabulary)))
