"""Promise 1 at the decoder: a token's logits have the same bits however the work is cut and whoever shares the batch.

For every level of vector instructions that this CPU has, and for plain torch.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import UnsupportedModel
from engine.runner import ModelRunner
from tests.engine.conftest import Sequences
from tests.engine.models import write_tiny_model

LENGTH = 150
"""tokens compared: beyond the sliding windows, and more than any kernel takes at a time"""
LONG = 1100
"""positions: more than two of the partitions that keys are reduced in"""
LEVELS = ("torch", "avx2", "avx512", "avx512bf16")


def draw(seed: float, length: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(3, 203) for _ in range(length)]


def in_chunks(state: Sequences, name: str, tokens: list[int], size: int, start: int = 0) -> torch.Tensor:
    """Logits of all tokens from `start` on, computed `size` at a time."""
    firsts = range(start, len(tokens), size)
    return torch.cat([state.run((name, first, tokens[first : first + size])) for first in firsts])


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert actual.shape == expected.shape
    different = (actual.view(torch.int32) != expected.view(torch.int32)).any(dim=-1).nonzero().flatten().tolist()
    assert not different, f"{what}: rows {different[:10]} of {len(actual)} differ"


def load_or_skip(load_runner: Callable[..., ModelRunner], folder: Path, kernels: str, **options: Any) -> ModelRunner:
    try:
        return load_runner(folder, route="decoder", kernels=kernels, **options)
    except UnsupportedModel as error:
        if "this CPU has no" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.fixture(
    scope="module",
    params=[
        (name, dtype, kernels)
        for name in ("llama-grouped-biases", "gemma3-two-ropes-sliding", "olmo2-post-norm-full")
        for dtype in ("float32", "bfloat16")
        for kernels in LEVELS
        if name == "llama-grouped-biases" or dtype == "bfloat16"
    ],
    ids="/".join,
)
def runner(request, tiny_model, load_runner):
    name, dtype, kernels = request.param
    return load_or_skip(load_runner, tiny_model(name), kernels, dtype=dtype)


@pytest.fixture(scope="module")
def alone(runner):
    """The reference: each token computed in a step of its own."""
    return in_chunks(Sequences(runner), "alone", draw(1, LENGTH), 1)


def test_chunks_and_verification(runner, alone):
    tokens = draw(1, LENGTH)
    state = Sequences(runner, seed=3)
    assert_same_bits(state.run(("whole", 0, tokens)), alone, "one prefill")
    assert_same_bits(in_chunks(state, "sevens", tokens, 7), alone, "chunks of 7")
    assert_same_bits(in_chunks(state, "fives", tokens, 5), alone, "verification of 5 at a time")
    assert_same_bits(in_chunks(state, "many", tokens, 33), alone, "chunks of 33")


def test_in_a_batch_of_thirteen(runner, alone):
    """One token per step, at changing places among twelve neighbours that prefill, verify and decode."""
    tokens = draw(1, LENGTH)
    state = Sequences(runner, seed=4)
    generator = random.Random(5)
    lengths = dict.fromkeys((f"n{index}" for index in range(12)), 0)
    start = 90
    state.run(("x", 0, tokens[:start]))
    found = []
    for position, token in enumerate(tokens[start:], start):
        rows = []
        for name, length in lengths.items():
            length = 0 if length > 90 else length  # begins anew over its old blocks
            ids = draw(generator.random(), generator.choice((1, 1, 1, 5, 12)))
            rows.append((name, length, ids))
            lengths[name] = length + len(ids)
        place = generator.randrange(13)
        rows.insert(place, ("x", position, [token]))
        found.append(state.run(*rows, logits="last")[place])
    assert_same_bits(torch.stack(found), alone[start:], "batch of 13")


def test_prefix_hit(runner, alone):
    """The tail computed over blocks that another sequence, with another tail, has filled."""
    tokens = draw(1, LENGTH)
    state = Sequences(runner, seed=6)
    shared = 6 * runner.info.block_size
    in_chunks(state, "first", tokens[:shared] + draw(8, 40), 50)
    state.share("first", "second", 6)
    found = state.run(("second", shared, tokens[shared:]), ("other", 0, draw(9, 20)))[: LENGTH - shared]
    assert_same_bits(found, alone[shared:], "prefix hit")


def test_preemption(runner, alone):
    """Blocks are taken away and written over; what was known is computed anew in others, then decoding goes on."""
    tokens = draw(1, LENGTH)
    state = Sequences(runner, seed=7)
    in_chunks(state, "x", tokens[:100], 30)
    taken = state.tables.pop("x")
    state.tables["usurper"] = list(taken)
    state.run(("usurper", 0, draw(10, 112)))
    recomputed = state.run(("x", 0, tokens[:120]), ("usurper", 112, draw(11, 3)))[:120]
    assert not set(state.tables["x"]) & set(taken)
    assert_same_bits(recomputed, alone[:120], "recomputed")
    assert_same_bits(in_chunks(state, "x", tokens, 1, start=120), alone[120:], "after preemption")


def test_rejected_drafts_leave_no_trace(runner, alone):
    """Keys and values of wrong draft tokens are overwritten by the right ones."""
    tokens = draw(1, LENGTH)
    state = Sequences(runner, seed=8)
    start = 110
    state.run(("x", 0, tokens[:start]))
    rows = [
        state.run(("x", position, [token, *draw(position, 4)]))[0]
        for position, token in enumerate(tokens[start:], start)
    ]
    assert_same_bits(torch.stack(rows), alone[start:], "after rejected drafts")


@pytest.fixture(scope="session")
def long_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("long")
    return write_tiny_model(folder, "llama-grouped-biases", max_position_embeddings=2048)


@pytest.mark.parametrize("kernels", LEVELS)
def test_long_contexts(kernels, long_model, load_runner):
    tokens = draw(12, LONG)
    runner = load_or_skip(load_runner, long_model, kernels, dtype="bfloat16", num_blocks=300)
    state = Sequences(runner, seed=9)
    in_chunks(state, "x", tokens[:-12], 200)
    alone = in_chunks(state, "x", tokens, 1, start=LONG - 12)
    state.run(("y", 0, tokens[:1000]))
    batch = state.run(("y", 1000, tokens[1000:]), ("z", 0, draw(13, 70)))[:100]
    assert_same_bits(batch[-12:], alone, "a chunk of 100 beyond 1000 positions")
    fives = in_chunks(state, "y", tokens[:-2], 5, start=LONG - 12)
    assert_same_bits(fives, alone[:10], "verification of 5 at a time")
