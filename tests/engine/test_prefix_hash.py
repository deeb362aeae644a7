"""The prefix hash of draft.proto."""

from __future__ import annotations

import random

from engine.prefix_hash import extend, prefix_hash


def by_the_book(tokens: list[int]) -> int:
    value = 0
    for token in tokens:
        value = (value * 6364136223846793005 + token + 1) % 2**64
    return value


def test_equals_its_definition() -> None:
    assert prefix_hash([]) == 0
    assert prefix_hash([0]) == 1
    assert prefix_hash([7, 9]) == (8 * 6364136223846793005 + 10) % 2**64
    source = random.Random(1)
    for length in (1, 2, 3, 50, 1000, 4097):
        tokens = [source.randrange(2**32) for _ in range(length)]
        assert prefix_hash(tokens) == by_the_book(tokens)
        assert extend(prefix_hash(tokens[:-1]), tokens[-1]) == by_the_book(tokens)
