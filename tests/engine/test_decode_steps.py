"""Tokens without logits, by `choose` and by `decode`, against the sampler's from all logits of another engine."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.batch import Batch, Choices, DecodeRows, pad_tables
from engine.errors import UnsupportedModel
from engine.runner import ModelRunner
from engine.sampler import SampleRow, sample
from engine.sampling_params import SamplingParams
from tests.engine.kernels.conftest import CPU_FLAGS

BLOCK_SIZE = 16
SEEDS = [5, (1 << 64) - 3, 0xFEED_BEEF_0BAD_CAFE, 12]
TEMPERATURES = [0.0, 0.8, 1.5, 0.0]


def signed(seed: int) -> int:
    """The same 64 bits."""
    return int(np.array([seed], np.uint64).view(np.int64)[0])


class Rows:
    """Sequences in slots, on an engine; tokens by whichever way."""

    def __init__(self, runner: ModelRunner, prompts: list[list[int]], slots: list[int], num_slots: int = 6) -> None:
        self.runner = runner
        self.tokens = [list(prompt) for prompt in prompts]
        self.num_prompt = [len(prompt) for prompt in prompts]
        self.slots = slots
        self.tables = np.zeros((num_slots, 4), np.int32)
        for row, slot in enumerate(slots):
            self.tables[slot] = np.arange(4) + 12 * row + 3

    def widen(self) -> None:
        """As a slot table does when a sequence outgrows it: another array."""
        wider = np.zeros((len(self.tables), 12), np.int32)
        for row, slot in enumerate(self.slots):
            wider[slot] = np.arange(12) + 12 * row + 3
        self.tables = wider

    def batch(self, starts: list[int], ends: list[int]) -> Batch:
        """Tokens starts … ends of each row; logits of the last."""
        ids: list[int] = []
        positions: list[int] = []
        mapping: list[int] = []
        query_starts = [0]
        for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
            ids += self.tokens[row][start:end]
            positions += range(start, end)
            table = self.tables[self.slots[row]]
            mapping += [int(table[p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE for p in range(start, end)]
            query_starts.append(len(ids))
        return Batch(
            token_ids=np.array(ids, np.int32),
            positions=np.array(positions, np.int32),
            slot_mapping=np.array(mapping, np.int64),
            query_starts=np.array(query_starts, np.int32),
            context_lens=np.array(ends, np.int32),
            block_tables=pad_tables([self.tables[slot].tolist() for slot in self.slots]),
            logit_indices=np.array(query_starts[1:], np.int64) - 1,
        )

    def output_indices(self) -> list[int]:
        return [len(tokens) - prompt for tokens, prompt in zip(self.tokens, self.num_prompt, strict=True)]

    def by_logits(self, batch: Batch) -> list[int | None]:
        rows = [
            SampleRow(SamplingParams(temperature=TEMPERATURES[row % 4]), SEEDS[row % 4], index, [0], 1)
            for row, index in enumerate(self.output_indices())
        ]
        return sample(self.runner.forward(batch), rows).token_ids

    def by_choice(self, batch: Batch) -> list[int]:
        count = range(len(self.tokens))
        choices = Choices(
            [TEMPERATURES[row % 4] for row in count], [SEEDS[row % 4] for row in count], self.output_indices()
        )
        return self.runner.choose(batch, choices)

    def by_decoding(self) -> list[int]:
        numbers = []
        for row, index in enumerate(self.output_indices()):
            seed = signed(SEEDS[row % 4])
            numbers += [self.slots[row], len(self.tokens[row]) - 1, self.tokens[row][-1], seed, index]
        temperatures = [TEMPERATURES[row % 4] for row in range(len(self.tokens))]
        return self.runner.decode(DecodeRows(numbers, temperatures, self.tables))

    def append(self, token_ids: list[int]) -> None:
        for tokens, token_id in zip(self.tokens, token_ids, strict=True):
            tokens.append(token_id)


def load(load_runner: Callable[..., ModelRunner], folder: Path, kernels: str, **options: Any) -> ModelRunner:
    try:
        return load_runner(folder, route="decoder", kernels=kernels, num_blocks=64, **options)
    except UnsupportedModel as error:
        if "this CPU has no" not in str(error):
            raise
        pytest.skip(str(error))


NAMES = [
    ("llama-grouped-biases", "bfloat16"),
    ("gemma2-soft-capping-sliding", "float32"),
    ("phi-full-partial-rotary-biases", "bfloat16"),
    ("cohere-interleaved-rotary-logit-scale", "bfloat16"),
]
"""with a head that is screened, one that is capped, one with a bias, one with a scale"""


@pytest.mark.parametrize("kernels", CPU_FLAGS)
@pytest.mark.parametrize(("name", "dtype"), NAMES)
def test_tokens_are_those_of_all_logits(
    tiny_model: Callable[[str], Path], load_runner: Callable[..., ModelRunner], name: str, dtype: str, kernels: str
) -> None:
    """Prompts in one step, then token by token, across blocks and a wider table; in between a step needs more room."""
    rng = random.Random(3)
    prompts = [[rng.randrange(3, 200) for _ in range(length)] for length in (5, 40, 17, 31)]
    engines = [load(load_runner, tiny_model(name), kernels, dtype=dtype) for _ in range(2)]
    theirs, ours = (Rows(engine, prompts, [4, 0, 5, 2]) for engine in engines)
    assert ours.runner.chooses
    for step in range(45):
        starts = [len(tokens) - 1 if step else 0 for tokens in theirs.tokens]
        batch = theirs.batch(starts, [len(tokens) for tokens in theirs.tokens])
        expected = theirs.by_logits(batch)
        actual = ours.by_decoding() if step and step % 7 != 5 else ours.by_choice(batch)
        assert actual == expected, f"step {step}"
        theirs.append(actual)
        ours.append(actual)
        if step == 20:
            theirs.widen()
            ours.widen()
        if step == 30:  # the workspace grows, and buffers that were bound are no longer its own
            many = Rows(ours.runner, [[7] * 90], [0])
            many.tables[0] = np.arange(4) + 56
            many.tables = np.concatenate([many.tables, many.tables + 4], axis=1)
            ours.runner.forward(many.batch([0], [90]))
    assert len({token for row, prompt in enumerate(prompts) for token in ours.tokens[row][len(prompt) :]}) > 20


@pytest.mark.parametrize("kernels", CPU_FLAGS)
@pytest.mark.parametrize(("name", "dtype"), NAMES)
def test_rows_of_one_slot_are_a_verification(
    tiny_model: Callable[[str], Path], load_runner: Callable[..., ModelRunner], name: str, dtype: str, kernels: str
) -> None:
    """Drafts of 0 to 5 tokens behind each row's last: the tokens are those of one chunk's logits, blocks crossed."""
    rng = random.Random(4)
    prompts = [[rng.randrange(3, 200) for _ in range(length)] for length in (5, 30, 17, 14)]
    engines = [load(load_runner, tiny_model(name), kernels, dtype=dtype) for _ in range(2)]
    theirs, ours = (Rows(engine, prompts, [4, 0, 5, 2]) for engine in engines)
    for rows in (theirs, ours):
        rows.runner.forward(rows.batch([0] * 4, [len(tokens) - 1 for tokens in rows.tokens]))
    for step in range(6):
        starts = [len(tokens) - 1 for tokens in ours.tokens]
        for tokens in ours.tokens:
            tokens += [rng.randrange(3, 200) for _ in range(rng.randrange(6))]
        theirs.tokens = [list(tokens) for tokens in ours.tokens]
        batch = theirs.batch(starts, [len(tokens) for tokens in theirs.tokens])
        batch = replace(batch, logit_indices=np.arange(len(batch.token_ids)))
        numbers: list[int] = []
        wanted: list[tuple[int, int]] = []
        for row, (start, tokens) in enumerate(zip(starts, ours.tokens, strict=True)):
            for position in range(start, len(tokens)):
                index = position + 1 - ours.num_prompt[row]
                numbers += [ours.slots[row], position, tokens[position], signed(SEEDS[row]), index]
                wanted.append((row, index))
        sampled = [
            SampleRow(SamplingParams(temperature=TEMPERATURES[row]), SEEDS[row], index, [0], 1) for row, index in wanted
        ]
        expected = sample(theirs.runner.forward(batch), sampled).token_ids
        temperatures = [TEMPERATURES[row] for row, _ in wanted]
        assert ours.runner.decode(DecodeRows(numbers, temperatures, ours.tables)) == expected, f"step {step}"


def test_what_can_not_be_is_refused(tiny_model: Callable[[str], Path], load_runner: Callable[..., ModelRunner]) -> None:
    runner = load(load_runner, tiny_model("llama-grouped-biases"), "avx2")
    tables = np.zeros((2, 3), np.int32)
    good = [1, 47, 5, -9, 0]
    assert runner.decode(DecodeRows(list(good), [0.0], tables)) == runner.decode(DecodeRows(list(good), [0.0], tables))
    for place, value in ((0, 2), (0, -1), (1, 48), (1, -1), (2, 203), (2, -1)):
        bad = list(good)
        bad[place] = value
        with pytest.raises((IndexError, RuntimeError)):
            runner.decode(DecodeRows(bad, [0.0], tables))
    with pytest.raises(RuntimeError, match="numbers per row"):
        runner.decode(DecodeRows(good[:4], [0.0], tables))


def test_the_bell_is_raised_once_a_step(load_runner, tiny_model):
    runner = load(load_runner, tiny_model("llama-grouped-biases"), "auto")
    tables = np.zeros((1, 4), np.int32)
    bell = os.eventfd(0, os.EFD_NONBLOCK)
    try:
        for _ in range(3):
            runner.decode(DecodeRows([0, 0, 5, 0, 0], [0.0], tables, bell))
        assert os.eventfd_read(bell) == 3
        runner.decode(DecodeRows([0, 0, 5, 0, 0], [0.0], tables))
        with pytest.raises(BlockingIOError):
            os.eventfd_read(bell)
    finally:
        os.close(bell)


def test_plain_torch_does_not_choose(
    tiny_model: Callable[[str], Path], load_runner: Callable[..., ModelRunner]
) -> None:
    assert not load_runner(tiny_model("llama-grouped-biases"), route="decoder", kernels="torch").chooses
