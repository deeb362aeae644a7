"""The executor over a real model: a tiny seeded decoder in float32, run by the paged engine.

The oracle of plain decoding is transformers' own greedy `generate`; with drafts, plain decoding itself.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from drafting.mirror import Mirror
from drafting.model_proposer import ModelProposer
from engine.prefix_hash import prefix_hash
from engine.runner import ModelRunner
from worker.steps import SamplingParams

VOCAB = 131
PROMPTS = [[3, 14, 15, 92, 65, 35], [27, 18, 28, 18, 28, 45, 90, 45], [14, 14, 21, 35, 62, 37, 30, 95, 5, 4, 8, 80]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=1,
        # Large enough that neighbouring logits are far apart: outputs have high entropy and no near-ties.
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    vocabulary = {f"t{index}": index for index in range(VOCAB)}
    tokenizer = {"model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "t0"}, "added_tokens": []}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return path


def runner(folder: Path) -> ModelRunner:
    return ModelRunner.load(folder, dtype="float32", device="cpu", num_blocks=128, block_size=16, threads=1)


def begin(rig: Any, temperature: float, count: int) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=count, top_logprobs=1)
    admissions = [rig.admission(slot, prompt, params=params) for slot, prompt in enumerate(PROMPTS)]
    rig.step([(slot, len(prompt), 0) for slot, prompt in enumerate(PROMPTS)], admissions=admissions)


def run(rig: Any, temperature: float, k: int, count: int = 40) -> dict[int, list[int]]:
    begin(rig, temperature, count)
    while not all(rig.executor.sequences.get(slot).ended for slot in range(len(PROMPTS))):
        rig.step([(slot, 0, k) for slot in range(len(PROMPTS))])
    return {slot: rig.output(slot) for slot in range(len(PROMPTS))}


def test_greedy_equals_transformers(make_rig: Any, folder: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    outputs = run(make_rig(engine=runner(folder)), 0.0, 0)
    for slot, prompt in enumerate(PROMPTS):
        expected = model.generate(
            torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0, len(prompt) :].tolist()
        assert outputs[slot] == expected
        assert len(set(expected)) > 5


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_any_draft_gives_the_plain_tokens(
    make_rig: Any, scripted_drafting: Any, folder: Path, temperature: float
) -> None:
    engine = runner(folder)
    truth = run(make_rig(engine=engine), temperature, 0)
    source = random.Random(11)

    def propose(slot: int, tokens: list[int], limit: int) -> list[int]:
        """Right, random, truncated, stale (of an earlier position) or of another sequence."""
        done = len(tokens) - len(PROMPTS[slot])
        right = truth[slot][done : done + limit]
        kind = source.randrange(5)
        if kind == 0:
            return right
        if kind == 1:
            return [source.randrange(VOCAB) for _ in range(limit)]
        if kind == 2:
            return right[: source.randint(0, limit)]
        if kind == 3:
            return truth[slot][max(0, done - 1) :][:limit]
        return [*right[:2], *truth[(slot + 1) % 3][:limit]][:limit]

    for k in range(1, 9):
        rig = make_rig(scripted_drafting(propose), engine)
        assert run(rig, temperature, k) == truth, k
        drafted = sum(sum(outcome.num_drafted_tokens) for outcome in rig.outcomes)
        accepted = sum(sum(outcome.num_accepted_tokens) for outcome in rig.outcomes)
        assert 0 < accepted < drafted


def test_the_model_itself_as_draft_model_is_always_right(make_rig: Any, scripted_drafting: Any, folder: Path) -> None:
    """The same weights and the same noise guess exactly what the target samples, at T > 0 too."""
    proposer = ModelProposer(runner(folder), "tiny", VOCAB)
    mirrors: dict[int, Mirror] = {}

    def propose(slot: int, tokens: list[int], limit: int) -> list[int]:
        mirror = mirrors.get(slot)
        if mirror is None:
            mirror = mirrors[slot] = Mirror(
                1, slot, 1, list(PROMPTS[slot]), len(PROMPTS[slot]), 7 + slot, 0.9, 4, prefix_hash(PROMPTS[slot])
            )
        if len(tokens) > len(mirror.tokens):
            mirror.commit(tokens[len(mirror.tokens) :])
        while len(mirror.guess) < limit:
            proposer.extend([mirror])
        return mirror.guess[:limit]

    truth = run(make_rig(engine=runner(folder)), 0.9, 0)
    rig = make_rig(scripted_drafting(propose), runner(folder))
    assert run(rig, 0.9, 4) == truth
    drafted = sum(sum(outcome.num_drafted_tokens) for outcome in rig.outcomes)
    accepted = sum(sum(outcome.num_accepted_tokens) for outcome in rig.outcomes)
    assert accepted == drafted > 50
