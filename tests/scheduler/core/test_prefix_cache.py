"""Names of blocks: equal prefixes only, never merely equal blocks."""

from __future__ import annotations

from hashlib import blake2b
from struct import pack

import pytest

from scheduler.core.prefix_cache import PrefixCache, block_content, chain_hash, chain_seed

SEED = chain_seed("m", "")


def test_names_are_a_blake2b_chain_over_little_endian_ids() -> None:
    """The oracle is hashlib itself, fed by hand."""
    seed = blake2b(b"1:msalt", digest_size=16).digest()
    assert chain_seed("m", "salt") == seed
    first = blake2b(seed + pack("<2I", 3, 70000), digest_size=16).digest()
    assert chain_hash(seed, block_content((3, 70000))) == first


def test_model_and_salt_do_not_run_together() -> None:
    assert len({chain_seed(model, salt) for model, salt in (("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc"))}) == 4


def test_the_longest_known_run_matches() -> None:
    cache = PrefixCache(2)
    name = cache.register(7, SEED, (1, 2))
    cache.register(3, name, (3, 4))
    assert cache.match(SEED, (1, 2, 3, 4, 5), 2)[0] == [7, 3]
    assert cache.match(SEED, (1, 2, 3, 4, 5), 1) == ([7], [name])
    assert cache.match(SEED, (1, 2, 9, 4), 2)[0] == [7]
    assert cache.match(SEED, (9, 2, 3, 4), 2)[0] == []


def test_an_equal_block_after_another_prefix_does_not_match() -> None:
    cache = PrefixCache(2)
    cache.register(1, cache.register(0, SEED, (1, 1)), (5, 5))
    other = cache.register(2, SEED, (2, 2))
    assert cache.match(SEED, (2, 2, 5, 5), 2) == ([2], [other])


def test_links_are_computed_once_and_only_as_far_as_looked() -> None:
    cache = PrefixCache(2)
    first = cache.register(0, SEED, (1, 2))
    links: list[tuple[bytes, bytes]] = []
    assert cache.match(SEED, (1, 2, 3, 4, 5, 6), 3, links)[0] == [0]
    assert len(links) == 2
    cache.register(9, first, (3, 4))
    assert cache.match(SEED, (1, 2, 3, 4, 5, 6), 3, links)[0] == [0, 9]
    assert [name for name, _ in links[:1]] == [first]
    assert len(links) == 3
    assert cache.match(SEED, (1, 2, 3, 4), 2, links)[0] == cache.match(SEED, (1, 2, 3, 4), 2)[0] == [0, 9]


def test_another_salt_does_not_match() -> None:
    cache = PrefixCache(2)
    cache.register(0, chain_seed("m", "mine"), (1, 2))
    assert cache.match(chain_seed("m", "yours"), (1, 2), 1)[0] == []


def test_the_first_block_with_a_name_keeps_it() -> None:
    cache = PrefixCache(2)
    assert cache.register(0, SEED, (1, 2)) == cache.register(1, SEED, (1, 2))
    assert cache.match(SEED, (1, 2), 1)[0] == [0]
    assert not cache.knows(1)
    cache.forget(0)
    assert cache.match(SEED, (1, 2), 1)[0] == []
    assert len(cache) == 0
    cache.check_integrity()


def test_a_collision_of_names_serves_nothing_foreign() -> None:
    cache = PrefixCache(2)
    name = cache.register(0, SEED, (1, 2))
    cache._name_of[0] = (name, block_content((8, 8)))  # as if (8, 8) had the same name
    assert cache.match(SEED, (1, 2), 1)[0] == []


def test_integrity_tells_maps_apart() -> None:
    cache = PrefixCache(2)
    name = cache.register(0, SEED, (1, 2))
    cache._block_of[name] = 5
    cache._name_of[5] = (b"other", b"")
    del cache._name_of[0]
    with pytest.raises(AssertionError, match="does not carry"):
        cache.check_integrity()
