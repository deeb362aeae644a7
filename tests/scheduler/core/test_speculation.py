"""On where it pays, off where it doesn't, and neither forever: the controller against machines of known speed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tandem.v1 import types_pb2

from scheduler.core import speculation
from scheduler.core.acceptance import FIRST_TOKENS, survival
from scheduler.core.config import CoreConfig
from scheduler.core.draft_kinds import kind_of
from scheduler.core.sequence import Sequence
from scheduler.core.speculation import Phase, Speculation
from scheduler.core.step import Step, StepOutcome
from tests.scheduler.core.builders import sequence_of

CONFIG = CoreConfig()
GREEDY, SAMPLED = (True, 0), (False, 0)
NGRAM: int = types_pb2.SPECULATION_MODE_NGRAM


@dataclass
class Machine:
    """A worker and its draft worker: what steps take, and which drafts come and are right."""

    fixed: float = 0.010
    per_token: float = 0.0002
    drafting: float = 0.0
    """more per step that may draft"""
    right: Callable[[Sequence], float] = lambda sequence: 0.7
    comes: float = 1.0
    """probability that a row's draft is there"""
    comes_for: Callable[[Sequence], bool] = lambda sequence: True
    config: CoreConfig = CONFIG
    seed: int = 1
    spec: Speculation = field(default_factory=Speculation)
    rows: list[Sequence] = field(default_factory=list)
    seconds: float = 0.0
    tokens: float = 0.0
    """both as expected of the budgets given, so that a rate is no matter of luck"""
    steps: int = 0

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)

    def add(self, count: int, **fields: object) -> None:
        for _ in range(count):
            number = len(self.rows) + 1 + 1000 * self.steps
            self.rows.append(sequence_of(number, number=number, limit=10**9, **fields))

    def step(self) -> list[int]:
        """One decode step; its budgets."""
        self.steps += 1
        budgets = self.spec.budgets(self.rows, 0, self.config)
        drafts = [0] * len(self.rows) if budgets is None else budgets
        drafted, accepted = [], []
        for sequence, k in zip(self.rows, drafts, strict=True):
            drafted.append(k if self.dice.random() < self.comes and self.comes_for(sequence) else 0)
            right = 0
            while right < drafted[-1] and self.dice.random() < self.right(sequence):
                right += 1
            accepted.append(right)
        size = len(self.rows) + sum(drafted)
        self.seconds += self.duration(len(self.rows) + self.comes * sum(drafts), any(drafts))
        rows = zip(self.rows, drafts, strict=True)
        self.tokens += sum(1 + self.comes * sum(survival([self.right(sequence)] * k)) for sequence, k in rows)
        duration = self.duration(size, any(drafts))
        duration *= 1 + 0.02 * self.dice.random() + 5 * (self.dice.random() < 0.01)
        step = Step(self.steps, sequences=self.rows, num_prefill=[0] * len(self.rows), num_draft=drafts)
        emitted = [1 + count for count in accepted]
        any_drafted = any(drafted)
        self.spec.observe(
            step,
            StepOutcome(
                self.steps,
                emitted,
                [0] * sum(emitted),
                [0] * len(emitted),
                drafted if any_drafted else [],
                accepted if any_drafted else [],
                duration_s=duration,
                num_model_tokens=size,
            ),
        )
        return drafts

    def duration(self, size: float, drafting: bool) -> float:
        """Of a step, as a rule."""
        return self.fixed + self.per_token * size + self.drafting * drafting

    def run(self, count: int) -> list[list[int]]:
        return [self.step() for _ in range(count)]

    def rate(self, count: int) -> float:
        """Tokens per second over so many steps."""
        seconds, tokens = self.seconds, self.tokens
        self.run(count)
        return (self.tokens - tokens) / (self.seconds - seconds)

    def expected_rate(self, k: int, probability: float) -> float:
        """Of plain steps, or of k tokens for each row."""
        rows = len(self.rows)
        size = rows * (1 + k * self.comes)
        tokens = rows * (1 + self.comes * sum(survival([probability] * k)))
        return tokens / self.duration(size, k > 0)


def test_rows_that_nobody_drafts_for_do_not_speak_for_the_others() -> None:
    """Their request asks for a proposer that the draft worker doesn't have."""
    machine = Machine(right=lambda sequence: 0.8)
    machine.add(4)
    mute = machine.rows[0]
    machine.comes_for = lambda sequence: sequence is not mute
    budgets = machine.run(400)[-40:]
    assert machine.spec.kinds.of(SAMPLED).availability.shares(1)[0] > 0.9
    # It is asked for a token at most, which costs nothing while none comes.
    assert max(drafts[0] for drafts in budgets) <= 1
    assert sum(drafts[1] for drafts in budgets) > 3 * len(budgets)


def test_plain_steps_are_measured_before_the_first_draft() -> None:
    machine = Machine()
    machine.add(1)
    drafts = machine.run(12)
    assert drafts[:5] == [[0]] * 5
    assert all(k > 0 for (k,) in drafts[6:])
    assert machine.spec.plain_times.observed >= 4
    assert machine.spec.gain > 1.5


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.floats(0.02, 0.95),
    st.integers(1, 40),
    st.floats(0.00005, 0.005),
    st.sampled_from([0.0, 0.002, 0.010]),
    st.sampled_from([1.0, 0.6]),
    st.integers(0, 1000),
)
def test_never_slower_than_plain_and_near_the_best(
    probability: float, rows: int, per_token: float, drafting: float, comes: float, seed: int
) -> None:
    """The machines here take 10 ms and something by the token; rates over the first steps, learning included. Where
    drafting takes as much from the target as a step does, being no slower is all that is asked."""
    machine = Machine(0.010, per_token, drafting, lambda _: probability, comes, seed=seed)
    machine.add(rows)
    most = max(0, min(4, 64 // rows - 1))
    best = max(machine.expected_rate(k, probability) for k in range(most + 1))
    plain = machine.expected_rate(0, probability)
    assert machine.rate(1200) > 0.95 * plain
    assert machine.rate(600) > (max(0.96 * plain, 0.85 * best) if drafting < 0.010 else 0.96 * plain)


def test_off_costs_few_drafts() -> None:
    machine = Machine(right=lambda _: 0.0)
    machine.add(8)
    machine.run(100)
    assert sum(sum(drafts) > 0 for drafts in machine.run(2000)) < 60


def test_a_larger_batch_switches_off_and_a_smaller_one_on_again_at_once() -> None:
    machine = Machine(per_token=0.004, right=lambda _: 0.6)
    machine.add(1)
    machine.run(60)
    assert machine.spec.phase is Phase.ON
    machine.add(25)
    assert sum(map(sum, machine.run(60))) < 60
    assert machine.spec.phase is not Phase.ON
    assert machine.spec.gain == 1.0
    del machine.rows[:-1]  # the newest stays
    assert machine.step()[0] > 0


def test_more_rows_than_the_budget_has_tokens_are_plain_without_a_look() -> None:
    machine = Machine()
    machine.add(64)
    machine.run(30)
    assert machine.spec.phase is Phase.MEASURING
    assert machine.spec.budgets(machine.rows, 0, CONFIG) is None


def test_a_row_that_no_draft_fits_is_left_out_and_probed_ever_more_seldom() -> None:
    machine = Machine(per_token=0.003, right=lambda sequence: 0.0 if sequence is machine.rows[0] else 0.8)
    machine.add(3)
    machine.run(60)
    drafts = machine.run(1000)
    assert sum(others > 0 for _, others, _ in drafts) > 900
    tried = [number for number, (k, _, _) in enumerate(drafts) if k]
    assert 2 <= len(tried) < 60
    gaps = [late - early for early, late in pairwise(tried) if late - early > 8]
    assert len(gaps) > 2
    assert all(late > 0.9 * early for early, late in pairwise(gaps)), "but for a probe that met another one's"
    assert gaps[-1] > 2 * gaps[0]


def test_a_row_that_begins_to_copy_is_found_out() -> None:
    right = {"bad": 0.0}
    machine = Machine(per_token=0.0015, right=lambda sequence: right["bad"] if sequence is machine.rows[0] else 0.8)
    machine.add(3)
    machine.run(200)
    right["bad"] = 0.95
    machine.run(300)
    assert all(bad > 0 for bad, *_ in machine.run(10))


def test_drafts_that_become_right_are_found_out() -> None:
    right = {"all": 0.0}
    machine = Machine(right=lambda _: right["all"])
    machine.add(2)
    machine.run(400)
    assert machine.spec.phase is Phase.OFF
    right["all"] = 0.9
    machine.run(speculation.LONGEST_PROBE_WAIT + 50)
    assert machine.spec.phase is Phase.ON


def test_a_draft_worker_that_never_answers_and_slows_the_target_is_left_alone() -> None:
    machine = Machine(drafting=0.005, comes=0.0)
    machine.add(1)
    machine.run(150)
    assert machine.spec.phase is Phase.OFF
    assert machine.spec.kinds.of(SAMPLED).availability.shares(1)[0] < 0.2


def test_waiting_for_the_first_draft_is_not_held_against_it() -> None:
    machine = Machine(comes=0.0)
    machine.add(1)
    machine.run(5 + speculation.GRACE_STEPS)
    assert machine.spec.kinds.of(SAMPLED).availability.shares(1)[0] == 1.0


def test_the_target_became_faster_without_drafts() -> None:
    """Nothing but a plain step now and then can tell that plain steps have become cheap."""
    machine = Machine(fixed=0.030)
    machine.add(1)
    machine.run(100)
    assert machine.spec.phase is Phase.ON
    machine.fixed, machine.drafting = 0.005, 0.025
    machine.run(2048)
    assert machine.spec.phase is not Phase.ON
    assert machine.rate(1000) > 0.95 * machine.expected_rate(0, 0.7)


def long_row(number: int, prompt: int, left: int) -> Sequence:
    sequence = sequence_of(number, number=number, prompt=prompt)
    sequence.limit = len(sequence.token_ids) + left
    return sequence


@pytest.mark.parametrize(("prompt", "left", "begins"), [(32, 60, True), (4096, 60, False), (4096, 10**5, True)])
def test_a_sequence_begins_to_draft_only_if_it_may_earn_back_that_it_must_be_read(
    prompt: int, left: int, begins: bool
) -> None:
    machine = Machine(per_token=0.001, right=lambda _: 0.7)
    machine.add(1)
    machine.run(100)
    assert machine.spec.phase is Phase.ON
    machine.rows = [long_row(77, prompt, left)]
    assert any(map(sum, machine.run(20))) == begins


def test_one_that_drafts_already_has_been_read() -> None:
    machine = Machine(per_token=0.001, right=lambda _: 0.7)
    machine.rows = [long_row(1, 32, 10**5)]
    machine.run(100)
    (sequence,) = machine.rows
    assert sequence.drafts is not None
    sequence.token_ids += range(5000)
    sequence.limit = len(sequence.token_ids) + 60
    assert any(map(sum, machine.run(10)))


def test_a_probe_asks_the_shortest_sequences_and_stays_with_them() -> None:
    machine = Machine(per_token=0.003, right=lambda _: 0.0)
    machine.add(6)
    machine.run(1500)
    rows = [long_row(100 + number, prompt, 10**6) for number, prompt in enumerate((900, 40, 300, 60, 500, 20))]
    rows[5].limit = len(rows[5].token_ids) + 4  # too soon over
    machine.rows = rows
    probes = []
    for _ in range(6000):
        drafts = machine.step()
        if any(drafts):
            rows[1].token_ids += [7] * 100  # it is soon longer than another one
            probes.append([row for row, k in enumerate(drafts) if k])
        if len(probes) == speculation.PROBE_STEPS:
            break
    assert probes == [[1, 3]] * speculation.PROBE_STEPS


def test_nothing_is_probed_where_not_even_a_copy_would_pay() -> None:
    """Of a hundred rows a token more costs as much as nine tenths of one that is sure to come."""
    machine = Machine(fixed=0.040, per_token=0.004, right=lambda _: 0.8, config=CoreConfig(draft_token_budget=500))
    machine.spec.plain_times.begin_with((size, machine.duration(size, False)) for size in (1, 16, 64, 128, 256))
    machine.add(100)
    assert not any(map(sum, machine.run(3000)))
    assert machine.spec.phase is Phase.OFF
    del machine.rows[3:]
    assert any(map(sum, machine.run(30)))


def test_no_probe_begins_beside_a_prompt() -> None:
    machine = Machine(per_token=0.003, right=lambda _: 0.0)
    machine.add(6)
    machine.run(1500)
    for _ in range(6000):
        if machine.spec.phase is Phase.PROBING:
            machine.step()
        assert not any(machine.spec.budgets(machine.rows, 100, CONFIG) or [])
    assert machine.spec.phase is Phase.OFF
    assert any(map(sum, machine.run(10)))


def test_what_a_request_allows() -> None:
    machine = Machine(right=lambda _: 0.95)
    machine.add(1, max_draft_tokens=0)
    machine.add(1, max_draft_tokens=2)
    machine.add(1)
    for none, few, any_number in machine.run(60)[10:]:
        assert (none, few <= 2, any_number <= CONFIG.max_draft_tokens) == (0, True, True)
    *others, any_number = machine.step()
    assert others == [0, 2] and any_number > FIRST_TOKENS  # noqa: PT018


def test_no_budget_beyond_the_last_token() -> None:
    machine = Machine(right=lambda _: 0.95)
    machine.add(1)
    machine.run(30)
    (sequence,) = machine.rows
    sequence.sampling_in_flight = 1
    sequence.limit = len(sequence.token_ids) + 4
    assert machine.step() == [2]
    sequence.limit = len(sequence.token_ids) + 2
    assert machine.step() == [0]


def test_rows_that_may_not_draft_teach_nothing() -> None:
    machine = Machine()
    machine.add(1, max_draft_tokens=0)
    machine.run(200)
    machine.rows.clear()
    machine.add(1)
    machine.run(3)
    assert machine.step()[0] > 0


def test_temperatures_are_told_apart() -> None:
    machine = Machine(right=lambda sequence: 0.9 if sequence.request.spec.greedy else 0.2)
    machine.add(2, greedy=True)
    machine.add(2)
    machine.run(300)
    assert machine.spec.kinds.of(GREEDY).acceptance.conditional(1)[0] > 0.8
    assert machine.spec.kinds.of(SAMPLED).acceptance.conditional(1)[0] < 0.35
    assert sum(machine.spec.totals.tried) > sum(machine.spec.totals.accepted) > 0


@pytest.mark.parametrize("rows", [1, 5, 30])
def test_the_bounds_of_a_step(rows: int) -> None:
    machine = Machine(right=lambda _: 0.95, config=CoreConfig(draft_token_budget=33, token_budget=500))
    machine.add(rows)
    for drafts in machine.run(60):
        assert sum(drafts) + rows <= 33
        assert max(drafts) <= CONFIG.max_draft_tokens


def test_what_one_proposer_has_shown_says_nothing_of_another() -> None:
    """Chats that a model guesses badly and late, then a copy, on a machine where only the copy pays."""
    machine = Machine(
        fixed=0.0065,
        drafting=0.003,
        right=lambda sequence: 0.95 if sequence.request.spec.speculation_mode == NGRAM else 0.3,
    )
    machine.comes = 0.5
    machine.add(1, greedy=True)
    machine.run(4000)
    assert machine.spec.phase is Phase.OFF
    for _ in range(3):
        machine.rows.clear()
        machine.comes = 1.0
        machine.add(1, greedy=True, speculation_mode=NGRAM)
        budgets = [k for (k,) in machine.run(40)]
        assert sum(budgets[8:]) > 3 * len(budgets[8:]), budgets
        machine.rows.clear()
        machine.comes = 0.5
        machine.add(1, greedy=True)
        machine.run(200)
        assert not any(k for (k,) in machine.run(8))


def test_only_a_named_proposer_is_a_kind_of_its_own() -> None:
    named = {"SPECULATION_MODE_NGRAM", "SPECULATION_MODE_MODEL", "SPECULATION_MODE_COMBINED"}
    for name, mode in types_pb2.SpeculationMode.items():
        assert kind_of(sequence_of(1, greedy=True, speculation_mode=mode)) == (True, mode if name in named else 0)
