"""Speculation changes no token: cases 15, 64, 67, 68 and 70, with a draft worker and its stream in between."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from tandem.v1 import types_pb2
from transformers import LlamaConfig, LlamaForCausalLM

import draft_worker.__main__
from draft_worker.config import DraftWorkerConfig
from draft_worker.loading import options_of
from drafting.loading import load_proposer
from drafting.model_proposer import ModelProposer
from drafting.proposer import Proposer
from engine.batch import Batch
from engine.runner import ModelRunner
from tests.cases.cell import VOCAB_SIZE, ForcedEngine, WholeCell, whole_cell
from tests.integration.harness import MODEL, receive, request

STOP = types_pb2.FINISH_REASON_STOP
PADDED_SIZE = VOCAB_SIZE + 5
FIXED = {"speculation": "fixed", "max_draft_tokens": 8}


def limited(message: Any, max_draft_tokens: int) -> Any:
    """The same request with so long drafts; 0: plain decoding."""
    copy = type(message).FromString(message.SerializeToString())
    copy.speculation.max_draft_tokens = max_draft_tokens
    return copy


async def test_case_15_min_tokens_holds_under_speculation(folder: Path) -> None:
    def draft() -> Proposer:
        return ModelProposer(ForcedEngine(disagreement=0.2), "draft", VOCAB_SIZE)

    async with whole_cell(folder, ForcedEngine(step_ms=4), draft, FIXED) as cell:
        accepted = 0
        for index in range(4):
            message = request(f"number {index}", 48, temperature=0.8)
            message.stop.min_tokens = 16
            message.stop.token_ids.extend(range(64, 96))  # a third of what the model says
            plain = await receive(cell.stub.GenerateStream(limited(message, 0)))
            drafted = await receive(cell.stub.GenerateStream(limited(message, 4)))
            assert (drafted.tokens, drafted.texts, drafted.finish) == (plain.tokens, plain.texts, plain.finish)
            assert plain.finish[0] == STOP
            assert not any(64 <= token < 96 for token in plain.tokens[0][:16])
            accepted += drafted.usage.accepted_tokens
            assert plain.usage.drafted_tokens == 0
        assert accepted > 10


@pytest.mark.parametrize("stop", [{"strings": ["er!"]}, {"token_ids": [ord("!")]}], ids=["string", "token"])
async def test_case_67_and_68_a_stop_inside_an_accepted_run_ends_ids_logprobs_and_text(
    folder: Path, stop: dict[str, list[Any]]
) -> None:
    """Everything that is drafted is right, and goes on beyond the stop."""
    script = b"the draft knows it all, and more: ever!" + b"this is never said. " * 4
    scripts = {ord("p"): (1, script)}

    def draft() -> Proposer:
        return ModelProposer(ForcedEngine(scripts), "draft", VOCAB_SIZE)

    async with whole_cell(folder, ForcedEngine(scripts, step_ms=5), draft, FIXED) as cell:
        answers = []
        for max_draft_tokens in (0, 6):
            message = limited(request("p", 100), max_draft_tokens)
            message.output.top_logprobs = 1
            for name, value in stop.items():
                getattr(message.stop, name).extend(value)
            answer = await cell.whole(message)
            (choice,) = answer.choices
            assert bytes(choice.token_ids) == script[:39]
            assert choice.text == "the draft knows it all, and more: ev" + ("er" if "token_ids" in stop else "")
            assert [entry.chosen.token_id for entry in choice.logprobs] == list(choice.token_ids)
            assert choice.finish_reason == STOP
            assert answer.usage.completion_tokens == 39
            answers.append(answer)
        assert answers[0].choices == answers[1].choices
        assert answers[0].usage.drafted_tokens == 0
        assert answers[1].usage.accepted_tokens > 6, "no draft reached the stop"
        await cell.until_idle()


# ------------------------------------------------------------------------------------------------------- real models


def write_llama(folder: Path, path: Path, vocab_size: int = PADDED_SIZE, noise: float = 0.0) -> Path:
    """A tiny seeded Llama; a smaller vocabulary leaves out its last rows, `noise` makes a worse model of it."""
    shutil.copytree(folder, path)
    torch.manual_seed(7)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=PADDED_SIZE,
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            bos_token_id=256,
            eos_token_id=257,
            initializer_range=0.3,
        )
    )
    with torch.no_grad():
        for weights in model.parameters():
            weights.add_(noise * weights.std() * torch.randn_like(weights))
    if vocab_size != PADDED_SIZE:
        model.resize_token_embeddings(vocab_size)
    model.save_pretrained(path)
    return path


def runner(path: Path, dtype: str) -> ModelRunner:
    return ModelRunner.load(path, dtype=dtype, device="cpu", num_blocks=64, block_size=16, threads=1)


class Paced:
    """An engine whose steps take a while, so that a draft model of the target's own size keeps up."""

    def __init__(self, engine: ModelRunner, step_s: float = 0.02) -> None:
        self.info = engine.info
        self._engine = engine
        self._step_s = step_s

    def forward(self, batch: Batch) -> torch.Tensor:
        time.sleep(self._step_s)
        return self._engine.forward(batch)


def real_draft(path: Path, target: Path, dtype: str = "float32") -> Any:
    config = DraftWorkerConfig(
        target=MODEL, target_model=str(target), draft=str(path), dtype=dtype, threads=1, kv_cache_gib=0.01
    )
    return lambda: load_proposer(options_of(config))


async def answers_by_k(
    cell: WholeCell, prompt: list[int], ks: Iterable[int], max_tokens: int
) -> tuple[dict[int, list[int]], int, int]:
    """The tokens at each k, with the drafted and the accepted ones of all."""
    tokens, drafted, accepted = {}, 0, 0
    for k in ks:
        message = request(prompt, max_tokens)
        answer = await receive(cell.stub.GenerateStream(limited(message, k)))
        tokens[k] = answer.tokens[0]
        drafted += answer.usage.drafted_tokens
        accepted += answer.usage.accepted_tokens
    return tokens, drafted, accepted


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_case_64_greedy_tokens_are_the_same_for_every_draft_length(
    folder: Path, tmp_path: Path, dtype: str
) -> None:
    """From a prompt of one token; in bfloat16 there is no near-tie to explain, since drafts change no bit."""
    target = write_llama(folder, tmp_path / "target")
    worse = write_llama(folder, tmp_path / "worse", noise=0.03)
    prompt = [65]
    async with whole_cell(target, Paced(runner(target, dtype)), real_draft(worse, target, dtype), FIXED) as cell:
        tokens, drafted, accepted = await answers_by_k(cell, prompt, range(6), 64)
    assert 0 < accepted < drafted
    assert all(tokens[k] == tokens[0] for k in tokens), "a draft changed a token"
    assert len(set(tokens[0])) > 20
    if dtype == "float32":
        model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)
        expected = model.generate(
            torch.tensor([prompt]), max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert tokens[0] == expected[0, 1:].tolist()


@pytest.mark.parametrize("larger", ["draft", "target"])
async def test_case_70_padded_vocabularies_work_together(
    folder: Path, tmp_path: Path, larger: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The same weights but for some rows that no token of the tokenizer has; the larger target does say such ids."""
    small = write_llama(folder, tmp_path / "small", VOCAB_SIZE)
    large = write_llama(folder, tmp_path / "large")
    target, draft = (small, large) if larger == "draft" else (large, small)
    async with whole_cell(target, Paced(runner(target, "float32")), real_draft(draft, target)) as cell:
        said: set[int] = set()
        drafted = accepted = 0
        for first in range(65, 69):
            tokens, more_drafted, more_accepted = await answers_by_k(cell, [first], (0, 4), 40)
            assert tokens[4] == tokens[0]
            said.update(tokens[0])
            drafted, accepted = drafted + more_drafted, accepted + more_accepted
    assert accepted > 0.5 * drafted > 0
    assert (max(said) >= VOCAB_SIZE) == (larger == "target")
    assert "a round failed" not in caplog.text


@pytest.mark.usefixtures("restored_process")
def test_case_70_a_permuted_vocabulary_is_refused_at_start(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    permuted = write_llama(folder, tmp_path / "permuted", VOCAB_SIZE)
    tokenizer = json.loads((permuted / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (permuted / "tokenizer.json").write_text(json.dumps(tokenizer))
    flags = [f"--draft={permuted}", f"--target-model={folder}", f"--target={MODEL}", "--port=0"]
    monkeypatch.setattr(sys, "argv", ["draft_worker", *flags])
    assert draft_worker.__main__.main() == 2
    told = capsys.readouterr()
    assert "token 97 is" in told.err
    assert "READY" not in told.out
