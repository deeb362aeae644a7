"""Promise 1 at the engine: a token's logits have the same bits however the work is cut and whoever shares the batch."""

from __future__ import annotations

import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

PROMPT_LENGTH = 140
"""more than two key tiles, and beyond the sliding windows"""


def token_by_token(state, name, token_ids):
    return torch.cat([state.run((name, position, [token])) for position, token in enumerate(token_ids)])


def in_chunks(state, name, token_ids, size, start=0):
    return torch.cat(
        [state.run((name, first, token_ids[first : first + size])) for first in range(start, len(token_ids), size)]
    )


def draw_tokens(seed, length, vocab_size=203):
    draw = random.Random(seed)
    return [draw.randrange(3, vocab_size) for _ in range(length)]


def assert_same_bits(actual, expected, what):
    assert actual.shape == expected.shape
    different = (actual.view(torch.int32) != expected.view(torch.int32)).any(dim=-1).nonzero().flatten().tolist()
    assert not different, f"{what}: rows {different[:10]} of {len(actual)} differ"


@pytest.fixture(
    params=[
        ("llama-grouped-biases", "float32"),
        ("llama-grouped-biases", "bfloat16"),
        ("gemma2-soft-capping-sliding", "float32"),
        ("gemma2-soft-capping-sliding", "bfloat16"),
    ],
    ids="/".join,
    scope="module",
)
def runner(request, tiny_model, load_runner):
    name, dtype = request.param
    return load_runner(tiny_model(name), dtype=dtype)


@pytest.fixture(scope="module")
def alone(runner, sequences):
    """The reference: each token of the prompt computed in a step of its own."""
    return token_by_token(sequences(runner), "alone", draw_tokens(1, PROMPT_LENGTH))


def test_prefill_chunks_and_verification(runner, sequences, alone):
    prompt = draw_tokens(1, PROMPT_LENGTH)
    state = sequences(runner, seed=3)
    assert_same_bits(state.run(("whole", 0, prompt)), alone, "one prefill")
    assert_same_bits(in_chunks(state, "sevens", prompt, 7), alone, "chunks of 7")
    assert_same_bits(in_chunks(state, "fives", prompt, 5), alone, "verification of 5 at a time")
    assert_same_bits(in_chunks(state, "thirties", prompt, 33), alone, "chunks of 33")


def test_in_a_batch_of_thirteen(runner, sequences, alone):
    """One token of the prompt per step, at changing places among twelve neighbours that prefill, verify and decode."""
    prompt = draw_tokens(1, PROMPT_LENGTH)
    state = sequences(runner, seed=4)
    draw = random.Random(5)
    lengths = dict.fromkeys((f"n{index}" for index in range(12)), 0)
    start = 70
    state.run(("x", 0, prompt[:start]))
    found = []
    for position, token in enumerate(prompt[start:], start):
        rows = []
        for name, length in lengths.items():
            length = 0 if length > 90 else length  # begins anew over its old blocks
            tokens = draw_tokens(draw.random(), draw.choice((1, 1, 1, 5, 12)))
            rows.append((name, length, tokens))
            lengths[name] = length + len(tokens)
        place = draw.randrange(13)
        rows.insert(place, ("x", position, [token]))
        logits = state.run(*rows, logits="last")
        found.append(logits[place])
    assert_same_bits(torch.stack(found), alone[start:], "batch of 13")


def test_prefix_hit(runner, sequences, alone):
    """The tail computed over blocks that another sequence, with another tail, has filled."""
    prompt = draw_tokens(1, PROMPT_LENGTH)
    state = sequences(runner, seed=6)
    shared = 6 * runner.info.block_size
    in_chunks(state, "first", prompt[:shared] + draw_tokens(8, 40), 50)
    state.share("first", "second", 6)
    tail = state.run(("second", shared, prompt[shared:]), ("other", 0, draw_tokens(9, 20)))[: PROMPT_LENGTH - shared]
    assert_same_bits(tail, alone[shared:], "prefix hit")


def test_rejected_drafts_leave_no_trace(runner, sequences, alone):
    """KV of wrong draft tokens is overwritten by the right ones."""
    prompt = draw_tokens(1, PROMPT_LENGTH)
    state = sequences(runner, seed=7)
    start = 100
    state.run(("x", 0, prompt[:start]))
    found = []
    for position, token in enumerate(prompt[start:], start):
        found.append(state.run(("x", position, [token, *draw_tokens(position, 4)]))[0])
    assert_same_bits(torch.stack(found), alone[start:], "after rejected drafts")


@pytest.mark.parametrize("name", ["phi-full-partial-rotary-biases", "gpt2-learned-positions", "qwen3-moe"])
def test_other_layer_kinds(name, tiny_model, load_runner, sequences):
    """Layer norms, GELU, fused convolution-style linears, experts."""
    state = sequences(load_runner(tiny_model(name)))
    prompt = draw_tokens(1, 100)
    alone = token_by_token(state, "alone", prompt)
    assert_same_bits(state.run(("other", 0, draw_tokens(2, 30)), ("whole", 0, prompt))[30:], alone, "one prefill")
    assert_same_bits(in_chunks(state, "fives", prompt, 5), alone, "verification of 5 at a time")


class Products(TorchDispatchMode):
    """Records the shapes of all matrix products; of our own kernels only the weights', as their rows are independent
    whatever the shape (tests/engine/kernels/test_cpp_linear.py).
    """

    def __init__(self):
        super().__init__()
        self.shapes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("attend", "write_cache"):
            pass  # the kernels cut these themselves; tests/engine/kernels compares the bits
        elif func.namespace == "tandem":
            self.shapes.add((name, *(tuple(x.shape) for x in args[2:4] if isinstance(x, torch.Tensor))))
        elif any(word in name for word in ("mm", "linear", "matmul", "einsum", "attention", "conv")):
            self.shapes.add((name, *(tuple(x.shape) for x in args if isinstance(x, torch.Tensor))))
        return func(*args, **(kwargs or {}))


def products_of(run):
    with Products() as products:
        run()
    return products.shapes


@pytest.mark.parametrize("name", ["llama-grouped-biases", "gemma2-soft-capping-sliding", "gpt2-learned-positions"])
def test_products_have_the_same_shapes_in_every_batch(name, tiny_model, load_runner, sequences):
    """The reason for the equal bits, and all that can be tested of it where a machine's kernels happen to agree."""
    runner = load_runner(tiny_model(name))
    state = sequences(runner)
    one = products_of(lambda: state.run(("a", 0, [5])))
    assert len(one) >= 4, "the products weren't seen"
    assert products_of(lambda: state.run(("b", 0, draw_tokens(1, 150)))) == one
    rows = [(f"r{index}", 0, draw_tokens(index, 1 + 3 * index)) for index in range(13)]
    assert products_of(lambda: state.run(*rows)) == one
    assert products_of(lambda: state.run(("b", 150, [1]), ("a", 1, [1, 2, 3, 4, 5]), logits="last")) == one


def test_other_block_sizes(tiny_model, load_runner, sequences):
    prompt = draw_tokens(1, PROMPT_LENGTH)
    expected = None
    for block_size in (8, 16, 24, 64):
        runner = load_runner(tiny_model("llama-grouped-biases"), block_size=block_size)
        logits = in_chunks(sequences(runner), "x", prompt, 40)
        expected = logits if expected is None else expected
        assert_same_bits(logits, expected, f"block size {block_size}")


def test_two_threads(tiny_model, load_runner, sequences):
    prompt = draw_tokens(1, 70)
    for dtype in ("float32", "bfloat16"):
        runner = load_runner(tiny_model("llama-grouped-biases"), dtype=dtype, threads=2)
        expected = sequences(runner).run(("alone", 0, prompt))
        state = sequences(runner)
        assert_same_bits(token_by_token(state, "x", prompt[:6]), expected[:6], f"{dtype}, two threads, one by one")
        assert_same_bits(in_chunks(state, "x", prompt, 32, start=6), expected[6:], f"{dtype}, two threads, in chunks")


@pytest.mark.real_model
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_real_model(dtype, default_model, load_runner, sequences):
    runner = load_runner(default_model, dtype=dtype)
    prompt = draw_tokens(2, 75, 49152)
    state = sequences(runner)
    alone = torch.cat((state.run(("alone", 0, prompt[:64])), in_chunks(state, "alone", prompt, 1, start=64)))
    together = state.run(*((f"n{index}", 0, draw_tokens(index, 3, 49152)) for index in range(12)), ("x", 0, prompt))
    assert_same_bits(together[-len(prompt) :], alone, "prefill among twelve")
    assert_same_bits(in_chunks(state, "chunks", prompt, 26), alone, "chunks of 26")
