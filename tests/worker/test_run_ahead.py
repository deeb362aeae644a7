"""Steps launched before the one before is known, on a device that does nothing before somebody waits for it.

The oracle recomputes every token alone, from scratch (`plain_tokens`).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from engine.batch import Batch, LaunchedRows
from engine.fake import EOS_TOKEN_ID, FakeEngine
from engine.run_ahead import PendingTokens
from tests.engine.lazy_stream import LazyStream
from worker.executor import EngineBroken
from worker.steps import Finish, SamplingParams, Step, StepOutcome

PROMPT = [ord(c) for c in "It was a bright cold day in April"]
OPTIONS: dict[str, Any] = {"num_blocks": 512, "block_size": 4, "max_sequences": 8, "max_model_len": 256}


@dataclass
class Ahead:
    """A rig whose engine is a lazy device; remembers what was launched."""

    rig: Any
    stream: LazyStream
    num_fed: int = 0
    num_planned: int = 0
    """rows of the step launched last that have something to compute"""
    launched: list[Step] = field(default_factory=list)
    """in flight"""

    @property
    def run_ahead(self) -> Any:
        return self.rig.executor.ahead

    def launch(self, rows: list[tuple[int, int, int]], **changes: Any) -> None:
        step = self.rig.planned(rows, **changes)
        assert self.run_ahead.can_launch(step)
        launched = self.run_ahead.launch(step)
        self.num_fed += sum(plan.is_fed for plan in launched.plans)
        self.num_planned = len(launched.plans)
        self.launched.append(step)

    def land(self) -> StepOutcome:
        step = self.launched.pop(0)
        outcome = self.rig.taken(self.run_ahead.land())
        assert outcome.number == step.number
        return outcome

    def can_launch(self, rows: list[tuple[int, int, int]], **changes: Any) -> bool:
        return self.run_ahead.can_launch(self.rig.planned(rows, **changes))


@pytest.fixture
def make_ahead(make_rig: Any) -> Any:
    def make(fail_at: frozenset[int] = frozenset(), engine: Any = None, drafting: Any = None, **options: Any) -> Ahead:
        stream = LazyStream(fail_at=fail_at)
        engine = engine or FakeEngine(**OPTIONS, run_ahead=True, stream=stream, **options)
        return Ahead(make_rig(drafting, engine), stream)

    return make


def params_of(slot: int, **changes: Any) -> SamplingParams:
    return SamplingParams(temperature=(0.0, 1.0, 0.7)[slot % 3], **{"max_tokens": 20, **changes})


# ------------------------------------------------------------------------------------------------------ the same tokens


@pytest.mark.parametrize("seed", range(4))
def test_tokens_are_those_of_steps_one_by_one(make_ahead: Any, plain_tokens: Any, seed: int) -> None:
    """A scheduler of two steps in flight that issues whatever it may: chunks, decode rows, new ones into slots just
    left, rows of sequences that the step before ends; and now and then waits.
    """
    draw = random.Random(seed)
    ahead = make_ahead()
    table, slots = ahead.rig.executor.sequences, range(5)
    wanted: dict[int, list[int]] = {}
    left, dropped, reused = 14, 0, 0
    while True:
        admissions, released = [], []
        for slot in slots:
            sequence = table.get(slot)
            if (sequence is None or sequence.ended) and left:
                left -= 1
                if sequence is not None:
                    assert sequence.tokens[sequence.num_prompt :] == wanted[slot]
                    released.append(slot)
                    reused += any(slot in step.slots for step in ahead.launched)
                prompt = PROMPT[: draw.choice((1, 17, 30))]
                truth = plain_tokens(prompt, 7 + slot, params_of(slot).temperature, 20)
                stop = truth[draw.randint(0, 19)]
                wanted[slot] = truth[: truth.index(stop) + 1]
                params = params_of(slot, stop_token_ids=frozenset({stop}))
                admissions.append(ahead.rig.admission(slot, prompt, params=params))
        entering = {admission.slot for admission in admissions}
        rows = []
        for slot in slots:
            if slot in entering:
                rows.append((slot, draw.randint(1, 30), 0))
            elif (sequence := table.get(slot)) is not None and draw.random() < 0.9:
                planned = max(sequence.computed, sequence.launched)
                remaining = sequence.known + sequence.awaited - planned
                rows.append((slot, 0 if remaining <= 1 else draw.randint(1, remaining), 0))
        if not any(slot in entering or not table.get(slot).ended for slot in slots):
            break
        if rows:
            ahead.launch(rows, admissions=admissions, released=released)
        while ahead.launched and (len(ahead.launched) == 2 or draw.random() < 0.2):
            outcome = ahead.land()
            ended = {slot for slot, finish in zip(outcome.slots, outcome.finishes, strict=True) if finish}
            dropped += sum(slot in ended for step in ahead.launched for slot in step.slots)
    while ahead.launched:
        ahead.land()
    for slot in slots:
        assert ahead.rig.output(slot) == wanted[slot]
        assert table.get(slot).awaited == 0
    assert ahead.num_fed > 20
    assert dropped > 2
    assert reused > 0
    assert ahead.stream.was_late


def test_a_row_that_ends_in_one_step_is_no_row_of_the_next(make_ahead: Any, plain_tokens: Any) -> None:
    """Its token of the step launched meanwhile is dropped; its neighbour's isn't."""
    truth = plain_tokens(PROMPT, 7, 0.0, 16)
    other = plain_tokens(PROMPT[:9], 8, 1.0, 20)
    ahead = make_ahead()
    stopping = SamplingParams(temperature=0, max_tokens=16, stop_token_ids=frozenset({truth[1]}))
    assert truth[0] != truth[1]
    admissions = [
        ahead.rig.admission(0, PROMPT, params=stopping),
        ahead.rig.admission(1, PROMPT[:9], params=params_of(1)),
    ]
    ahead.launch([(0, 99, 0), (1, 99, 0)], admissions=admissions)
    ahead.launch([(0, 0, 0), (1, 0, 0)])
    assert ahead.land().token_ids == [truth[0], other[0]]
    ahead.launch([(0, 0, 0), (1, 0, 0)])
    outcome = ahead.land()
    assert (outcome.token_ids, outcome.finishes) == ([truth[1], other[1]], [Finish.STOP, Finish.NOT])
    late = ahead.land()
    assert (late.num_tokens, late.token_ids, late.finishes, late.failures) == ([0, 1], [other[2]], [0, 0], [])
    sequence = ahead.rig.executor.sequences.get(0)
    assert (sequence.known, sequence.computed) == (len(PROMPT) + 2, len(PROMPT) + 1)
    # Launched once it is known: it isn't computed at all.
    ahead.launch([(0, 0, 0), (1, 0, 0)])
    assert ahead.land().num_model_tokens == 1


def test_what_is_written_in_vain_lies_beyond_what_counts_as_computed(make_ahead: Any, plain_tokens: Any) -> None:
    """The KV of an ended sequence that is offered, and named, is what it would have been."""
    truth = plain_tokens(PROMPT, 7, 0.0, 16)
    stopping = SamplingParams(temperature=0, max_tokens=16, stop_token_ids=frozenset({truth[3]}))
    held = []
    for depth in (1, 2):
        ahead = make_ahead()
        kv = ahead.rig.executor.engine._kv
        untouched = kv.copy()
        ahead.launch([(0, 99, 0)], admissions=[ahead.rig.admission(0, PROMPT, params=stopping, blocks=12)])
        while not ahead.rig.executor.sequences.get(0).ended:
            if len(ahead.launched) < depth:
                ahead.launch([(0, 0, 0)])
            else:
                ahead.land()
        while ahead.launched:
            ahead.land()
        (resident,) = ahead.rig.executor.sequences.residents()
        length = resident.num_computed_tokens
        held.append((resident, kv[:length].tolist()))
        assert length == len(PROMPT) + truth.index(truth[3])
        in_vain = [place for place in range(len(kv)) if kv[place] != untouched[place] and place >= length]
        assert in_vain == ([length] if depth == 2 else [])
        assert length < 12 * 4  # in a block of its own
    assert held[0] == held[1]


def test_the_last_token_by_length_is_not_followed_by_a_row(make_ahead: Any) -> None:
    ahead = make_ahead()
    params = SamplingParams(temperature=0, max_tokens=2)
    ahead.launch([(0, 99, 0)], admissions=[ahead.rig.admission(0, PROMPT, params=params)])
    ahead.launch([(0, 0, 0)])
    assert ahead.land().num_tokens == [1]
    assert ahead.num_planned == 1
    ahead.launch([(0, 0, 0)])
    assert ahead.num_planned == 0
    assert ahead.land().finishes == [Finish.LENGTH]
    late = ahead.land()
    assert (late.num_tokens, late.num_model_tokens) == ([0], 0)


def test_rows_without_room_wait_for_a_block(make_ahead: Any, plain_tokens: Any) -> None:
    ahead = make_ahead()
    ahead.launch([(0, 99, 0)], admissions=[ahead.rig.admission(0, PROMPT[:8], blocks=2)], reserve=False)
    ahead.launch([(0, 0, 0)], reserve=False)  # its token would be the ninth of eight places
    assert ahead.land().num_tokens == [1]
    assert ahead.land().num_tokens == [0]
    ahead.launch([(0, 0, 0)])
    ahead.launch([(0, 0, 0)])
    ahead.land()
    ahead.land()
    assert ahead.rig.output(0) == plain_tokens(PROMPT[:8], 7, 0.0, 16)[:3]


# ----------------------------------------------------------------------------------------------------------- who waits


@pytest.mark.parametrize(
    "params",
    [
        {"top_p": 0.9},
        {"top_k": 5},
        {"repetition_penalty": 1.3},
        {"top_logprobs": 1},
        {"prompt_logprobs": 0},
        {"logit_bias": {4: 1.0}},
        {"min_tokens": 3, "stop_token_ids": frozenset({EOS_TOKEN_ID})},
    ],
)
def test_a_row_that_needs_the_host_is_not_launched(make_ahead: Any, params: dict[str, Any]) -> None:
    ahead = make_ahead()
    admissions = [ahead.rig.admission(0, PROMPT), ahead.rig.admission(1, PROMPT, params=SamplingParams(**params))]
    rows = [(0, 99, 0), (1, 99, 0)]
    assert not ahead.can_launch(rows, admissions=admissions)
    ahead.rig.step(rows, admissions=admissions)
    assert not ahead.can_launch([(0, 0, 0), (1, 0, 0)])
    assert ahead.can_launch([(0, 0, 0)])
    assert not ahead.can_launch([])


def test_a_row_with_a_draft_budget_waits(make_ahead: Any) -> None:
    ahead = make_ahead()
    ahead.rig.step([(0, 99, 0)], admissions=[ahead.rig.admission(0, PROMPT)])
    assert not ahead.can_launch([(0, 0, 1)])
    assert ahead.can_launch([(0, 0, 0)])
    # A chunk's budget says only what its tokens are for.
    assert ahead.can_launch([(1, 9, 1)], admissions=[ahead.rig.admission(1, PROMPT)])


def test_no_third_step_is_launched(make_ahead: Any) -> None:
    ahead = make_ahead()
    ahead.launch([(0, 99, 0)], admissions=[ahead.rig.admission(0, PROMPT)])
    ahead.launch([(0, 0, 0)])
    assert not ahead.can_launch([(0, 0, 0)])
    ahead.land()
    assert ahead.can_launch([(0, 0, 0)])


# ------------------------------------------------------------------------------------------------------ what goes wrong


def test_a_choice_that_failed_ends_its_row_and_the_one_launched_after_it(make_ahead: Any, plain_tokens: Any) -> None:
    ahead = make_ahead(fail_on_token_ids=frozenset({1}))
    ahead.launch(
        [(0, 99, 0), (1, 99, 0)],
        admissions=[ahead.rig.admission(0, [1, *PROMPT]), ahead.rig.admission(1, PROMPT, seed=7)],
    )
    ahead.launch([(0, 0, 0), (1, 0, 0)])
    outcome = ahead.land()
    assert [(failure.row, failure.reason) for failure in outcome.failures] == [(0, "SAMPLING_FAILED")]
    assert "not finite" in outcome.failures[0].message
    late = ahead.land()
    assert (late.num_tokens, late.failures) == ([0, 1], [])
    assert ahead.rig.output(1) == plain_tokens(PROMPT, 7, 0.0, 16)[:2]


@dataclass
class Brittle:
    """A lazy device that can't be given a batch with a certain token, which is only found out when it is launched."""

    stream: LazyStream
    poison: int
    inner: FakeEngine = field(init=False)
    runs_ahead: bool = True

    def __post_init__(self) -> None:
        self.inner = FakeEngine(**OPTIONS, run_ahead=True, stream=self.stream)

    @property
    def info(self) -> Any:
        return self.inner.info

    def forward(self, batch: Batch) -> torch.Tensor:
        self._check(batch)
        return self.inner.forward(batch)

    def launch(self, rows: LaunchedRows) -> PendingTokens:
        self._check(rows.batch)
        return self.inner.launch(rows)

    def _check(self, batch: Batch) -> None:
        if self.poison in batch.token_ids:
            raise RuntimeError("a kernel can't be launched")


def test_a_step_that_can_not_be_launched_is_computed_when_it_lands(make_ahead: Any, plain_tokens: Any) -> None:
    """Behind one that is on the device: its fed tokens are known by then. Only the culprit's row fails."""
    stream = LazyStream()
    ahead = make_ahead(engine=Brittle(stream, poison=2))
    ahead.launch([(0, 99, 0)], admissions=[ahead.rig.admission(0, PROMPT, seed=7)])
    ahead.launch([(0, 0, 0), (1, 99, 0)], admissions=[ahead.rig.admission(1, [*PROMPT[:5], 2])])
    ahead.land()
    assert not ahead.can_launch([(0, 0, 0)])  # it would be put on the device before the one that isn't there
    outcome = ahead.land()
    assert outcome.num_tokens == [1, 0]
    assert [(failure.row, failure.reason) for failure in outcome.failures] == [(1, "ENGINE_FAILED")]
    ahead.launch([(0, 0, 0)])
    ahead.land()
    assert ahead.rig.output(0) == plain_tokens(PROMPT, 7, 0.0, 16)[:3]


@pytest.mark.parametrize("fail_at", [{2}, {3}, {2, 3}])
def test_what_the_device_failed_on_is_computed_again_in_order(
    make_ahead: Any, plain_tokens: Any, fail_at: set[int]
) -> None:
    """A sequence that ended in the first of the two stays ended in the second."""
    truth, other = plain_tokens(PROMPT, 7, 0.0, 16), plain_tokens(PROMPT[:9], 8, 1.0, 20)
    ahead = make_ahead(frozenset(fail_at))
    stopping = SamplingParams(temperature=0, max_tokens=16, stop_token_ids=frozenset({truth[1]}))
    ahead.launch(
        [(0, 99, 0), (1, 99, 0)],
        admissions=[
            ahead.rig.admission(0, PROMPT, params=stopping),
            ahead.rig.admission(1, PROMPT[:9], params=params_of(1)),
        ],
    )
    ahead.launch([(0, 0, 0), (1, 0, 0)])
    ahead.land()
    ahead.launch([(0, 0, 0), (1, 0, 0)])
    assert ahead.land().token_ids == [truth[1], other[1]]
    assert ahead.land().token_ids == [other[2]]
    for _ in range(2):
        ahead.launch([(1, 0, 0)])
    ahead.land()
    ahead.land()
    assert ahead.rig.output(1) == other[:5]
    assert ahead.rig.executor.sequences.get(1).awaited == 0


def test_a_device_that_failed_on_what_has_left_its_slot_is_broken(make_ahead: Any) -> None:
    ahead = make_ahead(frozenset({1}))
    ahead.launch([(0, 99, 0)], admissions=[ahead.rig.admission(0, PROMPT)])
    ahead.launch([(0, 99, 0)], released=[0], admissions=[ahead.rig.admission(0, PROMPT[::-1])])
    with pytest.raises(EngineBroken, match="left their slots"):
        ahead.run_ahead.land()


def test_a_sequence_that_has_left_its_slot_gets_its_last_token(
    make_ahead: Any, plain_tokens: Any, scripted_drafting: Any
) -> None:
    """As after a preemption: the token counts. No draft is asked for it under the name of who has the slot now."""
    drafting = scripted_drafting(lambda *_: [])
    ahead = make_ahead(drafting=drafting)
    ahead.launch([(0, 99, 0)], admissions=[ahead.rig.admission(0, PROMPT)])
    ahead.launch([(0, 99, 0)], released=[0], admissions=[ahead.rig.admission(0, PROMPT[::-1])])
    assert ahead.land().token_ids == plain_tokens(PROMPT, 7, 0.0, 1)
    assert drafting.followed == {}
    assert ahead.land().token_ids == plain_tokens(PROMPT[::-1], 7, 0.0, 1)
    assert drafting.followed == {0: ahead.rig.executor.sequences.get(0).tokens}


def test_a_steps_time_begins_when_the_one_before_has_landed(make_rig: Any) -> None:
    now = iter(range(0, 1000, 10))
    stream = LazyStream()
    rig = make_rig(engine=FakeEngine(**OPTIONS, run_ahead=True, stream=stream))
    rig.executor.ahead._clock = lambda: next(now)
    ahead = Ahead(rig, stream)
    ahead.launch([(0, 99, 0)], admissions=[rig.admission(0, PROMPT)])  # at 0
    ahead.launch([(0, 0, 0)])  # at 10
    assert ahead.land().duration_s == 20
    assert ahead.land().duration_s == 10
