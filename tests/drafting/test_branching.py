"""Branches: which are worth guessing, what becomes of them at a commit, and that their KV is what it should be."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cluster.draft_news import Commit, News, Open
from draft_worker.drafting import Drafter
from draft_worker.inbox import Delivery
from drafting.branching import MIN_WORTH, Odds, best_forks
from drafting.mirror import Mirror, RunnerUp
from drafting.mirrors import MirrorTable
from drafting.model_proposer import ModelProposer
from engine.fake import FakeEngine
from engine.prefix_hash import prefix_hash
from tests.drafting.mirroring import feed
from tests.drafting.mirroring import mirror as new_mirror

PROMPT = [5, 6, 7]
torch.set_num_threads(1)


def guessed(guess: list[int], margins: list[float], second: int = 100) -> Mirror:
    """A mirror with this guess, won by these margins; the runner-up of guess i is second + i."""
    made = new_mirror(PROMPT, guess=list(guess))
    made.runner_ups = {len(PROMPT) + i: RunnerUp(second + i, margin) for i, margin in enumerate(margins)}
    return made


def branch_of(mirror: Mirror, index: int, token_id: int, *more: int) -> Mirror:
    branch = mirror.fork(index, token_id)
    branch.guess += more
    mirror.branches.append(branch)
    return branch


# ---------------------------------------------------------------------------------------------------------- odds


def test_odds_are_learned_by_margin_and_start_at_a_prior() -> None:
    odds = Odds()
    assert odds.right(0.1) < odds.right(1.2) < odds.right(9.0)
    for index in range(400):
        odds.observe(0.1, right=index % 2 == 0, second=index % 2 == 1)
        odds.observe(9.0, right=True, second=False)
    assert odds.right(0.1) == pytest.approx(0.5, abs=0.02)
    assert odds.second(0.1) > 0.95
    assert odds.right(9.0) > 0.98
    assert odds.right(1.2) == Odds().right(1.2)


def test_odds_learn_up_to_the_first_wrong_guess() -> None:
    odds = Odds()
    mirror = guessed([1, 2, 3], [0.1, 9.0, 9.0])
    odds.learn(mirror, [1, 101, 55, 56])
    fresh = Odds()
    fresh.observe(0.1, right=True, second=False)
    fresh.observe(9.0, right=False, second=True)
    assert vars(odds) == vars(fresh)


def test_the_likeliest_rejections_are_forked() -> None:
    odds = Odds()
    # Sure, doubtful, sure, doubtful, sure: the earlier of two equally doubtful ones is reached more often.
    mirror = guessed([1, 2, 3, 4, 5], [9.0, 0.1, 9.0, 0.1, 9.0])
    assert best_forks(mirror, odds, 2) == [(1, 101), (3, 103)]
    assert best_forks(mirror, odds, 1) == [(1, 101)]
    assert best_forks(mirror, odds, 0) == []
    branch_of(mirror, 1, 101)
    assert best_forks(mirror, odds, 2) == [(3, 103)]
    assert best_forks(mirror, odds, 1) == []


def test_nothing_is_forked_where_the_guess_is_nearly_sure_or_nothing_is_known() -> None:
    odds = Odds()
    for _ in range(500):
        odds.observe(9.0, right=True, second=False)
    assert best_forks(guessed([1, 2, 3], [9.0, 9.0, 9.0]), odds, 4) == []
    assert best_forks(guessed([1, 2, 3], []), odds, 4) == []
    # Behind guesses that came without a runner-up, a rejection is reached more seldom.
    far = guessed([1] * 5, [])
    far.runner_ups[len(PROMPT) + 4] = RunnerUp(9, 0.1)
    assert (best_forks(far, Odds(), 4) == [(4, 9)]) is (MIN_WORTH <= 0.8**4 * 0.65 * 0.4)


def test_branches_reach_no_further_than_the_bonus() -> None:
    """max_draft is 4: the fifth guess is what the bonus may be, later ones no verification of this draft can reject."""
    mirror = guessed([1] * 9, [0.1] * 9)
    assert sorted(index for index, _ in best_forks(mirror, Odds(), 99))[-1] <= 4


# -------------------------------------------------------------------------------------------------------- commits


def test_a_branch_that_agrees_takes_over_with_its_kv() -> None:
    mirror = guessed([1, 2, 3, 4], [1.0] * 4)
    mirror.computed, mirror.block_ids = 6, [10, 11]
    lost = branch_of(mirror, 0, 50, 51)
    won = branch_of(mirror, 2, 70, 71, 72, 73)
    won.computed, won.block_ids, won.num_shared = 8, [10, 20], 1
    won.runner_ups = {6: RunnerUp(99, 0.5)}
    gone = mirror.commit([1, 2, 70])
    assert gone == [lost, won]
    assert mirror.branches == []
    assert (mirror.guess, mirror.computed, mirror.block_ids, mirror.num_shared) == ([71, 72, 73], 8, [10, 20], 0)
    assert mirror.runner_ups == {6: RunnerUp(99, 0.5)}
    assert mirror.tail().token_ids == [71, 72, 73]
    # What it replaces goes with it: of its parent's old blocks, those that were not shared.
    assert won.block_ids[won.num_shared :] == [11]
    assert mirror.num_won == 1


def test_branches_further_on_survive_a_commit_that_agrees_with_the_guess() -> None:
    mirror = guessed([1, 2, 3, 4], [1.0] * 4)
    early, late = branch_of(mirror, 0, 50), branch_of(mirror, 3, 80, 81)
    assert mirror.commit([1, 2]) == [early]
    assert mirror.branches == [late]
    assert (late.guess, late.fork_at, late.tail().base) == ([3, 80, 81], 1, 5)
    assert late.tail().prefix_hash == prefix_hash([*PROMPT, 1, 2])
    assert mirror.commit([3, 80]) == [late]
    assert mirror.guess == [81]


def test_a_commit_that_nobody_foresaw_ends_all_branches() -> None:
    mirror = guessed([1, 2], [1.0] * 2)
    branches = [branch_of(mirror, 0, 50), branch_of(mirror, 1, 60)]
    assert mirror.commit([99]) == branches
    assert (mirror.guess, mirror.branches) == ([], [])


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=5)


@given(TOKENS, st.lists(st.tuples(st.integers(0, 4), TOKENS), max_size=3), TOKENS)
def test_whoever_agrees_furthest_goes_on(
    guess: list[int], others: list[tuple[int, list[int]]], committed: list[int]
) -> None:
    mirror = guessed(guess, [])
    lines = [list(guess)]
    for index, tokens in others:
        # As in life: one branch a fork, and not with the token that the guess has there.
        if index < len(guess) and guess[index] != tokens[0] and all(one.fork_at != index for one in mirror.branches):
            lines.append(branch_of(mirror, index, *tokens).guess[:])
    branches = list(mirror.branches)
    gone = mirror.commit(committed)

    def agreeing(line: list[int]) -> int:
        return next((i for i, (a, b) in enumerate(zip(line, committed)) if a != b), min(len(line), len(committed)))  # noqa: B905

    furthest = max(lines, key=agreeing)
    whole = agreeing(furthest) == min(len(furthest), len(committed))
    assert mirror.guess == (furthest[len(committed) :] if whole else [])
    assert sorted(map(id, gone + mirror.branches)) == sorted(map(id, branches))
    for branch in mirror.branches:
        assert branch.tokens is mirror.tokens
        assert branch.guess[: branch.fork_at] == mirror.guess[: branch.fork_at]
        assert branch.guess[branch.fork_at :][:1] != mirror.guess[branch.fork_at :][:1]


# ------------------------------------------------------------------------------------------- with a model behind it


def engine(disagreement: float, num_blocks: int = 64) -> FakeEngine:
    return FakeEngine(
        num_blocks=num_blocks, block_size=4, max_sequences=8, max_model_len=256, disagreement=disagreement
    )


def continuation(tokens: list[int], count: int, temperature: float, seed: int, num_prompt: int) -> list[int]:
    """What a fresh draft model guesses after these tokens, with no history behind it."""
    fresh = new_mirror(tokens, temperature=temperature, seed=seed, num_prompt=num_prompt, max_draft=count)
    feed(ModelProposer(engine(0.3), "fresh", 260), [fresh])
    return fresh.guess[:count]


@pytest.mark.parametrize("num_blocks", [64, 20])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_whatever_is_committed_every_guess_is_what_a_fresh_model_says(temperature: float, num_blocks: int) -> None:
    """The fake engine's state is a hash of all KV before a token: one block too many or too few shows.

    With 20 blocks the two mirrors and their branches take them from each other.
    """
    chance = random.Random(f"{temperature} {num_blocks}")
    proposer = ModelProposer(engine(0.3, num_blocks), "rough", 260)
    drafter = Drafter(proposer, MirrorTable(8, 8), num_branches=3)
    texts = {slot: [ord(c) for c in "Call me Ishmael."][: 9 + slot] for slot in range(2)}
    opens = [Open(slot, 1, list(text), len(text), 40 + slot, temperature, 4) for slot, text in texts.items()]
    drafter.update(Delivery(news={1: News(opens=opens)}))
    lengths = {slot: len(text) for slot, text in texts.items()}
    num_branches = num_first_seconds = 0
    for _ in range(14):
        for _ in range(chance.randrange(12)):
            drafter.guess()
            proposer.check_integrity()
        for slot, text in texts.items():
            mirror = drafter.mirrors.get(1, slot)
            assert mirror is not None
            for one in (mirror, *mirror.branches):
                num_branches += one.parent is not None
                fork = 0 if one.parent is None else one.fork_at + 1
                told = text + one.guess[:fork]
                truth = continuation(told, len(one.guess) - fork, temperature, 40 + slot, lengths[slot])
                assert one.guess[fork:] == truth
            # The next tokens: those guessed, or a branch's, or others.
            line = chance.choice([mirror, *mirror.branches]).guess
            new = line[: chance.randrange(1, 6)] or [65]
            if chance.random() < 0.3:
                new = [*new[:-1], chance.randrange(32, 127)]
            text += new
            commit = Commit(slot, 1, len(text) - len(new), list(new), prefix_hash(text))
            drafter.update(Delivery(news={1: News(commits=[commit])}))
            proposer.check_integrity()
            num_first_seconds += bool(mirror.guess)
    assert num_branches > 10
    assert drafter.mirrors.num_branches_won > 1
    drafter.update(Delivery(ended_streams=[1]))
    proposer.check_integrity()
    assert sorted(proposer._free) == list(range(num_blocks))


def test_branches_of_a_rough_draft_save_round_trips() -> None:
    """The target is the fake engine that the draft is a rough copy of: its runner-up is right where it is wrong."""
    waits = {}
    for num_branches in (0, 2):
        proposer = ModelProposer(engine(0.25), "rough", 260)
        drafter = Drafter(proposer, MirrorTable(8, 8), num_branches)
        text = [ord(c) for c in "Call me Ishmael."]
        plain = new_mirror(text, max_draft=40, seed=40)
        feed(ModelProposer(engine(0.0), "target", 260), [plain], rounds=300)
        truth = plain.guess[:70]
        drafter.update(Delivery(news={1: News(opens=[Open(0, 1, list(text), len(text), 40, 0.0, 4)])}))
        done = waits[num_branches] = 0
        while done + 5 < len(truth):
            while not drafter.idle:
                drafter.guess()
            mirror = drafter.mirrors.get(1, 0)
            assert mirror is not None
            right = mirror._agreeing(truth[done : done + 4])
            new = truth[done : done + right + 1]
            done += len(new)
            text += new
            answer = drafter.update(
                Delivery(news={1: News(commits=[Commit(0, 1, len(text) - len(new), new, prefix_hash(text))])})
            )
            # Either the next tail goes out at once, or the worker has to wait for rounds.
            waits[num_branches] += not answer
        assert drafter.mirrors.num_branches_won == 0 or num_branches
    assert waits[2] < 0.6 * waits[0]
