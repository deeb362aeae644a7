"""The runner against transformers' own greedy generation, in float32, token for token."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.kernels import cpp_attention
from engine.kernels.build import level_number
from engine.kernels.cpp_attention import CppCache

ARCHITECTURES = [
    "llama-grouped-biases",
    "llama-multi-query-tied",
    "llama3-rope",
    "qwen2-biases",
    "qwen3-qk-norm-wide-heads",
    "mistral-sliding",
    "gemma2-soft-capping-sliding",
    "gemma3-two-ropes-sliding",
    "phi-full-partial-rotary-biases",
    "phi3-fused-sliding",
    "gpt-neox-partial-rotary-parallel",
    "olmo2-post-norm-full",
    "cohere-interleaved-rotary-logit-scale",
    "granite-multipliers",
    "gpt2-learned-positions",
    "gpt-oss-sinks-sliding-moe",
    "qwen3-moe",
]
NEW_TOKENS = 40
NEAR_TIE = 1e-4
"""float64 gap between two logits under which float32 may choose either"""


@cache
def reference(folder, dtype):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


def transformers_greedy(folder, prompt, num_tokens):
    model = reference(folder, torch.float32)
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()


def paged_greedy(state, prompts, num_tokens):
    """All prompts together: prefills of unequal chunks, then decoding in one batch."""
    outputs: dict[str, list[int]] = {name: [] for name in prompts}
    computed = dict.fromkeys(prompts, 0)
    while min(len(out) for out in outputs.values()) < num_tokens:
        rows = []
        for index, (name, prompt) in enumerate(prompts.items()):
            known = prompt + outputs[name]
            end = min(len(known), computed[name] + 11 + 6 * index)
            rows.append((name, computed[name], known[computed[name] : end]))
            computed[name] = end
        logits = state.run(*rows, logits="last")
        for (name, _, _), row in zip(rows, logits, strict=True):
            if computed[name] == len(prompts[name]) + len(outputs[name]):
                outputs[name].append(int(row.argmax()))
    return {name: out[:num_tokens] for name, out in outputs.items()}


def is_near_tie(folder, prefix, one, other):
    with torch.inference_mode():
        logits = reference(folder, torch.float64)(torch.tensor([prefix])).logits[0, -1]
    return abs(float(logits[one] - logits[other])) < NEAR_TIE


def assert_same_tokens(folder, prompt, ours, theirs):
    """Equal token for token; a first difference is excused only by a float64 near-tie."""
    for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if one != other:
            assert is_near_tie(folder, prompt + ours[:index], one, other), f"differs at {index}: {ours} / {theirs}"
            return index
    return len(ours)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_output_equals_transformers(name, tiny_model, load_runner, sequences):
    folder = tiny_model(name)
    draw = random.Random(7)
    prompts = {key: [draw.randrange(3, 203) for _ in range(length)] for key, length in (("a", 37), ("b", 70), ("c", 3))}
    outputs = paged_greedy(sequences(load_runner(folder)), prompts, NEW_TOKENS)
    equal = 0
    for key, prompt in prompts.items():
        equal += assert_same_tokens(folder, prompt, outputs[key], transformers_greedy(folder, prompt, NEW_TOKENS))
    assert equal >= 3 * NEW_TOKENS - NEW_TOKENS // 2, "too much was excused as near-ties"
    # A skipped or repeated token shows only where the tokens differ.
    assert len({token for out in outputs.values() for token in out}) >= NEW_TOKENS // 2, outputs


@pytest.mark.real_model
def test_real_model_equals_transformers(default_model, load_runner, sequences):
    text_ids = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
    prompts = {"chat": text_ids, "story": [1, 4093, 198, 14101, 253, 1512, 3100, 563, 253, 15070, 30]}
    outputs = paged_greedy(sequences(load_runner(default_model)), prompts, 32)
    for key, prompt in prompts.items():
        expected = transformers_greedy(default_model, prompt, 32)
        assert assert_same_tokens(default_model, prompt, outputs[key], expected) >= 30
        assert len(set(outputs[key])) > 16


def test_float32_logits_at_the_asked_rows_only(tiny_model, load_runner, sequences):
    runner = load_runner(tiny_model("llama-grouped-biases"), dtype="bfloat16")
    state = sequences(runner)
    every = state.run(("a", 0, list(range(3, 40))), ("b", 0, list(range(50, 60))))
    assert every.shape == (47, runner.info.vocab_size)
    assert every.dtype == torch.float32
    last = sequences(runner).run(("a", 0, list(range(3, 40))), ("b", 0, list(range(50, 60))), logits="last")
    assert torch.equal(last, every[[36, 46]])


def test_a_step_without_logits(tiny_model, load_runner, sequences):
    """A prefill chunk that doesn't reach the prompt's end wants none."""
    runner = load_runner(tiny_model("llama-grouped-biases"))
    state = sequences(runner)
    batch = state.batch(("a", 0, list(range(3, 20))))
    without = type(batch)(
        **{name: getattr(batch, name) for name in batch.__slots__ if name != "logit_indices"},
        logit_indices=batch.logit_indices[:0],
    )
    assert runner.forward(without).shape == (0, runner.info.vocab_size)
    expected = sequences(runner).run(("b", 0, list(range(3, 21))))[-1:]
    assert torch.equal(state.run(("a", 17, [20])), expected)


def poison(cache, level, slots, rows):
    if isinstance(cache, CppCache):
        cpp_attention.write(level_number(level), rows, rows, slots, cache)
    else:
        cache.write(slots, rows, rows)


def test_a_poisoned_neighbour_and_a_stale_block_change_nothing(tiny_model, load_runner, sequences):
    """NaN and infinity in one sequence's KV stay there, also for the next owner of its blocks."""
    runner = load_runner(tiny_model("llama-grouped-biases"), num_blocks=4)
    prompt = list(range(5, 15))
    clean = sequences(runner).run(("a", 0, prompt))
    for layer in range(3):
        for fault, slots in ((torch.nan, range(10, 40)), (torch.inf, range(40, 64))):
            rows = torch.full((len(slots), 2, 16), fault)
            poison(runner._model._caches[layer], runner._model._level, torch.tensor(slots), rows)
    state = sequences(runner)
    assert torch.equal(state.run(("a", 0, prompt)), clean)


def test_info_names_what_changes_bits(tiny_model, load_runner):
    info = load_runner(tiny_model("llama-grouped-biases"), max_sequences=7, max_model_len=100).info
    assert (info.num_blocks, info.block_size, info.max_sequences, info.max_model_len) == (96, 16, 7, 100)
    assert info.vocab_size == 203
    for part in ("route=", "dtype=float32", "device=cpu-", "torch=", "transformers=", "model="):
        assert part in info.fingerprint
    other = load_runner(tiny_model("qwen2-biases")).info.fingerprint
    assert other != info.fingerprint
    assert load_runner(tiny_model("llama-grouped-biases"), dtype="bfloat16").info.fingerprint != info.fingerprint
