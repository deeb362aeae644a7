"""The index against a search that compares everything with everything."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafting.suffix_index import FIRST_SLOTS, MAX_CHAIN, MAX_MATCH, SIZES, Match, SuffixIndex

UNLIMITED = 10**9


def agreeing(tokens: Sequence[int], suffix: Sequence[int], position: int) -> int:
    length = 0
    while length < min(len(suffix), position, MAX_MATCH) and tokens[position - 1 - length] == suffix[-1 - length] >= 0:
        length += 1
    return length


def searched(tokens: Sequence[int], suffix: Sequence[int]) -> Match | None:
    """Every position, from the latest on; a longer match wins."""
    best = Match(-1, SIZES[-1] - 1)
    for position in range(len(tokens) - 1, -1, -1):
        length = agreeing(tokens, suffix, position)
        if tokens[position] >= 0 and length > best.length:
            best = Match(position, length)
    return best if best.position >= 0 else None


texts = st.lists(st.integers(-1, 3), max_size=80)


@settings(max_examples=300, deadline=None)
@given(texts, texts)
def test_it_finds_what_a_search_finds(tokens: list[int], suffix: list[int]) -> None:
    index = SuffixIndex(tokens, max_chain=UNLIMITED)
    index.learn()
    assert index.find(suffix) == searched(tokens, suffix)
    assert index.find(tokens) == searched(tokens, tokens)


@settings(max_examples=100, deadline=None)
@given(texts, st.integers(1, 4))
def test_with_short_chains_a_match_is_still_one(tokens: list[int], max_chain: int) -> None:
    index = SuffixIndex(tokens, max_chain)
    index.learn()
    found, best = index.find(tokens), searched(tokens, tokens)
    assert (found is None) <= (best is None or max_chain < UNLIMITED)
    if found is not None:
        assert best is not None
        assert SIZES[-1] <= found.length == agreeing(tokens, tokens, found.position) <= best.length
        assert tokens[found.position] >= 0


@pytest.mark.parametrize("size", [3, 50])
def test_it_grows_with_its_tokens(size: int) -> None:
    """Token by token over several doublings of the tables, long matches and large ids among them."""
    source = random.Random(size)
    tokens: list[int] = []
    index = SuffixIndex(tokens, max_chain=UNLIMITED)
    lengths = set()
    for _ in range(8 * FIRST_SLOTS):
        if len(tokens) > 60 and source.random() < 0.05:
            start = source.randrange(len(tokens) - 40)
            tokens += tokens[start : start + 30]
        else:
            tokens.append(source.choice([*range(size), 2**32 - 1]))
        index.learn()
        found = index.find(tokens)
        assert found == searched(tokens, tokens)
        lengths.add(found.length if found else 0)
    assert MAX_MATCH in lengths


def test_only_what_is_learned_is_found() -> None:
    tokens = [1, 2, 3, 4, 5, 9, 1, 2, 3, 4]
    index = SuffixIndex(tokens)
    assert index.find([1, 2]) is None
    index.learn(4)
    assert (len(index), index.find([1, 2]), index.find([3, 4])) == (4, Match(2, 2), None)
    index.learn()
    assert index.find(tokens) == Match(4, 4)


class Counted(list):
    """Counts how often it is looked into."""

    looks = 0

    def __getitem__(self, key):
        type(self).looks += 1
        return super().__getitem__(key)


def test_work_is_bounded_however_bad_the_text() -> None:
    """All tokens equal: every position is a candidate. Work is counted, not timed."""
    tokens = Counted([7] * 5000)
    index = SuffixIndex(tokens)
    index.learn()
    learned = Counted.looks
    # Twice each token's runs, since a table that doubles takes everything anew: at most as much again.
    assert learned <= 3 * sum(SIZES) * len(tokens)
    assert index.find([7] * 100) == Match(4999, MAX_MATCH)
    assert index.find([8, 7, 7, 7, 7]) == Match(4999, 4)
    assert Counted.looks - learned <= 2 * len(SIZES) * MAX_CHAIN * (MAX_MATCH + 2)
