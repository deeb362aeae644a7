"""Drafts that the worker guesses between its steps: the executor over a fake engine, the draft model another one."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from cluster.draft_news import Source
from drafting.combined_proposer import CombinedProposer
from drafting.mirror import ALWAYS, Mirror
from drafting.model_proposer import ModelProposer
from drafting.ngram_proposer import NgramProposer
from drafting.proposer import Proposer
from drafting.rounds import MAX_FAILURES
from engine.fake import FakeEngine
from worker.own_drafts import MANY_TOKENS, OwnDrafts
from worker.steps import SamplingParams

Plain = Callable[[list[int], int, float, int], list[int]]


def model(num_blocks: int = 64, **options: Any) -> ModelProposer:
    options = {"max_sequences": 16, "max_model_len": 256, "disagreement": 0.2, **options}
    return ModelProposer(FakeEngine(num_blocks=num_blocks, block_size=4, **options), "fake", 260)


class Failing:
    """A proposer that raises when told to."""

    name = "failing"
    sources = frozenset(Source)

    def __init__(self, inner: Proposer) -> None:
        self.inner = inner
        self.failing = False
        self.rounds: list[int] = []

    def extend(self, mirrors: Sequence[Mirror]) -> None:
        self.rounds.append(len(mirrors))
        if self.failing:
            raise RuntimeError("no luck")
        self.inner.extend(mirrors)

    def fork(self, branch: Mirror) -> bool:
        raise AssertionError("nothing is guessed ahead, so nothing branches")

    def forget(self, mirror: Mirror) -> None:
        self.inner.forget(mirror)


def spotless(drafts: OwnDrafts, proposer: Proposer) -> None:
    """Nothing is held for anybody."""
    assert len(drafts.mirrors) == 0
    if isinstance(proposer, ModelProposer):
        proposer.check_integrity()
        assert not proposer._holders


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", ["model", "ngram", "combined", "few blocks"])
def test_tokens_are_plain_ones(make_rig: Any, plain_tokens: Plain, kind: str, temperature: float) -> None:
    """Sequences come and go, some budgets are 0 for a while, prompts are read beside decoding rows."""
    rng = random.Random(kind)
    proposer: Proposer = model(num_blocks=9 if kind == "few blocks" else 64)
    if kind in ("ngram", "combined"):
        proposer = NgramProposer() if kind == "ngram" else CombinedProposer(NgramProposer(), proposer)
    drafts = OwnDrafts(proposer, max_sequences=4)
    rig = make_rig(drafts, num_blocks=4096)
    params = SamplingParams(temperature=temperature, max_tokens=24)
    truth: dict[int, list[int]] = {}
    done = 0
    while done < 12:
        admissions, rows, released = [], [], []
        for slot in range(4):
            sequence = rig.executor.sequences.get(slot)
            if sequence is None and rng.random() < 0.4:
                prompt = [rng.randrange(32, 127) for _ in range(rng.randrange(2, 50))] * 2
                seed = rng.randrange(1 << 64)
                truth[slot] = plain_tokens(prompt, seed, temperature, 24)
                admissions.append(rig.admission(slot, prompt, seed=seed, params=params))
                rows.append((slot, 16, 0))
            elif sequence is not None and sequence.ended:
                assert rig.output(slot) == truth[slot]
                released.append(slot)
                done += 1
            elif sequence is not None:
                left = len(sequence.tokens) - sequence.computed
                rows.append((slot, 16 if left > 1 else 0, 0 if left > 1 else rng.choice((0, 1, 4))))
        for slot in released:
            rig.blocks.pop(slot)
        rig.step(rows, admissions=admissions, released=released)
    accepted = sum(sum(outcome.num_accepted_tokens) for outcome in rig.outcomes)
    drafted = sum(sum(outcome.num_drafted_tokens) for outcome in rig.outcomes)
    # What the fake engine says hardly ever stood there before.
    assert kind == "ngram" or 0 < accepted < drafted
    for slot in range(4):
        drafts.forget(slot)
    spotless(drafts, proposer)


def test_a_step_guesses_what_its_budgets_say(make_rig: Any) -> None:
    drafts = OwnDrafts(model(disagreement=0.0), max_sequences=4)
    drafts.mirrors.begin_stream(0, ALWAYS._replace(ahead=1.01))
    rig = make_rig(drafts)
    params = SamplingParams(temperature=0.0, max_tokens=12)
    prompt = list(b"a prompt of some tokens")
    admissions = [rig.admission(slot, prompt, seed=3, params=params) for slot in range(3)]
    rig.step([(slot, len(prompt), 0) for slot in range(3)], admissions=admissions)
    assert drafts.rounds.num_guessed == 0
    outcome = rig.step([(0, 0, 3), (1, 0, 1), (2, 0, 0)])
    assert outcome.num_drafted_tokens == outcome.num_accepted_tokens == [3, 1, 0]
    assert drafts.rounds.num_guessed == 4
    assert [drafts.mirrors.get(0, slot) is None for slot in range(3)] == [False, False, True]
    # A budget that comes back finds the tokens that came meanwhile, and one that rises opens nothing anew.
    rig.step([(0, 0, 0), (1, 0, 0), (2, 0, 0)])
    mirror = drafts.mirrors.get(0, 1)
    outcome = rig.step([(0, 0, 2), (1, 0, 5), (2, 0, 2)])
    assert outcome.num_accepted_tokens == outcome.num_drafted_tokens == [2, 5, 2]
    assert drafts.mirrors.get(0, 1) is mirror
    # 12 tokens are all there are: after 1 + 4 + 1 + 3 of them two may be guessed at most.
    outcome = rig.step([(0, 0, 9), (1, 0, 0), (2, 0, 0)])
    assert outcome.num_drafted_tokens[0] == 2
    assert rig.executor.sequences.get(0).ended
    assert drafts.mirrors.get(0, 0) is None


def test_a_long_prompt_is_read_over_several_steps(make_rig: Any, plain_tokens: Plain) -> None:
    """One round of it a step; the last outcome is told before, which a guess of a moment doesn't wait for."""
    proposer = Failing(ModelProposer(FakeEngine(num_blocks=64, block_size=4, disagreement=0.0), "fake", 260, 40))
    drafts = OwnDrafts(proposer, max_sequences=4)
    rig = make_rig(drafts)
    prompts = {0: list(b"short"), 1: [ord("a") + index % 26 for index in range(200)]}
    params = SamplingParams(temperature=0.0, max_tokens=40)
    rig.step(
        [(slot, 200, 0) for slot in prompts],
        admissions=[rig.admission(slot, prompt, seed=3, params=params) for slot, prompt in prompts.items()],
    )
    told: list[int] = []
    drafted = []
    for number in range(5):
        step = rig.planned([(0, 0, 1), (1, 0, 1)] if number else [(1, 0, 1)])
        outcome = rig.taken(rig.executor.run(step, lambda number=number: told.append(number)))
        drafted.append(outcome.num_drafted_tokens)
    # 40 tokens a round. Where the short one guesses, the long one takes the rest of that round and one of its own.
    assert drafted == [[0], [1, 0], [1, 0], [1, 1], [1, 1]]
    assert proposer.rounds[0] == 1
    reading = {number for number in told if told.count(number) == 2}
    assert reading == {0, 1, 2}, "each forward pass tells once, and reading more than a few tokens does"
    for slot, prompt in prompts.items():
        assert rig.output(slot) == plain_tokens(prompt, 3, 0.0, 40)[: len(rig.output(slot))]
    assert MANY_TOKENS < 40


@pytest.mark.parametrize("source", [Source.ANY, Source.NGRAM])
@pytest.mark.parametrize("combined", [False, True])
def test_an_index_holds_nothing_up(make_rig: Any, combined: bool, source: Source) -> None:
    """Of a long prompt that only an index reads, the last outcome is told when the target begins, as without drafts."""
    index = NgramProposer()
    drafts = OwnDrafts(CombinedProposer(index, model()) if combined else index, max_sequences=4)
    rig = make_rig(drafts)
    prompt = [ord("a") + index % 26 for index in range(100)]
    rig.step([(0, 100, 0)], admissions=[rig.admission(0, prompt, draft_source=source)])
    told: list[int] = []
    for number in range(3):
        rig.taken(rig.executor.run(rig.planned([(0, 0, 2)]), lambda number=number: told.append(number)))
    reads = combined and source is Source.ANY
    assert told == ([0, 0, 1, 2] if reads else [0, 1, 2])


def test_a_round_that_fails_costs_its_drafts_and_three_end_all(make_rig: Any, plain_tokens: Plain) -> None:
    proposer = Failing(model(disagreement=0.0))
    changes: list[bool] = []
    drafts = OwnDrafts(proposer, 8, lambda: changes.append(drafts.drafting))
    rig = make_rig(drafts)
    prompt, params = list(b"tell me"), SamplingParams(temperature=0.0, max_tokens=30)
    truth = plain_tokens(prompt, 3, 0.0, 30)
    admissions = [rig.admission(slot, prompt, seed=3, params=params) for slot in range(6)]
    rig.step([(slot, len(prompt), 0) for slot in range(6)], admissions=admissions)
    proposer.failing = True
    assert rig.step([(0, 0, 2), (1, 0, 2)]).num_drafted_tokens == [0, 0]
    proposer.failing = False
    # Those two decode plainly from here on; a success between failures forgives them.
    assert rig.step([(0, 0, 2), (1, 0, 2), (2, 0, 2)]).num_drafted_tokens == [0, 0, 2]
    proposer.failing = True
    for slot in range(2, 2 + MAX_FAILURES):
        assert drafts.drafting
        assert rig.step([(slot, 0, 2)]).num_drafted_tokens == [0]
    assert changes == [False]
    rounds = len(proposer.rounds)
    assert rig.step([(5, 0, 2)]).num_drafted_tokens == [0]
    assert len(proposer.rounds) == rounds
    for slot in range(6):
        assert rig.generate(slot, 2) == truth
    spotless(drafts, proposer.inner)


def test_who_is_not_served_is_asked_for_once(make_rig: Any) -> None:
    drafts = OwnDrafts(model(), max_sequences=4)
    rig = make_rig(drafts)
    prompt = list(b"copy, copy, copy, co")
    wanted = rig.admission(0, prompt, draft_source=Source.NGRAM)
    rig.step([(0, len(prompt), 0)], admissions=[wanted])
    for _ in range(4):
        assert rig.step([(0, 0, 3)]).num_drafted_tokens == [0]
    assert drafts.mirrors.num_refused == 1
    # The next sequence of the slot may want what there is.
    rig.step([(0, len(prompt), 0)], admissions=[rig.admission(0, prompt, params=SamplingParams(max_tokens=9))])
    assert rig.step([(0, 0, 3)]).num_drafted_tokens != [0]


def test_what_drafting_took_is_told(make_rig: Any) -> None:
    ticks = iter(range(100))
    rig = make_rig(OwnDrafts(model(), max_sequences=4))
    rig.executor._clock = lambda: float(next(ticks))
    prompt = list(b"tell me")
    outcome = rig.step([(0, len(prompt), 0)], admissions=[rig.admission(0, prompt)])
    assert (outcome.duration_s, outcome.drafting_s) == (1.0, 0.0)
    outcome = rig.step([(0, 0, 2)])
    assert (outcome.duration_s, outcome.drafting_s) == (2.0, 1.0)
