"""Counts, eviction order and conservation of one worker's blocks."""

from __future__ import annotations

import pytest

from scheduler.core.block_pool import BlockPool, OutOfBlocks
from scheduler.core.prefix_cache import chain_seed

SEED = chain_seed("m", "")


def named(pool: BlockPool, block: int, *tokens: int) -> bytes:
    return pool.cache.register(block, SEED, tokens)


def test_all_blocks_are_free_at_first() -> None:
    pool = BlockPool(4, 2)
    assert (pool.num_free, pool.num_cached, pool.num_referenced, pool.num_available) == (4, 0, 0, 4)
    pool.check_integrity([])


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), (-1, 4)])
def test_a_pool_without_room_is_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="blocks"):
        BlockPool(*sizes)


def test_allocated_blocks_are_distinct_and_come_back() -> None:
    pool = BlockPool(4, 2)
    first, second = pool.allocate(3), pool.allocate(1)
    assert sorted(first + second) == [0, 1, 2, 3]
    pool.check_integrity([first, second])
    pool.release(first)
    assert pool.num_free == 3
    pool.check_integrity([second])


def test_asking_for_too_much_takes_nothing() -> None:
    pool = BlockPool(4, 2)
    table = pool.allocate(2)
    assert not pool.can_allocate(3)
    with pytest.raises(OutOfBlocks):
        pool.allocate(3)
    pool.check_integrity([table])
    assert pool.num_free == 2


def test_named_blocks_are_kept_and_evicted_least_recently_used_first() -> None:
    pool = BlockPool(3, 2)
    a, b, c = pool.allocate(3)
    for block, token in ((a, 10), (b, 20), (c, 30)):
        named(pool, block, token, token)
    pool.release([b])
    pool.release([a])
    assert (pool.num_free, pool.num_cached) == (0, 2)
    assert pool.allocate(1) == [b]
    assert pool.evictions == 1
    assert not pool.cache.knows(b)
    assert pool.cache.knows(a)
    pool.check_integrity([[b], [c]])


def test_free_blocks_are_taken_before_anything_is_forgotten() -> None:
    pool = BlockPool(3, 2)
    a, b = pool.allocate(2)
    named(pool, a, 1, 1)
    pool.release([a, b])
    pool.allocate(2)
    assert pool.evictions == 0
    assert pool.cache.knows(a)


def test_a_shared_block_outlives_its_first_holder_and_is_most_recent_when_it_returns() -> None:
    pool = BlockPool(3, 2)
    a, b = pool.allocate(2)
    named(pool, a, 1, 1)
    named(pool, b, 2, 2)
    pool.share([a])
    pool.release([a])
    assert pool.num_referenced == 2
    pool.release([a])
    pool.release([b])
    pool.share([a])  # a hit takes it out of the line
    pool.release([a])
    pool.allocate(1)
    assert pool.allocate(1) == [b]


def test_hits_that_are_unreferenced_count_against_what_is_available() -> None:
    pool = BlockPool(4, 2)
    a, b = pool.allocate(2)
    named(pool, a, 1, 1)
    pool.release([a])
    assert pool.count_cached([a, b]) == 1


def test_a_block_is_not_released_twice() -> None:
    pool = BlockPool(2, 2)
    (a,) = pool.allocate(1)
    pool.release([a])
    with pytest.raises(RuntimeError, match="more often"):
        pool.release([a])


def test_adopted_blocks_are_cached_and_the_first_given_goes_first() -> None:
    pool = BlockPool(3, 2)
    named(pool, 2, 1, 1)
    named(pool, 0, 2, 2)
    pool.adopt([2, 0])
    pool.check_integrity([])
    assert (pool.num_free, pool.num_cached) == (1, 2)
    assert pool.allocate(3) == [1, 2, 0]


def test_is_free_knows_the_bounds() -> None:
    pool = BlockPool(2, 2)
    assert [pool.is_free(block) for block in (-1, 0, 1, 2)] == [False, True, True, False]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda pool, table: table.append(table[0]), "twice"),
        (lambda pool, table: table.pop(), "reference counts"),
        (lambda pool, table: pool._free.append(pool._free[0]), "free twice"),
        (lambda pool, table: pool._free.pop(), "in 0 places"),
        (lambda pool, table: pool._cached.update({table[0]: None}), "in 2 places"),
        (lambda pool, table: pool.cache.register(pool._free[0], SEED, (5, 5)), "free block is known"),
    ],
)
def test_integrity_tells_what_is_wrong(spoil: object, message: str) -> None:
    pool = BlockPool(4, 2)
    table = pool.allocate(2)
    spoil(pool, table)  # type: ignore[operator]
    with pytest.raises(AssertionError, match=message):
        pool.check_integrity([table])
