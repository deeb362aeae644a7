"""Tokens that stay on the device from one step to the next; the device does everything as late as it may."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.batch import Batch, Choices, LaunchedRows
from engine.cuda_graphs import RepeatingRecorder
from engine.decoder_route import DecoderModel, decoder_spec
from engine.decoder_spec import DecoderSpec
from engine.kernels.torch_ops import TorchOps
from engine.loading import check_supported
from engine.run_ahead import NOT_THERE, AheadSteps, Fed, PendingTokens, TokenFeed
from engine.sampler import SampleRow, sample
from engine.sampling_params import SamplingParams
from tests.engine.lazy_stream import LazyStream

CPU = torch.device("cpu")
BLOCK_SIZE = 16
PROMPTS = {3: list(range(5, 24)), 0: [7], 5: list(range(40, 88))}
"""by slot; their blocks are 8 · slot and the seven after it"""
TEMPERATURES = {3: 0.0, 0: 0.9, 5: 1.3}


def test_a_slot_feeds_what_it_was_given_last() -> None:
    feed = TokenFeed(4, CPU)
    feed.remember(torch.tensor([3, 1]), torch.tensor([11, 22]))
    feed.remember(torch.tensor([0, 3]), torch.tensor([33, 44]))
    token_ids = torch.tensor([1, 2, 3, 4, 5], dtype=torch.int32)
    feed.fill(token_ids, Fed(at=torch.tensor([4, 0, 2]), slots=torch.tensor([3, 1, 0])))
    assert token_ids.tolist() == [22, 2, 33, 4, 44]
    assert token_ids.dtype == torch.int32


def test_a_failed_choice_is_an_id_that_exists() -> None:
    feed = TokenFeed(2, CPU)
    feed.remember(torch.tensor([1, 0]), torch.tensor([-1, 9]))
    token_ids = torch.full((2,), 77, dtype=torch.int32)
    feed.fill(token_ids, Fed(at=torch.tensor([0, 1]), slots=torch.tensor([1, 0])))
    assert token_ids.tolist() == [0, 9]


def test_nothing_to_feed() -> None:
    token_ids = torch.tensor([3], dtype=torch.int32)
    nothing = torch.zeros(0, dtype=torch.int64)
    TokenFeed(1, CPU).fill(token_ids, Fed(nothing, nothing))
    assert token_ids.tolist() == [3]


def test_before_they_are_there_tokens_are_neither_ids_nor_failures() -> None:
    steps = AheadSteps(
        lambda batch, fed: lambda: torch.tensor([[0.0, 3.0, 1.0]]),
        lambda logits, temperatures, keys: logits.argmax(-1),
        TokenFeed(1, CPU),
        CPU,
        LazyStream(),
    )
    one = np.zeros(1, np.int64)
    empty = np.zeros(0, np.int64)
    small = np.zeros(1, np.int32)
    batch = Batch(small, small, one, np.array([0, 1], np.int32), small + 1, small[:, None], one)
    pending = steps.launch(LaunchedRows(batch, Choices([0.0], [1], [0]), one, empty, empty))
    assert not pending.is_there
    assert pending._host.tolist() == [NOT_THERE]
    assert pending.token_ids() == [1]
    assert pending.is_there


# ------------------------------------------------------------------------------------------------------- a whole model


class Sequences:
    """What a worker keeps, in the smallest form: positions move on without tokens being known."""

    def __init__(self) -> None:
        self.tokens = {slot: list(prompt) for slot, prompt in PROMPTS.items()}
        self.lengths = {slot: len(prompt) for slot, prompt in PROMPTS.items()}
        """tokens, those that are still being chosen included"""
        self.num_fed = 0

    def rows(self, slots: list[int], computed: dict[int, int]) -> LaunchedRows:
        """Everything from `computed` on of each slot; the last may be fed."""
        token_ids: list[int] = []
        positions: list[int] = []
        starts, fed = [0], []
        for slot in slots:
            for position in range(computed[slot], self.lengths[slot]):
                if position >= len(self.tokens[slot]):
                    fed.append((len(token_ids), slot))
                token_ids.append(self.tokens[slot][position] if position < len(self.tokens[slot]) else 0)
                positions.append(position)
            starts.append(len(token_ids))
        lengths = [self.lengths[slot] for slot in slots]
        of_row = np.repeat(slots, np.diff(starts))
        at = np.array(positions)
        self.num_fed += len(fed)
        fed_at, fed_slots = np.array(fed, np.int64).reshape(-1, 2).T
        return LaunchedRows(
            Batch(
                token_ids=np.array(token_ids, np.int32),
                positions=at.astype(np.int32),
                slot_mapping=(8 * of_row + at // BLOCK_SIZE).astype(np.int64) * BLOCK_SIZE + at % BLOCK_SIZE,
                query_starts=np.array(starts, np.int32),
                context_lens=np.array(lengths, np.int32),
                block_tables=(8 * np.array(slots)[:, None] + np.arange(8)).astype(np.int32),
                logit_indices=np.array(starts[1:], np.int64) - 1,
            ),
            Choices(
                [TEMPERATURES[slot] for slot in slots],
                [77 + slot for slot in slots],
                [self.lengths[slot] - len(PROMPTS[slot]) for slot in slots],
            ),
            np.array(slots, np.int64),
            fed_at,
            fed_slots,
        )


ORDER = [[3, 0, 5], [5, 3], [3, 5, 0], [0], [0, 5], [5, 0, 3], [3], [3, 0]]
"""the slots of each step; the first computes prompts"""


def run(model: DecoderModel, depth: int) -> dict[int, list[int]]:
    """The steps of ORDER, of which up to `depth` are launched and not known."""
    state = Sequences()
    computed = dict.fromkeys(PROMPTS, 0)
    in_flight: list[tuple[list[int], PendingTokens]] = []

    def land() -> None:
        slots, pending = in_flight.pop(0)
        for slot, token_id in zip(slots, pending.token_ids(), strict=True):
            state.tokens[slot].append(token_id)

    for slots in ORDER:
        if len(in_flight) == depth:
            land()
        in_flight.append((slots, model.launch(state.rows(slots, computed))))
        for slot in slots:
            computed[slot] = state.lengths[slot]
            state.lengths[slot] += 1
    while in_flight:
        land()
    assert (state.num_fed > 0) == (depth > 1)
    return {slot: tokens[len(PROMPTS[slot]) :] for slot, tokens in state.tokens.items()}


def sampled_one_by_one(model: DecoderModel) -> dict[int, list[int]]:
    """The oracle: every token from a forward of its whole context alone, chosen by the sampler."""
    found: dict[int, list[int]] = {}
    for slot, prompt in PROMPTS.items():
        state = Sequences()
        tokens = state.tokens[slot]
        for index in range(sum(slot in slots for slots in ORDER)):
            state.lengths[slot] = len(tokens)
            batch = state.rows([slot], {slot: 0}).batch
            params = SamplingParams(temperature=TEMPERATURES[slot])
            (token_id,) = sample(model.forward(batch), [SampleRow(params, 77 + slot, index, (), 1)]).token_ids
            assert token_id is not None
            tokens.append(token_id)
        found[slot] = tokens[len(prompt) :]
    return found


@pytest.mark.parametrize("graphs", [False, True])
def test_tokens_of_a_model_that_runs_ahead(tiny_model: Callable[[str], Path], graphs: bool) -> None:
    facts = check_supported(tiny_model("llama-grouped-biases"))
    spec = decoder_spec(facts, 128)
    assert isinstance(spec, DecoderSpec)

    def load(**options: Any) -> DecoderModel:
        ops = TorchOps(CPU)
        model = DecoderModel(facts, spec, ops, torch.bfloat16, CPU, 128, max_sequences=6, **options)
        model.allocate(48, BLOCK_SIZE)
        return model

    plain = load()
    assert not plain.runs_ahead
    expected = sampled_one_by_one(plain)
    assert len({tuple(tokens) for tokens in expected.values()}) == 3
    recorder = RepeatingRecorder() if graphs else None
    for depth in (1, 2):
        stream = LazyStream()
        assert run(load(run_ahead=True, stream=stream, recorder=recorder), depth) == expected
        assert stream.was_late == (depth > 1)
    # And on the stream that a CPU has.
    assert run(load(run_ahead=True, recorder=recorder), 2) == expected
