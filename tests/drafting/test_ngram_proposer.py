"""Copying: from the sequence itself against a plain search, and from what the tenant's others put out."""

from __future__ import annotations

import random

from drafting.ngram_proposer import NgramProposer
from drafting.output_memory import OutputMemory
from drafting.suffix_index import MAX_MATCH, SIZES
from tests.drafting.mirroring import feed, mirror


def looked_up(known: list[int], committed: int) -> list[int]:
    """The slow way: what followed the longest match of the end among the committed, the latest of equal ones."""
    best, start = SIZES[-1] - 1, None
    for position in range(committed - 1, 0, -1):
        length = 0
        while length < min(position, MAX_MATCH) and known[position - 1 - length] == known[-1 - length]:
            length += 1
        if length > best:
            best, start = length, position
    return [] if start is None else known[start:]


def test_it_guesses_what_a_search_finds() -> None:
    source = random.Random(5)
    proposer = NgramProposer()
    found = 0
    for slot in range(30):
        followed = mirror([source.randrange(3) for _ in range(source.randint(1, 12))], slot)
        for _ in range(6):
            expected: list[int] = list(followed.guess)
            while len(expected) < followed.wanted + len(followed.guess):
                more = looked_up(followed.tokens + expected, len(followed.tokens))
                if not more:
                    break
                expected += more[: followed.wanted + len(followed.guess) - len(expected)]
            complete = len(expected) == followed.wanted + len(followed.guess)
            proposer.extend([followed])
            assert followed.guess == expected
            assert followed.exhausted != complete
            found += bool(expected)
            followed.commit([*followed.guess[: source.randint(0, 3)], source.randrange(3)])
        proposer.forget(followed)
    assert found > 60
    assert proposer._indexes == {}


def test_a_repeating_text_is_continued() -> None:
    followed = mirror([1, 2, 3, 4] * 3)
    NgramProposer().extend([followed])
    assert followed.guess == ([1, 2, 3, 4] * 9)[: len(followed.guess)] != []
    novel = mirror([1, 2, 3, 4, 5])
    NgramProposer().extend([novel])
    assert (novel.guess, novel.exhausted, novel.wanted) == ([], True, 0)


def remembering(now_s: list[float]) -> NgramProposer:
    return NgramProposer(OutputMemory(1000, 60.0), lambda: now_s[0])


def test_what_a_tenant_got_is_copied_for_it_and_for_nobody_else() -> None:
    now_s = [0.0]
    proposer = remembering(now_s)
    first = mirror([50, 51, 1, 2, 3, 4, 5, 6], num_prompt=2, tenant=b"a")
    proposer.learn(first)
    proposer.forget(first)
    same, other, nameless = (mirror([70, 2, 3], 1, tenant=tenant) for tenant in (b"a", b"b", b""))
    for each in (same, other, nameless):
        feed(proposer, [each])
    assert (same.guess, other.guess, nameless.guess) == ([4, 5, 6], [], [])
    assert same.exhausted
    # Prompts are not remembered, only what came out.
    prompted = mirror([70, 50, 51], 1, tenant=b"a")
    feed(proposer, [prompted])
    assert prompted.guess == []
    now_s[0] = 61.0
    late = mirror([70, 2, 3], 2, tenant=b"a")
    feed(proposer, [late])
    assert late.guess == []


def test_the_longer_match_counts_and_of_equal_ones_the_sequences_own() -> None:
    proposer = remembering([0.0])
    proposer.forget(mirror([0, 1, 2, 3, 8, 8, 8], num_prompt=1, tenant=b"a"))
    longer = mirror([2, 3, 9, 1, 2, 3], 1, tenant=b"a", max_draft=1)
    equal = mirror([1, 2, 3, 9, 5, 1, 2, 3], 2, tenant=b"a", max_draft=1)
    feed(proposer, [longer, equal])
    assert longer.guess[:3] == [8, 8, 8]
    assert equal.guess[0] == 9


def test_a_sequence_that_is_opened_again_is_remembered_once() -> None:
    proposer = remembering([0.0])
    for end in (6, 8, 8):
        proposer.forget(mirror([50, 1, 2, 3, 4, 5, 6, 7][:end], num_prompt=1, tenant=b"a"))
    assert proposer.memory.num_tokens == 5 + 1 + 2 + 1


def test_predictions_look_at_learned_tokens_only() -> None:
    proposer = NgramProposer()
    followed = mirror([1, 2, 3, 1, 2, 3, 4])
    proposer.learn(followed, 5)
    assert proposer.num_learned(followed) == 5
    run = proposer.prediction(followed)
    assert run is not None
    assert (run.token_ids, run.match_length) == ([3], 2)
    proposer.learn(followed)
    assert proposer.prediction(followed) is None
