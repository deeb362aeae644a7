"""The model's guesses against a plain recomputation."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from drafting.mirror import Mirror
from drafting.model_proposer import ModelProposer
from engine.batch import Batch
from engine.fake import FakeEngine
from engine.noise import gumbel
from tests.drafting.mirroring import feed, mirror

torch.set_num_threads(1)

PROMPT = [ord(c) for c in "All happy families are alike"]


def engine(**changes: Any) -> FakeEngine:
    options = {"num_blocks": 64, "block_size": 4, "max_sequences": 8, "max_model_len": 128}
    return FakeEngine(**{**options, **changes})


def next_token(tokens: list[int], num_prompt: int, seed: int, temperature: float, vocab_size: int = 260) -> int:
    """One sequence, all of it recomputed in a fresh engine."""
    n = len(tokens)
    logits = engine().forward(
        Batch(
            token_ids=np.array(tokens, np.int32),
            positions=np.arange(n, dtype=np.int32),
            slot_mapping=np.arange(n, dtype=np.int64),
            query_starts=np.array([0, n], np.int32),
            context_lens=np.array([n], np.int32),
            block_tables=np.arange(64, dtype=np.int32)[None],
            logit_indices=np.array([n - 1], np.int64),
        )
    )[0][:vocab_size]
    if temperature:
        # log q / T: the normaliser changes no argmax, and is here all the same.
        logits = torch.log_softmax(logits.double(), -1).float() / temperature + gumbel(seed, n - num_prompt, vocab_size)
    return int(logits.argmax())


def right_guess(of: Mirror, vocab_size: int = 260) -> list[int]:
    tokens = list(of.tokens)
    for _ in of.guess:
        tokens.append(next_token(tokens, of.num_prompt, of.seed, of.temperature, vocab_size))
    return tokens[len(of.tokens) :]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_the_model_guesses_with_the_targets_own_noise(temperature: float) -> None:
    proposer = ModelProposer(engine(), "m", 260)
    mirrors = [mirror(PROMPT[slot:], slot, temperature=temperature) for slot in range(4)]
    assert feed(proposer, mirrors) == 9
    proposer.check_integrity()
    assert len({tuple(m.guess) for m in mirrors}) == 4
    for each in mirrors:
        assert len(each.guess) == 9
        assert each.guess == right_guess(each)


def test_after_rollbacks_guesses_are_as_from_a_fresh_mirror() -> None:
    proposer = ModelProposer(engine(), "m", 260)
    source = random.Random(3)
    followed = mirror(PROMPT, temperature=1.0)
    corrections = agreements = 0
    for _ in range(14):
        for _ in range(source.randint(1, 6)):
            if followed.wanted:
                proposer.extend([followed])
        right = source.randint(0, len(followed.guess))
        committed = followed.guess[:right]
        if source.random() < 0.6:
            committed = [*committed, source.randrange(33, 120)]
            corrections += 1
        if committed:
            agreements += right > 0
            followed.commit(committed)
        proposer.check_integrity()
    feed(proposer, [followed])
    assert followed.guess == right_guess(followed)
    assert corrections > 3 < agreements


def test_long_prompts_are_fed_over_rounds_and_hold_nobody_up() -> None:
    proposer = ModelProposer(engine(), "m", 260, max_round_tokens=8)
    long, short = mirror(PROMPT * 3, 0), mirror(PROMPT[:3], 1)
    proposer.extend([long, short])
    assert (len(short.guess), len(long.guess)) == (1, 0)
    assert long.computed == 5
    feed(proposer, [long, short])
    assert long.guess == right_guess(long)
    assert short.guess == right_guess(short)


def test_a_short_pool_takes_kv_from_those_that_wait_and_feeds_them_anew() -> None:
    proposer = ModelProposer(engine(num_blocks=12), "m", 260)
    mirrors = [mirror(PROMPT[slot:], slot) for slot in range(3)]
    for each in mirrors:
        feed(proposer, [each])
        proposer.check_integrity()
        assert each.guess == right_guess(each)
    assert mirrors[0].computed == 0
    mirrors[0].commit(mirrors[0].guess[:3])
    feed(proposer, [mirrors[0]])
    assert mirrors[0].guess == right_guess(mirrors[0])
    for each in mirrors:
        proposer.forget(each)
        proposer.forget(each)
    proposer.check_integrity()
    assert len(proposer._free) == 12


def test_what_can_never_fit_is_given_up() -> None:
    proposer = ModelProposer(engine(num_blocks=4), "m", 260)
    never, small = mirror(PROMPT, 0), mirror(PROMPT[:3], 1)
    feed(proposer, [never, small])
    assert (never.guess, never.exhausted) == ([], True)
    assert len(small.guess) == 9
    too_long = mirror(PROMPT * 5, 2)
    assert feed(ModelProposer(engine(max_model_len=128), "m", 260), [too_long]) == 1


def test_padding_of_either_vocabulary_is_harmless() -> None:
    """Case 70: the draft model's ids beyond the target's are never guessed; the target's beyond ours are survived."""
    narrow = mirror(PROMPT, temperature=1.5)
    feed(ModelProposer(engine(), "m", 100), [narrow])
    assert max(narrow.guess) < 100
    assert narrow.guess == right_guess(narrow, 100)
    foreign = mirror([*PROMPT, 262, 2**32 - 1])
    feed(ModelProposer(engine(), "m", 264), [foreign])
    assert len(foreign.guess) == 9


def test_logits_that_are_no_numbers_end_one_guess_only() -> None:
    proposer = ModelProposer(engine(fail_on_token_ids=frozenset({1})), "m", 260)
    bad, good = mirror([*PROMPT, 1], 0), mirror(PROMPT, 1)
    feed(proposer, [bad, good])
    assert (bad.guess, bad.exhausted) == ([], True)
    assert good.guess == right_guess(good)
