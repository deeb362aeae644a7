"""Steps on an engine that chooses tokens itself: when it is asked, with what, and what comes of a failed choice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from engine.batch import Batch, Choices, DecodeRows, EngineInfo
from engine.fake import FakeEngine
from engine.sampler import SampleRow, sample
from worker.steps import SamplingParams


@dataclass
class ChoosingFake:
    """The fake engine's logits, and the sampler's tokens of them."""

    inner: FakeEngine = field(
        default_factory=lambda: FakeEngine(num_blocks=256, block_size=4, max_sequences=16, max_model_len=256)
    )
    calls: list[str] = field(default_factory=list)
    chooses: bool = True
    fails: bool = False

    @property
    def info(self) -> EngineInfo:
        return self.inner.info

    def forward(self, batch: Batch) -> torch.Tensor:
        self.calls.append("forward")
        return self.inner.forward(batch)

    def choose(self, batch: Batch, choices: Choices) -> list[int]:
        self.calls.append("choose")
        rows = zip(choices.temperatures, choices.seeds, choices.output_indices, strict=True)
        return self._tokens(batch, list(rows))

    def decode(self, rows: DecodeRows) -> list[int]:
        self.calls.append("decode")
        slots, positions, token_ids, seeds, indices = np.array(rows.numbers, np.int64).reshape(-1, 5).T
        size, count = self.info.block_size, len(slots)
        batch = Batch(
            token_ids=token_ids.astype(np.int32),
            positions=positions.astype(np.int32),
            slot_mapping=rows.block_tables[slots, positions // size].astype(np.int64) * size + positions % size,
            query_starts=np.arange(count + 1, dtype=np.int32),
            context_lens=(positions + 1).astype(np.int32),
            block_tables=rows.block_tables[slots],
            logit_indices=np.arange(count),
        )
        return self._tokens(batch, list(zip(rows.temperatures, seeds.tolist(), indices.tolist(), strict=True)))

    def _tokens(self, batch: Batch, wanted: list[tuple[float, int, int]]) -> list[int]:
        logits = self.inner.forward(batch)
        rows = [
            SampleRow(SamplingParams(temperature=temperature), seed, index, [0], 1)
            for temperature, seed, index in wanted
        ]
        chosen = sample(logits, rows).token_ids
        return [-1 if self.fails or token_id is None else token_id for token_id in chosen]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("seed", [7, (1 << 64) - 5])
def test_tokens_are_plain_ones_and_no_logits_are_asked_for(
    make_rig: Any, plain_tokens: Callable[..., list[int]], temperature: float, seed: int
) -> None:
    engine = ChoosingFake()
    rig = make_rig(engine=engine)
    prompts = {0: [5, 6, 7, 8, 9], 3: [11, 12]}
    admissions = [
        rig.admission(slot, prompt, seed=seed, params=SamplingParams(temperature=temperature, max_tokens=30))
        for slot, prompt in prompts.items()
    ]
    rig.step([(slot, len(prompt), 0) for slot, prompt in prompts.items()], admissions=admissions)
    for _ in range(29):
        rig.step([(slot, 0, 0) for slot in prompts])
    for slot, prompt in prompts.items():
        assert rig.output(slot) == plain_tokens(prompt, seed, temperature, 30)
    assert engine.calls == ["choose"] + ["decode"] * 29


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_verification_is_a_decode_of_more_rows(
    make_rig: Any,
    plain_tokens: Callable[..., list[int]],
    scripted_drafting: Any,
    temperature: float,
) -> None:
    """Rows with drafts, right, wrong or none, beside each other; as many native rows as tokens."""
    prompts = {0: [5, 6, 7, 8, 9], 3: [11, 12], 4: [9, 9, 9]}
    truth = {slot: plain_tokens(prompt, 7, temperature, 30) for slot, prompt in prompts.items()}

    def propose(slot: int, tokens: list[int], limit: int) -> list[int]:
        done = len(tokens) - len(prompts[slot])
        right = truth[slot][done : done + min(limit, slot)]
        return right if done % 3 else [*right[:1], *((token + 1) % 260 for token in right[1:])]

    engine = ChoosingFake()
    rig = make_rig(scripted_drafting(propose), engine=engine)
    params = SamplingParams(temperature=temperature, max_tokens=30)
    admissions = [rig.admission(slot, prompt, seed=7, params=params) for slot, prompt in prompts.items()]
    rig.step([(slot, len(prompt), 0) for slot, prompt in prompts.items()], admissions=admissions)
    while any(not rig.executor.sequences.get(slot).ended for slot in prompts):
        rig.step([(slot, 0, 4) for slot in prompts])
    assert {slot: rig.output(slot) for slot in prompts} == truth
    assert set(engine.calls[1:]) == {"decode"}
    assert len(engine.calls) < 31
    assert max(outcome.num_model_tokens for outcome in rig.outcomes[1:]) == 1 + 4 + 5
    assert sum(sum(outcome.num_accepted_tokens) for outcome in rig.outcomes) > 20


@pytest.mark.parametrize(
    "params",
    [{"top_p": 0.9}, {"top_k": 5}, {"repetition_penalty": 1.3}, {"top_logprobs": 1}, {"logit_bias": {4: 1.0}}],
)
def test_a_row_that_wants_more_gives_the_whole_step_its_logits(make_rig: Any, params: dict[str, Any]) -> None:
    engine = ChoosingFake()
    rig = make_rig(engine=engine)
    rows = [SamplingParams(max_tokens=9), SamplingParams(max_tokens=9, **params)]
    rig.step(
        [(0, 3, 0), (1, 3, 0)], admissions=[rig.admission(slot, [5, 6, 7], params=rows[slot]) for slot in range(2)]
    )
    rig.step([(0, 0, 0), (1, 0, 0)])
    assert engine.calls == ["forward"] * 2
    rig.step([(0, 0, 0)])
    assert engine.calls[2:] == ["decode"]


def test_a_choice_that_failed_ends_its_row_only(make_rig: Any) -> None:
    engine = ChoosingFake(fails=True)
    rig = make_rig(engine=engine)
    outcome = rig.step([(0, 3, 0)], admissions=[rig.admission(0, [5, 6, 7])])
    (failure,) = outcome.failures
    assert failure.reason == "SAMPLING_FAILED"
    assert "not finite" in failure.message
    engine.fails = False
    outcome = rig.step([(1, 3, 0)], admissions=[rig.admission(1, [5, 6, 7])])
    assert not outcome.failures
    assert len(outcome.token_ids) == 1
