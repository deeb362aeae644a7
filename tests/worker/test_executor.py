"""The executor over the fake engine; the oracle recomputes every token alone, from scratch, with none of its code."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.sampler import SampleResult, SampleRow, sample
from worker import executor
from worker.steps import Finish, SamplingParams

PROMPT = [ord(c) for c in "It was a bright cold day in April"]
BLOCK = 4


def random_draft(slot: int, tokens: list[int], limit: int) -> list[int]:
    source = random.Random(len(tokens))
    return [source.randrange(32, 127) for _ in range(source.randint(0, limit))]


SPOILERS: dict[str, Callable[[list[int], int], list[int]]] = {
    "perfect": lambda right, done: right,
    "wrong at once": lambda right, done: [(token + 1) % 260 for token in right],
    "wrong at the end": lambda right, done: [*right[:-1], 300] if right else [],
    "truncated": lambda right, done: right[: done % 3],
    "wrong now and then": lambda right, done: [t if (done + i) % 4 else 32 for i, t in enumerate(right)],
    "too long": lambda right, done: right + [33] * 20,
    "no ids": lambda right, done: [-1, 10**9],
}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_plain_decoding_equals_the_oracle_with_any_chunking(
    make_rig: Any, temperature: float, plain_tokens: Any
) -> None:
    truth = plain_tokens(PROMPT, 7, temperature, 16)
    for chunk in (5, 16, len(PROMPT)):
        rig = make_rig()
        params = SamplingParams(temperature=temperature, max_tokens=16)
        rig.step(admissions=[rig.admission(0, PROMPT, params=params)])
        while rig.executor.sequences.get(0).computed < len(PROMPT):
            rig.step([(0, chunk, 0)])
        assert rig.generate(0) == truth
        assert rig.outcomes[-1].finishes == [Finish.LENGTH]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("spoiler", SPOILERS)
def test_any_draft_gives_the_plain_tokens(
    make_rig: Any, scripted_drafting: Any, temperature: float, spoiler: str, plain_tokens: Any, knowing: Any
) -> None:
    truth = plain_tokens(PROMPT, 7, temperature, 24)
    all_drafted = all_accepted = 0
    for k in range(1, 9):
        drafting = scripted_drafting(knowing(truth, PROMPT, SPOILERS[spoiler]))
        rig = make_rig(drafting)
        rig.step([(0, len(PROMPT), 0)], admissions=[admission_of(rig, temperature, 24)])
        assert rig.generate(0, k) == truth, (spoiler, k)
        drafted = sum(outcome.num_drafted_tokens[0] for outcome in rig.outcomes)
        accepted = sum(outcome.num_accepted_tokens[0] for outcome in rig.outcomes)
        if spoiler == "perfect":
            assert accepted == drafted > 0
            assert len(rig.outcomes) == 1 + -(-23 // (k + 1))
        elif spoiler in ("wrong at once", "no ids"):
            assert accepted == 0
            assert (drafted > 0) == (spoiler == "wrong at once")
        all_drafted, all_accepted = all_drafted + drafted, all_accepted + accepted
    if spoiler == "wrong now and then":
        assert 0 < all_accepted < all_drafted


def admission_of(rig: Any, temperature: float, max_tokens: int) -> Any:
    return rig.admission(0, PROMPT, params=SamplingParams(temperature=temperature, max_tokens=max_tokens))


def test_neighbours_with_random_drafts_are_as_alone(make_rig: Any, scripted_drafting: Any, plain_tokens: Any) -> None:
    prompts = {slot: PROMPT[slot : slot + 9 + slot] for slot in range(6)}
    temperatures = {slot: (0.0, 1.0, 0.6)[slot % 3] for slot in prompts}
    rig = make_rig(scripted_drafting(random_draft))
    admissions = [
        rig.admission(slot, prompt, params=SamplingParams(temperature=temperatures[slot], max_tokens=12))
        for slot, prompt in prompts.items()
    ]
    rig.step([(slot, len(prompt), 0) for slot, prompt in prompts.items()], admissions=admissions)
    while not all(rig.executor.sequences.get(slot).ended for slot in prompts):
        rig.step([(slot, 0, slot % 5) for slot in prompts])
    for slot, prompt in prompts.items():
        assert rig.output(slot) == plain_tokens(prompt, 7 + slot, temperatures[slot], 12), slot
    assert sum(sum(outcome.num_drafted_tokens) for outcome in rig.outcomes) > 20


RULES = {
    "min_tokens": {"min_tokens": 9, "stop_token_ids": frozenset(range(32, 80))},
    "stop": {"stop_token_ids": frozenset(range(32, 40))},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 1.0, "frequency_penalty": 0.7},
    "bad words": {"bad_words": tuple((a, b) for a in range(40, 80) for b in range(60, 100))},
    "truncation": {"top_k": 20, "top_p": 0.7, "min_p": 0.05},
    "bias": {"logit_bias": {65: 3.0, 66: -5.0}},
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", RULES)
def test_processors_advance_position_by_position(
    make_rig: Any, scripted_drafting: Any, rule: str, temperature: float, knowing: Any
) -> None:
    """Cases 15, 67 and 68: the same ids, finish and log-probabilities with drafts as without."""
    params = SamplingParams(temperature=temperature, max_tokens=20, top_logprobs=2, **RULES[rule])  # type: ignore[arg-type]

    def run(drafting: Any, k: int) -> tuple[list[int], list[Any], int, int]:
        rig = make_rig(drafting)
        rig.step([(0, len(PROMPT), 0)], admissions=[rig.admission(0, PROMPT, params=params)])
        tokens = rig.generate(0, k)
        logprobs = [entry for outcome in rig.outcomes for row in outcome.logprobs for entry in row.output]
        accepted = sum(outcome.num_accepted_tokens[0] for outcome in rig.outcomes)
        return tokens, logprobs, rig.outcomes[-1].finishes[0], accepted

    tokens, logprobs, finish, _ = run(None, 0)
    assert len(logprobs) == len(tokens)
    assert [entry.chosen.token_id for entry in logprobs] == tokens
    for k in (1, 4, 8):
        drafting = scripted_drafting(knowing(tokens, PROMPT, SPOILERS["wrong now and then"]))
        assert run(drafting, k)[:3] == (tokens, logprobs, finish)
        drafting = scripted_drafting(knowing(tokens + [32] * 8, PROMPT, SPOILERS["perfect"]))
        assert run(drafting, k)[:3] == (tokens, logprobs, finish)
        assert run(drafting, k)[3] > 0 or len(tokens) < 3


def test_counts_grow_with_the_sequence(
    make_rig: Any, scripted_drafting: Any, monkeypatch: pytest.MonkeyPatch, knowing: Any, plain_tokens: Any
) -> None:
    """Penalties take what the sequence has counted so far, which is what counting its whole context would give."""
    checked = 0

    def sample_twice(logits: torch.Tensor, rows: list[SampleRow]) -> SampleResult:
        nonlocal checked
        result = sample(logits, rows)
        assert sample(logits, [row._replace(counts=None) for row in rows]) == result
        checked += sum(row.counts is not None for row in rows)
        return result

    monkeypatch.setattr(executor, "sample", sample_twice)
    params = SamplingParams(temperature=1.0, max_tokens=24, **RULES["penalties"])  # type: ignore[arg-type]
    plain = make_rig()
    plain.step([(0, len(PROMPT), 0)], admissions=[plain.admission(0, PROMPT, params=params)])
    truth = plain.generate(0)
    rig = make_rig(scripted_drafting(knowing(truth, PROMPT, SPOILERS["wrong now and then"])))
    rig.step([(0, len(PROMPT), 0)], admissions=[rig.admission(0, PROMPT, params=params)])
    assert rig.generate(0, 5) == truth
    assert checked > 2 * 24
    assert len(rig.outcomes) < len(plain.outcomes)
    assert truth != plain_tokens(PROMPT, 7, 1.0, 24), "the penalties changed nothing"


def test_a_stop_token_is_emitted_and_ends_the_sequence(make_rig: Any, plain_tokens: Any) -> None:
    truth = plain_tokens(PROMPT, 7, 0.0, 16)
    params = SamplingParams(temperature=0, max_tokens=16, stop_token_ids=frozenset({truth[5]}))
    rig = make_rig()
    rig.step([(0, len(PROMPT), 0)], admissions=[rig.admission(0, PROMPT, params=params)])
    assert rig.generate(0) == truth[: truth.index(truth[5]) + 1]
    assert rig.outcomes[-1].finishes == [Finish.STOP]
    late = rig.step([(0, 0, 4)])
    assert (late.num_tokens, late.token_ids, late.finishes, late.failures) == ([0], [], [0], [])


def test_the_context_ends_a_sequence(make_rig: Any) -> None:
    rig = make_rig(max_model_len=40)
    params = SamplingParams(temperature=0, max_tokens=100)
    rig.step([(0, len(PROMPT), 0)], admissions=[rig.admission(0, PROMPT, params=params)])
    assert len(rig.generate(0, 4)) == 40 - len(PROMPT)
    assert rig.outcomes[-1].finishes == [Finish.LENGTH]


def test_drafts_are_clamped_to_the_blocks_and_nothing_errs(
    make_rig: Any, scripted_drafting: Any, plain_tokens: Any, knowing: Any
) -> None:
    truth = plain_tokens(PROMPT, 7, 0.0, 16)
    rig = make_rig(scripted_drafting(knowing(truth, PROMPT, SPOILERS["perfect"])))
    blocks = -(-len(PROMPT) // BLOCK)
    rig.step([(0, len(PROMPT), 0)], admissions=[rig.admission(0, PROMPT, blocks=blocks)], reserve=False)
    room = blocks * BLOCK - len(PROMPT)
    emitted = rig.step([(0, 0, 8)], reserve=False)
    assert emitted.num_drafted_tokens == [room - 1]
    assert emitted.num_tokens == [room]
    # No block is left for the token just emitted: nothing happens, until there is one.
    assert rig.step([(0, 0, 8)], reserve=False).num_tokens == [0]
    assert rig.generate(0, 3) == truth


def test_steps_issued_ahead_use_the_workers_own_lengths(make_rig: Any, plain_tokens: Any) -> None:
    """A decode row planned before the last prefill's outcome is known, and one after the sequence's end."""
    rig = make_rig()
    params = SamplingParams(temperature=0, max_tokens=2)
    rig.step([(0, 10, 0)], admissions=[rig.admission(0, PROMPT, params=params)])
    rig.step([(0, 1000, 0)])
    assert rig.outcomes[-1].num_tokens == [1]
    assert rig.step([(0, 0, 0), (3, 0, 0)]).num_tokens == [1, 0]
    assert rig.step([(0, 0, 0)]).num_tokens == [0]
    assert rig.output(0) == plain_tokens(PROMPT, 7, 0.0, 2)


def test_releases_come_before_admissions_and_blocks_may_be_reused_at_once(make_rig: Any, plain_tokens: Any) -> None:
    rig = make_rig(num_blocks=12)
    first = rig.admission(0, PROMPT, blocks=12)
    rig.step([(0, len(PROMPT), 0)], admissions=[first])
    other = PROMPT[::-1]
    second = rig.admission(0, other, block_ids=list(reversed(first.block_ids)), seed=99)
    rig.step([(0, len(other), 0)], released=[0], admissions=[second], reserve=False)
    assert rig.generate(0) == plain_tokens(other, 99, 0.0, 16)


def test_a_resumed_sequence_continues_where_it_was(make_rig: Any) -> None:
    """Case 56: emitted tokens come back as output; the noise, the penalties and max_tokens go on counting."""
    params = SamplingParams(temperature=1.0, max_tokens=16, frequency_penalty=1.0)
    undisturbed = make_rig()
    undisturbed.step([(0, len(PROMPT), 0)], admissions=[undisturbed.admission(0, PROMPT, params=params)])
    truth = undisturbed.generate(0)
    for done in (1, 7, 15):
        rig = make_rig()
        known = PROMPT + truth[:done]
        rig.step(
            [(0, len(known), 0)],
            admissions=[rig.admission(0, known, num_prompt_tokens=len(PROMPT), params=params)],
        )
        assert rig.generate(0) == truth


def test_a_sequence_admitted_at_its_limit_says_so(make_rig: Any) -> None:
    rig = make_rig()
    known = PROMPT + [65] * 16
    outcome = rig.step([(0, 5, 0)], admissions=[rig.admission(0, known, num_prompt_tokens=len(PROMPT))])
    assert (outcome.num_tokens, outcome.finishes) == ([0], [Finish.LENGTH])


def test_prompt_logprobs_do_not_depend_on_chunks(make_rig: Any, plain_tokens: Any) -> None:
    """Cases 34 and 35."""
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2)
    gathered = []
    for chunk in (len(PROMPT), 8, 5, 1):
        rig = make_rig()
        rig.step(admissions=[rig.admission(0, PROMPT, params=params)])
        entries: dict[int, Any] = {}
        while rig.executor.sequences.get(0).computed < len(PROMPT):
            for row in rig.step([(0, chunk, 0)]).logprobs:
                assert row.output == []
                for offset, entry in enumerate(row.prompt):
                    assert row.first_prompt_position + offset not in entries
                    entries[row.first_prompt_position + offset] = entry
        assert sorted(entries) == list(range(len(PROMPT)))
        assert entries[0].chosen is None
        assert [entries[i].chosen.token_id for i in range(1, len(PROMPT))] == PROMPT[1:]
        gathered.append(entries)
        assert rig.generate(0) == plain_tokens(PROMPT, 7, 0.0, 3)
    assert all(other == gathered[0] for other in gathered)


def test_prompt_logprobs_of_one_row_leave_its_neighbours_alone(
    make_rig: Any, scripted_drafting: Any, plain_tokens: Any, knowing: Any
) -> None:
    truth = plain_tokens(PROMPT, 7, 0.0, 16)
    rig = make_rig(scripted_drafting(knowing(truth, PROMPT, SPOILERS["wrong now and then"])))
    rig.step([(0, len(PROMPT), 0)], admissions=[rig.admission(0, PROMPT)])
    params = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=1)
    rig.step([(0, 0, 3), (1, 7, 0)], admissions=[rig.admission(1, PROMPT, params=params)])
    rig.step([(1, 30, 0), (0, 0, 3)])
    assert rig.generate(0, 3) == truth
    assert rig.generate(1) == truth[:4]


# ----------------------------------------------------------------------------------------------- drafting and residents


def test_drafting_is_told_what_is_known_and_when_to_forget(make_rig: Any, scripted_drafting: Any) -> None:
    drafting = scripted_drafting(lambda *_: [])
    rig = make_rig(drafting)
    rig.step([(0, len(PROMPT), 2)], admissions=[rig.admission(0, PROMPT), rig.admission(1, PROMPT)])
    assert drafting.followed[0] == rig.executor.sequences.get(0).tokens
    rig.step([(0, 0, 2)])
    assert drafting.followed[0] == rig.executor.sequences.get(0).tokens
    rig.generate(0, 2)
    assert 0 not in drafting.followed
    rig.step([], released=[1])
    assert drafting.forgotten[-1] == 1
    rig.executor.reset()
    assert len(rig.executor.sequences) == 0


def test_residents_are_what_has_valid_kv(make_rig: Any) -> None:
    rig = make_rig()
    admission = rig.admission(0, PROMPT, blocks=20, cache_salt="salt")
    rig.step([(0, 10, 0)], admissions=[admission, rig.admission(1, PROMPT)], reserve=False)
    [resident] = rig.executor.sequences.residents()
    assert resident.token_ids == PROMPT
    assert resident.num_computed_tokens == 10
    assert resident.block_ids == list(admission.block_ids)[:3]
    assert resident.cache_salt == "salt"
    rig.step([(0, 99, 0)], reserve=False)
    rig.generate(0)
    [resident] = rig.executor.sequences.residents()
    assert resident.num_computed_tokens == len(resident.token_ids) - 1
    rig.step([], released=[0, 1])
    assert rig.executor.sequences.residents() == []
