"""The decoder against transformers: every family, every implementation of the operations that this CPU can run."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.errors import UnsupportedModel
from engine.families import FAMILIES
from engine.kernels.selection import KERNELS
from engine.kernels.torch_ops import TorchOps
from engine.runner import ModelRunner
from tests.engine.conftest import Sequences
from tests.engine.models import CONFIGS

NAMES = [name for name, settings in CONFIGS.items() if settings["model_type"] in FAMILIES]
NEW_TOKENS = 40
LOGIT_ERROR = 1e-5
"""of the largest logit: float32 against float64, through three layers of width 64"""
NEAR_TIE = 1e-4
"""float64 gap between two logits under which float32 may choose either"""
BFLOAT16_EXCESS = 1.1
"""our root mean square error in bfloat16, of transformers' own in bfloat16"""


@cache
def reference(folder: Path, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


def reference_logits(folder: Path, dtype: torch.dtype, token_ids: list[int]) -> torch.Tensor:
    """float64 [T, V]"""
    with torch.inference_mode():
        logits: torch.Tensor = reference(folder, dtype)(torch.tensor([token_ids])).logits
    return logits[0].double()


def draw(seed: int, length: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(3, 203) for _ in range(length)]


def greedy(state: Sequences, prompts: dict[str, list[int]], num_tokens: int) -> dict[str, list[int]]:
    """All prompts together: prefills of unequal chunks, then decoding in one batch."""
    known = {name: list(prompt) for name, prompt in prompts.items()}
    computed = dict.fromkeys(prompts, 0)
    while any(len(known[name]) < len(prompt) + num_tokens for name, prompt in prompts.items()):
        rows = []
        for index, name in enumerate(prompts):
            end = min(len(known[name]), computed[name] + 11 + 6 * index)
            rows.append((name, computed[name], known[name][computed[name] : end]))
            computed[name] = end
        for (name, _, _), row in zip(rows, state.run(*rows, logits="last"), strict=True):
            if computed[name] == len(known[name]):
                known[name].append(int(row.argmax()))
    return {name: known[name][len(prompt) :][:num_tokens] for name, prompt in prompts.items()}


@pytest.fixture(scope="module")
def load(tiny_model: Callable[[str], Path], load_runner: Callable[..., ModelRunner]) -> Callable[..., ModelRunner]:
    """A tiny model on the decoder route; skips where the CPU lacks the level."""

    def load(name: str, kernels: str, **options: Any) -> ModelRunner:
        try:
            return load_runner(tiny_model(name), route="decoder", kernels=kernels, **options)
        except UnsupportedModel as error:
            if "this CPU has no" not in str(error):
                raise
            pytest.skip(str(error))

    return load


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_are_transformers_own(name, kernels, load, tiny_model):
    """Each token is the one that transformers' float64 forward over what comes before it likes best, so by induction
    the run is transformers' greedy run; and all logits are close to that forward's.
    """
    folder = tiny_model(name)
    prompts = {"a": draw(1, 37), "b": draw(2, 70), "c": draw(3, 3)}
    runner = load(name, kernels)
    outputs = greedy(Sequences(runner), prompts, NEW_TOKENS)
    near_ties = 0
    for key, prompt in prompts.items():
        tokens = prompt + outputs[key]
        expected = reference_logits(folder, torch.float64, tokens)
        chosen = torch.tensor(outputs[key])
        rows = expected[len(prompt) - 1 : -1]
        gaps = rows.max(dim=-1).values - rows.gather(1, chosen[:, None])[:, 0]
        assert gaps.max() < NEAR_TIE, f"{key} differs at {int((gaps >= NEAR_TIE).nonzero()[0])}"
        near_ties += int((gaps > 0).sum())
        error = (Sequences(runner, seed=1).run((key, 0, tokens)) - expected).abs().max()
        assert error < LOGIT_ERROR * expected.abs().max()
    assert near_ties <= 1
    # A skipped or repeated token shows only where the tokens differ.
    assert len({token for out in outputs.values() for token in out}) >= NEW_TOKENS // 2, outputs


@pytest.mark.parametrize("kernels", [level for level in KERNELS if level != "auto"])
@pytest.mark.parametrize("name", ["llama-grouped-biases", "gemma2-soft-capping-sliding", "starcoder2-layer-norm-plain"])
def test_logits_at_every_level(name, kernels, load, tiny_model):
    tokens = draw(4, 150)
    logits = Sequences(load(name, kernels)).run(("a", 0, tokens))
    expected = reference_logits(tiny_model(name), torch.float64, tokens)
    assert (logits - expected).abs().max() < LOGIT_ERROR * expected.abs().max()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", ["llama-grouped-biases", "gemma3-two-ropes-sliding", "olmo2-post-norm-full"])
def test_bfloat16_is_as_close_to_float64_as_transformers_is(name, kernels, load, tiny_model):
    tokens = draw(5, 150)
    ours = Sequences(load(name, kernels, dtype="bfloat16")).run(("a", 0, tokens))
    folder = tiny_model(name)
    rounded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager").double()
    with torch.inference_mode():
        exact = rounded.eval()(torch.tensor([tokens])).logits[0]
    theirs = reference_logits(folder, torch.bfloat16, tokens)

    def root_mean_square(logits: torch.Tensor) -> float:
        return float((logits - exact).square().mean().sqrt())

    assert 0 < root_mean_square(ours) < BFLOAT16_EXCESS * root_mean_square(theirs)


def test_float32_logits_at_the_asked_rows_only(load):
    runner = load("llama-grouped-biases", "auto", dtype="bfloat16")
    rows = (("a", 0, list(range(3, 40))), ("b", 0, list(range(50, 60))))
    every = Sequences(runner).run(*rows)
    assert every.shape == (47, runner.info.vocab_size)
    assert every.dtype == torch.float32
    assert torch.equal(Sequences(runner).run(*rows, logits="last"), every[[36, 46]])


def test_a_step_without_logits(load):
    """A prefill chunk that doesn't reach the prompt's end wants none."""
    runner = load("llama-grouped-biases", "auto")
    state = Sequences(runner)
    batch = state.batch(("a", 0, list(range(3, 20))))
    without = type(batch)(
        **{name: getattr(batch, name) for name in batch.__slots__ if name != "logit_indices"},
        logit_indices=batch.logit_indices[:0],
    )
    assert runner.forward(without).shape == (0, runner.info.vocab_size)
    expected = Sequences(runner).run(("b", 0, list(range(3, 21))))[-1:]
    assert torch.equal(state.run(("a", 17, [20])), expected)


def test_behind_the_last_attention_only_wanted_tokens_go_on(tiny_model, monkeypatch):
    num_rows = []
    linear_gated = TorchOps.linear_gated

    def counted(ops: TorchOps, x: torch.Tensor, *rest: Any) -> None:
        num_rows.append(len(x))
        linear_gated(ops, x, *rest)

    monkeypatch.setattr(TorchOps, "linear_gated", counted)
    runner = ModelRunner.load(
        tiny_model("llama-grouped-biases"), route="decoder", kernels="torch", dtype="float32", num_blocks=64
    )
    state = Sequences(runner)
    state.run(("a", 0, draw(1, 30)), ("b", 0, draw(2, 5)), logits="last")
    num_layers = len(num_rows)
    assert num_rows == [35] * (num_layers - 1) + [2]
    num_rows.clear()
    batch = state.batch(("a", 30, draw(3, 4)))
    runner.forward(replace(batch, logit_indices=batch.logit_indices[:0]))
    assert num_rows == [4] * (num_layers - 1)


def test_a_step_of_a_known_size_makes_no_buffers(load):
    runner = load("llama-grouped-biases", "torch")
    state = Sequences(runner)
    state.run(("a", 0, draw(6, 60)))
    logits = runner.forward(state.batch(("a", 60, [5])))
    assert runner.forward(state.batch(("a", 61, [5]))).data_ptr() == logits.data_ptr()


def test_routes_are_named_in_the_fingerprint(load, load_runner, tiny_model):
    folder = tiny_model("llama-grouped-biases")
    decoder, transformers = load("llama-grouped-biases", "torch"), load_runner(folder, route="transformers")
    assert decoder.info.fingerprint.startswith("route=decoder kernels=torch-ops")
    assert transformers.info.fingerprint.startswith("route=transformers")
    for part in ("dtype=float32", f"model={decoder.facts.content_id}"):
        assert part in decoder.info.fingerprint


def test_a_family_that_is_not_described_takes_the_other_route(load_runner, tiny_model):
    folder = tiny_model("gpt2-learned-positions")
    assert load_runner(folder, route="auto", kernels="torch").info.fingerprint.startswith("route=transformers")
    with pytest.raises(UnsupportedModel, match=r"the decoder route can't run .*gpt2 isn't in the decoder's table"):
        load_runner(folder, route="decoder", kernels="torch")


@pytest.mark.parametrize(("option", "value"), [("route", "fast"), ("kernels", "sse2"), ("numerics", "loose")])
def test_options_that_are_none(option, value, load_runner, tiny_model):
    with pytest.raises(ValueError, match=f"{option} '{value}' is not one of"):
        load_runner(tiny_model("llama-grouped-biases"), **{option: value})
