"""The prefix hash of draft.proto, in both services that compute it."""

from __future__ import annotations

import random
from types import ModuleType

import pytest

from draft_worker import prefix_hash as of_draft_worker
from worker import prefix_hash as of_worker


def by_the_book(tokens: list[int]) -> int:
    value = 0
    for token in tokens:
        value = (value * 6364136223846793005 + token + 1) % 2**64
    return value


@pytest.mark.parametrize("module", [of_worker, of_draft_worker])
def test_equals_its_definition(module: ModuleType) -> None:
    assert module.prefix_hash([]) == 0
    assert module.prefix_hash([0]) == 1
    assert module.prefix_hash([7, 9]) == (8 * 6364136223846793005 + 10) % 2**64
    source = random.Random(1)
    for length in (1, 2, 3, 50, 1000, 4097):
        tokens = [source.randrange(2**32) for _ in range(length)]
        assert module.prefix_hash(tokens) == by_the_book(tokens)
        assert module.extend(module.prefix_hash(tokens[:-1]), tokens[-1]) == by_the_book(tokens)
