"""What goes wrong in one row stays in that row; what goes wrong in the engine ends the process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.batch import Batch
from engine.fake import FakeEngine
from worker.executor import EngineBroken
from worker.steps import SamplingParams

PROMPT = [ord(c) for c in "It was a bright cold day in April"]
BLOCK = 4


def test_not_a_number_fails_its_own_row_only(make_rig: Any, scripted_drafting: Any, plain_tokens: Any) -> None:
    """Case 30: at worst that request fails; its neighbour gives exactly what it gives alone."""
    engine = FakeEngine(
        num_blocks=64, block_size=BLOCK, max_sequences=4, max_model_len=256, fail_on_token_ids=frozenset({1})
    )
    rig = make_rig(scripted_drafting(lambda *_: []), engine)
    admissions = [rig.admission(0, PROMPT), rig.admission(1, [1, *PROMPT])]
    outcome = rig.step([(0, len(PROMPT), 0), (1, 99, 0)], admissions=admissions)
    assert outcome.num_tokens == [1, 0]
    assert [(failure.row, failure.reason) for failure in outcome.failures] == [(1, "SAMPLING_FAILED")]
    assert 1 in rig.executor.drafting.forgotten
    outcome = rig.step([(1, 0, 0), (0, 0, 0)])
    assert (outcome.num_tokens, outcome.failures) == ([0, 1], [])
    assert rig.generate(0) == plain_tokens(PROMPT, 7, 0.0, 16)


def test_a_drafted_position_that_fails_is_no_failure(
    make_rig: Any, scripted_drafting: Any, plain_tokens: Any, knowing: Any
) -> None:
    """The draft leads where the logits are no numbers; plain decoding never goes there."""
    truth = plain_tokens(PROMPT, 7, 0.0, 16)
    engine = FakeEngine(
        num_blocks=64, block_size=BLOCK, max_sequences=4, max_model_len=256, fail_on_token_ids=frozenset({1})
    )
    rig = make_rig(scripted_drafting(knowing(truth, PROMPT, lambda right, done: [*right[:1], 1, 1])), engine)
    rig.step([(0, len(PROMPT), 0)], admissions=[rig.admission(0, PROMPT)])
    assert rig.generate(0, 4) == truth
    assert not any(outcome.failures for outcome in rig.outcomes)
    assert sum(outcome.num_accepted_tokens[0] for outcome in rig.outcomes) > 0


def test_a_bias_outside_the_vocabulary_fails_alone(make_rig: Any, plain_tokens: Any) -> None:
    rig = make_rig()
    bad = SamplingParams(temperature=0, max_tokens=4, logit_bias={5000: 1.0})
    outcome = rig.step(
        [(0, 99, 0), (1, 99, 0)], admissions=[rig.admission(0, PROMPT, params=bad), rig.admission(1, PROMPT, seed=7)]
    )
    assert [failure.row for failure in outcome.failures] == [0]
    assert rig.generate(1) == plain_tokens(PROMPT, 7, 0.0, 16)


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": [5, 260]},
        {"token_ids": []},
        {"num_prompt_tokens": 0},
        {"num_computed_tokens": len(PROMPT)},
        {"num_computed_tokens": 4, "block_ids": []},
        {"block_ids": [100_000]},
        {"invalid": "temperature must be finite"},
        {"token_ids": [65] * 300, "num_prompt_tokens": 300},
    ],
)
def test_an_impossible_admission_fails_at_its_first_row(
    make_rig: Any, changes: dict[str, Any], plain_tokens: Any
) -> None:
    rig = make_rig()
    outcome = rig.step(
        [(0, 99, 0), (1, 99, 0)],
        admissions=[rig.admission(0, PROMPT, **changes), rig.admission(1, PROMPT, seed=7)],
    )
    assert [(failure.row, failure.reason) for failure in outcome.failures] == [(0, "ROW_FAILED")]
    assert rig.step([(0, 0, 0)]).failures == []
    assert rig.generate(1) == plain_tokens(PROMPT, 7, 0.0, 16)


def test_a_slot_outside_the_table_and_a_block_outside_the_pool_fail_alone(make_rig: Any, plain_tokens: Any) -> None:
    rig = make_rig()
    outcome = rig.step(
        [(99, 99, 0), (1, 99, 0)], admissions=[rig.admission(99, PROMPT), rig.admission(1, PROMPT, seed=7)]
    )
    assert [failure.row for failure in outcome.failures] == [0]
    assert rig.generate(1) == plain_tokens(PROMPT, 7, 0.0, 16)


class Brittle:
    """An engine that raises when a batch holds a certain token, or always."""

    def __init__(self, poison: int | None) -> None:
        self.inner = FakeEngine(num_blocks=64, block_size=BLOCK, max_sequences=16, max_model_len=256)
        self.poison = poison
        self.calls = 0

    @property
    def info(self) -> Any:
        return self.inner.info

    def forward(self, batch: Batch) -> torch.Tensor:
        self.calls += 1
        if self.poison is None or self.poison in batch.token_ids:
            raise RuntimeError("a kernel failed")
        return self.inner.forward(batch)


def test_an_engine_that_chokes_on_one_row_keeps_the_others(make_rig: Any, plain_tokens: Any) -> None:
    rig = make_rig(None, Brittle(poison=2))
    admissions = [rig.admission(slot, [*PROMPT[:8], 2] if slot == 3 else PROMPT[:9], seed=7) for slot in range(5)]
    outcome = rig.step([(slot, 9, 0) for slot in range(5)], admissions=admissions)
    assert [(failure.row, failure.reason) for failure in outcome.failures] == [(3, "ENGINE_FAILED")]
    assert "kernel" not in outcome.failures[0].message
    truth = plain_tokens(PROMPT[:9], 7, 0.0, 16)
    assert all(rig.generate(slot) == truth for slot in (0, 1, 2, 4))
    # Single bad rows with successes in between don't make the engine broken.
    for slot in range(5, 8):
        admission = rig.admission(slot, [2, 2, 3])
        assert rig.step([(slot, 3, 0)], admissions=[admission]).failures
        rig.step([(slot + 5, 3, 0)], admissions=[rig.admission(slot + 5, [5, 6, 7])])


def test_an_engine_that_fails_on_everything_is_broken(make_rig: Any) -> None:
    rig = make_rig(None, Brittle(poison=None))
    assert rig.step([(0, 99, 0)], admissions=[rig.admission(0, PROMPT)]).failures
    with pytest.raises(EngineBroken):
        rig.step([(1, 99, 0)], admissions=[rig.admission(1, PROMPT)])
    both = make_rig(None, Brittle(poison=None))
    with pytest.raises(EngineBroken):
        both.step([(0, 99, 0), (1, 99, 0)], admissions=[both.admission(0, PROMPT[:5]), both.admission(1, PROMPT[:5])])
